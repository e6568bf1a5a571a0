"""Lines of a part, one for each case and row, kept on disk: a kernel that takes the process or the GPU's context with
it costs its own line and no other.

An illegal address is told by every call on the device from then on, until the process ends. So the part ends with
`DEVICE_LOST`, whoever started it starts it again, and it goes on behind the line at fault.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

from benchmarks.gpu_suite.setting import Setting
from benchmarks.kernel_cases import KernelCase

DEVICE_LOST = 3
"""Exit code of a part that wants to be started again."""

MOST_LOSSES = 2
"""Of a family's row; after these its other cases are left alone, for every one costs the start of a process."""

Line = dict[str, Any]


class DeviceLost(Exception):
    """Nothing runs on the device any more in this process."""


class Attempts:
    """The lines so far, those of earlier processes included.

    Args:
        values: what the part returns, of its lines.
    """

    def __init__(self, setting: Setting, values: Callable[[list[Line]], dict[str, Any]]) -> None:
        saved = setting.saved()
        self.lines: list[Line] = saved.get("lines", [])
        if at := saved.get("at"):
            self.lines.append(at | {"failed": "the process ended here", "ok": False, "lost": True})
        self._setting, self._values = setting, values
        self._known = {(line["kernel"], line["row"]) for line in self.lines}
        self._losses = Counter((line["family"], line["row"]) for line in self.lines if "lost" in line)

    def rows(self, case: KernelCase, rows: dict[str, Any]) -> dict[str, Any]:
        """Those to try on a case: not tried yet, and not known to lose the device."""
        return {
            name: row for name, row in rows.items()
            if (case.name, name) not in self._known and self._losses[case.family, name] < MOST_LOSSES
        }  # fmt: skip

    def run(self, case: KernelCase, row: str, attempt: Callable[[], Line]) -> None:
        """Adds the line of an attempt that says itself what failed.

        Raises:
            DeviceLost: it was the last here; all is saved.
        """
        at: Line = {"kernel": case.name, "family": case.family, "row": row}
        self._setting.save(self._values(self.lines) | {"at": at})
        self.lines.append(at | attempt())
        if "failed" in self.lines[-1] and not self._setting.device_works():
            self.lines[-1]["lost"] = True
            self._setting.save(self._values(self.lines))
            raise DeviceLost
