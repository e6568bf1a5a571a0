"""The process's limit of address space (``ulimit -v``): too small, libraries fail in the middle of an import, and
threads do not start, in places that cannot name the cause.
"""

from __future__ import annotations

import resource

from moe_engine.errors import ConfigError

FIX = "run `ulimit -v unlimited` first, and limit memory by a container"


def check_address_space(num_bytes: int) -> None:
    """Raises ConfigError: the limit is below the memory of an engine's process."""
    limit = resource.getrlimit(resource.RLIMIT_AS)[0]
    if limit != resource.RLIM_INFINITY and limit < num_bytes:
        raise ConfigError(
            f"ulimit -v: a process may have {limit >> 20} MB of address space, and one of this engine's takes "
            f"{num_bytes >> 20} MB of memory and more address space: {FIX}"
        )


def address_space_hint() -> str:
    """The end of a message about a process that failed to start: the limit may be the cause. Empty without a limit."""
    limit = resource.getrlimit(resource.RLIMIT_AS)[0]
    return "" if limit == resource.RLIM_INFINITY else f"; `ulimit -v` allows {limit >> 20} MB of address space: {FIX}"
