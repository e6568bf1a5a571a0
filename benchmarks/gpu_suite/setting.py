"""Device and time limit of the suite: a GPU, or tiny sizes for a dry run."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from moe_engine.kernels.device import Device, probe

RESERVE = 8.0
"""Seconds before a part's time limit at which it starts no further case, so that its results are written."""


@dataclass(frozen=True)
class Setting:
    """Setting of one part.

    Attributes:
        kind: ``cuda`` or ``cpu``.
        dry: tiny sizes; the numbers are meaningless.
        ends: in `time.monotonic`'s seconds.
        output: file of a part's partial results, or None.
        only: texts, one of which the name of a case has to contain; empty: all cases.
    """

    kind: str
    dry: bool
    ends: float
    output: Path | None = None
    only: tuple[str, ...] = ()

    @classmethod
    def of(cls, dry: str | None, seconds: float, output: Path | None = None, only: Sequence[str] = ()) -> Setting:
        """`dry`: the device kind of a dry run; None: a real run on a GPU."""
        return cls(dry or "cuda", dry is not None, time.monotonic() + seconds, output, tuple(only))

    @property
    def device(self) -> Device:
        return probe(self.kind)

    @property
    def is_over(self) -> bool:
        """True if nothing more may be started."""
        return time.monotonic() > self.ends - RESERVE

    def has_device(self) -> bool:
        """True if torch sees the device. The process must not be forked afterwards."""
        if self.kind == "cpu":
            return True
        import torch

        return torch.cuda.is_available()

    def device_works(self) -> bool:
        """True if this process can still use the device."""
        if self.kind == "cpu":
            return True
        import torch

        try:
            torch.cuda.synchronize()
        except RuntimeError:
            return False
        return True

    def save(self, values: dict[str, Any]) -> None:
        """Saves the part's partial results, for a part that does not finish."""
        if self.output is not None:
            partial = self.output.with_suffix(".partial")
            partial.write_text(json.dumps(values, default=str))
            partial.replace(self.output)

    def saved(self) -> dict[str, Any]:
        """Partial results of an earlier process of this part."""
        if self.output is None or not self.output.exists():
            return {}
        found: dict[str, Any] = json.loads(self.output.read_text())
        return found

    def give_up(self, seconds: float) -> bool:
        """Whether the part's current line has taken longer; then it is marked as failed."""
        if self.output is None or not self.output.exists() or time.time() - self.output.stat().st_mtime < seconds:
            return False
        values = self.saved()
        if "at" in values:
            self.save(values | {"at": values["at"] | {"failed": f"no result after {seconds:.0f} s"}})
        return "at" in values
