"""Permute and unpermute in Triton: sort tokens by expert, gather, weighted sum.

Legend: T tokens, K experts per token, P = T * K pairs (token, choice), E experts, D hidden, M rows.
No host synchronisation, no atomics, no dependence on program order: equal inputs give equal bits, and all shapes depend
on T, K and E alone, so that a captured graph can replay it.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from moe_engine.kernels.permutation.expert_order import ExpertOrder, most_rows
from moe_engine.kernels.quantization.protocol import BLOCK, QuantizedRows
from moe_engine.kernels.quantization.triton_rows import TILE_ROWS, quantize_tile
from moe_engine.kernels.triton.aot import AotCase

_STEP = 64  # pairs that a program ranks at once, by all-pairs comparison
_MAX_CHUNKS = 128  # counting programs; every placing program reads all their counts
_COMBINE_TILE = 1024


@triton.jit(do_not_specialize=["num_pairs", "num_steps"], do_not_specialize_on_alignment=["ids"])
def count_kernel(ids, counts, num_pairs, num_steps, EXPERTS: tl.constexpr, STEP: tl.constexpr):
    """counts [chunk, e]: pairs of a chunk of STEP * num_steps of expert e. EXPERTS is a power of two."""
    chunk = tl.program_id(0)
    experts = tl.arange(0, EXPERTS)
    total = tl.zeros((EXPERTS,), tl.int32)
    for step in range(num_steps):
        pairs = (chunk * num_steps + step) * STEP + tl.arange(0, STEP)
        chosen = tl.load(ids + pairs, mask=pairs < num_pairs, other=-1)
        total += tl.sum((chosen[:, None] == experts[None, :]).to(tl.int32), axis=0)
    tl.store(counts + chunk * EXPERTS + experts, total)


@triton.jit(do_not_specialize=["num_pairs", "num_steps", "num_chunks"], do_not_specialize_on_alignment=["ids"])
def place_kernel(
    ids, counts, offsets, ends_out, positions, source, num_pairs, num_steps, num_chunks,
    NUM_EXPERTS: tl.constexpr, EXPERTS: tl.constexpr, STEP: tl.constexpr, ALIGN: tl.constexpr,
):  # fmt: skip
    """A pair's row = start of its expert's group + earlier pairs of that expert, in previous chunks and in its own."""
    chunk = tl.program_id(0)
    experts = tl.arange(0, EXPERTS)
    total = tl.zeros((EXPERTS,), tl.int32)
    before = tl.zeros((EXPERTS,), tl.int32)
    for other in range(num_chunks):
        count = tl.load(counts + other * EXPERTS + experts)
        total += count
        before += tl.where(other < chunk, count, 0)
    size = tl.where(experts < NUM_EXPERTS, tl.cdiv(total, ALIGN) * ALIGN, 0)
    ends = tl.cumsum(size, 0)
    if chunk == 0:
        tl.store(offsets + experts, ends - size, mask=experts < NUM_EXPERTS)
        tl.store(ends_out + experts, ends - size + total, mask=experts < NUM_EXPERTS)
        tl.store(offsets + NUM_EXPERTS, tl.sum(size, 0))
    start = ends - size + before
    lane = tl.arange(0, STEP)
    for step in range(num_steps):
        pairs = (chunk * num_steps + step) * STEP + lane
        chosen = tl.load(ids + pairs, mask=pairs < num_pairs, other=-1)
        known = (chosen >= 0) & (chosen < NUM_EXPERTS)
        named = chosen[:, None] == experts[None, :]
        earlier = (chosen[:, None] == chosen[None, :]) & (lane[None, :] < lane[:, None])
        row = tl.sum(tl.where(named, start[None, :], 0), axis=1) + tl.sum(earlier.to(tl.int32), axis=1)
        tl.store(positions + pairs, tl.where(known, row, -1), mask=pairs < num_pairs)
        tl.store(source + row, pairs, mask=known)
        start += tl.sum(named.to(tl.int32), axis=0)


@triton.jit(do_not_specialize=["num_rows", "x_scale_stride", "scale_stride"], do_not_specialize_on_alignment=["end"])
def permute_kernel(
    x, x_scales, source, end, out, scales, num_rows, x_scale_stride, scale_stride,
    TOP_K: tl.constexpr, WIDTH: tl.constexpr, X_STRIDE: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr,
    FP8: tl.constexpr, POWER_OF_TWO: tl.constexpr, CARRIES: tl.constexpr,
):  # fmt: skip
    """out [M, WIDTH] = x[source // TOP_K], zeros in padding and from row *end on; with FP8 quantized in the same pass.

    CARRIES: x is already quantized (bytes), and its scales are copied too; 1 in padding.
    """
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    cols = tl.program_id(1) * COLS + tl.arange(0, COLS)
    inside = rows < num_rows
    pair = tl.load(source + rows, mask=rows < tl.minimum(num_rows, tl.load(end)), other=-1)
    token = (pair // TOP_K).to(tl.int64)
    mask = (pair >= 0)[:, None] & (cols < WIDTH)[None, :]
    tile = tl.load(x + token[:, None] * X_STRIDE + cols[None, :], mask=mask, other=0)
    place = out + rows.to(tl.int64)[:, None] * WIDTH + cols[None, :]
    mask = inside[:, None] & (cols < WIDTH)[None, :]
    if FP8:
        numbers, scale = quantize_tile(tile.to(tl.float32), POWER_OF_TWO)
        tl.store(place, numbers, mask=mask)
        tl.store(scales + tl.program_id(1) * scale_stride + rows, scale, mask=inside)
    else:
        tl.store(place, tile, mask=mask)
    if CARRIES:
        token_scales = x_scales + tl.program_id(1) * x_scale_stride + token
        scale = tl.load(token_scales, mask=pair >= 0, other=1.0)
        tl.store(scales + tl.program_id(1) * scale_stride + rows, scale, mask=inside)


@triton.jit(do_not_specialize_on_alignment=["weights"])
def combine_kernel(
    rows, positions, weights, add, out,
    TOP_K: tl.constexpr, WIDTH: tl.constexpr, ADD_STRIDE: tl.constexpr, TILE: tl.constexpr, HAS_ADD: tl.constexpr,
):  # fmt: skip
    """out[t] = add[t] + sum_k weights[t, k] * rows[positions[t, k]], in float32 and in the order of k."""
    token = tl.program_id(0).to(tl.int64)
    cols = tl.program_id(1) * TILE + tl.arange(0, TILE)
    total = tl.zeros((TILE,), tl.float32)
    for k in tl.static_range(TOP_K):
        row = tl.load(positions + token * TOP_K + k).to(tl.int64)
        weight = tl.load(weights + token * TOP_K + k)
        width = tl.where(row >= 0, WIDTH, 0)
        value = tl.load(rows + row * WIDTH + cols, mask=cols < width, other=0.0).to(tl.float32)
        total += tl.where(row >= 0, weight, 0.0) * value
    inside = cols < WIDTH
    if HAS_ADD:
        total += tl.load(add + token * ADD_STRIDE + cols, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + token * WIDTH + cols, total.to(out.dtype.element_ty), mask=inside)


def sort_by_expert(topk_ids: Tensor, num_experts: int, align: int = 1) -> ExpertOrder:
    """Sorts the pairs of topk_ids int32 [T, K] by expert, stably; groups start at multiples of `align`.

    `source` has room for all pairs and, with `align` > 1, for the padding of every group.
    """
    ids = topk_ids.to(torch.int32).contiguous()
    num_pairs, device = ids.numel(), ids.device
    offsets = torch.empty(num_experts + 1, dtype=torch.int32, device=device)
    ends = torch.empty(num_experts, dtype=torch.int32, device=device)
    if not num_pairs:
        return ExpertOrder(offsets.zero_(), ends.zero_(), torch.empty_like(ids), ids.new_empty(0))
    experts = triton.next_power_of_2(num_experts)
    num_steps = triton.cdiv(triton.cdiv(num_pairs, _STEP), _MAX_CHUNKS)
    num_chunks = triton.cdiv(num_pairs, _STEP * num_steps)
    counts = torch.empty(num_chunks, experts, dtype=torch.int32, device=device)
    if align == 1:
        source = torch.empty(num_pairs, dtype=torch.int32, device=device)
    else:
        source = torch.full((most_rows(num_pairs, num_experts, align),), -1, dtype=torch.int32, device=device)
    positions = torch.empty_like(ids)
    count_kernel[(num_chunks,)](ids, counts, num_pairs, num_steps, EXPERTS=experts, STEP=_STEP, num_warps=4)
    place_kernel[(num_chunks,)](
        ids, counts, offsets, ends, positions, source, num_pairs, num_steps, num_chunks,
        **_place_constants(num_experts, align), num_warps=4,
    )  # fmt: skip
    return ExpertOrder(offsets, ends, positions, source)


def permute(x: Tensor, order: ExpertOrder) -> Tensor:
    """x [T, D] -> [M, D]: each row is its pair's token, zeros in padding."""
    out = torch.empty(len(order.source), x.shape[1], dtype=x.dtype, device=x.device)
    _permute(x, None, order, out, None)
    return out


def permute_quantize(x: Tensor, order: ExpertOrder, power_of_two: bool = False) -> QuantizedRows:
    """`permute`, quantized to FP8 in the same pass."""
    rows = QuantizedRows.empty(len(order.source), x.shape[1], x.device)
    _permute(x, None, order, rows.data, rows, power_of_two)
    return rows


def permute_rows(x: QuantizedRows, order: ExpertOrder) -> QuantizedRows:
    """`permute` of quantized tokens; the scales of padding are 1."""
    rows = QuantizedRows.empty(len(order.source), x.data.shape[1], x.data.device)
    _permute(x.data.view(torch.uint8), x, order, rows.data.view(torch.uint8), rows)
    return rows


def _permute(
    x: Tensor,
    scaled: QuantizedRows | None,
    order: ExpertOrder,
    out: Tensor,
    quantized: QuantizedRows | None,
    power_of_two: bool = False,
) -> None:
    """`quantized`: output of the scales, copied from `scaled` or, without it, computed here."""
    x = x.contiguous()
    num_rows, width = out.shape
    if not num_rows:
        return
    fp8 = quantized is not None and scaled is None
    grid = (triton.cdiv(num_rows, TILE_ROWS), triton.cdiv(width, BLOCK))
    permute_kernel[grid](
        x, None if scaled is None else scaled.scales, order.source, order.offsets[-1:], out,
        None if quantized is None else quantized.scales, num_rows,
        0 if scaled is None else scaled.scale_stride, 0 if quantized is None else quantized.scale_stride,
        **_permute_constants(order.positions.shape[1], width, fp8, power_of_two, scaled is not None), num_warps=4,
    )  # fmt: skip


def combine(rows: Tensor, positions: Tensor, weights: Tensor, add: Tensor | None = None) -> Tensor:
    """rows [M, D], positions int32 [T, K] (-1: none), weights float32 [T, K], add [T, D] -> [T, D] in rows' dtype."""
    (tokens, top_k), width = positions.shape, rows.shape[1]
    out = torch.empty(tokens, width, dtype=rows.dtype, device=rows.device)
    if add is not None and add.stride(-1) != 1:
        add = add.contiguous()
    if tokens:
        stride = width if add is None or tokens == 1 else add.stride(0)
        combine_kernel[(tokens, triton.cdiv(width, _COMBINE_TILE))](
            rows, positions, weights.float().contiguous(), add, out, TOP_K=top_k, WIDTH=width, ADD_STRIDE=stride,
            TILE=_COMBINE_TILE, HAS_ADD=add is not None, num_warps=4,
        )  # fmt: skip
    return out


def _place_constants(num_experts: int, align: int) -> dict[str, Any]:
    experts = triton.next_power_of_2(num_experts)
    return {"NUM_EXPERTS": num_experts, "EXPERTS": experts, "STEP": _STEP, "ALIGN": align}


def _permute_constants(
    top_k: int, width: int, fp8: bool, power_of_two: bool = False, carries: bool = False
) -> dict[str, Any]:
    return {
        "TOP_K": top_k, "WIDTH": width, "X_STRIDE": width, "ROWS": TILE_ROWS, "COLS": BLOCK, "FP8": fp8,
        "POWER_OF_TWO": power_of_two, "CARRIES": carries,
    }  # fmt: skip


def aot_cases() -> list[AotCase]:
    """DeepSeek V3's 256 experts, V2-Lite's 64, and the 16 per rank of EP 16."""
    cases = []
    ints = {"num_pairs": "i32", "num_steps": "i32"}
    for experts in (256, 64, 16):
        constants: dict[str, Any] = {"EXPERTS": experts, "STEP": _STEP}
        signature = {"ids": "*i32:1", "counts": "*i32", **ints}
        cases.append(AotCase(f"expert_count_{experts}", count_kernel, signature, constants, 4, 3, False))
        signature = signature | {
            "offsets": "*i32",
            "ends_out": "*i32",
            "positions": "*i32",
            "source": "*i32",
            "num_chunks": "i32",
        }
        constants = _place_constants(experts, 1)
        cases.append(AotCase(f"expert_place_{experts}", place_kernel, signature, constants, 4, 3, False))
    for width, top_k, what in ((7168, 8, "fp8"), (7168, 8, "bytes"), (7168, 8, "bf16"), (2048, 6, "bf16")):
        x, out = {"fp8": ("*bf16", "*fp8e4nv"), "bytes": ("*u8", "*u8"), "bf16": ("*bf16", "*bf16")}[what]
        signature = {"x": x, "source": "*i32", "end": "*i32:1", "out": out, "num_rows": "i32"}
        signature |= {"x_scale_stride": "i32", "scale_stride": "i32"}
        constants = _permute_constants(top_k, width, what == "fp8", carries=what == "bytes")
        for scales, given in (("x_scales", what == "bytes"), ("scales", what != "bf16")):
            signature |= {scales: "*fp32"} if given else {}
            constants |= {} if given else {scales: None}
        name = f"expert_permute_{width}{'' if what == 'bf16' else '_' + what}"
        cases.append(AotCase(name, permute_kernel, signature, constants, 4, 3, False))
    for width, top_k in ((7168, 8), (2048, 6)):
        signature = {"rows": "*bf16", "positions": "*i32", "weights": "*fp32:1", "add": "*bf16", "out": "*bf16"}
        constants = {"TOP_K": top_k, "WIDTH": width, "ADD_STRIDE": width, "TILE": _COMBINE_TILE, "HAS_ADD": True}
        cases.append(AotCase(f"expert_combine_{width}", combine_kernel, signature, constants, 4, 3, False))
    return cases
