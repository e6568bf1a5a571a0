"""Copies of transfers between servers on a simulated GPU: a transfer thread reads a place only after its store is
complete, and a load copies its written bytes to the pool."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from moe_engine.models.config_sections.state import StateGroup, StatePart
from moe_engine.types import KVLoad, KVOps
from moe_engine.worker.device_stream import DeviceStream
from moe_engine.worker.kv_cache import kv_copies
from moe_engine.worker.kv_cache.host_states import HostStates
from moe_engine.worker.kv_cache.kv_pool import KVPool, KVSpec
from moe_engine.worker.kv_cache.state_pool import StatePool
from moe_engine.worker.kv_cache.transfer_copies import TransferCopies
from tests.waiting import until


@pytest.mark.parametrize("layout", ["page_first", "layer_first"])
@pytest.mark.parametrize("staged", [False, True])
@pytest.mark.parametrize("at_once", [2, 100])
def test_rows_that_another_server_gets(
    layout: str, staged: bool, at_once: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    stream, spec = DeviceStream("cuda"), KVSpec.gqa(3, 2, 4, torch.float32)
    monkeypatch.setattr(kv_copies, "COPY_BYTES", at_once * spec.bytes_per_token)
    pool = KVPool(spec, 16, 1, stream)
    content = torch.randint(0, 255, (17, spec.bytes_per_token), dtype=torch.uint8)
    every = stream.from_list(range(17), torch.int64)
    pool.write_rows(every, stream.upload(content))
    copies = TransferCopies(pool, 8, stream, layout=layout, staged=staged)
    assert copies.row_bytes == spec.bytes_per_token and len(copies.row_widths) == 6
    places, slots = [5, 6, 7, 0, 2], [3, 9, 4, 1, 2]
    copies.start(KVOps(store_slots=slots, store_places=places, serial=1))
    pool.write_rows(every, stream.upload(torch.zeros_like(content)))  # the next step overwrites the slots
    until(lambda: copies.stored == 1)
    out = np.zeros(5 * copies.row_bytes, np.uint8)
    copies.read_into(places, out.reshape(5, -1))
    assert np.array_equal(out.reshape(5, -1), content[slots].numpy())
    assert np.array_equal(copies.read(places), content[slots].numpy())
    arrived = np.random.default_rng(torch.randint(0, 1 << 30, ()).item()).integers(
        0, 255, (3, copies.row_bytes), np.uint8
    )
    copies.write([1, 4, 3], arrived)  # the transfer thread, before the scheduler plans the load
    done: list[int] = []
    copies.listener = lambda load, error: done.append(load)
    copies.start(KVOps(loads=[KVLoad(1, [1, 4, 3], [8, 12, 10])], serial=2, store_slots=[0], store_places=[6]))
    copies.start(KVOps(arrived=[1]))
    found = stream.read(pool.read_rows(stream.from_list([8, 12, 10], torch.int64)))
    assert np.array_equal(found, arrived)
    until(lambda: done == [1])
    until(lambda: copies.stored == 2)
    copies.close()


def test_a_state_that_another_server_gets() -> None:
    """The rows of a state have places after those of tokens; the last one may be shorter."""
    stream, spec = DeviceStream("cuda"), KVSpec.gqa(1, 1, 4, torch.float32)
    states = StatePool((StateGroup((0,), (StatePart((7, 3)),)),), 2, torch.bfloat16, stream, num_snapshots=3)
    copies = TransferCopies(KVPool(spec, 8, 1, stream), 4, stream, states=HostStates(5, states, stream))
    size, row = states.snapshot_bytes, copies.row_bytes
    assert size % row and copies.state_rows == size // row + 1
    content = torch.randint(0, 255, (size,), dtype=torch.uint8)
    states.write_snapshot(1, stream.upload(content))
    copies.start(KVOps(state_stores=[(1, 2)], serial=1))
    until(lambda: copies.stored == 1)
    places = [range(4 + entry * copies.state_rows, 4 + (entry + 1) * copies.state_rows) for entry in (2, 4)]
    out = np.ones((copies.state_rows, row), np.uint8)
    copies.read_into([*places[0]][:1], out[:1])  # in pieces
    copies.read_into([*places[0]][1:], out[1:])
    assert np.array_equal(out.reshape(-1)[:size], content.numpy()) and not out.reshape(-1)[size:].any()
    copies.write([*places[1]], out)
    copies.start(KVOps(loads=[KVLoad(1, [], [], [(4, 2)])]))
    copies.start(KVOps(arrived=[1]))
    assert np.array_equal(stream.read(states.read_snapshot(2)), content.numpy())
    copies.close()
