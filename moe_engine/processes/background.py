"""Background work that yields to the engine's steps: threads and processes that compile grammars or read large bodies.

Niceness alone does not do it on Linux. It counts within a scheduling group, and every session of processes is a group
of its own (`sched_autogroup_enabled`), with a niceness of its own. And since Linux 6.12 a thread that has a core keeps
it for a slice of milliseconds, whatever its niceness, unless it asks for a shorter one.
"""

from __future__ import annotations

import ctypes
import os
import platform
import struct
import sys
from contextlib import suppress
from pathlib import Path
from threading import get_native_id

NICENESS = 15
"""About a thirtieth of a core beside a busy step; a whole core where one is free."""
SLICE_SECONDS = 0.0001
"""The kernel's least."""
_SET_ATTRIBUTES = {"x86_64": 314, "aarch64": 274}
"""Number of the system call sched_setattr by machine; Python has no function for it."""
_ATTRIBUTES = struct.Struct("=IIQiIQQQ")
"""Size, policy, flags, niceness, priority, runtime (the slice in ns), deadline, period: `man 2 sched_setattr`."""


def yield_to_steps(niceness: int = NICENESS) -> None:
    """The calling thread, and threads that it starts, get a core when no step needs it, and release it at once when a
    step does. No effect outside Linux, which alone has priorities of threads."""
    if sys.platform != "linux":
        return
    thread = get_native_id()
    niceness = _lower_priority(thread, niceness)
    with suppress(OSError):
        os.sched_setscheduler(thread, os.SCHED_BATCH, os.sched_param(0))
    _shorten_slice(thread, niceness)


def yield_session_to_steps(pid: int, niceness: int = NICENESS) -> None:
    """The same for a child process that was started with `start_new_session`, from its first instruction on; its main
    thread calls `yield_to_steps`, too."""
    if sys.platform != "linux":
        return
    with suppress(OSError):
        _lower_priority(pid, niceness)
    with suppress(OSError):  # without groups; or the group was changed within the last tenth of a second
        Path(f"/proc/{pid}/autogroup").write_text(str(niceness))


def _lower_priority(thread: int, niceness: int) -> int:
    """Raises the niceness, which cannot be reduced again without a privilege."""
    niceness = max(niceness, os.getpriority(os.PRIO_PROCESS, thread))
    os.setpriority(os.PRIO_PROCESS, thread, niceness)
    return niceness


def _shorten_slice(thread: int, niceness: int) -> None:
    """Requests a short slice; older kernels ignore it."""
    number = _SET_ATTRIBUTES.get(platform.machine())
    if number is None:
        return
    size, slice_ns = _ATTRIBUTES.size, int(SLICE_SECONDS * 1e9)
    packed = _ATTRIBUTES.pack(size, os.SCHED_BATCH, 0, niceness, 0, slice_ns, 0, 0)
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None).syscall(ctypes.c_long(number), ctypes.c_int(thread), packed, ctypes.c_uint(0))
