"""Child processes that a signal holds (SIGSTOP, SIGTSTP): alive for whoever waits for their end, else silent."""

from __future__ import annotations

import time

import psutil

from moe_engine.processes.child import ChildProcess

LOOK_SECONDS = 0.2


class StoppedProcessDetector:
    """For how long a child has been held, as far as somebody asked: time in which this process was held itself counts
    little, so that whoever freezes and thaws all of them together loses none."""

    def __init__(self, child: ChildProcess) -> None:
        self._child = child
        self._looked = time.monotonic()
        self._seconds = 0.0

    def seconds(self) -> float:
        """0.0 for one that runs or has ended. Cheap enough for every turn of a loop."""
        now = time.monotonic()
        elapsed = now - self._looked
        if elapsed >= LOOK_SECONDS:
            self._looked = now
            self._seconds = self._seconds + min(elapsed, 2 * LOOK_SECONDS) if self._is_held() else 0.0
        return self._seconds

    def _is_held(self) -> bool:
        try:
            return psutil.Process(self._child.pid).status() == psutil.STATUS_STOPPED
        except psutil.Error:
            return False
