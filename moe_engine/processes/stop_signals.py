"""The signals that end a program: SIGINT, SIGTERM and SIGHUP, which comes when its terminal closes.

A program that was started with SIGHUP ignored, as by `nohup`, keeps ignoring it.
"""

from __future__ import annotations

import signal


def stop_signals() -> tuple[signal.Signals, ...]:
    """The signals that a program handles by ending in order."""
    ignored = signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    return (signal.SIGINT, signal.SIGTERM) if ignored else (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def ignore_stop_signals() -> None:
    """For a child process: they reach every process of a group, and its parent ends it."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
