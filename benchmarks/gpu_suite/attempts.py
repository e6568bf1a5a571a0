"""Lines of a part, one for each case and row, kept on disk: a kernel that takes the process or the GPU's context with
it costs its own line and no other.

An illegal address is told by every call on the device from then on, until the process ends. So the part ends with
`DEVICE_LOST`, whoever started it starts it again, and it goes on behind the line at fault.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from benchmarks.gpu_suite.setting import Setting

DEVICE_LOST = 3
"""Exit code of a part that wants to be started again."""

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
            self.lines.append(at | {"failed": "the process ended here", "ok": False})
        self._setting, self._values = setting, values
        self._known = {(line["kernel"], line["row"]) for line in self.lines}

    def rows(self, kernel: str, rows: dict[str, Any]) -> dict[str, Any]:
        """Those that were not tried yet on a case."""
        return {name: row for name, row in rows.items() if (kernel, name) not in self._known}

    def run(self, kernel: str, row: str, attempt: Callable[[], Line]) -> None:
        """Adds the line of an attempt that says itself what failed.

        Raises:
            DeviceLost: it was the last here; all is saved.
        """
        at: Line = {"kernel": kernel, "row": row}
        self._setting.save(self._values(self.lines) | {"at": at})
        self.lines.append(at | attempt())
        if "failed" in self.lines[-1] and not self._setting.device_works():
            self._setting.save(self._values(self.lines))
            raise DeviceLost
