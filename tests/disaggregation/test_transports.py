"""Each transport against the protocol, between two instances in this process."""

from __future__ import annotations

import random
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from moe_engine.core.kv_transfer import wire
from moe_engine.core.kv_transfer.transports.protocol import Transport, TransportError, Write
from moe_engine.core.kv_transfer.transports.table import open_transport
from moe_engine.parallel import host_support
from tests.disaggregation.transport_names import each_transport

PEER = b"decode"
SIZE = 1 << 14


class Both:
    """A transport that writes, and the transport of the target memory; the control connection delivers at once."""

    def __init__(self, name: str) -> None:
        self.target: Transport = open_transport(name, "127.0.0.1", lambda peer, frames: None)
        self.source: Transport = open_transport(name, "127.0.0.1", self._carry)

    def _carry(self, peer: bytes, frames: list[Any]) -> None:
        kind, *values = wire.decode(frames[0])
        assert peer == PEER and kind == "bytes"
        self.target.receive(values, memoryview(frames[1].copy()))

    def close(self) -> None:
        self.source.close()
        self.target.close()


def wait(write: Write) -> None:
    end = time.monotonic() + 30
    while not write.poll():
        assert time.monotonic() < end
        time.sleep(0.001)


@pytest.fixture(params=each_transport())
def both(request: pytest.FixtureRequest) -> Any:
    made = Both(request.param)
    yield made
    made.close()


def test_blocks_arrive_and_nothing_else_changes(both: Both) -> None:
    memory, own = both.target.register(SIZE), both.source.register(SIZE)
    memory.array[:] = 0
    own.array[:] = np.frombuffer(random.randbytes(SIZE), np.uint8)
    both.source.open(PEER, memory.description)
    expected = np.zeros(SIZE, np.uint8)
    cuts = sorted(random.sample(range(SIZE), 6))
    blocks = [(a, SIZE - b, b - a) for a, b in zip(cuts[::2], cuts[1::2])]  # other offsets on the other side
    for local, remote, length in blocks:
        expected[remote : remote + length] = own.array[local : local + length]
    wait(both.source.write(PEER, own, blocks))
    assert np.array_equal(memory.array, expected)
    own.array[:] = np.frombuffer(random.randbytes(SIZE), np.uint8)
    wait(both.source.write(PEER, own, [(0, 0, SIZE)]))  # a second write, of all blocks
    assert np.array_equal(memory.array, own.array)


def test_blocks_outside_of_a_memory_are_refused(both: Both) -> None:
    memory, own = both.target.register(SIZE), both.source.register(2 * SIZE)
    both.source.open(PEER, memory.description)
    for block in ((0, 1, SIZE), (2 * SIZE - 1, 0, 2), (-1, 0, 1), (0, SIZE, 1)):
        with pytest.raises(TransportError, match="outside"):
            both.source.write(PEER, own, [block])


def test_unknown_peers_and_descriptions_are_refused(both: Both) -> None:
    own = both.source.register(SIZE)
    with pytest.raises(TransportError):
        both.source.write(PEER, own, [(0, 0, 1)])
    with pytest.raises(TransportError):
        both.source.open(PEER, b"\xc1")
    memory = both.target.register(SIZE)
    both.source.open(PEER, memory.description)
    both.source.forget(PEER)
    with pytest.raises(TransportError):
        both.source.write(PEER, own, [(0, 0, 1)])


def test_a_peer_that_connects_again_has_new_memory(both: Both) -> None:
    """Writes to the old memory do not reach it."""
    own = both.source.register(SIZE)
    own.array[:] = 7
    old = both.target.register(SIZE)
    both.source.open(PEER, old.description)
    wait(both.source.write(PEER, own, [(0, 0, SIZE)]))
    other = both.target.register(SIZE)  # of another peer
    other.array[:] = 1
    both.target.release(old)
    new = both.target.register(SIZE)
    new.array[:] = 2
    both.source.open(PEER, new.description)
    wait(both.source.write(PEER, own, [(0, 0, 16)]))
    assert new.array[:16].tolist() == [7] * 16 and set(new.array[16:].tolist()) == {2}
    assert set(other.array.tolist()) == {1}


def test_shared_memory_leaves_no_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_support, "FOLDER", str(tmp_path))
    killed = tmp_path / f"{host_support.PREFIX}kv-killed"
    killed.touch()  # no process locks it
    both = Both("shm")
    first, second = both.target.register(SIZE), both.target.register(SIZE)
    assert len(list(tmp_path.iterdir())) == 2
    both.source.open(PEER, first.description)
    assert len(list(tmp_path.iterdir())) == 1  # the name is removed once opened
    with pytest.raises(TransportError, match="use tcp"):
        both.source.open(PEER, first.description)
    both.target.release(second)
    assert not list(tmp_path.iterdir())
    third = both.target.register(SIZE)
    both.close()
    assert third.array.nbytes == SIZE and not list(tmp_path.iterdir())
    own = both.source.register(SIZE, is_target=False)  # of a sender whose process may be killed
    assert own.array.nbytes == SIZE and not list(tmp_path.iterdir())
    both.source.release(own)
    name, inode, size = wire.decode(third.description)
    for wrong in ([f"../{name}", inode, size], ["passwd", inode, size], [name, inode, size]):
        with pytest.raises(TransportError):
            both.source.open(PEER, wire.encode(wrong))
