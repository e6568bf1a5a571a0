"""Waiting for what other threads and processes do."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

Found = TypeVar("Found")


def until(condition: Callable[[], Found], what: str = "", seconds: float = 120.0) -> Found:
    """The first true value of the condition. `what`: the message if there is none in time."""
    deadline = time.monotonic() + seconds
    while not (found := condition()):
        assert time.monotonic() < deadline, what or "a condition was not met in time"
        time.sleep(0.005)
    return found
