"""Threads and processes that yield to the engine's steps, by their attributes in the kernel."""

from __future__ import annotations

import ctypes
import os
import platform
import random
import struct
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from moe_engine.processes.background import SLICE_SECONDS, yield_session_to_steps, yield_to_steps

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="only Linux has priorities of threads")

GET_ATTRIBUTES = {"x86_64": 315, "aarch64": 275}
"""Number of the system call sched_getattr."""


def attributes(thread: int) -> tuple[int, ...]:
    """Size, policy, flags, niceness, priority, runtime, deadline, period."""
    data = ctypes.create_string_buffer(48)
    number = ctypes.c_long(GET_ATTRIBUTES[platform.machine()])
    done = ctypes.CDLL(None).syscall(number, ctypes.c_int(thread), data, ctypes.c_uint(48), ctypes.c_uint(0))
    assert done == 0
    return struct.unpack("=IIQiIQQQ", data.raw)


def kernel() -> tuple[int, int]:
    major, minor = platform.release().split(".")[:2]
    return int(major), int("".join(c for c in minor if c.isdigit()) or 0)


@pytest.mark.skipif(platform.machine() not in GET_ATTRIBUTES, reason="the number of the system call is unknown here")
def test_a_thread_alone_has_a_low_priority_and_a_short_slice():
    found: list[tuple[int, ...]] = []
    niceness = random.randint(1, 19)

    def work() -> None:
        yield_to_steps(niceness)
        found.append(attributes(threading.get_native_id()))

    before = attributes(threading.get_native_id())
    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    _, policy, _, nice, _, slice_ns, _, _ = found[0]
    assert policy == os.SCHED_BATCH
    assert nice == max(niceness, before[3])
    if kernel() >= (6, 12):
        assert slice_ns == int(SLICE_SECONDS * 1e9)
    assert attributes(threading.get_native_id()) == before


def test_a_session_has_the_niceness_as_a_group():
    child = subprocess.Popen(["sleep", "60"], start_new_session=True)
    try:
        niceness = random.randint(1, 19)
        yield_session_to_steps(child.pid, niceness)
        assert os.getpriority(os.PRIO_PROCESS, child.pid) == max(niceness, os.getpriority(os.PRIO_PROCESS, 0))
        group = Path(f"/proc/{child.pid}/autogroup")
        if group.exists() and (words := group.read_text().split()):  # empty without autogroups
            assert words[-1] == str(niceness)
    finally:
        child.kill()
        child.wait()


def test_a_process_that_has_ended_is_no_error():
    child = subprocess.Popen(["true"], start_new_session=True)
    child.wait()
    yield_session_to_steps(child.pid)
