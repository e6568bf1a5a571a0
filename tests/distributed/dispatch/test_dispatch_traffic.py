"""Traffic between ranks and nodes, counted from the routing in Python and compared with the groups' messages."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest

from moe_engine.parallel.dispatch.protocol import Mode
from moe_engine.parallel.dispatch.tables import MODES
from tests.distributed.dispatch.ranks import Ranks
from tests.distributed.dispatch.routings import MAX_TOKENS, Routing, draw_ids
from tests.distributed.dispatch.worlds import Setup, run_counted

NUM_NODES, PER_NODE = 2, 2
N = NUM_NODES * PER_NODE
LOCAL, TOP_K, HIDDEN = 4, 8, 2048
ROW_BYTES = HIDDEN * 2  # bfloat16


@pytest.fixture(scope="module")
def four() -> Iterator[Ranks]:
    with Ranks(N) as ranks:
        yield ranks


def routing_of(seed: int) -> Routing:
    generator = np.random.default_rng(seed)
    num_experts = N * LOCAL
    ids = tuple(draw_ids("uniform", MAX_TOKENS, num_experts, TOP_K, N, generator) for _ in range(N))
    return Routing(seed, num_experts, TOP_K, ids)


def pairs(routing: Routing, source: int, experts_of_side: int) -> dict[int, int]:
    """Number of the source's tokens with an expert on each side (a rank, a node)."""
    found: dict[int, int] = {}
    for token in routing.ids[source]:
        for side in {expert // experts_of_side for expert in token}:
            found[side] = found.get(side, 0) + 1
    return found


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("seed", range(3))
def test_a_token_crosses_once_to_a_rank_in_one_message(four: Ranks, seed: int, mode: Mode) -> None:
    """A token is sent once per rank, not per expert; at most 5 % more bytes than rows and choices, and a header."""
    routing = routing_of(seed)
    of_ranks = four.call(run_counted, Setup("all_to_all", mode, "bfloat16", hidden=HIDDEN), routing)
    for source, operations in enumerate(of_ranks):
        out, back = [num_bytes for _, _, num_bytes in operations]
        wanted = pairs(routing, source, LOCAL)
        assert out[source] == 0  # local rows are not sent
        for rank in set(range(N)) - {source}:
            rows = wanted.get(rank, 0)
            assert rows * ROW_BYTES + 16 <= out[rank] <= rows * ROW_BYTES * 1.05 + 16
            assert back[rank] == pairs(routing, rank, LOCAL).get(source, 0) * ROW_BYTES


@pytest.mark.parametrize("room_tokens", [None, 2])
def test_sizes_are_exchanged_first_on_devices_and_beyond_rooms(four: Ranks, room_tokens: int | None) -> None:
    routing = routing_of(3)
    setup = Setup("all_to_all", "normal", "bfloat16", False, HIDDEN, as_device=True)
    if room_tokens is not None:
        setup = replace(setup, as_device=False, room_tokens=room_tokens)
    for source, operations in enumerate(four.call(run_counted, setup, routing)):
        sizes, out, back = [num_bytes for _, _, num_bytes in operations]
        assert sizes == ([8] * N if room_tokens is None else [16 * (rank != source) for rank in range(N)])
        wanted = pairs(routing, source, LOCAL)
        for rank in range(N):
            rows = wanted.get(rank, 0)
            assert rows * ROW_BYTES <= out[rank] <= rows * ROW_BYTES * 1.05
            assert back[rank] == pairs(routing, rank, LOCAL).get(source, 0) * ROW_BYTES


@pytest.mark.parametrize("seed", range(3))
def test_a_token_crosses_once_to_a_node_and_to_the_same_place_in_it(four: Ranks, seed: int) -> None:
    routing = routing_of(seed)
    setup = Setup("two_hop", "normal", "bfloat16", hidden=HIDDEN, num_nodes=NUM_NODES)
    between = 0
    for rank, operations in enumerate(four.call(run_counted, setup, routing)):
        node = rank // PER_NODE
        # groups: `rails` joins equal positions of all nodes, so no message reaches another position of another node
        assert {name for name, _, _ in operations} == {"rails", "node"}
        out, back = [num_bytes for name, _, num_bytes in operations if name == "rails"]
        wanted = pairs(routing, rank, LOCAL * PER_NODE)
        other = 1 - node
        assert wanted.get(other, 0) * ROW_BYTES <= out[other] <= wanted.get(other, 0) * ROW_BYTES * 1.05 + 16
        arrived = pairs(routing, other * PER_NODE + rank % PER_NODE, LOCAL * PER_NODE).get(node, 0)
        assert back[other] == arrived * ROW_BYTES
        between += out[other]
    one_hop = sum(
        rows * ROW_BYTES
        for source in range(N)
        for rank, rows in pairs(routing, source, LOCAL).items()
        if rank // PER_NODE != source // PER_NODE
    )
    assert between < 0.65 * one_hop  # with 8 of 16 experts nearly every token has experts on both ranks of a node


def test_fp8_halves_what_is_sent_out(four: Ranks) -> None:
    routing = routing_of(7)
    plain = four.call(run_counted, Setup("all_to_all", "normal", "bfloat16", hidden=HIDDEN), routing)
    quantized = four.call(run_counted, Setup("all_to_all", "normal", "bfloat16", True, HIDDEN), routing)
    for one, two in zip(plain, quantized):
        assert sum(two[0][2]) < 0.54 * sum(one[0][2])
        assert two[1] == one[1]


@pytest.mark.parametrize("backend", ["all_to_all", "allgather"])
def test_low_latency_of_devices_sends_the_same_bytes_whatever_is_chosen(four: Ranks, backend: str) -> None:
    setup = Setup(backend, "low_latency", "bfloat16", hidden=128, as_device=True)
    generator = np.random.default_rng(0)
    sent = []
    for kind, size in (("uniform", 6), ("one_expert_set", 1), ("all_dropped", 3), ("uniform", 0)):
        ids = tuple(draw_ids(kind, size, N * LOCAL, TOP_K, N, generator) for _ in range(N))
        sent.append(four.call(run_counted, setup, Routing(1, N * LOCAL, TOP_K, ids)))
    assert all(one == sent[0] for one in sent)
