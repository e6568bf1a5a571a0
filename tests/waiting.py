"""Waiting for what other threads and processes do, and looking at the processes."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import suppress
from typing import TypeVar

import psutil

Found = TypeVar("Found")


def until(condition: Callable[[], Found], what: str = "", seconds: float = 120.0) -> Found:
    """The first true value of the condition. `what`: the message if there is none in time."""
    deadline = time.monotonic() + seconds
    while not (found := condition()):
        assert time.monotonic() < deadline, what or "a condition was not met in time"
        time.sleep(0.005)
    return found


def children_with(pid: int, word: str) -> list[int]:
    """Process ids of the process's children whose command line has the word."""
    found = []
    for child in psutil.Process(pid).children():
        with suppress(psutil.Error):  # it has just ended
            if word in child.cmdline():
                found.append(child.pid)
    return found


def is_running(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
