"""Row ``mooncake``: the transfer engine of Mooncake, over RDMA where the machine has such devices, else over TCP.

Contract: `mooncake.engine.TransferEngine` 0.3: with ``P2PHANDSHAKE`` an engine is reached at HOST:PORT of its own
(`get_rpc_port`) without a metadata server; memory is addressed by the peer's virtual addresses; `transfer_submit_write`
begins one block; `transfer_check_status` returns 1 for done, 0 for in progress, a negative value for a failure.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np

from moe_engine.core.kv_transfer import wire
from moe_engine.core.kv_transfer.transports.protocol import (
    Block,
    Memory,
    Send,
    TransportError,
    Write,
    check_blocks,
    no_bytes_here,
)

DEVICES = "/sys/class/infiniband"


def find_protocol() -> str:
    """``rdma`` where the machine has RDMA devices."""
    return "rdma" if os.path.isdir(DEVICES) and os.listdir(DEVICES) else "tcp"


class MooncakeTransport:
    """Implements `Transport`.

    Args:
        host: address of this server for its peers.
        protocol: of the engine; empty: `find_protocol`.
        devices: names of the RDMA devices to use, separated by commas; empty: all that fit.

    Raises:
        TransportError: the library does not load, or the engine does not start.
    """

    def __init__(self, host: str, send: Send, protocol: str = "", devices: str = "") -> None:
        try:
            from mooncake.engine import TransferEngine
        except ImportError as error:
            raise TransportError(f"mooncake does not load: {error}") from error
        protocol = protocol or find_protocol()
        self._engine = TransferEngine()
        if (code := self._engine.initialize(host, "P2PHANDSHAKE", protocol, devices)) != 0:
            raise TransportError(f"mooncake does not start at {host} with {protocol}: error {code}")
        self._name = f"{host}:{self._engine.get_rpc_port()}"
        self._peers: dict[bytes, tuple[str, int, int]] = {}
        """Peer -> (name of its engine, address of its memory, bytes)."""
        self._spare: dict[int, list[np.ndarray]] = {}

    def register(self, num_bytes: int, *, is_target: bool = True) -> Memory:
        spare = self._spare.get(num_bytes)
        if spare:
            array = spare.pop()
        else:
            array = np.zeros(num_bytes, np.uint8)
            if (code := self._engine.register_memory(array.ctypes.data, num_bytes)) != 0:
                raise TransportError(f"mooncake cannot register {num_bytes} bytes: error {code}")
        return Memory(array, wire.encode([self._name, array.ctypes.data, num_bytes]))

    def release(self, memory: Memory) -> None:
        """Keeps the memory for reuse and never frees it: over TCP a late write is a copy to the address."""
        self._spare.setdefault(memory.array.nbytes, []).append(memory.array)

    def open(self, peer: bytes, description: bytes) -> None:
        try:
            self._peers[peer] = msgspec.msgpack.decode(description, type=tuple[str, int, int])
        except msgspec.MsgspecError as error:
            raise TransportError(f"the description of the peer's memory cannot be read: {error}") from None

    def write(self, peer: bytes, memory: Memory, blocks: Sequence[Block]) -> Write:
        if peer not in self._peers:
            raise TransportError("the peer has no memory")
        name, address, num_bytes = self._peers[peer]
        check_blocks(blocks, memory.array.nbytes, num_bytes)
        own = memory.array.ctypes.data
        handles = []
        for local, remote, length in blocks:
            handle = self._engine.transfer_submit_write(name, own + local, address + remote, length)
            if handle <= 0:
                raise TransportError(f"mooncake cannot reach {name}: error {handle}")
            handles.append(handle)
        return MooncakeWrite(self._engine, name, handles)

    def receive(self, values: list[Any], payload: Any) -> None:
        raise no_bytes_here("mooncake")

    def forget(self, peer: bytes) -> None:
        self._peers.pop(peer, None)

    def close(self) -> None:
        self._peers.clear()


class MooncakeWrite:
    def __init__(self, engine: Any, name: str, handles: list[int]) -> None:
        self._engine, self._name, self._handles = engine, name, handles
        self._failed = 0

    def poll(self) -> bool:
        """The engine frees a handle once it has reported the end, so no handle is polled again after that."""
        running = []
        for handle in self._handles:
            status = self._engine.transfer_check_status(handle)
            if status == 0:
                running.append(handle)
            elif status < 0:
                self._failed = status
        self._handles = running
        if self._failed and not running:  # other blocks may still be written
            raise TransportError(f"mooncake: a write to {self._name} failed: error {self._failed}")
        return not running
