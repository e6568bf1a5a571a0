"""Background work that yields to the engine's steps: threads and processes that compile grammars or read large bodies.

Niceness alone does not do it on Linux:

- It counts within a scheduling group, and every session of processes is a group of its own
  (`sched_autogroup_enabled`). A server's processes have process groups of their own (`process_group=0`), which keep a
  Ctrl-C away from them, in one session.
- A step's thread that wakes up takes the core of a thread that computes no earlier than at the kernel's next tick,
  1 to 4 ms later, unless that thread enters the kernel: its share of the core may end within the tick, and since Linux
  6.13 the kernel does not interrupt a thread for another one (lazy preemption). `yielding` makes it sleep for an
  instant every `PERIOD_SECONDS`. A `sched_yield` would forfeit the next share too (Linux 6.18): on a machine without
  idle time a thread got a hundredth of what its niceness allows, and a large grammar took minutes.

A thread of the policy `SCHED_IDLE` gives its core to any other thread immediately, and the kernel wakes threads on that
core as on a free one. On a machine without idle time it gets almost none, and no thread may leave the policy without a
privilege: `in_idle_time` does the work again at `NICENESS` then.
"""

from __future__ import annotations

import ctypes
import os
import pickle
import select
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import cache, partial
from signal import Signals
from threading import get_native_id
from time import CLOCK_MONOTONIC
from typing import Any, NoReturn, TypeVar, cast
from warnings import catch_warnings, simplefilter

from moe_engine.processes.child import PR_SET_PDEATHSIG
from moe_engine.processes.pipe_frames import LENGTH_BYTES, write_frame
from moe_engine.processes.watched_thread import start_watched

NICENESS = 5
"""Above that of the server. A quarter of a core during a busy step; a whole core where one is free. At 15 more a thread
waited for a tenth of a second after each of its sleeps on a machine without idle time: a process was not ready after
two minutes."""
PERIOD_SECONDS = 0.0002
"""A signal and its sleep take about 30 us."""
PATIENCE_SECONDS = 0.5
"""Several times what a large grammar takes on a core that is busy half of the time."""

T = TypeVar("T")


def yield_to_steps(niceness: int = NICENESS, thread: int | None = None) -> None:
    """A thread (None: the calling one), and threads and processes that it starts, get a lower priority than now, once a
    call. No effect outside Linux, which alone has priorities of threads.

    Args:
        niceness: added to the present one: a server may run at another one than 0.
        thread: its native id; a process id: the main thread of a process. No error if it has ended.
    """
    if sys.platform != "linux":
        return
    thread = get_native_id() if thread is None else thread
    with suppress(OSError):  # it has ended
        os.setpriority(os.PRIO_PROCESS, thread, os.getpriority(os.PRIO_PROCESS, thread) + niceness)
        os.sched_setscheduler(thread, os.SCHED_BATCH, os.sched_param(0))


@contextmanager
def yielding() -> Iterator[None]:
    """Within it the calling thread leaves its core for an instant every `PERIOD_SECONDS`, also where it runs no Python
    code: a seventh of its time on a free core. No effect where the system has no timers of threads."""
    timer = _start_timer(get_native_id()) if sys.platform == "linux" else None
    try:
        yield
    finally:
        if timer is not None:
            _libc().timer_delete(timer)


def in_idle_time(work: Callable[[], T], patience: float = PATIENCE_SECONDS) -> T:
    """The result of `work`, pickled, from a forked process that computes only while no other thread needs its core. If
    it has no result after `patience` seconds, fails, or cannot be started, the calling thread does the same work.

    A thread instead of the process would keep the GIL while it waits for a core, so that the caller would wait too.
    """
    if sys.platform != "linux":
        return work()
    read, write = os.pipe()
    found, pid = None, -1
    try:
        with catch_warnings(), suppress(BlockingIOError):  # the limit of processes is reached
            simplefilter("ignore", DeprecationWarning)  # of forks with threads: other threads only wait
            pid = os.fork()
        if pid == 0:
            _work_when_idle(work, write)
        os.close(write)
        found = _read_frame(read, patience)
    finally:
        os.close(read)
        if pid > 0:
            os.kill(pid, Signals.SIGKILL)
            _reap_later(pid)
    if found is not None:
        return cast(T, pickle.loads(found))
    with yielding():
        return work()


def _reap_later(pid: int) -> None:
    """Not in this thread if the system starts another one: the process may need a core to end."""
    try:
        start_watched("idle time", partial(_reap, pid), lambda message: None)
    except RuntimeError:
        _reap(pid)


def _reap(pid: int) -> None:
    os.waitpid(pid, 0)


def _work_when_idle(work: Callable[[], Any], write: int) -> NoReturn:
    """In the forked process, which ends with its parent and holds no other pipe."""
    try:
        _libc().prctl(PR_SET_PDEATHSIG, Signals.SIGKILL)
        os.closerange(0, write)
        os.closerange(write + 1, os.sysconf("SC_OPEN_MAX"))
        os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
        with yielding(), os.fdopen(write, "wb") as pipe:
            write_frame(pipe, pickle.dumps(work()))
    finally:
        os._exit(0)


def _read_frame(pipe: int, seconds: float) -> bytes | None:
    """None: it is not whole within the time, or never will be."""
    end, found, poller = time.monotonic() + seconds, bytearray(), select.poll()
    poller.register(pipe, select.POLLIN)
    while poller.poll(max(0.0, end - time.monotonic()) * 1000):
        part = os.read(pipe, 1 << 20)
        found += part
        data = memoryview(found)[LENGTH_BYTES:]
        if len(found) >= LENGTH_BYTES and len(data) == int.from_bytes(found[:LENGTH_BYTES], "little"):
            return bytes(data)
        data.release()
        if not part:
            break
    return None


class _Event(ctypes.Structure):
    """``struct sigevent``, whose union holds a thread's id: `man 3 sigevent`, `man 2 timer_create`."""

    _fields_ = (
        ("value", ctypes.c_void_p),
        ("signal", ctypes.c_int),
        ("notify", ctypes.c_int),
        ("thread", ctypes.c_int),
        ("rest", ctypes.c_byte * 44),
    )


class _Times(ctypes.Structure):
    """``struct itimerspec``: period and first expiry, each in seconds and nanoseconds."""

    _fields_ = tuple((name, ctypes.c_long) for name in ("period_s", "period_ns", "first_s", "first_ns"))


_SIGNAL = Signals.SIGURG
"""Ignored by default, and by interpreters and libraries that do not use urgent data of sockets. Its number, 23, is the
argument of the handler, `usleep`: microseconds."""
_SET_TIMER_SLACK = 29
"""``PR_SET_TIMERSLACK``, of the calling thread, in nanoseconds."""
_NOTIFY_THREAD = 4
"""``SIGEV_THREAD_ID``."""


@cache
def _libc() -> ctypes.CDLL:
    """The C library, whose ``usleep`` becomes the signal's handler: it needs no GIL."""
    libc = ctypes.CDLL(None)
    libc.timer_delete.argtypes = [ctypes.c_void_p]
    libc.signal.argtypes = [ctypes.c_int, ctypes.c_void_p]
    libc.signal(_SIGNAL, ctypes.cast(libc.usleep, ctypes.c_void_p))
    return libc


def _start_timer(thread: int) -> ctypes.c_void_p | None:
    """None: the system refuses it, or its C library is older than glibc 2.34."""
    timer, period = ctypes.c_void_p(), int(PERIOD_SECONDS * 1e9)
    event = _Event(None, _SIGNAL, _NOTIFY_THREAD, thread)
    with suppress(AttributeError):
        if _libc().timer_create(CLOCK_MONOTONIC, ctypes.byref(event), ctypes.byref(timer)) == 0:
            _libc().prctl(_SET_TIMER_SLACK, 1)  # the default adds 50 us to each sleep
            _libc().timer_settime(timer, 0, ctypes.byref(_Times(0, period, 0, period)), None)
            return timer
    return None
