"""A transport that fails at random, and a connection between two servers that can be cut or stopped."""

from __future__ import annotations

import itertools
import select
import socket
import threading
from collections.abc import Callable, Sequence
from random import Random
from typing import Any, ClassVar

import msgspec
import numpy as np

from moe_engine.core.kv_transfer import wire
from moe_engine.core.kv_transfer.transports.protocol import (
    Block,
    Memory,
    Transport,
    TransportError,
    Write,
    check_blocks,
)


class FaultyTransport:
    """Implements `Transport` within a process, with one-sided writes, also to memory that the receiver has released.

    A write fails at its start, or later, with all, part or none of its bytes written; or it is slow; or it damages a
    byte; or it succeeds.
    """

    memories: ClassVar[dict[int, np.ndarray]] = {}
    numbers: ClassVar[Any] = itertools.count(1)

    def __init__(self, rng: Random, rate: float) -> None:
        self._rng, self._rate = rng, rate
        self._peers: dict[bytes, np.ndarray] = {}
        self.num_faults = 0

    def fault(self) -> bool:
        found = self._rng.random() < self._rate
        self.num_faults += found
        return found

    def register(self, num_bytes: int, *, is_target: bool = True) -> Memory:
        if self.fault():
            raise TransportError("made up: no memory")
        number = next(self.numbers)
        self.memories[number] = np.zeros(num_bytes, np.uint8)
        return Memory(self.memories[number], wire.encode(number))

    def release(self, memory: Memory) -> None: ...

    def open(self, peer: bytes, description: bytes) -> None:
        if self.fault():
            raise TransportError("made up: not reachable")
        self._peers[peer] = self.memories[msgspec.msgpack.decode(description)]

    def write(self, peer: bytes, memory: Memory, blocks: Sequence[Block]) -> Write:
        if self.fault():
            raise TransportError("made up: cannot begin")
        target = self._peers[peer]
        check_blocks(blocks, memory.array.nbytes, target.nbytes)
        return FaultyWrite(self, target, memory.array, list(blocks), self._rng.choice([0, 0, 1, 5]))

    def receive(self, values: list[Any], payload: Any) -> None:
        raise TransportError("made up: bytes over the connection")

    def forget(self, peer: bytes) -> None:
        self._peers.pop(peer, None)

    def close(self) -> None: ...


class FaultyWrite:
    def __init__(
        self, owner: FaultyTransport, target: np.ndarray, source: np.ndarray, blocks: list[Block], polls: int
    ) -> None:
        self._owner, self.target, self._source, self._blocks, self._polls = owner, target, source, blocks, polls

    def poll(self) -> bool:
        if self._polls:
            self._polls -= 1
            return False
        fails, damages = self._owner.fault(), self._owner.fault()
        for local, remote, length in self._blocks:
            part = length // 2 if fails else length
            self.target[remote : remote + part] = self._source[local : local + part]
            if damages:
                self.target[remote] ^= 255
        self._blocks = []
        if fails:
            raise TransportError("made up: failed")
        return True


class FaultyRow:
    """A row of the table that fails at random: at the start of a call, or after the bytes of a write were sent.

    `num_live`: memories that were registered and not released.
    """

    def __init__(self, row: Transport, rng: Random, rate: float) -> None:
        self._row, self._rng, self._rate = row, rng, rate
        self.num_faults = self.num_live = 0

    def _may_fail(self, what: str) -> None:
        if self._rng.random() < self._rate:
            self.num_faults += 1
            raise TransportError(f"made up: {what}")

    def register(self, num_bytes: int, *, is_target: bool = True) -> Memory:
        self._may_fail("no memory")
        memory = self._row.register(num_bytes, is_target=is_target)
        self.num_live += 1
        return memory

    def release(self, memory: Memory) -> None:
        self.num_live -= 1
        self._row.release(memory)

    def open(self, peer: bytes, description: bytes) -> None:
        self._may_fail("not reachable")
        self._row.open(peer, description)

    def write(self, peer: bytes, memory: Memory, blocks: Sequence[Block]) -> Write:
        self._may_fail("cannot begin")
        write = self._row.write(peer, memory, blocks)
        return LateWrite(self, write, self._rng.choice([0, 0, 0, 1, 5, 50]))

    def receive(self, values: list[Any], payload: Any) -> None:
        self._may_fail("the bytes are lost")
        self._row.receive(values, payload)

    def forget(self, peer: bytes) -> None:
        self._row.forget(peer)

    def close(self) -> None:
        self._row.close()


class LateWrite:
    """A write that ends some polls later, and may fail then."""

    def __init__(self, owner: FaultyRow, write: Write, polls: int) -> None:
        self._owner, self._write, self._polls = owner, write, polls

    def poll(self) -> bool:
        if self._polls:
            self._polls -= 1
            return False
        if not self._write.poll():
            return False
        self._owner._may_fail("failed")
        return True


class Cable:
    """A port that forwards to another port of this machine. `cut` closes its connections, `stop` stops forwarding.
    `on_bytes` is called with the bytes forwarded so far, after each part."""

    def __init__(self, port: int) -> None:
        self.num_bytes = 0
        self.on_bytes: Callable[[int], None] = lambda count: None
        self.target = port
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = self._listener.getsockname()[1]
        self._pairs: dict[socket.socket, socket.socket] = {}
        self._lock = threading.Lock()
        self._flows = threading.Event()
        self._flows.set()
        self._closing = False
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def cut(self) -> None:
        with self._lock:
            for end in self._pairs:
                end.close()
            self._pairs.clear()

    def stop(self) -> None:
        self._flows.clear()

    def go_on(self) -> None:
        self._flows.set()

    def close(self) -> None:
        self._closing = True
        self._flows.set()
        self._thread.join(5)
        self.cut()
        self._listener.close()

    def _run(self) -> None:
        while not self._closing:
            with self._lock:
                ends = [end for end in self._pairs if end.fileno() >= 0]
            if not self._flows.wait(0.05):
                continue
            try:
                ready = select.select([self._listener, *ends], [], [], 0.02)[0]
            except (OSError, ValueError):  # closed meanwhile
                continue
            for end in ready:
                self._accept() if end is self._listener else self._forward(end)

    def _accept(self) -> None:
        near, _ = self._listener.accept()
        try:
            far = socket.create_connection(("127.0.0.1", self.target), 2)
        except OSError:
            near.close()
            return
        with self._lock:
            self._pairs[near], self._pairs[far] = far, near

    def _forward(self, end: socket.socket) -> None:
        with self._lock:
            other = self._pairs.get(end)
        if other is None:
            return
        try:
            data = end.recv(1 << 13)
            if data:
                other.sendall(data)
                self.num_bytes += len(data)
                self.on_bytes(self.num_bytes)
                return
        except OSError:
            pass
        with self._lock:
            for each in (end, other):
                self._pairs.pop(each, None)
                each.close()
