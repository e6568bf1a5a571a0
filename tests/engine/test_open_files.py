"""The limit of open files: raised up to the hard limit, refused by name if it is too small."""

from __future__ import annotations

import errno
import os
import resource
import subprocess
import sys

import pytest

from moe_engine.errors import ConfigError
from moe_engine.processes import open_files, stopped
from moe_engine.processes.open_files import LEAST, WANTED, check_limit, raise_limit
from moe_engine.processes.stopped import StoppedProcessDetector

ENDLESS = resource.RLIM_INFINITY


@pytest.mark.parametrize(("soft", "hard", "raised"), [
    (1024, 2**20, WANTED), (1024, 4096, 4096), (1024, 1024, 1024), (1024, ENDLESS, WANTED), (2**20, 2**20, 2**20),
    (ENDLESS, ENDLESS, ENDLESS), (64, 64, 64), (64, LEAST, LEAST),
])  # fmt: skip
def test_limit_is_raised_as_far_as_the_user_may(
    monkeypatch: pytest.MonkeyPatch, soft: int, hard: int, raised: int
) -> None:
    limits = [(soft, hard)]
    monkeypatch.setattr(open_files.resource, "getrlimit", lambda which: limits[-1])
    monkeypatch.setattr(open_files.resource, "setrlimit", lambda which, new: limits.append(new))
    raise_limit()
    assert limits[-1] == (raised, hard)
    if raised != ENDLESS and raised < LEAST:
        with pytest.raises(ConfigError, match=rf"^ulimit -n: .* {soft} files .* at least {LEAST}, .*-n {WANTED}"):
            check_limit()
    else:
        check_limit()


def test_a_command_may_start_without_standard_streams() -> None:
    """The server's first sockets had the numbers 0 to 2, and its engine failed to start without a word."""
    child = "import os; [os.fstat(fd) for fd in range(3)]; print(); print(file=__import__('sys').stderr)"
    code = f"""
import os, subprocess, sys
from moe_engine.processes.open_files import open_standard_streams
open_standard_streams()
assert os.open("/", os.O_RDONLY) == 3
print("x"), print("x", file=sys.stderr), sys.stdin.read()
sys.exit(subprocess.run([sys.executable, "-c", {child!r}]).returncode)
"""
    closed = ["sh", "-c", 'exec "$@" <&- >&- 2>&-', "sh", sys.executable, "-c", code]
    assert subprocess.run(closed, check=False).returncode == 0


def test_a_process_without_free_descriptors_can_watch_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """psutil opens a file of /proc: the server's watchdog ended with its OSError."""

    def none_free(pid: int) -> None:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    detector = StoppedProcessDetector(os.getpid())
    monkeypatch.setattr(stopped, "LOOK_SECONDS", 0.0)
    monkeypatch.setattr(stopped.psutil, "Process", none_free)
    assert detector.seconds() == 0.0
