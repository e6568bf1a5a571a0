"""Row ``nixl``: NIXL's agent with its UCX backend, over RDMA, TCP or shared memory, as UCX finds them.

Contract: the Python API of nixl 1.x (`nixl._api`): `register_memory` takes (address, bytes, device, tag);
`get_agent_metadata` contains the memory registered at the call; `check_xfer_state` returns PROC, DONE or ERR; a handle
is released after its end.
"""

from __future__ import annotations

import itertools
import os
import socket
from collections.abc import Sequence
from contextlib import suppress
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

BACKEND = "UCX"
HOST_MEMORY = "DRAM"
_agents = itertools.count(1)


class NixlTransport:
    """Implements `Transport`.

    Raises:
        TransportError: the library does not load, or has no UCX.
    """

    def __init__(self, host: str, send: Send) -> None:
        try:
            from nixl._api import nixl_agent, nixl_agent_config
        except ImportError as error:
            raise TransportError(f"nixl does not load: {error}") from error
        name = f"moe-engine {socket.gethostname()} {os.getpid()} {next(_agents)}"
        self._peers: dict[bytes, tuple[str, int, int]] = {}
        """Peer -> (name of its agent, address of its memory, bytes)."""
        self._spare: dict[int, list[np.ndarray]] = {}
        try:
            self._agent = nixl_agent(name, nixl_agent_config(backends=[BACKEND]))
        except Exception as error:  # of the library's own types
            raise TransportError(f"nixl does not start with {BACKEND}: {error}") from error

    def register(self, num_bytes: int, *, is_target: bool = True) -> Memory:
        spare = self._spare.get(num_bytes)
        try:
            if spare:
                array = spare.pop()
            else:
                array = np.zeros(num_bytes, np.uint8)
                self._agent.register_memory([(array.ctypes.data, num_bytes, 0, "")], HOST_MEMORY)
            metadata = self._agent.get_agent_metadata()
        except Exception as error:
            raise TransportError(f"nixl cannot register {num_bytes} bytes: {error}") from error
        return Memory(array, wire.encode([metadata, array.ctypes.data, num_bytes]))

    def release(self, memory: Memory) -> None:
        """Keeps the memory for reuse and never frees it: without RDMA in UCX, a late write is a copy to the address."""
        self._spare.setdefault(memory.array.nbytes, []).append(memory.array)

    def open(self, peer: bytes, description: bytes) -> None:
        self.forget(peer)
        try:
            metadata, address, num_bytes = msgspec.msgpack.decode(description, type=tuple[bytes, int, int])
            name = self._agent.add_remote_agent(metadata)
        except Exception as error:
            raise TransportError(f"nixl cannot reach the decode server's memory: {error}") from error
        self._peers[peer] = (name.decode() if isinstance(name, bytes) else name), address, num_bytes

    def write(self, peer: bytes, memory: Memory, blocks: Sequence[Block]) -> Write:
        if peer not in self._peers:
            raise TransportError("the peer has no memory")
        name, address, num_bytes = self._peers[peer]
        check_blocks(blocks, memory.array.nbytes, num_bytes)
        own, agent = memory.array.ctypes.data, self._agent
        try:
            local = agent.get_xfer_descs([(own + begin, length, 0) for begin, _, length in blocks], HOST_MEMORY)
            remote = agent.get_xfer_descs([(address + begin, length, 0) for _, begin, length in blocks], HOST_MEMORY)
            handle = agent.initialize_xfer("WRITE", local, remote, name)
            write = NixlWrite(agent, handle)
            write.state = agent.transfer(handle)
        except Exception as error:
            raise TransportError(f"nixl cannot begin a write: {error}") from error
        return write

    def receive(self, values: list[Any], payload: Any) -> None:
        raise no_bytes_here("nixl")

    def forget(self, peer: bytes) -> None:
        known = self._peers.pop(peer, None)
        if known is not None:
            with suppress(Exception):
                self._agent.remove_remote_agent(known[0])

    def close(self) -> None:
        for peer in list(self._peers):
            self.forget(peer)


class NixlWrite:
    def __init__(self, agent: Any, handle: Any) -> None:
        self._agent, self._handle = agent, handle
        self.state = "PROC"

    def poll(self) -> bool:
        try:
            if self.state == "PROC":
                self.state = self._agent.check_xfer_state(self._handle)
        except Exception as error:
            self.state = "ERR"
            raise TransportError(f"nixl: {error}") from error
        finally:
            if self.state != "PROC" and self._handle is not None:
                handle, self._handle = self._handle, None
                with suppress(Exception):
                    self._agent.release_xfer_handle(handle)
        if self.state not in ("PROC", "DONE"):
            raise TransportError(f"nixl: the write ended with {self.state}")
        return self.state == "DONE"
