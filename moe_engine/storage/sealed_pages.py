"""The stored form of pages: a header with length, name and checksum before the bytes.

A page that is truncated, has a flipped bit, or is stored under another page's name is detected when it is read, and
counts as a miss. Layout, little endian: magic (8), length of the bytes (8), CRC-32 of name and bytes (4), zeros (12),
bytes.
"""

from __future__ import annotations

import logging
import struct
import threading
import time
import zlib
from collections.abc import Callable, Sequence
from typing import Any

from moe_engine.storage.protocol import Buffer, PageStorage

logger = logging.getLogger("moe_engine")

HEADER = struct.Struct("<8sQI12x")
MAGIC = b"MOEKV001"
"""Magic number; changes with this layout."""
RETRY_SECONDS = 30.0
"""Pause of reads or writes after an error of the backend."""


def seal(name: str, page: Buffer, sealed: Buffer) -> None:
    """Writes a page with its header to `sealed`."""
    copy_bytes(page, sealed[HEADER.size :])
    HEADER.pack_into(sealed, 0, MAGIC, len(page), _checksum(name, page))


def unseal(name: str, sealed: Buffer, target: Buffer) -> bool:
    """Copies the page to `target`; False, and `target` is undefined, if the bytes differ from the stored ones."""
    if len(sealed) != HEADER.size + len(target):
        return False
    magic, length, checksum = HEADER.unpack_from(sealed)
    if magic != MAGIC or length != len(target):
        return False
    copy_bytes(sealed[HEADER.size :], target)  # checked after the copy: these are the bytes that are used
    return checksum == _checksum(name, target)


def copy_bytes(source: Buffer, target: Buffer) -> None:
    """Copies bytes without the interpreter's lock: a copy of megabytes would delay the thread of the steps."""
    import numpy as np  # imported here: the frontend reads settings of storages, and numpy would slow its start

    np.copyto(np.frombuffer(target, np.uint8), np.frombuffer(source, np.uint8))


def _checksum(name: str, page: Buffer) -> int:
    return zlib.crc32(page, zlib.crc32(name.encode()))


class SealedPages:
    """Pages of one size in a backend. An error of the backend counts as a miss: reads, or writes, then pause for
    `RETRY_SECONDS`, with one line in the log.

    Args:
        prefix: prefix of all names; changes with everything that changes the meaning of the bytes.
    """

    def __init__(
        self, storage: PageStorage, prefix: str, page_bytes: int, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.page_bytes = page_bytes
        self._storage = storage
        self._prefix = prefix
        self._clock = clock
        self._paused = {"reads": 0.0, "writes": 0.0}
        self._reported: set[str] = set()
        self._lock = threading.Lock()
        self._threads = threading.local()
        self.num_errors = 0
        self.num_corrupt = 0
        """Number of pages that differed from the stored ones."""

    @property
    def storage(self) -> PageStorage:
        return self._storage

    def name_of(self, key: bytes) -> str:
        return f"{self._prefix}-{key.hex()}"

    def exists(self, keys: Sequence[bytes]) -> int:
        """Number of leading pages that are stored."""
        if not keys or self._pauses("reads"):
            return 0
        try:
            return self._storage.exists([self.name_of(key) for key in keys])
        except Exception as error:  # of any backend
            self._failed("reads", error)
            return 0

    def get(self, keys: Sequence[bytes], targets: Sequence[Buffer]) -> int:
        """Number of leading pages that were read and equal the stored ones."""
        if not keys or self._pauses("reads"):
            return 0
        names = [self.name_of(key) for key in keys]
        sealed = self._memory(len(names))
        try:
            found = self._storage.get(names, sealed)
        except Exception as error:  # of any backend
            self._failed("reads", error)
            return 0
        for i, (name, target) in enumerate(zip(names, targets)):
            if not found[i]:
                return i
            if not unseal(name, sealed[i], target):
                self._discard(name)
                return i
        return len(names)

    def put(self, keys: Sequence[bytes], pages: Sequence[Buffer]) -> int:
        """Stores pages that are not stored yet, in one call of the backend; number of pages that are stored now. After
        an error none counts."""
        if not keys or self._pauses("writes"):
            return 0
        names = [self.name_of(key) for key in keys]
        try:
            new = [(name, page) for name, page in zip(names, pages) if not self._storage.exists([name])]
            if not new:
                return len(names)
            sealed = self._memory(len(new))
            for (name, page), target in zip(new, sealed):
                seal(name, page, target)
            return len(names) - len(new) + sum(self._storage.put([name for name, _ in new], sealed))
        except Exception as error:  # of any backend
            self._failed("writes", error)
            return 0

    def _memory(self, count: int) -> list[Buffer]:
        """Memory of this thread for sealed pages, valid until its next call: fresh memory of a page costs more time
        than its copy."""
        size = HEADER.size + self.page_bytes
        memory: list[Buffer] = getattr(self._threads, "memory", [])
        if len(memory) < count:
            whole = memoryview(bytearray(size * count))
            memory = self._threads.memory = [whole[i * size : (i + 1) * size] for i in range(count)]
        return memory[:count]

    def clear(self) -> None:
        """Removes all pages of the storage."""
        try:
            self._storage.clear()
        except Exception as error:  # of any backend
            self._failed("writes", error)

    def facts(self) -> dict[str, Any]:
        """Plain values: those of the backend, and errors and wrong pages since the start."""
        try:
            found = self._storage.describe()
        except Exception as error:  # of any backend
            found = {"error": f"{type(error).__name__}: {error}"}
        return found | {"num_errors": self.num_errors, "num_corrupt": self.num_corrupt}

    def _discard(self, name: str) -> None:
        """Removes a page with wrong bytes, so that it is stored again."""
        with self._lock:
            self.num_corrupt += 1
            if "corrupt" not in self._reported:
                self._reported.add("corrupt")
                logger.warning(
                    "KV storage: page %s differs from the stored one (checksum or size); such pages are removed and "
                    "count as misses",
                    name,
                )
        try:
            self._storage.delete([name])
        except Exception as error:  # of any backend
            self._failed("writes", error)

    def _pauses(self, what: str) -> bool:
        return self._clock() < self._paused[what]

    def _failed(self, what: str, error: Exception) -> None:
        with self._lock:
            self.num_errors += 1
            self._paused[what] = self._clock() + RETRY_SECONDS
            line = f"{what}: {type(error).__name__}: {error}"
            if line not in self._reported and len(self._reported) < 100:
                self._reported.add(line)
                logger.warning(
                    "KV storage: %s. The engine continues without it and tries again every %g s", line, RETRY_SECONDS
                )
