"""Threads and processes that yield to the engine's steps, by their attributes in the kernel."""

from __future__ import annotations

import errno
import os
import random
import signal
import subprocess
import sys
import threading
import time
from threading import get_native_id

import pytest

from moe_engine.processes import background
from moe_engine.processes.background import in_idle_time, yield_to_steps, yielding
from moe_engine.processes.frame_child import FrameChild

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="only Linux has priorities and timers of threads")


def attributes(thread: int) -> tuple[int, int]:
    """Policy and niceness."""
    return os.sched_getscheduler(thread), os.getpriority(os.PRIO_PROCESS, thread)


def test_a_thread_alone_has_a_low_priority():
    found: list[tuple[int, int]] = []
    niceness = random.randint(1, 19)

    def work() -> None:
        yield_to_steps(niceness)
        found.append(attributes(get_native_id()))

    before = attributes(get_native_id())
    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert found == [(os.SCHED_BATCH, min(before[1] + niceness, 19))]
    assert attributes(get_native_id()) == before


def test_a_process_has_a_low_priority_within_the_session():
    """A session of its own would be a scheduling group of its own; a process group keeps Ctrl-C away."""
    child = FrameChild("moe_engine.structured_output.check_process")
    try:
        niceness = random.randint(1, 19)
        yield_to_steps(niceness, child.pid)
        assert attributes(child.pid) == (os.SCHED_BATCH, min(attributes(0)[1] + niceness, 19))
        assert os.getsid(child.pid) == os.getsid(0)
        assert os.getpgid(child.pid) == child.pid
    finally:
        child.kill()


def test_a_process_that_has_ended_is_no_error():
    child = subprocess.Popen(["true"])
    child.wait()
    yield_to_steps(thread=child.pid)


def test_a_thread_that_yields_is_interrupted_until_its_work_ends():
    """Python's handler, which counts, takes the place of the sleep."""
    count, limit = 0, time.monotonic() + 60

    def counted(number: int, frame: object) -> None:
        nonlocal count
        count += 1

    with yielding():
        signal.signal(signal.SIGURG, counted)
        while count < 5 and time.monotonic() < limit:
            pass
    reached = count
    time.sleep(20 * background.PERIOD_SECONDS)
    signal.signal(signal.SIGURG, signal.SIG_DFL)
    background._libc.cache_clear()
    assert reached >= 5
    assert count <= reached + 1  # a signal that was sent before the end


SHARES = """
import contextlib, os, sys
from moe_engine.processes.background import yield_to_steps, yielding
os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
if sys.argv[1] != "busy":
    yield_to_steps(8)
    with yielding() if sys.argv[1] == "yielding" else contextlib.nullcontext():
        print(flush=True)
        while True:
            pass
print(flush=True)
while True:
    pass
"""


def test_a_thread_that_yields_keeps_the_share_of_its_niceness():
    """On a core without idle time, beside busy processes; `sched_yield` in place of the sleep: a hundredth of it."""
    kinds = ["yielding", "plain", "busy", "busy"]
    started = [subprocess.Popen([sys.executable, "-c", SHARES, kind], stdout=subprocess.PIPE) for kind in kinds]
    try:
        for process in started:
            assert process.stdout is not None and process.stdout.readline()
        yields, plain = (process.pid for process in started[:2])
        before, wanted, limit = used(yields), used(plain) + 0.1, time.monotonic() + 120
        while used(plain) < wanted and time.monotonic() < limit:
            time.sleep(0.1)
        share = (used(yields) - before) / 0.1
    finally:
        for process in started:
            process.kill()
            process.communicate()
    assert share > 0.05


def used(process: int) -> float:
    """CPU seconds, from the clock of the process: `man 3 clock_getcpuclockid`."""
    return time.clock_gettime(~process << 3 | 2)


def test_work_that_waits_is_not_disturbed():
    with yielding():
        assert subprocess.run(["sleep", "0.01"], check=False).returncode == 0
        time.sleep(0.01)
        assert threading.Event().wait(0.01) is False


def test_only_the_process_of_work_in_idle_time_has_the_policy(monkeypatch: pytest.MonkeyPatch):
    """Also on a machine without idle time, where the caller does the work."""
    policies, reap = list[int](), background._reap_later

    def seen(process: int) -> None:
        policies.append(os.sched_getscheduler(process))
        reap(process)

    monkeypatch.setattr(background, "_reap_later", seen)
    before = attributes(0)
    assert in_idle_time(lambda: 7, patience=10) == 7
    assert policies == [os.SCHED_IDLE]
    assert attributes(0) == before


@pytest.fixture
def idle_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine that has it: the process keeps the policy of its caller."""
    monkeypatch.setattr(os, "sched_setscheduler", lambda *arguments: None)


@pytest.mark.usefixtures("idle_time")
def test_work_in_idle_time_has_a_process_of_its_own():
    assert in_idle_time(os.getpid, patience=60) != os.getpid()


@pytest.mark.usefixtures("idle_time")
def test_an_error_of_work_in_idle_time_reaches_the_caller():
    def work() -> None:
        raise MemoryError("of the work")

    with pytest.raises(MemoryError, match="of the work"):
        in_idle_time(work, patience=60)


@pytest.mark.usefixtures("idle_time")
def test_a_long_result_arrives_whole():
    text, process = random.randbytes(1 << 20), os.getpid()
    assert in_idle_time(lambda: (os.getpid() != process, text), patience=60) == (True, text)


def test_the_caller_does_the_work_without_idle_time():
    """A process that sleeps simulates one without CPU time. Python's sleep goes on after the signals of `yielding`."""
    caller = get_native_id()

    def work() -> int:
        if get_native_id() != caller:
            time.sleep(5)
        return get_native_id()

    assert in_idle_time(work, patience=0.01) == caller


def test_the_caller_does_the_work_where_the_system_starts_no_process(monkeypatch: pytest.MonkeyPatch):
    def refused() -> int:
        raise BlockingIOError(errno.EAGAIN, os.strerror(errno.EAGAIN))

    files = len(os.listdir("/proc/self/fd"))
    monkeypatch.setattr(os, "fork", refused)
    assert in_idle_time(get_native_id, patience=60) == get_native_id()
    assert len(os.listdir("/proc/self/fd")) == files


def test_an_ended_process_is_reaped_where_the_system_starts_no_thread(monkeypatch: pytest.MonkeyPatch):
    def refused(*arguments: object) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(background, "start_watched", refused)
    ended = os.spawnlp(os.P_NOWAIT, "true", "true")
    background._reap_later(ended)
    with pytest.raises(ChildProcessError):
        os.waitpid(ended, 0)
