"""The two products of routed experts in Triton, for both batch layouts, in bf16, FP8 and 4 bits.

    inner = silu(x @ gate.T) * (x @ up.T)        [M, I], in FP8 quantized in registers
    rows  = inner @ down.T                       [M, D]

Legend: M rows, D hidden, I expert width, E experts. A row is multiplied with the weights of its group's expert.

Row counts are known only on the device: programs count the tiles from the group sizes and share them
(`group_tiles.py`). No host synchronization; all shapes depend on M and E alone.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from moe_engine.kernels.experts.batch import ExpertBiases
from moe_engine.kernels.experts.group_tiles import expert_tiles, find_tile, num_programs
from moe_engine.kernels.experts.tiles import ExpertTiles
from moe_engine.kernels.gate_form import SILU, GatedActivation
from moe_engine.kernels.linear.products import (
    add_product,
    empty_tile,
    load_scale,
    load_step,
    scale_columns,
    weight_tile,
)
from moe_engine.kernels.linear.tiles import Tiles
from moe_engine.kernels.linear.triton_block_gemm import fits_tma
from moe_engine.kernels.linear.triton_four_bits import (
    HALF,
    add_four_bits,
    first_columns,
    options_of,
    scale_tile,
    whole_factor,
)
from moe_engine.kernels.linear.triton_four_bits import constants_of as four_bits_constants
from moe_engine.kernels.quantization.codes import GroupCodes
from moe_engine.kernels.quantization.protocol import FP8, QuantizedRows
from moe_engine.kernels.quantization.triton_rows import quantize_tile
from moe_engine.kernels.triton.clamped_gate import clamp_gate_up, silu_mul, situ, squared_relu
from moe_engine.kernels.triton.dependent import dependent_jit, wait_for_inputs

_HALF = tl.constexpr(HALF)


@dataclass(frozen=True)
class Groups:
    """Row ranges of the experts.

    Attributes:
        sizes: int32 [E + 1] offsets, or int32 [E] counts of a padded batch, or with `pairs` int32 [M] the expert of
            each row, any other number for none.
        capacity: rows for each expert of a padded batch; 0: `sizes` are offsets.
        num_rows: max number of rows.
        mean_rows: host-side estimate of rows per expert: selects the tiles.
        tiles: tiles of both products.
    """

    sizes: Tensor
    num_experts: int
    capacity: int
    num_rows: int
    mean_rows: int
    tiles: ExpertTiles
    pairs: bool = False

    def max_tiles(self, block_m: int) -> int:
        """Max row tiles: every expert may end in a partial tile."""
        if self.pairs:
            return self.num_rows
        if self.capacity:
            return self.num_experts * triton.cdiv(self.capacity, block_m)
        return min(self.num_rows, self.num_rows // block_m + self.num_experts)


@triton.jit
def gated(
    gate, up, bias, slope, limit,
    WIDTH: tl.constexpr, SWAP_AB: tl.constexpr, BIASED: tl.constexpr, CLAMP: tl.constexpr, SITU: tl.constexpr,
):  # fmt: skip
    """The activation of a tile [M, N], or with SWAP_AB [N, M]; bias: pointers of the N columns of gate, or None."""
    if BIASED:
        if bias is not None:
            axis: tl.constexpr = 1 if SWAP_AB else 0
            gate += tl.expand_dims(tl.load(bias), axis)
            up += tl.expand_dims(tl.load(bias + WIDTH), axis)
        gate, up = clamp_gate_up(gate, up, limit)
        inner = (up + 1.0) * (gate * tl.sigmoid(slope * gate))
    elif SITU:
        inner = situ(gate, up, limit, slope)
    else:
        inner = silu_mul(gate, up, limit, CLAMP)
    return inner


@triton.jit
def store_squared(place, x, mask, SWAP_AB: tl.constexpr):
    """relu(x)^2 of a tile [M, N], or with SWAP_AB [N, M]."""
    x = squared_relu(x)
    if SWAP_AB:
        x = tl.trans(x)
    tl.store(place, x.to(place.dtype.element_ty), mask=mask)


@triton.jit
def gate_up_tile(
    x, x_scales, source, weight, weight_scales, whole, out, out_scales, x_scale_stride, x_scale_row, x_scale_skip,
    out_scale_stride, bias, slope, limit, expert, tile_n, first, end,
    K: tl.constexpr, WIDTH: tl.constexpr, TOP_K: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr, GATHER: tl.constexpr, SWAP_AB: tl.constexpr, TMA: tl.constexpr, FP8: tl.constexpr,
    POWER_OF_TWO: tl.constexpr, PAIRS: tl.constexpr, BIASED: tl.constexpr, FORM: tl.constexpr, SCALES: tl.constexpr,
    CLAMP: tl.constexpr, SITU: tl.constexpr, ROWS: tl.constexpr, SQUARED: tl.constexpr,
):  # fmt: skip
    """One tile of `gate_up_kernel`: rows [first, end) of `expert`, at most BLOCK_M of them."""
    STEPS: tl.constexpr = (K + BLOCK_K - 1) // BLOCK_K
    SCALE_ROWS: tl.constexpr = (WIDTH + 127) // 128
    PACKED: tl.constexpr = 1 if FORM == "" else 2  # columns of an element of the weight
    HALVES: tl.constexpr = PACKED == 2 and FORM != "mxfp4"
    rows = first + tl.arange(0, BLOCK_M)
    cols = tile_n * BLOCK_N + tl.arange(0, BLOCK_N)
    lane = first_columns(FORM, BLOCK_K)
    w_lane = tl.arange(0, BLOCK_K // PACKED)
    x_rows = tl.minimum(rows, end - 1)
    if PAIRS:
        x_rows = x_rows // TOP_K
    elif GATHER:
        x_rows = tl.load(source + x_rows) // TOP_K
    w_row = expert * (2 * WIDTH) + tile_n * BLOCK_N
    w_rows = expert.to(tl.int64) * (2 * WIDTH) + tl.minimum(cols, WIDTH - 1)
    x_tile = weight_tile(x, x_rows, lane, K, False)
    gate_tile = weight_tile(weight, w_rows, w_lane, K // PACKED, TMA)
    up_tile = weight_tile(weight, w_rows + WIDTH, w_lane, K // PACKED, TMA)
    w_scale = weight_scales
    if FP8:
        x_scales += expert.to(tl.int64) * x_scale_skip
    BLOCKS: tl.constexpr = FP8 and ROWS == 0
    if BLOCKS:
        w_scale += (expert * (2 * SCALE_ROWS) + tile_n * BLOCK_N // 128).to(tl.int64) * STEPS
    if PACKED == 2:
        w_scale += expert.to(tl.int64) * (STEPS * 2 * WIDTH * SCALES)
        w_scale = scale_tile(w_scale, tl.minimum(cols, WIDTH - 1), SCALES, FORM)
    gate = empty_tile(BLOCK_M, BLOCK_N, SWAP_AB)
    up = empty_tile(BLOCK_M, BLOCK_N, SWAP_AB)
    for step in range(STEPS):
        a = load_step(x_tile, 0, step, lane, K, BLOCK_K, False)
        high = a
        if HALVES:
            high = load_step(x_tile + _HALF, 0, step, lane + _HALF, K, BLOCK_K, False)
        b = load_step(gate_tile, w_row, step, w_lane, K // PACKED, BLOCK_K // PACKED, TMA)
        c = load_step(up_tile, w_row + WIDTH, step, w_lane, K // PACKED, BLOCK_K // PACKED, TMA)
        if PACKED == 2:
            gate = add_four_bits(gate, a, high, b, w_scale, step, 2 * WIDTH, SCALES, FORM, SWAP_AB)
            up = add_four_bits(up, a, high, c, w_scale + SCALES * WIDTH, step, 2 * WIDTH, SCALES, FORM, SWAP_AB)
        else:
            x_scale = load_scale(x_scales, step * x_scale_stride + x_rows * x_scale_row, FP8)
            gate_scale = load_scale(w_scale, step, BLOCKS)
            up_scale = load_scale(w_scale, SCALE_ROWS * STEPS + step, BLOCKS)
            gate = add_product(gate, a, b, x_scale, gate_scale, SWAP_AB, FP8)
            up = add_product(up, a, c, x_scale, up_scale, SWAP_AB, FP8)
    if ROWS:
        w_scale += expert * (2 * WIDTH)
        gate = scale_columns(gate, w_scale + cols % WIDTH, SWAP_AB)
        up = scale_columns(up, w_scale + WIDTH + cols % WIDTH, SWAP_AB)
    if FORM == "nvfp4":
        gate *= whole_factor(whole + 2 * expert, x)
        up *= whole_factor(whole + 2 * expert + 1, x)
    if bias is not None:
        bias += expert * (2 * WIDTH) + tl.minimum(cols, WIDTH - 1)
    inside = rows < end
    mask = inside[:, None] & (cols < WIDTH)[None, :]
    place = out + rows.to(tl.int64)[:, None] * (2 * WIDTH if SQUARED else WIDTH) + cols[None, :]
    if SQUARED:
        store_squared(place, gate, mask, SWAP_AB)
        store_squared(place + WIDTH, up, mask, SWAP_AB)
    else:
        inner = gated(gate, up, bias, slope, limit, WIDTH, SWAP_AB, BIASED, CLAMP, SITU)
        if SWAP_AB:
            inner = tl.trans(inner)
        if FP8:  # BLOCK_N is 128: the tile is one block of scales
            inner = tl.where((cols < WIDTH)[None, :], inner, 0.0)
            quantized, scale = quantize_tile(inner, POWER_OF_TWO)
            tl.store(place, quantized, mask=mask)
            tl.store(out_scales + tile_n * out_scale_stride + rows, scale, mask=inside)
        else:
            tl.store(place, inner.to(out.dtype.element_ty), mask=mask)


@dependent_jit(
    do_not_specialize=["capacity", "x_scale_stride", "x_scale_row", "x_scale_skip", "out_scale_stride"],
    do_not_specialize_on_alignment=["sizes"],
)
def gate_up_kernel(
    x, x_scales, source, sizes, weight, weight_scales, whole, out, out_scales, capacity, x_scale_stride, x_scale_row,
    x_scale_skip, out_scale_stride, bias, slope, limit,
    NUM_EXPERTS: tl.constexpr, EXPERTS: tl.constexpr, K: tl.constexpr, WIDTH: tl.constexpr, TOP_K: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP: tl.constexpr, PADDED: tl.constexpr,
    GATHER: tl.constexpr, SWAP_AB: tl.constexpr, TMA: tl.constexpr, FP8: tl.constexpr,
    POWER_OF_TWO: tl.constexpr, PAIRS: tl.constexpr, BIASED: tl.constexpr, FORM: tl.constexpr, SCALES: tl.constexpr,
    CLAMP: tl.constexpr, SITU: tl.constexpr, ROWS: tl.constexpr, SQUARED: tl.constexpr,
):  # fmt: skip
    """out [M, WIDTH] = silu(x @ gate.T) * (x @ up.T); weight [E, 2 * WIDTH, K], gate first. BIASED: with bias
    [E, 2 * WIDTH] (None: zeros) and the activation of `ExpertBiases`. CLAMP: without biases, with `limit`.
    slope: alpha, with SITU beta (`GatedActivation`). SQUARED: relu^2 of both, side by side: out [M, 2 * WIDTH].
    FORM: of 4 bits, weight and its scales are in the memory of `triton_four_bits`; empty: not of 4 bits. whole: of
    NVFP4, float32 [E, 2].

    With GATHER row m is x[source[m] // TOP_K], with PAIRS x[m // TOP_K]. FP8: scales of weight are
    [E, 2, WIDTH / 128, K / 128], with ROWS [E, 2 * WIDTH]; the scale of row m of expert e and block b of x is
    x_scales[e * x_scale_skip + m * x_scale_row + b * x_scale_stride]. Grid: `num_programs`, with PAIRS every tile.
    """
    wait_for_inputs()
    NUM_N: tl.constexpr = (WIDTH + BLOCK_N - 1) // BLOCK_N
    if PAIRS:
        row = tl.program_id(0) // NUM_N
        expert = tl.load(sizes + row)
        if (expert >= 0) & (expert < NUM_EXPERTS):
            gate_up_tile(
                x, x_scales, source, weight, weight_scales, whole, out, out_scales, x_scale_stride, x_scale_row,
                x_scale_skip, out_scale_stride, bias, slope, limit, expert, tl.program_id(0) % NUM_N, row, row + 1,
                K, WIDTH, TOP_K, BLOCK_M, BLOCK_N, BLOCK_K, GATHER, SWAP_AB, TMA, FP8, POWER_OF_TWO, PAIRS, BIASED,
                FORM, SCALES, CLAMP, SITU, ROWS, SQUARED,
            )  # fmt: skip
    else:
        start, count, ends = expert_tiles(sizes, capacity, NUM_EXPERTS, EXPERTS, BLOCK_M, PADDED)
        total = tl.max(ends, 0)
        for tile in range(tl.program_id(0), total * NUM_N, tl.num_programs(0)):
            expert, tile_n, first, end = find_tile(tile, total, start, count, ends, EXPERTS, BLOCK_M, NUM_N, GROUP)
            gate_up_tile(
                x, x_scales, source, weight, weight_scales, whole, out, out_scales, x_scale_stride, x_scale_row,
                x_scale_skip, out_scale_stride, bias, slope, limit, expert, tile_n, first, end,
                K, WIDTH, TOP_K, BLOCK_M, BLOCK_N, BLOCK_K, GATHER, SWAP_AB, TMA, FP8, POWER_OF_TWO, PAIRS, BIASED,
                FORM, SCALES, CLAMP, SITU, ROWS, SQUARED,
            )  # fmt: skip


@triton.jit
def down_tile(
    x, x_scales, weight, weight_scales, whole, out, x_scale_stride, bias, expert, tile_n, first, end,
    K: tl.constexpr, WIDTH: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    SWAP_AB: tl.constexpr, TMA: tl.constexpr, FP8: tl.constexpr, BIASED: tl.constexpr, FORM: tl.constexpr,
    SCALES: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """One tile of `down_kernel`: rows [first, end) of `expert`, at most BLOCK_M of them."""
    STEPS: tl.constexpr = (K + BLOCK_K - 1) // BLOCK_K
    SCALE_ROWS: tl.constexpr = (WIDTH + 127) // 128
    PACKED: tl.constexpr = 1 if FORM == "" else 2  # columns of an element of the weight
    HALVES: tl.constexpr = PACKED == 2 and FORM != "mxfp4"
    cols = tile_n * BLOCK_N + tl.arange(0, BLOCK_N)
    rows = first + tl.arange(0, BLOCK_M)
    lane = first_columns(FORM, BLOCK_K)
    w_lane = tl.arange(0, BLOCK_K // PACKED)
    x_rows = tl.minimum(rows, end - 1)
    w_row = expert * WIDTH + tile_n * BLOCK_N
    w_rows = expert.to(tl.int64) * WIDTH + tl.minimum(cols, WIDTH - 1)
    x_tile = weight_tile(x, x_rows, lane, K, False)
    w_tile = weight_tile(weight, w_rows, w_lane, K // PACKED, TMA)
    w_scale = weight_scales
    BLOCKS: tl.constexpr = FP8 and ROWS == 0
    if BLOCKS:
        w_scale += (expert * SCALE_ROWS + tile_n * BLOCK_N // 128).to(tl.int64) * STEPS
    if PACKED == 2:
        w_scale += expert.to(tl.int64) * (STEPS * WIDTH * SCALES)
        w_scale = scale_tile(w_scale, tl.minimum(cols, WIDTH - 1), SCALES, FORM)
    total = empty_tile(BLOCK_M, BLOCK_N, SWAP_AB)
    for step in range(STEPS):
        a = load_step(x_tile, 0, step, lane, K, BLOCK_K, False)
        b = load_step(w_tile, w_row, step, w_lane, K // PACKED, BLOCK_K // PACKED, TMA)
        if PACKED == 2:
            high = a
            if HALVES:
                high = load_step(x_tile + _HALF, 0, step, lane + _HALF, K, BLOCK_K, False)
            total = add_four_bits(total, a, high, b, w_scale, step, WIDTH, SCALES, FORM, SWAP_AB)
        else:
            x_scale = load_scale(x_scales, step * x_scale_stride + x_rows, FP8)
            total = add_product(total, a, b, x_scale, load_scale(w_scale, step, BLOCKS), SWAP_AB, FP8)
    if ROWS:
        w_scale += expert * WIDTH
        total = scale_columns(total, w_scale + cols % WIDTH, SWAP_AB)
    if FORM == "nvfp4":
        total *= whole_factor(whole + expert, x)
    if SWAP_AB:
        total = tl.trans(total)
    if BIASED:
        total += tl.load(bias + expert * WIDTH + cols, cols < WIDTH, 0.0)[None, :]
    mask = (rows < end)[:, None] & (cols < WIDTH)[None, :]
    place = out + rows.to(tl.int64)[:, None] * WIDTH + cols[None, :]
    tl.store(place, total.to(out.dtype.element_ty), mask=mask)


@dependent_jit(do_not_specialize=["capacity", "x_scale_stride"], do_not_specialize_on_alignment=["sizes"])
def down_kernel(
    x, x_scales, sizes, weight, weight_scales, whole, out, capacity, x_scale_stride, bias,
    NUM_EXPERTS: tl.constexpr, EXPERTS: tl.constexpr, K: tl.constexpr, WIDTH: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP: tl.constexpr, PADDED: tl.constexpr,
    SWAP_AB: tl.constexpr, TMA: tl.constexpr, FP8: tl.constexpr, PAIRS: tl.constexpr, BIASED: tl.constexpr,
    FORM: tl.constexpr, SCALES: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """out [M, WIDTH] = x [M, K] @ weight[e].T; weight [E, WIDTH, K], in FP8 with scales [E, WIDTH / 128, K / 128], with
    ROWS [E, WIDTH].
    BIASED: + bias [E, WIDTH]. FORM: as in `gate_up_kernel`; whole: float32 [E]. Grid: `num_programs`, with PAIRS every
    tile."""
    wait_for_inputs()
    NUM_N: tl.constexpr = (WIDTH + BLOCK_N - 1) // BLOCK_N
    if PAIRS:
        row, tile_n = tl.program_id(0) // NUM_N, tl.program_id(0) % NUM_N
        expert = tl.load(sizes + row)
        if (expert >= 0) & (expert < NUM_EXPERTS):
            down_tile(
                x, x_scales, weight, weight_scales, whole, out, x_scale_stride, bias, expert, tile_n, row, row + 1,
                K, WIDTH, BLOCK_M, BLOCK_N, BLOCK_K, SWAP_AB, TMA, FP8, BIASED, FORM, SCALES, ROWS,
            )  # fmt: skip
        else:  # the sum reads the rows of all pairs
            cols = tile_n * BLOCK_N + tl.arange(0, BLOCK_N)
            nothing = tl.zeros((BLOCK_N,), out.dtype.element_ty)
            tl.store(out + row.to(tl.int64) * WIDTH + cols, nothing, mask=cols < WIDTH)
    else:
        start, count, ends = expert_tiles(sizes, capacity, NUM_EXPERTS, EXPERTS, BLOCK_M, PADDED)
        total = tl.max(ends, 0)
        for tile in range(tl.program_id(0), total * NUM_N, tl.num_programs(0)):
            expert, tile_n, first, end = find_tile(tile, total, start, count, ends, EXPERTS, BLOCK_M, NUM_N, GROUP)
            down_tile(
                x, x_scales, weight, weight_scales, whole, out, x_scale_stride, bias, expert, tile_n, first, end,
                K, WIDTH, BLOCK_M, BLOCK_N, BLOCK_K, SWAP_AB, TMA, FP8, BIASED, FORM, SCALES, ROWS,
            )  # fmt: skip


def gate_up(
    x: Tensor | QuantizedRows,
    weight: Tensor,
    scales: Tensor | None,
    groups: Groups,
    source: Tensor | None = None,
    top_k: int = 1,
    power_of_two: bool = False,
    bias: ExpertBiases | None = None,
    format: GroupCodes | None = None,
    whole: Tensor | None = None,
    form: GatedActivation = SILU,
) -> Tensor | QuantizedRows:
    """The first product: [M, I] in x's dtype, or quantized if x is.

    Args:
        x: [M, D], or with `source` [T, D], or padded [E, C, D]; `QuantizedRows` with FP8 weights.
        weight: [E, 2I, D], gate's rows first, or up alone [E, I, D] without a gate. scales: float32
            [E, 2, ceil(I / 128), ceil(D / 128)] of FP8 weights, or [E, 2I]. Of weights in 4 bits with a `format`,
            `whole` float32 [E, 2] of NVFP4 too, see `triton_four_bits`.
        form: the activation without a bias.
        source: int32 [M] pairs; row m is token source[m] // top_k. None with groups of pairs: token m // top_k.

    Rows outside all groups are unspecified.
    """
    data = x.data if isinstance(x, QuantizedRows) else x
    width, hidden = weight.shape[1] // 2, _columns(weight)
    columns = 2 * width if form.squared else width
    tiles, block_k = groups.tiles.gate_up.at(groups.mean_rows), groups.tiles.block_k
    matrix, tma = _weight(weight, tiles, block_k)
    out: Tensor | QuantizedRows
    if isinstance(x, QuantizedRows):
        out = QuantizedRows.empty(groups.num_rows, columns, data.device)
    else:
        out = torch.empty(groups.num_rows, columns, dtype=data.dtype, device=data.device)
    grid, rows = _grid(groups, tiles, width, 2, data, weight), has_row_scales(scales, format)
    shifted = bias is not None or form.alpha > 0
    if grid:
        gate_up_kernel[(grid,)](
            data, _scales(x), source, groups.sizes, matrix, scales, whole, out.data, _scales(out), groups.capacity,
            _scale_stride(x), *_row_scales(x), _scale_stride(out), *_bias_args(bias, form),
            **constants_of(groups, width, hidden, weight.dtype, tiles, tma, shifted, format, rows),
            **gathering_constants(top_k, source is not None, power_of_two, form),
            num_warps=tiles.num_warps, num_stages=tiles.num_stages, **options_of(format),
        )  # fmt: skip
    return out


def down(
    x: Tensor | QuantizedRows, weight: Tensor, scales: Tensor | None, groups: Groups, dtype: torch.dtype,
    bias: ExpertBiases | None = None, format: GroupCodes | None = None, whole: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """The second product: x [M, I] from `gate_up`, weight [E, D, I] -> [M, D] in `dtype`.

    `scales`: float32 [E, ceil(D / 128), ceil(I / 128)] of FP8 weights, or [E, D]; of 4 bits as in `gate_up`, with
    `whole` [E]. Rows outside all groups are unspecified.
    """
    data = x.data if isinstance(x, QuantizedRows) else x
    hidden, width = weight.shape[1], _columns(weight)
    tiles, block_k = groups.tiles.down.at(groups.mean_rows), groups.tiles.block_k
    matrix, tma = _weight(weight, tiles, block_k)
    out = torch.empty(groups.num_rows, hidden, dtype=dtype, device=data.device)
    grid, rows = _grid(groups, tiles, hidden, 1, data, weight), has_row_scales(scales, format)
    if grid:
        down_kernel[(grid,)](
            data, _scales(x), groups.sizes, matrix, scales, whole, out, groups.capacity, _scale_stride(x),
            None if bias is None else bias.down,
            **constants_of(groups, hidden, width, weight.dtype, tiles, tma, bias is not None, format, rows),
            num_warps=tiles.num_warps, num_stages=tiles.num_stages, **options_of(format),
        )  # fmt: skip
    return out


def has_row_scales(scales: Tensor | None, format: GroupCodes | None) -> bool:
    """True for FP8 weights with a scale per row."""
    return scales is not None and format is None and scales.dim() == 2


def _columns(weight: Tensor) -> int:
    """K of a weight [E, N, K], or [E, N, K / 2] in 4 bits."""
    return weight.shape[2] * (2 if weight.dtype == torch.uint8 else 1)


def _grid(groups: Groups, tiles: Tiles, width: int, weights: int, x: Tensor, weight: Tensor) -> int:
    """Programs of a product with `width` columns, whose tiles read `weights` tiles of weights in a step."""
    most = groups.max_tiles(tiles.block_m) * triton.cdiv(width, tiles.block_n)
    if groups.pairs:
        return most
    rows = weights * tiles.block_n // (2 * x.itemsize if weight.dtype == torch.uint8 else 1)  # of x's item size
    return num_programs(most, tiles, rows, groups.tiles.block_k, x.itemsize, x.device)


def _bias_args(bias: ExpertBiases | None, form: GatedActivation) -> tuple[Tensor | None, float, float]:
    return (None, form.alpha or form.beta, form.limit) if bias is None else (bias.gate_up, bias.alpha, bias.limit)


def _scales(x: Tensor | QuantizedRows) -> Tensor | None:
    return x.scales if isinstance(x, QuantizedRows) else None


def _scale_stride(x: Tensor | QuantizedRows) -> int:
    return x.scale_stride if isinstance(x, QuantizedRows) else 0


def _row_scales(x: Tensor | QuantizedRows) -> tuple[int, int]:
    """Elements between the scales of consecutive rows, and elements skipped between padded groups."""
    if not isinstance(x, QuantizedRows):
        return 0, 0
    row = x.scales.stride(-2) if x.scales.shape[-2] > 1 else 1
    return row, x.scales.stride(0) - x.scales.shape[1] * row if x.scales.dim() == 3 else 0


def _weight(weight: Tensor, tiles: Tiles, block_k: int) -> tuple[Tensor | TensorDescriptor, bool]:
    """weight [E, N, K] as kernel argument: itself, or the TMA descriptor of [E * N, K]."""
    matrix = weight.view(-1, weight.shape[2])
    if not tiles.tma or not fits_tma(matrix):
        return weight, False
    return TensorDescriptor.from_tensor(matrix, [tiles.block_n, block_k]), True


def constants_of(
    groups: Groups, n: int, k: int, stored: torch.dtype, tiles: Tiles, tma: bool, biased: bool = False,
    format: GroupCodes | None = None, rows: bool = False,
) -> dict[str, Any]:  # fmt: skip
    """Constants of a product with weights [E, `n`, `k`] (gate and up count as one `n`) in memory of a dtype. rows: FP8
    with a scale per row."""
    return {
        "NUM_EXPERTS": groups.num_experts, "EXPERTS": triton.next_power_of_2(groups.num_experts), "K": k, "WIDTH": n,
        "BLOCK_M": tiles.block_m, "BLOCK_N": tiles.block_n, "BLOCK_K": groups.tiles.block_k, "GROUP": tiles.group,
        "PADDED": groups.capacity > 0, "PAIRS": groups.pairs, "SWAP_AB": tiles.swap_ab, "TMA": tma,
        "FP8": stored == FP8, "ROWS": rows, "BIASED": biased, **four_bits_constants(format),
    }  # fmt: skip


def gathering_constants(top_k: int, gathers: bool, power_of_two: bool, form: GatedActivation = SILU) -> dict[str, Any]:
    """Extra constants of the first product."""
    forms = {"CLAMP": form.clamp, "SITU": form.beta > 0, "SQUARED": form.squared}
    return {"TOP_K": top_k, "GATHER": gathers, "POWER_OF_TWO": power_of_two, **forms}
