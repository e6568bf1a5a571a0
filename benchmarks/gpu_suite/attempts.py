"""Result lines of a part, one per case and row, saved on disk: a kernel that crashes the process or the GPU context
loses only its own line.

After an illegal address every call on the device fails until the process ends. So the part exits with `DEVICE_LOST`,
its parent restarts it, and it continues after the failing line.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any, Protocol

from benchmarks.gpu_suite.setting import Setting

DEVICE_LOST = 3
"""Exit code of a part that must be restarted."""

MOST_LOSSES = 2
"""Max device losses of a row in the cases of one model or kind; then the others of these are skipped, since each
costs a process start."""

Line = dict[str, Any]


def _group(kernel: str, row: str) -> tuple[str, str]:
    """The model or kind of a case, and the row."""
    return kernel.partition(".")[0], row


class Case(Protocol):
    """What has a line for each row."""

    @property
    def name(self) -> str: ...

    @property
    def family(self) -> str: ...


class DeviceLost(Exception):
    """The device is unusable in this process."""


class Attempts:
    """The lines so far, including those of earlier processes.

    Args:
        values: the part's result as a function of its lines.
    """

    def __init__(self, setting: Setting, values: Callable[[list[Line]], dict[str, Any]]) -> None:
        saved = setting.saved()
        self.lines: list[Line] = saved.get("lines", [])
        if at := saved.get("at"):
            failed = {"failed": "the process ended during this line", "ok": False, "lost": True}
            self.lines.append(failed | at)
        self._setting, self._values = setting, values
        self._known = {(line["kernel"], line["row"]) for line in self.lines}
        self._losses = Counter(_group(line["kernel"], line["row"]) for line in self.lines if "lost" in line)

    def rows(self, case: Case, rows: dict[str, Any]) -> dict[str, Any]:
        """The rows to try on a case: not tried yet, and not known to lose the device."""
        return {
            name: row for name, row in rows.items()
            if (case.name, name) not in self._known and self._losses[_group(case.name, name)] < MOST_LOSSES
        }  # fmt: skip

    def run(self, case: Case, row: str, attempt: Callable[[], Line]) -> None:
        """Adds the line of an attempt, which reports its own failures.

        Raises:
            DeviceLost: the process cannot continue; all lines are saved.
        """
        at: Line = {"kernel": case.name, "family": case.family, "row": row}
        self._setting.save(self._values(self.lines) | {"at": at})
        self.lines.append(at | attempt())
        if "failed" in self.lines[-1] and not self._setting.device_works():
            self.lines[-1]["lost"] = True
            self._setting.save(self._values(self.lines))
            raise DeviceLost
