"""Dispatch and all-reduce through torch's symmetric memory on a real GPU: several ranks on one GPU, eagerly and from a
captured graph."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from tests.distributed.dispatch.ranks import Ranks

pytestmark = pytest.mark.gpu

ENVIRONMENT = {"TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES": "1"}  # ranks share a GPU
TOKENS, TOP_K, HIDDEN, LOCAL = 8, 3, 1024, 4


def brought(rank: int, step: int, num_experts: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """x, ids, weights, and the expected result of experts that multiply by 1 + e / E."""
    generator = torch.Generator().manual_seed(100 * rank + step)
    x = torch.randn(TOKENS, HIDDEN, generator=generator).bfloat16()
    ids = torch.rand(TOKENS, num_experts, generator=generator).topk(TOP_K).indices.int()
    ids[torch.rand(TOKENS, TOP_K, generator=generator) < 0.1] = -1
    weights = torch.rand(TOKENS, TOP_K, generator=generator)
    factors = (1 + ids.double() / num_experts) * (ids >= 0)
    return x.cuda(), ids.cuda(), weights.cuda(), x.double() * (weights.double() * factors).sum(1, keepdim=True)


def run(rank: int, fp8: bool, steps: int) -> list[float]:
    """The worst error of every step, relative to the largest value: eager steps first, then replays."""
    from moe_engine.kernels.quantization.protocol import UNQUANTIZED
    from moe_engine.parallel.collectives import DistributedGroup
    from moe_engine.parallel.dispatch.build import Groups, build
    from moe_engine.parallel.dispatch.protocol import DispatchShape
    from moe_engine.parallel.dispatch.tables import DispatchChoice
    from moe_engine.parallel.overlap import Started
    from moe_engine.worker.device_stream import make_comm_stream
    from tests.distributed.dispatch.worlds import row_of

    torch.cuda.set_device(0)
    size = dist.get_world_size()
    num_experts = LOCAL * size
    group = DistributedGroup(dist.group.WORLD, 100.0, "cuda:0")
    shape = DispatchShape(num_experts, size, TOP_K, HIDDEN, TOKENS, torch.bfloat16, fp8)
    choice = DispatchChoice(row_of("symm_mem"), {"decode": "low_latency"}, "a test's")
    dispatcher: Any = build(choice, shape, TOKENS, Groups(group, process_group=dist.group.WORLD))
    stream = make_comm_stream(torch.device("cuda", torch.cuda.current_device()))
    own = 1 + torch.arange(rank * LOCAL, (rank + 1) * LOCAL, device="cuda").view(-1, 1, 1) / num_experts
    x, ids, weights, _ = brought(rank, 0, num_experts)

    def layer() -> Tensor:
        batch, handle = dispatcher.dispatch(x, ids, weights, "decode")
        return dispatcher.combine((batch.x * own).bfloat16(), weights, handle)

    def halves() -> Tensor:
        """Sends on another stream, waits on this one."""
        batch, handle = Started(stream.run(dispatcher.start_dispatch, x, ids, weights, "decode")).wait()
        rows = (batch.x * own).bfloat16()
        return Started(stream.run(dispatcher.start_combine, rows, weights, handle)).wait()

    def in_norm() -> Tensor:
        """The sum as it enters a residual stream."""
        batch, handle = dispatcher.dispatch(x, ids, weights, "decode")
        normed = dispatcher.start_combine_norm((batch.x * own).bfloat16(), weights, handle)
        residual = torch.zeros(len(x), HIDDEN, dtype=torch.bfloat16, device="cuda")
        normed(UNQUANTIZED, None, residual, torch.ones(HIDDEN, device="cuda"), 1e-6)
        return residual

    calls = (layer, halves, in_norm)
    layer()  # compiles
    in_norm()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        layer()
        replayed = [halves(), in_norm()]
    errors = []
    for step in range(2 * steps):
        new_x, new_ids, new_weights, expected = brought(rank, step, num_experts)
        for old, new in ((x, new_x), (ids, new_ids), (weights, new_weights)):
            old.copy_(new)
        if step < steps:
            out = calls[step % 3]()
        else:
            graph.replay()
            out = replayed[step % 2]
        torch.cuda.synchronize()
        errors.append(float((out.cpu().double() - expected).abs().max() / expected.abs().max()))
    return errors


@pytest.mark.parametrize("fp8", [False, True])
@pytest.mark.parametrize("num_ranks", [2, 4])
def test_ranks_that_share_a_gpu(num_ranks: int, fp8: bool) -> None:
    with Ranks(num_ranks, environment=ENVIRONMENT) as ranks:
        found = ranks.call(run, fp8, 6, timeout_s=240)
    assert max(max(errors) for errors in found) < (0.06 if fp8 else 0.02)


def rows_of(rank: int, step: int) -> Tensor:
    return torch.randn(TOKENS, HIDDEN, generator=torch.Generator().manual_seed(100 * rank + step)).bfloat16()


def sum_rows(rank: int, steps: int) -> list[float]:
    """The worst error of every all-reduce, plain and fused with a norm: eager calls first, then replays. Sums and norms
    of all ranks must be equal."""
    from moe_engine.kernels.quantization.protocol import UNQUANTIZED
    from moe_engine.parallel.all_reduce.custom import connect
    from moe_engine.parallel.collectives import DistributedGroup
    from moe_engine.parallel.dispatch.symm_mem.memory import TorchSymmetricMemory

    torch.cuda.set_device(0)
    group = DistributedGroup(dist.group.WORLD, 100.0, "cuda:0")
    all_reduce = connect(group, HIDDEN, torch.bfloat16, TorchSymmetricMemory(dist.group.WORLD))
    assert all_reduce is not None
    x, residual, weight = rows_of(rank, 0).cuda(), torch.zeros(TOKENS, HIDDEN).bfloat16().cuda(), torch.ones(HIDDEN)
    weight = weight.cuda()

    def norms() -> Tensor:
        one = all_reduce.add_rms_norm(None, UNQUANTIZED, x[:1], residual[:1], weight, 1e-6)  # type: ignore[arg-type]
        return torch.cat((one, all_reduce.sum(x)))

    norms()  # compiles
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        replayed = norms()
        replayed = norms()
    errors = []
    for step in range(2 * steps):
        x.copy_(rows_of(rank, step))
        residual.zero_()
        if step < steps:
            found = norms()
        else:
            graph.replay()
            found = replayed
        torch.cuda.synchronize()
        total = sum(rows_of(r, step).double() for r in range(group.size))
        stream = total[:1] * (1 if step < steps else 2)  # two sums per replay
        normed = stream * stream.square().mean(1, keepdim=True).rsqrt()
        expected = torch.cat((normed, total))
        values = found.cpu()
        everybody: list[Any] = [None] * group.size
        dist.all_gather_object(everybody, values)
        assert all(torch.equal(other, values) for other in everybody)
        errors.append(float((values.double() - expected).abs().max() / expected.abs().max()))
    return errors


@pytest.mark.parametrize("num_ranks", [2, 4])
def test_sums_of_ranks_that_share_a_gpu(num_ranks: int) -> None:
    with Ranks(num_ranks, environment=ENVIRONMENT) as ranks:
        found = ranks.call(sum_rows, 6, timeout_s=240)
    assert max(max(errors) for errors in found) < 0.02


def test_ranks_in_one_process_on_streams_of_their_own() -> None:
    from dataclasses import replace

    from benchmarks.gpu_suite.ranks_here import V3_BESIDE, RanksHere, error_of

    ranks = RanksHere(replace(V3_BESIDE, num_ranks=2), "cuda")
    expected = ranks.expected()
    assert max(error_of(ranks.run(number, apart=True), expected) for number in range(2)) < 0.01
    assert max(error_of(ranks.run_beside(number % 2), expected) for number in range(4)) < 0.01
    assert not ranks.lost.any()
