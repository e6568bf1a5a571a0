"""Products with FP8 weights, in blocks and with a scale per row, against float64 products of the same quantized
numbers."""

from __future__ import annotations

import random

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from moe_engine.kernels.gate_form import GELU_LIMIT
from moe_engine.kernels.linear.reference import TorchLinear
from moe_engine.kernels.linear.shapes import DEEPSEEK_V3, named_shapes
from moe_engine.kernels.linear.tiles import (
    BLOCK_FP8,
    FEW_BLOCK_FP8,
    FEW_ROWS,
    MOST_NORMED,
    NUM_SMS,
    WIDE_BLOCK_FP8,
    block_fp8_tiles,
)
from moe_engine.kernels.linear.triton_block_gemm import block_gemm
from moe_engine.kernels.linear.triton_linear import TritonLinear
from moe_engine.kernels.ops.triton_ops import TritonOps
from moe_engine.kernels.quantization import reference
from moe_engine.kernels.quantization.protocol import (
    UNQUANTIZED,
    ActivationFormat,
    BlockWeight,
    QuantizedRows,
    RowsToNorm,
    RowWeight,
)
from moe_engine.kernels.quantization.triton_rows import quantize_rows, rms_norm_quantize
from tests.kernels.cpu.formulas import block_product, bounded_silu, by_row, rms_norm

ROUNDING = {torch.float32: 1e-6, torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}
"""Error of one result, relative to the sum of the magnitudes of its terms."""


def operands(m: int, n: int, k: int, row_scales: bool = False) -> tuple[QuantizedRows, BlockWeight | RowWeight]:
    """Rows and blocks of different magnitudes, so that a misplaced scale is detected."""
    x = torch.randn(m, k) * torch.exp2(torch.randint(-6, 6, (m, 1)).float())
    weight = torch.randn(n, k)
    if row_scales:
        return reference.quantize_rows(x), by_row(weight * torch.exp2(torch.randint(-4, 4, (n, 1)).float()))
    for row in range(0, n, 128):
        for col in range(0, k, 128):
            weight[row : row + 128, col : col + 128] *= 2.0 ** float(torch.randint(-4, 4, ()))
    return reference.quantize_rows(x), reference.quantize_weight(weight)


def check(got: Tensor, rows: QuantizedRows, weight: BlockWeight | RowWeight, bias: Tensor | None = None) -> None:
    want = block_product(rows, weight)
    x, w = reference.dequantize_rows(rows, torch.float64), reference.dequantize_weight(weight, torch.float64)
    magnitude = x.abs() @ w.abs().T
    if bias is not None:
        want, magnitude = want + bias.double(), magnitude + bias.double().abs()
    assert got.shape == want.shape and got.isfinite().all()
    worst = float(((got.double() - want).abs() / magnitude).max())
    assert worst < ROUNDING[got.dtype], worst


def check_mlp(got: Tensor, want: Tensor) -> None:
    """Sums in another order move a number of the inner cast by a step of an eighth: 0.8 % of a result of 11 rows, if it
    is three times as large as others."""
    assert (got - want).norm() < 0.015 * want.norm()


# every row of the tile table; sizes below, at and above the tiles; K with a tail, with one block, split
@pytest.mark.parametrize(
    ("m", "n", "k"),
    [(1, 128, 128), (5, 200, 384), (16, 72, 2048), (17, 100, 300), (33, 257, 1280), (70, 130, 256)]
    + [(257, 129, 200), (300, 130, 272)],  # the bulk copy engine takes rows of 272 bytes, not of 200
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_block_gemm(m: int, n: int, k: int, dtype: torch.dtype) -> None:
    rows, weight = operands(m, n, k, row_scales=random.random() < 0.5)
    bias = torch.randn(n).to(dtype) if m % 2 else None
    check(block_gemm(rows, weight, dtype, bias), rows, weight, bias)


@pytest.mark.parametrize("trial", range(3))
def test_tiles_of_few_rows(trial: int) -> None:
    m, n, k = random.randint(1, FEW_ROWS), random.randint(1, 300), 16 * random.randint(1, 60)
    rows, weight = operands(m, n, k, row_scales=trial == 1)
    bias = torch.randn(n) if trial else None
    check(block_gemm(rows, weight, torch.float32, bias, FEW_BLOCK_FP8), rows, weight, bias)


@pytest.mark.parametrize("trial", range(3))
def test_few_rows_are_quantized_by_their_product(trial: int) -> None:
    """The bits of rows that another launch has quantized."""
    m, n, k, exact = random.randint(1, FEW_ROWS), random.randint(1, 300), random.randint(1, 900), trial == 2
    x = (torch.randn(m, k + 9) * torch.exp2(torch.randint(-6, 6, (m, 1)).float())).bfloat16()[:, 5 : 5 + k]
    _, weight = operands(m, n, k, row_scales=trial == 1)
    weight = weight if trial == 1 else BlockWeight(weight.data, weight.scales, exact)
    bias = torch.randn(n) if trial else None
    got = block_gemm(x, weight, torch.float32, bias, FEW_BLOCK_FP8)
    rows = quantize_rows(x, exact)
    assert torch.equal(got, block_gemm(rows, weight, torch.float32, bias, FEW_BLOCK_FP8))
    check(got, rows, weight, bias)


@pytest.mark.parametrize("scales", ["blocks", "powers of two", "rows"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_few_rows_are_normed_by_their_product(dtype: torch.dtype, scales: str) -> None:
    """Rows times the norm's weight are quantized, and products divided by the rows' root mean square. The error against
    float64 is that of rows which another launch has normed and quantized."""
    m, n, k = random.randint(1, MOST_NORMED), random.randint(1, 300), random.randint(1, 900)
    exact, eps = scales == "powers of two", random.choice([1e-6, 1e-2])
    x = (torch.randn(m, k + 9) * torch.exp2(torch.randint(-6, 6, (m, 1)).float())).to(dtype)[:, 5 : 5 + k]
    norm, bias = torch.rand(k) + 0.5, torch.randn(n) if scales == "rows" else None
    _, weight = operands(m, n, k, row_scales=scales == "rows")
    weight = weight if isinstance(weight, RowWeight) else BlockWeight(weight.data, weight.scales, exact)
    tiles = random.choice([FEW_BLOCK_FP8, WIDE_BLOCK_FP8])
    got = block_gemm(RowsToNorm(x, norm, eps), weight, torch.float32, bias, tiles)
    inverse = (x.double().square().mean(1, keepdim=True) + eps).rsqrt()
    want = block_product(quantize_rows(x.float() * norm, exact), weight) * inverse
    want = want if bias is None else want + bias.double()
    assert (got - want).abs().max() < 1e-4 * want.abs().max() + 1e-5
    full = rms_norm(x, norm, eps) @ reference.dequantize_weight(weight, torch.float64).T
    full = full if bias is None else full + bias.double()
    _, rows = rms_norm_quantize(x, norm, eps, power_of_two=exact, keep=False)
    apart = block_gemm(rows, weight, torch.float32, bias, FEW_BLOCK_FP8)
    error, other = ((each.double() - full).norm() for each in (got, apart))
    assert error < 1.5 * other + 0.02 * full.norm(), (error, other)


def test_rows_of_any_size_are_normed() -> None:
    """Also far below the smallest amax of normed rows."""
    x, norm = torch.randn(3, 400).bfloat16(), torch.rand(400) + 0.5
    _, weight = operands(1, 40, 400)
    want = block_gemm(RowsToNorm(x, norm, 0.0), weight, torch.float32, tiles=FEW_BLOCK_FP8)
    got = block_gemm(RowsToNorm(x * 2.0**-40, norm, 0.0), weight, torch.float32, tiles=FEW_BLOCK_FP8)
    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)
    zero = block_gemm(RowsToNorm(x * 0, norm, 1e-6), weight, torch.float32, tiles=FEW_BLOCK_FP8)
    assert (zero == 0).all()


def test_a_normed_row_does_not_depend_on_the_others() -> None:
    _, weight = operands(1, 40, 300)
    x, norm = torch.randn(5, 300).bfloat16(), torch.rand(300) + 0.5
    x[2] = float("nan")
    got = block_gemm(RowsToNorm(x, norm, 1e-6), weight, torch.float32, tiles=FEW_BLOCK_FP8)
    alone = block_gemm(RowsToNorm(x[4:], norm, 1e-6), weight, torch.float32, tiles=FEW_BLOCK_FP8)
    assert got[2].isnan().all() and got[[0, 1, 3, 4]].isfinite().all() and torch.equal(got[4:], alone)


def test_products_are_split_where_tiles_are_few() -> None:
    for shape in DEEPSEEK_V3.at(64):
        tiles = block_fp8_tiles(64, shape.n, shape.k)
        programs = -(-shape.n // tiles.block_n) * tiles.split
        assert programs >= NUM_SMS or tiles.split == 16 or shape.k // 128 < 8 * tiles.split, shape
    assert block_fp8_tiles(33, 257, 1280).split > 1  # the test above includes a split product
    for limit, tiles in BLOCK_FP8.rows:
        assert tiles.block_n <= 128 and (limit or 1 << 20) >= tiles.block_m  # a tile is within one block of the weight


def test_a_row_does_not_depend_on_the_others() -> None:
    rows, weight = operands(9, 96, 300)
    rows.data[4] = float("nan")
    got = block_gemm(rows, weight, torch.float32)
    alone = block_gemm(QuantizedRows(rows.data[8:], rows.scales[8:]), weight, torch.float32)
    assert got[4].isnan().all() and torch.equal(got[8:], alone)


def test_shapes_that_do_not_fit() -> None:
    rows, weight = operands(4, 32, 128)
    with pytest.raises(ValueError, match="do not fit"):
        block_gemm(rows, BlockWeight.empty(32, 256, "cpu"), torch.float32)
    assert block_gemm(QuantizedRows.empty(0, 128, "cpu"), weight, torch.float32).shape == (0, 32)


def test_linear_and_mlp_with_row_scales() -> None:
    linear, x = TritonLinear(), torch.randn(11, 256)
    gate_up, down = by_row(torch.randn(2 * 192, 256) / 16), by_row(torch.randn(200, 192) / 14)
    first, second = linear.prepare_rows(gate_up, torch.randn(384)), linear.prepare_rows(down)
    assert (first.num_bytes, second.num_bytes) == (384 * 256 + 2 * 4 * 384, 200 * 192 + 4 * 200)
    assert linear.input_format(first) == ActivationFormat.fp8(False)
    rows = reference.quantize_rows(x)
    check(linear.run(x, first), rows, gate_up, first.bias)
    mlp = linear.fuse_mlp(first, second)
    assert mlp is not None
    gate, up = (block_product(rows, gate_up) + first.bias.double()).chunk(2, 1)
    want = block_product(reference.quantize_rows(F.silu(gate).mul(up).float()), down)
    check_mlp(mlp(x), want)


@pytest.mark.parametrize("power_of_two", [False, True])
def test_linear_and_mlp(power_of_two: bool) -> None:
    linear = TritonLinear()
    x = torch.randn(11, 500)[:, 50:306]
    gate_up = reference.quantize_weight(torch.randn(2 * 192, 256) / 16, power_of_two)
    down = reference.quantize_weight(torch.randn(200, 192) / 14, power_of_two)
    first, second = linear.prepare_blocks(gate_up, torch.randn(384)), linear.prepare_blocks(down)
    assert (first.in_features, first.out_features, first.num_bytes) == (256, 384, 384 * 256 + 4 * 6 + 4 * 384)
    rows = reference.quantize_rows(x, power_of_two)
    got = linear.run(x, first)
    check(got, rows, gate_up, first.bias)
    assert linear.fuse_mlp(first, linear.prepare(torch.randn(4, 192))) is None
    gate, up = (block_product(rows, gate_up) + first.bias.double()).chunk(2, 1)
    for limit in (0.0, 0.6, -0.3, GELU_LIMIT):
        mlp = linear.fuse_mlp(first, second, limit)
        assert mlp is not None
        active = bounded_silu(gate, up, limit)
        want = block_product(reference.quantize_rows(active.float(), power_of_two), down)
        check_mlp(mlp(x), want)


@pytest.mark.parametrize("power_of_two", [False, True])
@pytest.mark.parametrize("rows", [0, 1, 6])
def test_a_product_behind_a_norm(rows: int, power_of_two: bool) -> None:
    linear, norm = TritonLinear(), torch.rand(200) + 0.5
    x = torch.randn(rows, 330).bfloat16()[:, 3:203]
    weight = reference.quantize_weight(torch.randn(70, 200), power_of_two)
    prepared = linear.prepare_blocks(weight, torch.randn(70))
    assert linear.input_format(prepared) == ActivationFormat.fp8(power_of_two)
    assert linear.input_format(linear.prepare(torch.randn(4, 200))) == UNQUANTIZED
    normed = TritonOps().rms_norm_quantized(linear.input_format(prepared), x, norm, 1e-5)
    assert normed.unquantized is None and len(normed) == rows
    got = linear.run(normed, prepared)
    assert got.shape == (rows, 70) and got.dtype == x.dtype
    _, quantized = reference.rms_norm_quantize(x, norm, 1e-5, None, power_of_two, keep=False)
    assert (normed.rows.data.float() != quantized.data.float()).float().sum() <= 0.03 * quantized.data.numel()  # ties
    want = block_product(normed.rows, weight) + prepared.bias.double()
    assert ((got - want).abs() <= want.abs() * 2.0**-8 + 1e-3).all()
    if rows:
        exact = rms_norm(x, norm, 1e-5) @ reference.dequantize_weight(weight, torch.float64).T + prepared.bias.double()
        assert (got - exact).norm() < 0.05 * exact.norm()


def test_plain_weights_go_to_torch() -> None:
    linear, weight, x = TritonLinear(), torch.randn(7, 12), torch.randn(3, 12)
    assert torch.equal(linear.run(x, linear.prepare(weight)), F.linear(x, weight))
    heads, x = torch.randn(3, 5, 12), torch.randn(4, 3, 12)
    assert torch.equal(
        linear.run_heads(x, linear.prepare_heads(heads)), TorchLinear().run_heads(x, TorchLinear().prepare_heads(heads))
    )


def test_floors_of_the_shapes() -> None:
    shapes = {shape.name: shape for shape in named_shapes()}
    o = shapes["deepseek-v3.o.m64"]
    assert o.flops == 2 * 64 * 7168 * 16384
    assert o.bytes == 64 * 16384 + 7168 * 16384 + 4 * 128 * (64 + 56) + 2 * 64 * 7168
    assert len(shapes) == len(named_shapes())


@pytest.mark.parametrize("power_of_two", [False, True])
@pytest.mark.parametrize(("tokens", "heads", "n", "k"), [(0, 2, 128, 64), (1, 3, 128, 200), (70, 2, 256, 96)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_heads_quantized(tokens: int, heads: int, n: int, k: int, dtype: torch.dtype, power_of_two: bool) -> None:
    """The product per head, rounded to the activation dtype, then quantized by the same rule as `quantize_rows`."""
    linear = TritonLinear()
    x = torch.randn(tokens, heads + 1, k + 5).to(dtype)[:, 1:, 5:]
    weight = torch.randn(heads, n, k).to(dtype) * torch.exp2(torch.randint(-4, 4, (heads, 1, 1)).float()).to(dtype)
    run, format = linear.capabilities.heads_quantized, ActivationFormat.fp8(power_of_two)
    assert run is not None
    got = run(x, linear.prepare_heads(weight), format)
    assert got.unquantized is None and got.dtype == dtype and got.rows.data.shape == (tokens, heads * n)
    exact = torch.einsum("thk,hnk->thn", x.double(), weight.double()).flatten(1)
    if not tokens:
        return
    values = reference.dequantize_rows(got.rows, torch.float64)
    scales = got.rows.scales.double().repeat_interleave(128, 1)
    rounding = 2.0**-8 if dtype == torch.bfloat16 else 1e-5
    limit = exact.abs() * (2.0**-4 + rounding) + 2.0**-9 * scales  # e4m3: half a step of 3 bits, and of subnormals
    assert ((values - exact).abs() <= limit).all()
    want = reference.quantize_rows(exact.to(dtype), power_of_two)
    assert torch.allclose(got.rows.scales, want.scales, rtol=2 * rounding) or power_of_two
    assert (got.rows.data.view(torch.uint8) == want.data.view(torch.uint8)).double().mean() > 0.97
    with pytest.raises(ValueError, match="do not fit"):
        run(x, linear.prepare_heads(weight[:, 1:]), format)
