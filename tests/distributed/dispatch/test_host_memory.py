"""The ledger's bytes of dispatch on CPUs are the bytes of the buffers when every token goes to all ranks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from moe_engine.kernels.device import cpu_device
from moe_engine.kernels.permutation_choice import permutation
from moe_engine.parallel.collectives import SingleRank
from moe_engine.parallel.dispatch import host_memory
from moe_engine.parallel.dispatch.host_all_to_all import HostAllToAll
from moe_engine.parallel.dispatch.host_memory import HostLoad
from moe_engine.parallel.dispatch.payload import RecordFormat, encode
from moe_engine.parallel.dispatch.protocol import DispatchShape
from moe_engine.parallel.dispatch.shared_memory import SharedMemory
from moe_engine.parallel.dispatch.tables import ROWS, Place

HIDDEN, TOP_K = 128, 3


class Mirror(SingleRank):
    """One of several ranks with identical peers: each operation returns its own data."""

    on_host = True

    def __init__(self, size: int) -> None:
        super().__init__()
        self.size = size

    def all_to_all(
        self, out: Tensor, x: Tensor, out_rows: Sequence[int] | None = None, x_rows: Sequence[int] | None = None
    ) -> None:
        assert out_rows is not None and x_rows is not None
        for room, rows in zip(out.split(list(out_rows)), x.split(list(x_rows))):
            room[: len(rows)] = rows


def held(value: Any, seen: set[int]) -> Iterator[int]:
    """Bytes of the tensors of an object and of its parts, each storage once."""
    if isinstance(value, Tensor):
        storage = value.untyped_storage()
        if storage.data_ptr() not in seen:
            seen.add(storage.data_ptr())
            yield storage.nbytes()
    elif isinstance(value, list):
        for item in value:
            yield from held(item, seen)
    elif type(value).__module__.endswith(("host_all_to_all", "buffers", "shared_memory")):
        for item in vars(value).values():
            yield from held(item, seen)


def shape_of(num_ranks: int, tokens: int, fp8: bool = False) -> DispatchShape:
    return DispatchShape(TOP_K * num_ranks, num_ranks, TOP_K, HIDDEN, tokens, torch.bfloat16, fp8)


def load_of(shape: DispatchShape, room_tokens: int) -> HostLoad:
    record = RecordFormat.of(shape).num_bytes
    return HostLoad(shape.num_ranks, 1, shape.max_tokens, room_tokens, record, 2 * HIDDEN)


@pytest.mark.parametrize("fp8", [False, True])
@pytest.mark.parametrize(("tokens", "room"), [(5, 5), (5, 64), (9, 4)])
def test_buffers_of_all_to_all(tokens: int, room: int, fp8: bool) -> None:
    shape = shape_of(3, tokens, fp8)
    exchange = HostAllToAll(Mirror(3), shape, room, permutation(shape.dtype))
    ids = torch.tensor([0, 3, 6]).repeat(tokens, 1)  # one expert per rank
    sent = encode(torch.ones(tokens, HIDDEN, dtype=torch.bfloat16), ids, torch.ones(tokens, TOP_K), fp8)
    arrived, handle = exchange.deliver(sent, 0)
    assert len(arrived.ids) == 3 * tokens
    exchange.collect(torch.ones(3 * tokens, HIDDEN, dtype=torch.bfloat16), handle)
    planned = host_memory.all_to_all(load_of(shape, room))
    others = (2 * 3 - 1) * 16 + 3  # headers of messages, and the participants
    assert sum(held(exchange, set())) == planned + others


def test_buffers_of_shared_memory() -> None:
    """A group of one rank, with the whole share; with both slots in use each has half of the tokens."""
    shape = shape_of(1, 32)
    exchange = SharedMemory(SingleRank(), shape, permutation(shape.dtype))
    ids = torch.tensor([0, 1, 2]).repeat(32, 1)
    sent = encode(torch.ones(32, HIDDEN, dtype=torch.bfloat16), ids, torch.ones(32, TOP_K), False)
    _, handle = exchange.deliver(sent, 0)
    exchange.collect(torch.ones(32, HIDDEN, dtype=torch.bfloat16), handle)
    region = exchange._regions[0]
    common = region.own.nbytes + region.sums.nbytes
    assert common + sum(held(exchange._taken, set())) == host_memory.shared_memory(load_of(shape, 32))


def test_every_backend_of_cpus_is_counted() -> None:
    able = {row.name for nodes in (1, 2) for row in ROWS if row.why_not(Place(cpu_device(), 4, nodes)) is None}
    assert {"all_to_all", "two_hop"} <= able <= set(host_memory.OF_BACKEND)


def test_two_hops_take_more_than_one_and_static_rooms_more_than_few() -> None:
    load = HostLoad(4, 2, 100, 10, 1000, 500)
    few, all_fit = host_memory.two_hop(load), host_memory.two_hop(HostLoad(4, 2, 100, 100, 1000, 500))
    between, inside = HostLoad(2, 1, 100, 10, 1000, 500), HostLoad(2, 1, 200, 10, 1000, 500)
    assert few == host_memory.all_to_all(between) + host_memory.all_to_all(inside) and few < all_fit
