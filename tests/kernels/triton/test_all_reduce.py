"""All-reduce through symmetric memory: all ranks in this process, with all programs concurrent in random order, against
float64; and the behavior of a rank with a missing peer. tests/distributed/dispatch and tests/simulated_cuda run it
across processes."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

from moe_engine.kernels.permutation.protocol import ExpertRows
from moe_engine.kernels.permutation.triton_permute import TritonPermutation
from moe_engine.kernels.quantization.protocol import UNQUANTIZED, ActivationFormat, QuantizedActivation
from moe_engine.kernels.symm_mem import all_reduce_layout
from moe_engine.kernels.symm_mem.all_reduce import SymmMemAllReduce
from moe_engine.kernels.symm_mem.all_reduce_layout import Arenas, why_not
from moe_engine.kernels.symm_mem.triton_all_reduce import one_shot_kernel, two_shot_kernel
from moe_engine.parallel.all_reduce import custom
from moe_engine.parallel.collectives import PeerLost
from moe_engine.parallel.dispatch.symm_mem.memory import SharedBytes
from tests.kernels.triton import beside

WIDTH, EPS = 200, 1e-6  # a part of a block
QUANTIZED = ActivationFormat(unquantized=True, rows=True)
ROWS_ALONE = ActivationFormat(unquantized=False, rows=True, power_of_two=True)


@dataclass
class World:
    """All ranks of one all-reduce, in plain memory."""

    ranks: list[SymmMemAllReduce]
    memory: list[Tensor]
    lost: Tensor
    arenas: Arenas

    def run(self, call: Callable[[SymmMemAllReduce, int], Any], seed: int) -> list[Any]:
        calls = [lambda r=r, own=own: call(own, r) for r, own in enumerate(self.ranks)]
        return beside.run_ranks(calls, [one_shot_kernel, two_shot_kernel], seed)

    def spoil(self) -> None:
        """Sets all memory except flags to NaN."""
        for own in self.memory:
            own[self.arenas.arenas_at :] = 0xFF


def world(num_ranks: int, dtype: torch.dtype, limit_s: float = 20.0, absent: int | None = None) -> World:
    arenas = Arenas(num_ranks, WIDTH, dtype.itemsize)
    memory = [torch.zeros(arenas.num_bytes, dtype=torch.uint8) for _ in range(num_ranks)]
    addresses, lost = [own.data_ptr() for own in memory], torch.zeros(num_ranks, dtype=torch.int32)
    ranks = [
        SymmMemAllReduce(arenas, rank, own, addresses, lost, limit_s)
        for rank, own in enumerate(memory) if rank != absent
    ]  # fmt: skip
    made = World(ranks, memory, lost, arenas)
    made.spoil()
    return made


def two_shot_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(all_reduce_layout.Arenas, "is_one_shot", lambda arenas, rows: False)


def rounded(value: Tensor, dtype: torch.dtype) -> Tensor:
    return value.float().to(dtype).double()


def in_order(parts: Tensor) -> Tensor:
    """Sums parts [R, ...] in the order of the kernels."""
    total = parts[0].float()
    for part in parts[1:]:
        total = total + part.float()
    return total.to(parts.dtype)


@pytest.mark.each_value
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("num_ranks", [2, 3, 4, 8])
@pytest.mark.parametrize("one_shot", [True, False])
def test_sums_are_exact_and_equal_on_all_ranks(
    num_ranks: int, one_shot: bool, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Consecutive calls of many sizes without a barrier: more rows than programs, fewer, none."""
    for module in ("all_reduce", "triton_all_reduce", "all_reduce_layout"):
        monkeypatch.setattr(f"moe_engine.kernels.symm_mem.{module}.PROGRAMS", 3)
    if not one_shot:
        two_shot_only(monkeypatch)
    made, sizes = world(num_ranks, dtype), [1, 5, 0, 2, 7, 3, 1]
    x = [torch.randn(num_ranks, rows, WIDTH).to(dtype) for rows in sizes]
    found = made.run(lambda own, r: [own.sum(part[r]) for part in x], random.randrange(1 << 20))
    for number, parts in enumerate(x):
        expected = in_order(parts)
        for rank in range(num_ranks):
            assert torch.equal(found[rank][number], expected), (rank, sizes[number])
    assert not made.lost.any()


@pytest.mark.each_value
@pytest.mark.parametrize("format", [None, QUANTIZED, ROWS_ALONE], ids=["plain", "fp8 and plain", "fp8"])
@pytest.mark.parametrize("one_shot", [True, False])
def test_with_residual_norm_and_quantization(
    one_shot: bool, format: ActivationFormat | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not one_shot:
        two_shot_only(monkeypatch)
    num_ranks, rows = 4, 6
    made = world(num_ranks, torch.bfloat16)
    parts = torch.randn(num_ranks, rows, WIDTH).bfloat16()
    residual, weight = torch.randn(rows, WIDTH).bfloat16(), 1 + 0.1 * torch.randn(WIDTH)
    streams = [residual.clone() for _ in range(num_ranks)]

    def call(own: SymmMemAllReduce, rank: int) -> Any:
        return own.add_rms_norm(format or UNQUANTIZED, parts[rank], streams[rank], weight, EPS)

    found = made.run(call, random.randrange(1 << 20))
    stream = rounded(rounded(parts.double().sum(0), torch.bfloat16) + residual.double(), torch.bfloat16)
    normed = stream * (stream.square().mean(1, keepdim=True) + EPS).rsqrt() * weight.double()
    for rank, result in enumerate(found):
        assert torch.equal(streams[rank], streams[0])
        torch.testing.assert_close(streams[rank].double(), stream, rtol=1e-2, atol=1e-2)  # a float32 sum, rounded
        numbers = [result]
        if isinstance(result, QuantizedActivation):
            scales = result.rows.scales.repeat_interleave(128, dim=1)[:, :WIDTH].double()
            numbers = [result.rows.data.double() * scales]
            assert (result.unquantized is not None) == format.unquantized  # type: ignore[union-attr]
            numbers += [] if result.unquantized is None else [result.unquantized]
        for value, bound in zip(reversed(numbers), (0.02, 0.07) if len(numbers) == 2 else (0.07,)):
            error = (value.double() - normed).norm() / normed.norm()
            assert error < (0.02 if format is None else bound)


@pytest.mark.each_value
@pytest.mark.parametrize("format", [UNQUANTIZED, QUANTIZED, ROWS_ALONE], ids=["plain", "fp8 and plain", "fp8"])
@pytest.mark.parametrize("shared", [True, False])
def test_experts_rows_are_summed_first(shared: bool, format: ActivationFormat, monkeypatch: pytest.MonkeyPatch) -> None:
    """As by `Permutation.combine` before; more rows than programs, and few."""
    for module in ("all_reduce", "triton_all_reduce", "all_reduce_layout"):
        monkeypatch.setattr(f"moe_engine.kernels.symm_mem.{module}.PROGRAMS", 3)
    num_ranks, weight, top_k = 3, 1 + 0.1 * torch.randn(WIDTH), random.randint(1, 5)
    made, combine = world(num_ranks, torch.bfloat16), TritonPermutation().combine
    for tokens in (1, 4):
        residual = torch.randn(tokens, WIDTH).bfloat16()
        of_ranks = []
        for _ in range(num_ranks):
            pairs = tokens * top_k
            positions = torch.randperm(pairs, dtype=torch.int32).view(tokens, top_k)
            positions[torch.rand(tokens, top_k) < 0.3] = -1  # experts of other ranks
            add = torch.randn(tokens, WIDTH).bfloat16() if shared else None
            rows = torch.randn(pairs, WIDTH).bfloat16()
            of_ranks.append(ExpertRows(rows, positions, torch.rand(tokens, top_k), add))
        sums = [combine(x.rows, x.positions, x.weights, x.add) for x in of_ranks]

        def both(own: SymmMemAllReduce, rank: int) -> list[Any]:
            found = []
            for x in (of_ranks[rank], sums[rank]):  # noqa: B023
                stream = residual.clone()  # noqa: B023
                found.append((own.add_rms_norm(format, x, stream, weight, EPS), stream))
            return found

        assert made.ranks[0].sums_rows(tokens)
        for (fused, stream), (apart, expected) in made.run(both, random.randrange(1 << 20)):
            assert torch.equal(stream, expected)
            if format.rows:
                assert torch.equal(fused.rows.data.float(), apart.rows.data.float())
                assert torch.equal(fused.rows.scales, apart.rows.scales)
                fused, apart = fused.unquantized, apart.unquantized
            assert (fused is None) == (apart is None) and (fused is None or torch.equal(fused, apart))


def test_a_row_has_the_same_bits_in_every_call(monkeypatch: pytest.MonkeyPatch) -> None:
    """One-shot alone, one-shot and two-shot with other rows."""
    made = world(4, torch.bfloat16)
    x = torch.randn(4, 9, WIDTH).bfloat16()
    alone = made.run(lambda own, r: own.sum(x[r, 5:6]), 1)[0]
    among = made.run(lambda own, r: own.sum(x[r]), 2)[0]
    two_shot_only(monkeypatch)
    found = made.run(lambda own, r: own.sum(x[r]), 3)[0]
    assert torch.equal(among[5:6], alone) and torch.equal(found, among)


@pytest.mark.parametrize("one_shot", [True, False])
def test_a_missing_rank_is_reported_within_the_limit(one_shot: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Later calls neither wait nor send."""
    if not one_shot:
        two_shot_only(monkeypatch)
    made = world(3, torch.float32, limit_s=1.0, absent=1)
    made.run(lambda own, r: own.sum(torch.ones(3, WIDTH)), 5)
    assert made.lost.tolist() == [0, 1, 0]
    before = [own.clone() for own in made.memory]
    made.run(lambda own, r: own.sum(torch.ones(3, WIDTH)), 6)
    assert all(torch.equal(own, old) for own, old in zip(made.memory, before))
    assert made.ranks[0].lost_ranks() == [1]


def test_layout() -> None:
    for num_ranks, width, item in ((2, 64, 2), (3, 200, 4), (8, 7168, 2)):
        arenas = Arenas(num_ranks, width, item)
        assert arenas.lanes >= num_ranks and arenas.lanes * 8 % 16 == 0
        assert arenas.arenas_at >= 2 * arenas.gathered_flags_at
        assert arenas.half_bytes >= 2 * num_ranks * width * item and arenas.half_bytes % 256 == 0
    v3 = Arenas(8, 7168, 2)
    assert v3.num_bytes < 50 << 20
    assert v3.is_one_shot(18) and not v3.is_one_shot(19) and Arenas(2, 7168, 2).is_one_shot(500)


def test_why_not() -> None:
    assert why_not(8, 7168, 2) is None
    assert "at most 16 ranks" in (why_not(32, 7168, 2) or "")
    assert "multiple of 16 bytes" in (why_not(8, 1028, 2) or "")
    assert "above 16384" in (why_not(8, 32768, 2) or "")


# -- all-reduce of a group


class Two:
    """A group of two ranks whose default all-reduce doubles."""

    size, rank, timeout_s = 2, 0, 5.0

    def all_reduce(self, x: Tensor) -> Tensor:
        return 2 * x


class Memory:
    """Symmetric memory of one rank; `reason`: why the ranks have none."""

    def __init__(self, reason: str = "") -> None:
        self._reason = reason

    def allocate(self, group: Any, num_bytes: int) -> SharedBytes:
        if self._reason:
            raise ValueError(self._reason)
        own = torch.zeros(num_bytes, dtype=torch.uint8)
        return SharedBytes(own, [own.data_ptr()] * group.size)

    def words_for_host(self, count: int) -> Tensor:
        return torch.zeros(count, dtype=torch.int32)


def test_large_rows_are_summed_by_the_group(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(custom, "MAX_BYTES", 15)
    found: Any = custom.connect(Two(), WIDTH, torch.float32, Memory())  # type: ignore[arg-type]
    x = torch.ones(1, WIDTH)
    assert torch.equal(found.sum(x), 2 * x)
    plain = found.add_rms_norm(lambda x, *rest: (x, *rest), QUANTIZED, x, "residual", "weight", EPS)
    assert torch.equal(plain[0], 2 * x) and plain[1:] == ("residual", "weight", EPS)
    rows = ExpertRows(x, torch.zeros(1, 1, dtype=torch.int32), torch.full((1, 1), 3.0), x)
    plain = found.add_rows_rms_norm(lambda x, *rest: (x, *rest), QUANTIZED, rows, x, "weight", EPS)
    assert torch.equal(plain[0], 8 * x) and plain[2:] == ("weight", EPS)


def test_a_late_rank_is_an_error_on_the_host() -> None:
    found: Any = custom.connect(Two(), WIDTH, torch.float32, Memory())  # type: ignore[arg-type]
    found.check_peers()
    found._lost[1] = 1
    with pytest.raises(PeerLost, match=r"all-reduce .* ranks \[1\] did not arrive within 5 s"):
        found.check_peers()


def test_without_memory_of_the_others_the_group_sums(caplog: pytest.LogCaptureFixture) -> None:
    assert custom.connect(Two(), WIDTH, torch.float32, Memory("no access")) is None  # type: ignore[arg-type]
    assert "the ranks use NCCL: no access" in caplog.text
