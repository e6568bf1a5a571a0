"""Silent processes of this machine: stopped by a signal (SIGSTOP, SIGTSTP), or waiting for a processor."""

from __future__ import annotations

import os
import time
from contextlib import suppress

import psutil

LOOK_SECONDS = 0.2
HELD_SECONDS = 5.0
"""A process that has been stopped by a signal (SIGSTOP, not a debugger) for this long is killed."""


class StoppedProcessDetector:
    """Measures how long a child has been stopped, in polls. Time in which this process was itself stopped hardly
    counts, so that freezing and thawing all processes together causes no loss."""

    def __init__(self, pid: int) -> None:
        self._pid = pid
        self._looked = time.monotonic()
        self._seconds = 0.0

    def seconds(self) -> float:
        """0.0 if it runs or has exited. Cheap enough for every iteration of a loop."""
        now = time.monotonic()
        elapsed = now - self._looked
        if elapsed >= LOOK_SECONDS:
            self._looked = now
            self._seconds = self._seconds + min(elapsed, 2 * LOOK_SECONDS) if is_stopped(self._pid) else 0.0
        return self._seconds


def is_stopped(pid: int) -> bool:
    """Whether a signal has stopped the process."""
    try:
        return psutil.Process(pid).status() == psutil.STATUS_STOPPED
    except (psutil.Error, OSError):  # it has ended, or no file can be opened
        return False


def is_starved(pid: int) -> bool:
    """Whether a thread of the process runs, or waits for a processor or a disk: the process is late, not lost. False
    for a stopped one, an ended one, and where the system does not tell."""
    with suppress(OSError):
        for thread in os.listdir(f"/proc/{pid}/task"):
            with suppress(OSError), open(f"/proc/{pid}/task/{thread}/stat", "rb") as file:
                if file.read().rpartition(b") ")[2][:1] in (b"R", b"D"):
                    return True
    return False
