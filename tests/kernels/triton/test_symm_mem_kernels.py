"""Kernels that write to peers: all ranks in this process, phase by phase. tests/distributed/dispatch/test_symm_mem.py
tests them over processes that wait for each other."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import pytest
import torch

from benchmarks.gpu_suite.ranks_here import Load, RanksHere, error_of
from moe_engine.kernels.quantization.protocol import UNQUANTIZED, ActivationFormat
from moe_engine.kernels.symm_mem.regions import ALIGNMENT
from tests.kernels.triton import beside

exchange = pytest.importorskip("moe_engine.kernels.symm_mem.exchange", reason="needs triton")


@pytest.fixture
def checked() -> None:
    """Not here: kernels read the addresses of peers from memory, the check knows those of arguments."""


SMALL = Load(num_ranks=3, num_local=2, top_k=3, hidden=128, tokens=4, dtype=torch.float32, fp8=False)


@pytest.mark.parametrize(
    ("load", "bound"),
    [(SMALL, 1e-6), (replace(SMALL, dtype=torch.bfloat16, fp8=True, hidden=256), 6e-2)],
    ids=["float32", "fp8"],
)
def test_what_the_gpu_suite_runs(load, bound):
    """Every phase's launch may be repeated, as in its timing; slots alternate."""
    ranks = RanksHere(load, "cpu")
    for number in (0, 1):

        def twice(name, call):
            call()
            return call()

        found = ranks.run(number, twice if number else None)
        assert error_of(found, ranks.expected()) <= bound
        chosen = torch.bincount(ranks.ids.flatten(), minlength=6)
        assert torch.cat(ranks.counts).tolist() == chosen.tolist()
    assert not ranks.lost.any()


def kernels() -> list[Any]:
    from moe_engine.kernels.symm_mem import triton_combine, triton_dispatch

    dispatch = [triton_dispatch.send_kernel, triton_dispatch.receive_kernel]
    return [*dispatch, triton_combine.combine_send_kernel, triton_combine.sum_kernel]


@pytest.mark.parametrize("load", [SMALL, replace(SMALL, dtype=torch.bfloat16, fp8=True, hidden=256)])
def test_programs_of_all_ranks_wait_for_each_other(load, monkeypatch):
    """Three waiting programs, ranks in any order, one rank without tokens; a token takes one row per rank for any
    choices there."""
    monkeypatch.setattr(exchange, "resident_programs", lambda device: 3)
    ranks = RanksHere(load, "cpu")
    for own in ranks.memory:
        own[2 * ALIGNMENT :] = 0xFF  # all except flags
    idle = 1
    for seed in (1, 2):

        def whole(rank: int, number: int = seed % 2) -> torch.Tensor:
            own, few = ranks.ranks[rank], slice(0) if rank == idle else slice(None)
            arrival = own.dispatch(ranks.x[rank, few], ranks.ids[rank, few], ranks.weights[rank, few], number)
            return own.combine(ranks.experts(rank, arrival), 0 if rank == idle else load.tokens, number)

        found = beside.run_ranks([lambda r=r: whole(r) for r in range(load.num_ranks)], kernels(), seed)
        active = [rank for rank in range(load.num_ranks) if rank != idle]
        assert len(found[idle]) == 0
        bound = 6e-2 if load.fp8 else 1e-6
        assert error_of(torch.stack([found[r] for r in active]), ranks.expected()[active]) <= bound
    slot = load.regions.slot(0)  # of the second run
    for owner, own in enumerate(ranks.memory):
        end = slot.rows + load.regions.capacity * load.hidden * (1 if load.fp8 else 4)
        rows = own[slot.rows : end].view(load.num_ranks, load.tokens, -1)
        chosen = (ranks.ids // load.num_local == owner).any(2)
        chosen[idle] = False
        assert torch.equal((rows != 0xFF).any(2), chosen)
    assert not ranks.lost.any()


@pytest.mark.each_value
@pytest.mark.parametrize("pair", [True, False])
@pytest.mark.parametrize("format", [UNQUANTIZED, ActivationFormat(True, True), ActivationFormat.fp8(True)])
def test_a_sum_goes_into_the_residual_and_its_norm(format, pair, monkeypatch):
    """As the separate operations do, on every rank; an idle rank waits."""
    monkeypatch.setattr(exchange, "resident_programs", lambda device: 2)
    load = replace(SMALL, dtype=torch.bfloat16, hidden=200, tokens=5)
    ranks, idle = RanksHere(load, "cpu"), random.randrange(load.num_ranks)
    residual, other = torch.randn(2, load.num_ranks, load.tokens, load.hidden).bfloat16()
    weight = 1 + 0.1 * torch.randn(load.hidden)

    def whole(rank: int) -> tuple[Any, torch.Tensor, torch.Tensor]:
        own, few = ranks.ranks[rank], slice(0) if rank == idle else slice(None)
        arrival = own.dispatch(ranks.x[rank, few], ranks.ids[rank, few], ranks.weights[rank, few], 1)
        own.combine_send(ranks.experts(rank, arrival), 1)
        stream = residual[rank, few].clone()
        normed = own.sum_rms_norm(format, other[rank, few] if pair else None, stream, weight, 1e-6, 1)
        return normed, stream, own.sum(len(stream), load.dtype, 1)

    for rank, (normed, stream, total) in enumerate(
        beside.run_ranks([lambda r=r: whole(r) for r in range(load.num_ranks)], kernels(), random.randrange(1 << 20))
    ):
        if rank == idle:
            assert len(total) == len(stream) == 0
            continue
        added = (total + other[rank] if pair else total) + residual[rank]
        assert torch.equal(stream, added)
        expected = torch.nn.functional.rms_norm(added.double(), (load.hidden,), weight.double(), 1e-6)
        if format.rows:
            scales = normed.rows.scales.repeat_interleave(128, dim=1)[:, : load.hidden]
            torch.testing.assert_close(normed.rows.data.double() * scales, expected, rtol=0.1, atol=0.02)
            assert (normed.unquantized is not None) == format.unquantized
        if format.unquantized:
            values = normed.unquantized if format.rows else normed
            torch.testing.assert_close(values.double(), expected, rtol=2e-2, atol=1e-2)


def test_a_rank_that_never_comes_is_named(monkeypatch):
    """The peers of a missing rank end after the limit with zeros, set no flag for missing rows, and do not wait
    again."""
    monkeypatch.setattr(exchange, "resident_programs", lambda device: 2)
    monkeypatch.setattr("benchmarks.gpu_suite.ranks_here.LIMIT_S", 2.0)
    ranks = RanksHere(SMALL, "cpu")

    def whole(rank: int) -> tuple[list[int], torch.Tensor]:
        own = ranks.ranks[rank]
        arrival = own.dispatch(ranks.x[rank], ranks.ids[rank], ranks.weights[rank], 0)
        counts = arrival.counts.tolist()
        return counts, own.combine(torch.zeros_like(arrival.rows), SMALL.tokens, 0)

    for _ in range(2):
        for counts, out in beside.run_ranks([lambda r=r: whole(r) for r in (0, 2)], kernels(), 3):
            assert counts == [0, 0] and not out.any()
    assert ranks.lost.tolist() == [0, 1, 0]
    returned = [own[ALIGNMENT : 2 * ALIGNMENT].view(torch.int64) for own in ranks.memory]
    assert not torch.cat(returned).any(), "results of a failed dispatch were announced"
