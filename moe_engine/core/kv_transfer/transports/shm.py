"""Row ``shm``: two servers of one machine; the prefill side writes to memory of the decode side.

The memory is a file in /dev/shm (`host_support.new_file`), whose name is removed once the peer has opened it.
"""

from __future__ import annotations

import mmap
import os
import re
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from moe_engine.core.kv_transfer import wire
from moe_engine.core.kv_transfer.transports.protocol import (
    Block,
    Done,
    Memory,
    Send,
    TransportError,
    Write,
    check_blocks,
    no_bytes_here,
)
from moe_engine.parallel import host_support

KIND = "kv-"
_NAME = re.compile(re.escape(host_support.PREFIX + KIND) + r"[A-Za-z0-9_]+")


class SharedMemoryTransport:
    """Implements `Transport`."""

    def __init__(self, host: str, send: Send) -> None:
        self._peers: dict[bytes, np.ndarray] = {}
        self._names: dict[Path, int] = {}
        """Files that a peer may open, with the descriptors that hold their locks."""

    def register(self, num_bytes: int, *, is_target: bool = True) -> Memory:
        if not is_target:  # without a name, which a killed process would leave behind
            return Memory(np.empty(num_bytes, np.uint8))
        try:
            file, name = host_support.new_file(KIND)
            path = Path(name)
            try:
                os.posix_fallocate(file, 0, num_bytes)  # allocates now: a full /dev/shm would kill the process later
                array = _map(file, num_bytes)
                inode = os.fstat(file).st_ino
            except OSError:
                _remove(path, file)
                raise
        except OSError as error:
            where = host_support.FOLDER
            raise TransportError(f"{num_bytes} bytes of shared memory ({where}): {error.strerror}") from None
        self._names[path] = file
        return Memory(array, wire.encode([path.name, inode, num_bytes]), path)

    def release(self, memory: Memory) -> None:
        if memory.handle is None:
            return
        _remove(memory.handle, self._names.pop(memory.handle, None))

    def open(self, peer: bytes, description: bytes) -> None:
        try:
            name, inode, num_bytes = msgspec.msgpack.decode(description, type=tuple[str, int, int])
        except msgspec.MsgspecError as error:
            raise TransportError(f"the description of the peer's memory cannot be read: {error}") from None
        folder = Path(host_support.FOLDER)
        if not _NAME.fullmatch(name):
            raise TransportError(f"{name!r:.60}: not a name of shared memory of this engine")
        try:
            file = os.open(folder / name, os.O_RDWR | os.O_NOFOLLOW)
            try:
                found = os.fstat(file)
                if (found.st_ino, found.st_size) != (inode, num_bytes):
                    raise FileNotFoundError
                self._peers[peer] = _map(file, num_bytes)
            finally:
                os.close(file)
            (folder / name).unlink()
        except OSError as error:
            why = "not found" if isinstance(error, FileNotFoundError) else error.strerror
            raise TransportError(
                "--disaggregation-transfer-backend shm: the memory of the decode server is not on this machine, or "
                f"not in this container's /dev/shm ({why}); use tcp"
            ) from None

    def write(self, peer: bytes, memory: Memory, blocks: Sequence[Block]) -> Write:
        target = self._peers.get(peer)
        if target is None:
            raise TransportError("the peer has no memory")
        check_blocks(blocks, memory.array.nbytes, target.nbytes)
        for local, remote, length in blocks:
            target[remote : remote + length] = memory.array[local : local + length]
        return Done()

    def receive(self, values: list[Any], payload: Any) -> None:
        raise no_bytes_here("shm")

    def forget(self, peer: bytes) -> None:
        self._peers.pop(peer, None)

    def close(self) -> None:
        for path, file in self._names.items():
            _remove(path, file)
        self._names.clear()
        self._peers.clear()


def _remove(path: Path, file: int | None) -> None:
    with suppress(OSError):  # the peer has removed the name
        path.unlink()
    if file is not None:
        os.close(file)


def _map(file: int, num_bytes: int) -> np.ndarray:
    return np.frombuffer(mmap.mmap(file, num_bytes), np.uint8)
