"""The process's limit of open files (``ulimit -n``): raised where it may be, refused by name where it is too small.

Without free descriptors libzmq aborts its process, and pipes and sockets fail in places that cannot name the cause.
"""

from __future__ import annotations

import resource

from moe_engine.errors import ConfigError

LEAST = 256
"""Sockets, pipes and libraries of a process, and some connections."""
RESERVED = 128
"""Files that client connections leave unused: for child processes, files of /proc, images, log files."""
WANTED = 2**16
"""Further connections take one each. A much larger limit slows programs that walk through all descriptors."""


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
