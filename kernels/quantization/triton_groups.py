"""`groups` in Triton: a fixed grid of programs that loop over the valid rows of their group and touch no other row.

Legend: G groups (experts), C capacity, M rows, K channels, I width of an MLP. Tiles are [rows, 128 channels].
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from moe_engine.kernels.gate_form import clamp_of
from moe_engine.kernels.quantization.groups import RowGroups, empty_exponents, empty_rows
from moe_engine.kernels.quantization.protocol import BLOCK, QuantizedRows
from moe_engine.kernels.quantization.triton_rows import TILE_ROWS, quantize_tile, store_scale
from moe_engine.kernels.triton.aot import AotCase
from moe_engine.kernels.triton.clamped_gate import silu_mul
from moe_engine.kernels.triton.dependent import dependent_jit, wait_for_inputs

_BLOCK = tl.constexpr(BLOCK)
MAX_PROGRAMS = 2048
"""Max programs of a launch, about 16 for each SM of an H200; programs loop over further rows."""
_UNSPECIALIZED = ["capacity", "scale_column", "scale_skip"]


@triton.jit
def group_rows(sizes, group, capacity, ALIGN: tl.constexpr):
    """(first row, number of rows) of a group. ALIGN 0: padded; else `sizes` are ends of aligned groups."""
    end = tl.load(sizes + group)
    if ALIGN == 0:
        return group * capacity, end
    before = tl.load(sizes + group - 1, mask=group > 0, other=0)
    start = (before + ALIGN - 1) // ALIGN * ALIGN
    return start, end - start


@dependent_jit(do_not_specialize=_UNSPECIALIZED, do_not_specialize_on_alignment=["sizes"])
def groups_kernel(
    x, sizes, weights, out, scales, capacity, scale_column, scale_skip, limit,
    WIDTH: tl.constexpr, ROWS: tl.constexpr, ALIGN: tl.constexpr, GATED: tl.constexpr, QUANTIZE: tl.constexpr,
    POWER_OF_TWO: tl.constexpr, WEIGHTED: tl.constexpr, CLAMP: tl.constexpr,
):  # fmt: skip
    """out [M, WIDTH] = x; GATED: silu(x[:, :WIDTH]) * x[:, WIDTH:], with CLAMP and `limit` as in
    `Ops.silu_and_mul`; WEIGHTED: * weights [M]. QUANTIZE: as e4m3.

    Scale of row m of group g and block b: scales[g * scale_skip + m + b * scale_column], or an
    exponent (`store_scale`).
    Grid (G, WIDTH / 128, programs per group).
    """
    wait_for_inputs()
    group, block = tl.program_id(0), tl.program_id(1)
    first, count = group_rows(sizes, group, capacity, ALIGN)
    cols = block * _BLOCK + tl.arange(0, _BLOCK)
    if QUANTIZE:
        scales += group.to(tl.int64) * scale_skip
    for begin in range(tl.program_id(2) * ROWS, count, tl.num_programs(2) * ROWS):
        rows = begin + tl.arange(0, ROWS)
        inside = rows < count
        mask = inside[:, None] & (cols < WIDTH)[None, :]
        line = (first + rows).to(tl.int64)
        place = x + line[:, None] * (WIDTH * (1 + GATED)) + cols[None, :]
        tile = tl.load(place, mask=mask, other=0.0).to(tl.float32)
        if GATED:
            up = tl.load(place + WIDTH, mask=mask, other=0.0).to(tl.float32)
            tile = silu_mul(tile, up, limit, CLAMP)
        if WEIGHTED:
            tile *= tl.load(weights + line, mask=inside, other=0.0)[:, None]
        target = out + line[:, None] * WIDTH + cols[None, :]
        if QUANTIZE:
            quantized, scale = quantize_tile(tile, POWER_OF_TWO)
            tl.store(target, quantized, mask=mask)
            store_scale(scales, block, line, scale_column, scale, inside)
        else:
            tl.store(target, tile.to(out.dtype.element_ty), mask=mask)


@dependent_jit(
    do_not_specialize=["capacity", "x_skip", "x_row", "x_block", "scale_column", "scale_skip"],
    do_not_specialize_on_alignment=["sizes", "x"],
)
def pack_kernel(
    x, sizes, out, capacity, x_skip, x_row, x_block, scale_column, scale_skip,
    BLOCKS: tl.constexpr, ROWS: tl.constexpr, ALIGN: tl.constexpr,
):  # fmt: skip
    """out, as `scales` of exponents in `groups_kernel`: those of x[g * x_skip + m * x_row + b * x_block], float32.
    Grid (G, BLOCKS / 4, programs per group)."""
    wait_for_inputs()
    group, word = tl.program_id(0), tl.program_id(1)
    first, count = group_rows(sizes, group, capacity, ALIGN)
    first = 0 if ALIGN == 0 else first
    x, out = x + group.to(tl.int64) * x_skip, out + group.to(tl.int64) * scale_skip
    for begin in range(tl.program_id(2) * ROWS, count, tl.num_programs(2) * ROWS):
        rows = begin + tl.arange(0, ROWS)
        inside, line = rows < count, (first + rows).to(tl.int64)
        packed = tl.zeros([ROWS], tl.int32)
        for i in tl.static_range(4):
            block = word * 4 + i
            scale = tl.load(x + line * x_row + block * x_block, inside & (block < BLOCKS), 0.0)
            packed |= (scale.to(tl.int32, bitcast=True) >> 23) << (8 * i)
        tl.store(out + word.to(tl.int64) * scale_column + line, packed, inside)


def pack_scales(scales: Tensor, groups: RowGroups) -> Tensor:
    """See `groups.pack_scales`."""
    out = empty_exponents(scales)
    *padded, rows, blocks = scales.shape
    strides = scales.stride(0) if padded else 0, scales.stride(-2), scales.stride(-1)
    count, words = len(groups.sizes), triton.cdiv(blocks, 4)
    if scales.numel():
        pack_kernel[(count, words, programs_per_group(count, words, rows))](
            scales, groups.sizes, out, 0 if groups.alignment else rows, *strides, out.stride(-1),
            out.stride(0) if padded else 0, BLOCKS=blocks, ROWS=TILE_ROWS, ALIGN=groups.alignment, num_warps=1,
        )  # fmt: skip
    return out


def quantize_groups(x: Tensor, groups: RowGroups, power_of_two: bool = False, exponents: bool = False) -> QuantizedRows:
    """See `groups.quantize_groups`."""
    rows = empty_rows(x, x.shape[-1], exponents)
    _launch(x, groups, rows, _constants(groups, x.shape[-1], power_of_two=power_of_two))
    return rows


def silu_mul_quantize_groups(
    gate_up: Tensor, groups: RowGroups, power_of_two: bool = False, exponents: bool = False, limit: float = 0.0,
    weights: Tensor | None = None,
) -> QuantizedRows:  # fmt: skip
    """See `groups.silu_mul_quantize_groups`."""
    width = gate_up.shape[-1] // 2
    rows = empty_rows(gate_up, width, exponents)
    weighted, clamp = weights is not None, clamp_of(limit)
    constants = _constants(groups, width, gated=True, power_of_two=power_of_two, weighted=weighted, clamp=clamp)
    _launch(gate_up, groups, rows, constants, weights, limit)
    return rows


def silu_mul_groups(gate_up: Tensor, groups: RowGroups, limit: float = 0.0, weights: Tensor | None = None) -> Tensor:
    """See `groups.silu_mul_groups`."""
    width = gate_up.shape[-1] // 2
    out = gate_up.new_empty(*gate_up.shape[:-1], width)
    weighted, clamp = weights is not None, clamp_of(limit)
    constants = _constants(groups, width, gated=True, quantize=False, weighted=weighted, clamp=clamp)
    _launch(gate_up, groups, out, constants, weights, limit)
    return out


def scale_groups(rows: Tensor, weights: Tensor, groups: RowGroups) -> Tensor:
    """See `groups.scale_groups`."""
    if not rows.is_contiguous():
        raise ValueError("scale_groups needs contiguous rows")
    _launch(rows, groups, rows, _constants(groups, rows.shape[-1], quantize=False, weighted=True), weights)
    return rows


def _launch(
    x: Tensor, groups: RowGroups, out: Tensor | QuantizedRows, constants: dict[str, Any],
    weights: Tensor | None = None, limit: float = 0.0,
) -> None:  # fmt: skip
    if not x.numel():
        return
    x, count, capacity = x.contiguous(), len(groups.sizes), 0 if groups.alignment else x.shape[1]
    data, scales, strides = out, None, (0, 0)
    if isinstance(out, QuantizedRows):
        data, scales = out.data, out.scales
        strides = out.scale_stride, 0 if groups.alignment else scales.stride(0) - capacity
    blocks = triton.cdiv(constants["WIDTH"], BLOCK)
    most = x.shape[-2] if groups.alignment else capacity
    groups_kernel[(count, blocks, programs_per_group(count, blocks, most))](
        x, groups.sizes, weights, data, scales, capacity, *strides, limit, **constants, num_warps=4
    )


def programs_per_group(count: int, blocks: int, most: int) -> int:
    """Programs for groups of at most `most` rows: one for each tile, within `MAX_PROGRAMS` of the launch."""
    return max(1, min(triton.cdiv(most, TILE_ROWS), MAX_PROGRAMS // (count * blocks)))


def _constants(
    groups: RowGroups, width: int, gated: bool = False, quantize: bool = True, power_of_two: bool = False,
    weighted: bool = False, clamp: bool | str = False,
) -> dict[str, Any]:  # fmt: skip
    return {
        "WIDTH": width, "ROWS": TILE_ROWS, "ALIGN": groups.alignment, "GATED": gated, "QUANTIZE": quantize,
        "POWER_OF_TWO": power_of_two, "WEIGHTED": weighted, "CLAMP": clamp,
    }  # fmt: skip


def aot_cases() -> list[AotCase]:
    """DeepSeek V3's experts (hidden 7168, width 2048) in FP8, V2-Lite's (width 1408) in bf16, and weighted results."""
    padded, aligned, small, grouped = (RowGroups(torch.empty(0), alignment) for alignment in (0, 128, 64, 1))
    strides = {"scale_column": "i32", "scale_skip": "i32"}
    found = []
    for name, groups, width, options in (
        ("quantize_padded_7168", padded, 7168, {}),
        ("silu_mul_padded_2048", padded, 2048, {"gated": True}),
        ("silu_mul_padded_2048_exponents", padded, 2048, {"gated": True, "power_of_two": True}),
        ("silu_mul_aligned_2048", aligned, 2048, {"gated": True, "power_of_two": True}),
        ("silu_mul_weighted_2048", aligned, 2048, {"gated": True, "power_of_two": True, "weighted": True}),
        ("silu_mul_weighted_2048_align64", small, 2048, {"gated": True, "weighted": True}),
        ("silu_mul_clamped_2048", padded, 2048, {"gated": True, "power_of_two": True, "clamp": True}),
        ("silu_mul_bf16_1408", padded, 1408, {"gated": True, "quantize": False}),
        ("weighted_7168", grouped, 7168, {"quantize": False, "weighted": True}),
    ):
        constants = _constants(groups, width, **options)
        signature = {"x": "*bf16", "sizes": "*i32:1", "capacity": "i32", "limit": "fp32", **strides}
        signature["out"] = "*fp8e4nv" if constants["QUANTIZE"] else "*bf16"
        kind = "*i32" if name.endswith("exponents") else "*fp32"
        pointers = {"scales": (kind, constants["QUANTIZE"]), "weights": ("*fp32", constants["WEIGHTED"])}
        signature |= {name: kind for name, (kind, used) in pointers.items() if used}
        constants |= {name: None for name, (_, used) in pointers.items() if not used}
        found.append(AotCase(f"groups_{name}", groups_kernel, signature, constants, 4, 3, False))
    sizes = dict.fromkeys(("capacity", "x_skip", "x_row", "x_block", "scale_column", "scale_skip"), "i32")
    signature = {"x": "*fp32:1", "sizes": "*i32:1", "out": "*i32", **sizes}
    for align in (0, 128):
        constants = {"BLOCKS": 56, "ROWS": TILE_ROWS, "ALIGN": align}
        found.append(AotCase(f"groups_pack_7168_align{align}", pack_kernel, signature, constants, 1, 3, False))
    return found
