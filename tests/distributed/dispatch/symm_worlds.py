"""Functions that ranks run in the tests of dispatch through peers' memory: a GPU's kernels, interpreted, on memory that
the processes share. Memory not yet written by the kernels is NaN, and -1 in integers."""

from __future__ import annotations

import time
from datetime import timedelta
from importlib import import_module
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from moe_engine.parallel.collectives import DistributedGroup, PeerLost
from moe_engine.parallel.dispatch.build import Groups, build
from moe_engine.parallel.dispatch.protocol import NUM_LIVE, DispatchShape, Phase
from moe_engine.parallel.dispatch.symm_mem.nvshmem4py import Nvshmem
from moe_engine.parallel.dispatch.tables import DispatchChoice
from tests.distributed.dispatch.host_symm_mem import HostSymmetricMemory
from tests.distributed.dispatch.nvshmem4py_emulator import Core, Device
from tests.distributed.dispatch.nvshmem_emulator import EmulatedShuffles
from tests.distributed.dispatch.routings import MAX_TOKENS, Routing
from tests.distributed.dispatch.worlds import (
    DTYPES,
    TIMEOUT_S,
    Outcome,
    Setup,
    dispatch,
    row_of,
    run_experts,
    shape_of,
    two_alive,
)

made: dict[Any, tuple[Any, HostSymmetricMemory, DistributedGroup]] = {}


def dispatcher_of(setup: Setup, routing: Routing) -> tuple[Any, HostSymmetricMemory, DistributedGroup]:
    """A dispatcher with both modes, on its own group; and the source of its memory, if any."""
    key = (setup, routing.num_experts, routing.top_k)
    if key not in made:
        process_group = dist.new_group()
        group, memory = DistributedGroup(process_group, TIMEOUT_S), HostSymmetricMemory()
        shuffles = package = None
        if setup.library == "nvshmem4py":
            package = Nvshmem(Core(process_group), Device(), group)
        else:
            shuffles = EmulatedShuffles(process_group)
        choice = DispatchChoice(row_of(setup.backend), {"prefill": "normal", "decode": "low_latency"}, "a test's")
        shape = shape_of(setup, routing.num_experts, routing.top_k)
        dispatcher = build(
            choice,
            shape,
            MAX_TOKENS,
            Groups(group, symm_mem=memory, shuffles=shuffles, nvshmem=package, on_host=False if package else None),
        )
        made[key] = dispatcher, memory, group
    return made[key]


def spoil(memory: HostSymmetricMemory, group: DistributedGroup) -> None:
    """Sets all memory except flags to NaN and -1, on every rank, while no kernel uses it."""
    group.barrier()
    for own in memory.own:
        for slot in own.view(NUM_LIVE, -1):
            slot[FLAG_END:].fill_(0xFF)
    group.barrier()


FLAG_END = 2 * 256  # bytes of a slot: flags of two kinds, for up to 32 ranks


def run_routings(rank: int, setup: Setup, routings: list[Routing], phase: Phase = "decode") -> list[Outcome]:
    """Dispatch, toy experts and combine for each routing in turn."""
    outcomes = []
    for routing in routings:
        dispatcher, memory, group = dispatcher_of(setup, routing)
        spoil(memory, group)
        x, ids, weights = routing.of(rank, setup.hidden, DTYPES[setup.dtype])
        batch, handle = dispatch(dispatcher, setup, x, ids, weights, phase)
        rows, counts = run_experts(batch, rank * routing.num_experts // dist.get_world_size())
        outcomes.append(Outcome(dispatcher.combine(rows, weights, handle), counts))
    return outcomes


def run_live(rank: int, setup: Setup, first: Routing, second: Routing, newest_first: bool) -> tuple[Outcome, Outcome]:
    """Two pending results in overwritten memory, combined in either order; a third dispatch is refused."""
    dispatcher, memory, group = dispatcher_of(setup, first)
    spoil(memory, group)
    return two_alive(dispatcher, rank, setup, first, second, newest_first)


def replay(rank: int, setup: Setup, routings: list[Routing]) -> list[Outcome]:
    """The same slot repeatedly, without the host's part, as in replays of a captured graph; without barriers in
    between, so that ranks run ahead of each other as far as the kernels allow."""
    dispatcher, _, _ = dispatcher_of(setup, routings[0])
    exchange = dispatcher._by_phase["decode"]._exchange
    outcomes = []
    for step, routing in enumerate(routings):
        x, ids, weights = routing.of(rank, setup.hidden, DTYPES[setup.dtype])
        arrival = exchange.dispatch(x, ids, weights, 0)
        rows = torch.full_like(arrival.rows, float("nan"))
        counts = arrival.counts.tolist()
        for e, valid in enumerate(counts):
            rows[e, :valid] = arrival.rows[e, :valid]
        outcomes.append(Outcome(exchange.combine(rows, len(x), 0), counts))
        time.sleep(0.01 * ((rank + step) % 2))
    return outcomes


def overflow(rank: int, setup: Setup) -> tuple[list[int], torch.Tensor, torch.Tensor]:
    """Every token names its expert several times, without a check: more rows than the buffers can hold."""
    routing = Routing(5, 2 * dist.get_world_size(), 3, ((),) * dist.get_world_size())
    dispatcher, memory, group = dispatcher_of(setup, routing)
    spoil(memory, group)
    x = torch.randn(MAX_TOKENS, setup.hidden, generator=torch.Generator().manual_seed(rank))
    ids = torch.full((MAX_TOKENS, 3), 1, dtype=torch.int32)
    weights = torch.ones(MAX_TOKENS, 3)
    batch, handle = dispatcher.dispatch(x, ids, weights, "decode")
    counts = batch.counts.tolist()
    return counts, x, dispatcher.combine(batch.x.clone(), weights, handle)


def run_until_lost(rank: int, timeout_s: float, going: str) -> str:
    """Endless dispatches; returns the error that ends them. Rank 0 creates the file `going` after some steps."""
    group = DistributedGroup(dist.new_group(timeout=timedelta(seconds=60)), timeout_s)
    routing = Routing(1, group.size, 1, ((),) * group.size)
    shape = shape_of(Setup("symm_mem", "low_latency", hidden=16), routing.num_experts, 1)
    choice = DispatchChoice(row_of("symm_mem"), {"decode": "low_latency"}, "a test's")
    dispatcher = build(choice, shape, MAX_TOKENS, Groups(group, symm_mem=HostSymmetricMemory()))
    x, ids, weights = torch.ones(1, 16), torch.tensor([[1 - rank]]), torch.ones(1, 1)
    for step in count():
        try:
            batch, handle = dispatcher.dispatch(x, ids, weights, "decode")
            dispatcher.combine(batch.x.clone(), weights, handle)
        except PeerLost as error:
            with pytest.raises(PeerLost):  # the check at the end of a replayed step raises it, too
                dispatcher.check_peers()
            return str(error)
        if step == 3 and rank == 0:
            Path(going).touch()
    raise AssertionError


def refusals(rank: int, module: str, shapes: list[DispatchShape]) -> list[str | None]:
    """`why_not` of a dispatcher's module."""
    found = import_module(f"moe_engine.parallel.dispatch.symm_mem.{module}")
    return [found.why_not(shape) for shape in shapes]
