"""``torch.profiler.profile`` of simulated devices: launches by name, one millisecond each."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from types import SimpleNamespace
from typing import Any

from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity
from torch.profiler import profile as of_host

launches: Counter[str] = Counter()
"""Launches since the process started."""


class _Profile:
    def __enter__(self) -> _Profile:
        self._before = Counter(launches)
        return self

    def __exit__(self, *exception: object) -> None:
        self._found = launches - self._before

    def key_averages(self) -> list[Any]:
        return [
            SimpleNamespace(key=name, count=count, device_type=DeviceType.CUDA, self_device_time_total=1e3 * count)
            for name, count in self._found.items()
        ]


def profile(*, activities: Iterable[ProfilerActivity] | None = None, **options: Any) -> Any:
    """Torch's profiler unless the device is profiled."""
    if activities is None or ProfilerActivity.CUDA not in activities:
        return of_host(activities=activities, **options)
    return _Profile()
