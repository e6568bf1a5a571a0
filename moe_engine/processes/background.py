"""Work that gives way to the engine's steps: threads and processes that compile grammars."""

from __future__ import annotations

import os
import sys
from contextlib import suppress
from threading import get_native_id

NICENESS = 15
"""About a thirtieth of a core beside a busy step; a whole core where one is free."""


def yield_to_steps() -> None:
    """The calling thread, and those that it starts, get a core when no step needs it, and never preempt a step that
    has one. Linux has priorities of threads; elsewhere nothing changes."""
    if sys.platform != "linux":
        return
    thread = get_native_id()
    with suppress(OSError):
        os.setpriority(os.PRIO_PROCESS, thread, NICENESS)
    with suppress(OSError):
        os.sched_setscheduler(thread, os.SCHED_BATCH, os.sched_param(0))
