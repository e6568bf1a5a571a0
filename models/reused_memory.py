"""Freed memory is kept for the next tensor while weights load.

A loader reads each tensor into memory that it frees once the tensor is packed. The C library returns such memory to the
system, which clears every page of the next tensor again: a sixth of the time of a load from the page cache.
"""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress

_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3
"""Parameters of glibc's ``mallopt``."""
_MAPPED = 32 << 20
"""Bytes from which a block is a mapping of its own; glibc takes no larger value."""
_KEPT, _KEPT_AFTERWARDS = 1 << 30, 64 << 20
"""Bytes at the end of the heap that are not returned. The second value is the one that glibc itself arrives at after
large blocks have been freed."""


@contextmanager
def reused_memory() -> Iterator[None]:
    """Within it freed blocks below 32 MiB are not returned to the system; all of them are at its end. No effect with
    other C libraries than glibc."""
    if not sys.platform.startswith("linux"):
        yield
        return
    libc = ctypes.CDLL(None)
    with suppress(AttributeError):
        libc.mallopt(_MMAP_THRESHOLD, _MAPPED)
        libc.mallopt(_TRIM_THRESHOLD, _KEPT)
    try:
        yield
    finally:
        with suppress(AttributeError):
            libc.mallopt(_TRIM_THRESHOLD, _KEPT_AFTERWARDS)
            libc.malloc_trim(0)
