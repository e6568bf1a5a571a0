"""Times of calls on a CPU, their repetitions interleaved."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch

Call = Callable[[], Any]


def alternate(calls: list[Call], seconds: float) -> list[float]:
    """Seconds of one call of each, the lower quartile of interleaved repetitions. With one thread: its CPU time."""
    clock = time.thread_time if torch.get_num_threads() == 1 else time.perf_counter
    for call in calls:
        call()
    times: list[list[float]] = [[] for _ in calls]
    stop = time.perf_counter() + seconds
    while len(times[0]) < 5 or (time.perf_counter() < stop and len(times[0]) < 300):
        for own, call in zip(times, calls):
            start = clock()
            call()
            own.append(clock() - start)
    return [sorted(own)[len(own) // 4] for own in times]
