"""The process's open files: standard streams, and the limit (``ulimit -n``), which is raised where it may be and
refused by name where it is too small.

Without free descriptors libzmq aborts its process, and pipes and sockets fail in places that cannot name the cause.
"""

from __future__ import annotations

import os
import resource
import sys
from contextlib import suppress

from moe_engine.errors import ConfigError

LEAST = 256
"""Sockets, pipes and libraries of a process, and some connections."""
RESERVED = 128
"""Files that client connections leave unused: for child processes, files of /proc, images, log files."""
WANTED = 2**16
"""Further connections take one each. A much larger limit slows programs that walk through all descriptors."""


def open_standard_streams() -> None:
    """Opens the null device as each standard stream that the caller closed, as some service managers do. The next
    sockets and pipes would get these numbers otherwise, and child processes would read and write them as their own."""
    for fd, name, mode in ((0, "stdin", "r"), (1, "stdout", "w"), (2, "stderr", "w")):
        with suppress(OSError):
            os.fstat(fd)
            continue
        os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)  # takes the lowest free number, which is `fd`
        setattr(sys, name, os.fdopen(fd, mode, closefd=False))


def raise_limit() -> None:
    """Raises this process's limit up to `WANTED`, as far as the user may. Later child processes inherit it."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = WANTED if hard == resource.RLIM_INFINITY else min(hard, WANTED)
    if soft != resource.RLIM_INFINITY and soft < most:
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))


def check_limit() -> None:
    """Raises ConfigError: the limit is below `LEAST`."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != resource.RLIM_INFINITY and soft < LEAST:
        raise ConfigError(
            f"ulimit -n: this process may open {soft} files (hard limit {hard}), and an engine needs at least {LEAST}, "
            f"a server one more for each connection: raise it, for example ulimit -n {WANTED}"
        )


def limit() -> int:
    """Files that this process may open, at most `WANTED`."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return WANTED if soft == resource.RLIM_INFINITY else min(soft, WANTED)
