"""Activation and quantization of expert batches: the valid rows against the reference, other rows not touched."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from moe_engine.kernels.experts.batch import ExpertBatch
from moe_engine.kernels.experts.deep_gemm import DeepGemmExperts
from moe_engine.kernels.gate_form import GELU_LIMIT
from moe_engine.kernels.linear.deep_gemm_products import DeepGemm
from moe_engine.kernels.quantization import groups as reference
from moe_engine.kernels.quantization import reference as rows_reference
from moe_engine.kernels.quantization import triton_groups, triton_rows
from moe_engine.kernels.quantization.groups import RowGroups
from moe_engine.kernels.quantization.protocol import QuantizedRows
from tests.kernels.cpu.formulas import NAN, close, normal
from tests.kernels.triton.launches import launches
from tests.kernels.triton.poison import poisoned_memory
from tests.kernels.triton.test_fp8_rows import agree
from tests.kernels.vendors.deep_gemm_emulator import DeepGemmEmulator

BF16 = torch.bfloat16
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")


def batch(layout: str, width: int) -> tuple[Tensor, RowGroups, Tensor]:
    """Rows in a layout, their groups, and a mask of the valid rows; other rows are NaN."""
    counts, capacity, align = torch.tensor([3, 0, 37, 16], dtype=torch.int32), 39, 16
    if layout == "padded":
        x, groups = normal(4, capacity, width, dtype=BF16), RowGroups(counts)
        valid = torch.arange(capacity) < counts[:, None]
    else:
        starts = torch.tensor([0, 16, 16, 64])
        groups = RowGroups((starts + counts).int(), align)
        assert torch.equal(groups.starts.long(), starts) and torch.equal(groups.counts, counts)
        x = normal(100, width, dtype=BF16)
        valid = torch.zeros(100, dtype=torch.bool)
        for start, count in zip(starts.tolist(), counts.tolist()):
            valid[start : start + count] = True
    x[~valid] = NAN
    return x, groups, valid


def weights_of(valid: torch.Tensor) -> torch.Tensor:
    """Router weights of valid rows."""
    return torch.where(valid, torch.rand(len(valid)) + 0.1, NAN)


@pytest.mark.parametrize("layout", ["padded", "aligned"])
@pytest.mark.parametrize(("power_of_two", "exponents"), [(False, False), (True, False), (True, True)])
def test_quantized_groups(layout: str, power_of_two: bool, exponents: bool) -> None:
    cases: list[tuple[str, int, int, dict[str, float]]] = [
        ("quantize_groups", 200, 1, {}),
        ("silu_mul_quantize_groups", 136, 2, {}),
        ("silu_mul_quantize_groups", 136, 2, {"limit": 0.8}),
        ("silu_mul_quantize_groups", 136, 2, {"limit": -0.5}),
        ("silu_mul_quantize_groups", 136, 2, {"limit": GELU_LIMIT}),
    ]
    for name, width, factor, limit in cases:
        x, groups, valid = batch(layout, width * factor)
        more = limit | ({"weights": weights_of(valid)} if layout == "aligned" and factor == 2 else {})
        with poisoned_memory():
            got = getattr(triton_groups, name)(x, groups, power_of_two, exponents, **more)
            want = getattr(reference, name)(x, groups, power_of_two, exponents, **more)
        assert got.scales.stride() == want.scales.stride() and got.data.shape == (*x.shape[:-1], width)
        assert got.data.is_contiguous() and got.exponents == exponents
        agree(*(QuantizedRows(part.data[valid], part.scales[valid]) for part in (got, want)))
        assert exponents or got.scales[~valid].isnan().all()  # not written


@pytest.mark.parametrize("by_columns", [False, True])
@pytest.mark.parametrize("layout", ["padded", "aligned"])
def test_packed_scales(layout: str, by_columns: bool) -> None:
    """Of rows that a dispatcher delivers: in one launch, from scales in any order, of the valid rows only."""
    for blocks in (1, 4, 7, 56):
        x, groups, valid = batch(layout, blocks)
        scales = torch.exp2(torch.randint(-20, 20, x.shape).float())
        scales[~valid] = NAN
        given = scales.transpose(-2, -1).contiguous().transpose(-2, -1) if by_columns else scales
        with poisoned_memory(), launches() as names:
            got = triton_groups.pack_scales(given, groups)
        assert names == ["pack_kernel"] and got.stride() == reference.pack_scales(given, groups).stride()
        assert torch.equal(rows_reference.as_scales(got[valid], blocks), scales[valid])
        assert torch.equal(got[valid], reference.pack_scales(given, groups)[valid])
        assert (got[~valid] == torch.iinfo(torch.int32).max).all()  # not written


@pytest.mark.parametrize("layout", ["padded", "aligned"])
def test_unquantized_groups(layout: str) -> None:
    x, groups, valid = batch(layout, 2 * 136)
    with poisoned_memory():
        for limit in (0.0, 0.8, -0.5, GELU_LIMIT):
            weights = weights_of(valid) if layout == "aligned" else None
            got = triton_groups.silu_mul_groups(x, groups, limit, weights)
            close(got[valid], reference.silu_mul_groups(x, groups, limit, weights)[valid].double(), 2)
            assert got[~valid].isnan().all()


def test_weighted_rows_in_place() -> None:
    x, groups, valid = batch("aligned", 136)
    x[~valid], weights = 7, torch.rand(len(x)) + 0.5
    want = reference.scale_groups(x.clone(), weights, groups)
    got = triton_groups.scale_groups(x, weights, groups)
    assert got is x and torch.equal(got[valid], want[valid]) and (got[~valid] == 7).all()


def test_a_padded_decode_works_on_valid_rows_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows quantized and activated between DeepGEMM's two products, and scales that it transposes: 4 rows of 4 x 64
    (before: all 256, twice), 2 launches, no transposition (before: 2)."""
    emulator = DeepGemmEmulator(9)
    kernel = DeepGemmExperts(DeepGemm(emulator.module, (9, 0), triton_rows))
    experts, capacity, hidden, width = 4, 64, 256, 128
    weights = kernel.allocate_blocks(experts, hidden, width, "cpu")
    for expert in range(experts):
        parts = (rows_reference.quantize_weight(torch.randn(*shape) / 16) for shape in ((width, hidden),) * 2)
        kernel.load_expert_blocks(
            weights, expert, *parts, rows_reference.quantize_weight(torch.randn(hidden, width) / 16)
        )
    x, counts = normal(experts, capacity, hidden, dtype=BF16), torch.tensor([1, 0, 3, 0], dtype=torch.int32)
    written: list[int] = []
    for name in ("quantize_groups", "silu_mul_quantize_groups"):
        run = getattr(triton_groups, name)

        def counted(*args, run=run):  # type: ignore[no-untyped-def]
            rows = run(*args)
            written.append(int((~rows.scales[..., 0].isnan()).sum()))
            return rows

        monkeypatch.setattr(triton_groups, name, counted)
    with poisoned_memory(), launches() as names:
        kernel.run(ExpertBatch("padded", x, counts=counts, mean_rows=1), weights)
    assert written == [4, 4] and names == ["groups_kernel"] * 2 and emulator.transposed == 0


def test_programs_do_not_follow_the_capacity() -> None:
    """V3 on 8 ranks, 32 experts here: 16 blocks of the intermediate. Before, there was a program for every 16 rows of
    the capacity, 32,768 at 1,024 rows per expert."""
    for capacity in (1024, 8192):
        assert 32 * 16 * triton_groups.programs_per_group(32, 16, capacity) <= triton_groups.MAX_PROGRAMS
    assert triton_groups.programs_per_group(2, 3, 20) == 2
