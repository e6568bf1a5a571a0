"""Low-priority work beside the engine's steps: threads and processes that compile grammars."""

from __future__ import annotations

import os
import sys
from contextlib import suppress
from threading import get_native_id

NICENESS = 15
"""Nice value: about a thirtieth of a core beside a busy step; a whole core if one is free."""


def yield_to_steps() -> None:
    """Lowers the priority of the calling thread and of threads that it starts: they get a core when no step needs it,
    and never preempt a step. Linux only (thread priorities); elsewhere nothing changes."""
    if sys.platform != "linux":
        return
    thread = get_native_id()
    with suppress(OSError):
        os.setpriority(os.PRIO_PROCESS, thread, NICENESS)
    with suppress(OSError):
        os.sched_setscheduler(thread, os.SCHED_BATCH, os.sched_param(0))
