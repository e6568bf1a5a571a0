"""A rank in the dispatch tests: dispatchers are made once; toy experts run between dispatch and combine."""

from __future__ import annotations

import os
import signal
import time
from dataclasses import dataclass, replace
from datetime import timedelta
from itertools import count, pairwise
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from moe_engine.kernels.experts.protocol import ExpertBatch
from moe_engine.kernels.permutation.reference import TorchPermutation
from moe_engine.kernels.permutation_choice import permutation
from moe_engine.kernels.quantization import reference
from moe_engine.kernels.quantization.groups import RowGroups
from moe_engine.kernels.quantization.protocol import Activation, ActivationFormat, QuantizedActivation
from moe_engine.parallel.collectives import DistributedGroup, Group, PeerLost
from moe_engine.parallel.dispatch.build import Groups, PhasedDispatcher, build
from moe_engine.parallel.dispatch.deepep import startup
from moe_engine.parallel.dispatch.exchanged import ExchangedDispatcher
from moe_engine.parallel.dispatch.host_all_to_all import HostAllToAll
from moe_engine.parallel.dispatch.layouts import GroupedLayout
from moe_engine.parallel.dispatch.protocol import Dispatcher, DispatchShape, Mode, Phase
from moe_engine.parallel.dispatch.tables import ROWS, DispatchChoice, DispatchRow
from moe_engine.parallel.host_group import HostGroup
from moe_engine.parallel.shared_segment import SharedSegment
from tests.distributed.dispatch import deepep_emulator
from tests.distributed.dispatch.routings import MAX_TOKENS, Routing, toy_expert

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
TIMEOUT_S = 60.0


@dataclass(frozen=True)
class Setup:
    """One way to dispatch. `library` names the emulated DeepEP generation; `num_nodes` splits the ranks; `as_device`
    uses the forms of ranks on devices; `room_tokens` is the buffer size of all_to_all on the host; `compiled` False:
    rows are arranged as on a machine without a compiler. `rows`: the experts read FP8, and tokens arrive quantized if
    the dispatcher accepts it. `aligned`: the experts take aligned groups."""

    backend: str
    mode: Mode
    dtype: str = "float32"
    fp8: bool = False
    hidden: int = 128
    num_nodes: int = 1
    library: str = ""
    as_device: bool = False
    room_tokens: int | None = None
    compiled: bool = True
    rows: bool = False
    aligned: bool = False


@dataclass
class Outcome:
    """One rank's result: combine's [T, D], and the rows of each of its experts."""

    out: Tensor
    rows_of_experts: list[int]


made: dict[Any, Any] = {}  # groups and dispatchers of this rank's process, created once
sent: list[tuple[str, str, list[int]]] = []  # (group, operation, bytes to each of its ranks)


def groups_of(num_nodes: int, library: str) -> Groups:
    """This rank's groups, which record the sent bytes. Collective over the world on the first call."""
    key = ("groups", num_nodes, library)
    if key in made:
        return made[key]
    world, rank = dist.get_world_size(), dist.get_rank()
    per_node = world // num_nodes
    nodes = [list(range(node * per_node, (node + 1) * per_node)) for node in range(num_nodes)]
    rails = [list(range(place, world, per_node)) for place in range(per_node)]

    def mine(name: str, lists: list[list[int]]) -> DistributedGroup:
        found = [(ranks, dist.new_group(ranks)) for ranks in lists]
        process_group = next(group for ranks, group in found if rank in ranks)
        return DistributedGroup(process_group, TIMEOUT_S, observe=lambda what, size: sent.append((name, what, size)))

    experts = mine("experts", [list(range(world))])
    module = deepep_emulator.module(getattr(deepep_emulator, library)) if library else None
    made[key] = Groups(experts, mine("node", nodes), mine("rails", rails), made_group(library), module)
    return made[key]


def made_group(library: str) -> Any:
    """A group for libraries; DeepEP takes its NCCL communicator."""
    if library == "ElasticBuffer":
        startup.set_environment(1, os.environ)  # as `startup.load`
    return deepep_emulator.NcclGroup(dist.new_group()) if library else dist.new_group()


def shape_of(setup: Setup, num_experts: int, top_k: int) -> DispatchShape:
    num_ranks, dtype = dist.get_world_size(), DTYPES[setup.dtype]
    return DispatchShape(num_experts, num_ranks, top_k, setup.hidden, MAX_TOKENS, dtype, setup.fp8)


def row_of(name: str) -> DispatchRow:
    return next(row for row in ROWS if row.name == name)


def dispatcher_of(setup: Setup, num_experts: int, top_k: int) -> Any:
    key = (setup, num_experts, top_k)
    if key not in made:
        choice = DispatchChoice(row_of(setup.backend), {"decode": setup.mode}, "a test's")
        shape = shape_of(setup, num_experts, top_k)
        rows = permutation(shape.dtype) if setup.compiled else TorchPermutation()
        groups = replace(groups_of(setup.num_nodes, setup.library), on_host=not setup.as_device, permutation=rows)
        if setup.room_tokens is None:
            made[key] = build(choice, shape, MAX_TOKENS, groups)
        else:
            exchange = HostAllToAll(groups.experts, shape, setup.room_tokens, rows)
            layout = GroupedLayout(shape, rows, groups.experts.device)
            dispatcher = ExchangedDispatcher(shape, exchange, layout, rows)
            of_phase: dict[Phase, Dispatcher] = {"decode": dispatcher}
            made[key] = PhasedDispatcher(lambda: of_phase)
    return made[key]


def run_experts(batch: ExpertBatch, first: int) -> tuple[Tensor, list[int]]:
    """Toy experts on the valid rows; every other row, in and out, becomes NaN."""
    if batch.scales is not None:
        blocks = batch.x.float().unflatten(-1, (-1, 128)) * batch.scales.unsqueeze(-1)
        batch = replace(batch, x=blocks.flatten(-2).to(batch.dtype), scales=None)
    out = torch.full_like(batch.x, float("nan"))
    if batch.ends is not None:
        groups, valid = RowGroups(batch.ends, batch.alignment), torch.zeros(len(batch.x), dtype=torch.bool)
        counts = groups.counts.tolist()
        for e, (start, count) in enumerate(zip(groups.starts.tolist(), counts)):
            valid[start : start + count] = True
            rows = toy_expert(batch.x[start : start + count].float(), first + e)
            if batch.row_weights is not None:
                rows = rows * batch.row_weights[start : start + count, None]
            out[start : start + count] = rows.to(out.dtype)
        batch.x[~valid] = float("nan")
        return out, counts
    if batch.layout == "grouped":
        assert batch.offsets is not None and batch.offsets.dtype == torch.int32
        spans = list(pairwise(batch.offsets.tolist()))
        for e, (start, stop) in enumerate(spans):
            out[start:stop] = toy_expert(batch.x[start:stop].float(), first + e).to(out.dtype)
        batch.x[spans[-1][1] :] = float("nan")
        if batch.counts is not None:  # groups with unused capacity
            return out, batch.counts.tolist()
        return out, [stop - start for start, stop in spans]
    assert batch.counts is not None and batch.counts.dtype == torch.int32
    counts = batch.counts.tolist()
    for e, valid in enumerate(counts):
        batch.x[e, valid:] = float("nan")
        out[e, :valid] = toy_expert(batch.x[e, :valid].float(), first + e).to(out.dtype)
    return out, counts


def run_routing(rank: int, setups: list[Setup], routing: Routing) -> list[Outcome]:
    """Dispatch, toy experts and combine, once with every setup."""
    outcomes = []
    for setup in setups:
        dispatcher = dispatcher_of(setup, routing.num_experts, routing.top_k)
        x, ids, weights = routing.of(rank, setup.hidden, DTYPES[setup.dtype])
        batch, handle = dispatch(dispatcher, setup, x, ids, weights)
        rows, counts = run_experts(batch, rank * routing.num_experts // dist.get_world_size())
        outcomes.append(Outcome(dispatcher.combine(rows, weights, handle), counts))
    return outcomes


def dispatch(
    dispatcher: PhasedDispatcher, setup: Setup, x: Tensor, ids: Tensor, weights: Tensor, phase: Phase = "decode"
) -> tuple[ExpertBatch, Any]:
    """The activation format of the setup; `aligned` reads scales column-major."""
    aligned = 16 if setup.aligned else 1
    if not setup.rows:
        return dispatcher.dispatch(x, ids, weights, phase, ActivationFormat(row_alignment=aligned))
    sent: Activation = x
    if dispatcher.takes_rows()[phase]:
        sent = QuantizedActivation(reference.quantize_rows(x), None, x.dtype)
    format = replace(ActivationFormat.fp8(False), row_alignment=aligned, column_scales=setup.aligned)
    batch, handle = dispatcher.dispatch(sent, ids, weights, phase, format)
    if setup.aligned:
        assert batch.scales is not None and batch.scales.stride(-2) == 1  # no transposition before DeepGEMM's products
    assert batch.scales is not None and batch.x.dtype == torch.float8_e4m3fn and batch.result_dtype == x.dtype
    assert batch.scales.shape == (*batch.x.shape[:-1], setup.hidden // 128)
    return batch, handle


def run_phases(rank: int, setup: Setup, routing: Routing) -> list[Outcome]:
    """Prefill and decode in turn on a dispatcher with both modes; `setup.mode` is ignored."""
    key = ("phases", setup, routing.num_experts, routing.top_k)
    if key not in made:
        choice = DispatchChoice(row_of(setup.backend), {"prefill": "normal", "decode": "low_latency"}, "a test's")
        shape = shape_of(setup, routing.num_experts, routing.top_k)
        made[key] = build(choice, shape, MAX_TOKENS, groups_of(setup.num_nodes, setup.library))
    x, ids, weights = routing.of(rank, setup.hidden, DTYPES[setup.dtype])
    phases: tuple[Phase, ...] = ("prefill", "decode", "decode", "prefill", "decode")
    outcomes = []
    for phase in phases:
        batch, handle = made[key].dispatch(x, ids, weights, phase)
        rows, counts = run_experts(batch, rank * routing.num_experts // dist.get_world_size())
        outcomes.append(Outcome(made[key].combine(rows, weights, handle), counts))
    return outcomes


def run_interleaved(rank: int, setups: list[Setup], first: Routing, second: Routing) -> list[tuple[Outcome, Outcome]]:
    """Two pending results of every setup, combined in the order of dispatch; a third dispatch must be refused."""
    return [
        two_alive(dispatcher_of(setup, first.num_experts, first.top_k), rank, setup, first, second) for setup in setups
    ]


def two_alive(
    dispatcher: Any, rank: int, setup: Setup, first: Routing, second: Routing, newest_first: bool = False
) -> tuple[Outcome, Outcome]:
    """As `run_interleaved`, combined in either order."""
    live = []
    for routing in (first, second):
        x, ids, weights = routing.of(rank, setup.hidden, DTYPES[setup.dtype])
        live.append((dispatcher.dispatch(x, ids, weights, "decode"), weights))
    try:
        dispatcher.dispatch(x, ids, weights, "decode")
    except RuntimeError as error:
        assert "pending" in str(error)
    else:
        raise AssertionError("a third live result")
    outcomes: dict[int, Outcome] = {}
    for number in (1, 0) if newest_first else (0, 1):
        (batch, handle), weights = live[number]
        rows, counts = run_experts(batch, rank * first.num_experts // dist.get_world_size())
        outcomes[number] = Outcome(dispatcher.combine(rows, weights, handle), counts)
    return outcomes[0], outcomes[1]


def run_counted(rank: int, setup: Setup, routing: Routing) -> list[tuple[str, str, list[int]]]:
    """Messages of this rank's groups during one dispatch and combine."""
    dispatcher_of(setup, routing.num_experts, routing.top_k)
    sent.clear()
    run_routing(rank, [setup], routing)
    return list(sent)


def run_until_broken(rank: int, backend: str, timeout_s: float, going: str) -> tuple[str, float]:
    """Endless dispatches on a separate group; returns the error that ends them, and the seconds of the last call.

    Rank 0 creates the file `going` once all ranks have dispatched a few times.
    """
    group = DistributedGroup(dist.new_group(timeout=timedelta(seconds=timeout_s)), timeout_s)
    shape = DispatchShape(2 * group.size, group.size, 2, 128, MAX_TOKENS, torch.float32)
    choice = DispatchChoice(row_of(backend), {"decode": "low_latency"}, "a test's")
    dispatcher = build(choice, shape, MAX_TOKENS, Groups(group))
    x, ids, weights = torch.ones(2, 128), torch.tensor([[0, 1], [2, 3]]), torch.ones(2, 2)
    for number in count():
        if rank == 0 and number == 5:
            Path(going).touch()
        start = time.monotonic()
        try:
            batch, handle = dispatcher.dispatch(x, ids, weights, "decode")
            dispatcher.combine(batch.x, weights, handle)
        except PeerLost as error:
            return str(error), time.monotonic() - start
    raise AssertionError


def sleep(rank: int, sleeper: int, seconds: float) -> int:
    if rank == sleeper:
        time.sleep(seconds)
    return rank


def fail(rank: int, culprit: int) -> None:
    if rank == culprit:
        raise ValueError(f"rank {rank} fails on purpose")


def die(rank: int, culprit: int) -> None:
    if rank == culprit:
        os.kill(os.getpid(), signal.SIGKILL)


def join_shared_segment(rank: int) -> list[int]:
    """Each rank's data, read by this rank; checks that no name remains."""
    group = DistributedGroup(dist.group.WORLD, TIMEOUT_S)
    segment = SharedSegment(group, 4096, num_flags=1)
    words = segment.bytes.view(torch.int64)
    words[rank] = 100 + rank
    segment.raise_flag(0, 1)
    segment.wait(0, 1, "a test")
    group.barrier()
    mapped = [line for line in Path("/proc/self/maps").read_text().splitlines() if "/moe-engine-" in line]
    assert mapped and all(line.endswith("(deleted)") for line in mapped), mapped
    return words[: group.size].tolist()


def group_operations(rank: int, shared: bool) -> dict[str, Any]:
    """Runs each operation of `Group` once."""
    group: Group = DistributedGroup(dist.group.WORLD, TIMEOUT_S)
    if shared:
        group = HostGroup(DistributedGroup(dist.group.WORLD, TIMEOUT_S))
    size = group.size
    x = torch.full((sum(range(size)) + size, 3), float(rank)).to(torch.float8_e4m3fn)
    sent = [to + 1 for to in range(size)]
    received = [rank + 1] * size
    out = torch.empty(sum(received), 3, dtype=x.dtype)
    group.all_to_all(out, x[: sum(sent)], received, sent)
    rooms = [rank if source == rank else size for source in range(size)]  # others send less than the capacity
    shorter = torch.zeros(sum(rooms), 2, dtype=torch.uint8)
    group.all_to_all(shorter, torch.full((rank * size, 2), 7 + rank, dtype=torch.uint8), rooms, [rank] * size)
    return {
        "shorter": shorter[:, 1].tolist(),
        "ints": group.exchange_ints([10 * rank + to for to in range(size)]),
        "all_to_all": out.float()[:, 0].tolist(),
        "all_gather": group.all_gather(torch.tensor([rank, -rank])).tolist(),
        "reduce_scatter": group.reduce_scatter(torch.full((size, 2), float(rank))).tolist(),
        "broadcast": group.broadcast(torch.full((2,), rank), source=size - 1).tolist(),
    }
