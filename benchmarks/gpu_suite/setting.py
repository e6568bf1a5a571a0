"""Where the suite runs and how much it may take: a GPU and its time, or a CPU where only the logic is tried."""

from __future__ import annotations

import time
from dataclasses import dataclass

from moe_engine.kernels.device import Device, cpu_device, probe

RESERVE = 8.0
"""Seconds before a part's end at which it begins nothing new, so that what it has is written."""


@dataclass(frozen=True)
class Setting:
    """`dry`: everything in sizes for a CPU; the numbers mean nothing. `ends`: in `time.monotonic`'s seconds."""

    dry: bool
    ends: float

    @classmethod
    def of(cls, dry: bool, seconds: float) -> Setting:
        return cls(dry, time.monotonic() + seconds)

    @property
    def kind(self) -> str:
        return "cpu" if self.dry else "cuda"

    @property
    def device(self) -> Device:
        return cpu_device() if self.dry else probe("cuda")

    @property
    def is_over(self) -> bool:
        """Whether to begin nothing more."""
        return time.monotonic() > self.ends - RESERVE
