"""Where the suite runs and how much it may take: a GPU and its time, or tiny sizes where only the logic is tried."""

from __future__ import annotations

import json
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from moe_engine.kernels.device import Device, probe

RESERVE = 8.0
"""Seconds before a part's end at which it begins nothing new, so that what it has is written."""


@dataclass(frozen=True)
class Setting:
    """One part's.

    Attributes:
        kind: ``cuda`` or ``cpu``.
        dry: tiny sizes; the numbers mean nothing.
        ends: in `time.monotonic`'s seconds.
        output: where a part leaves what it has so far, or None.
    """

    kind: str
    dry: bool
    ends: float
    output: Path | None = None

    @classmethod
    def of(cls, dry: str | None, seconds: float, output: Path | None = None) -> Setting:
        """`dry`: the kind of device to try the logic on; None: the real thing, on a GPU."""
        return cls(dry or "cuda", dry is not None, time.monotonic() + seconds, output)

    @property
    def device(self) -> Device:
        return probe(self.kind)

    @property
    def is_over(self) -> bool:
        """Whether to begin nothing more."""
        return time.monotonic() > self.ends - RESERVE

    def device_works(self) -> bool:
        """Whether this process can still use it."""
        if self.kind == "cpu":
            return True
        import torch

        try:
            torch.cuda.synchronize()
        except RuntimeError:
            return False
        return True

    def save(self, values: dict[str, Any]) -> None:
        """What the part has so far, for whoever looks if it never ends."""
        if self.output is not None:
            partial = self.output.with_suffix(".partial")
            partial.write_text(json.dumps(values, default=str))
            partial.replace(self.output)

    def saved(self) -> dict[str, Any]:
        """What an earlier process of this part has left."""
        if self.output is None or not self.output.exists():
            return {}
        found: dict[str, Any] = json.loads(self.output.read_text())
        return found
