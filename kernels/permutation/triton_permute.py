"""Permute and unpermute in Triton: sort tokens by expert, gather, weighted sum.

Legend: T tokens, K experts per token, P = T * K pairs (token, choice), E experts, D hidden, M rows.
No host synchronization, no dependence on program order: equal inputs give equal bits, and all shapes depend
on T, K and E alone, so that a captured graph can replay it.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from moe_engine.kernels.permutation.protocol import ExpertOrder, most_rows
from moe_engine.kernels.permutation.reference import TorchPermutation
from moe_engine.kernels.quantization.groups import RowGroups
from moe_engine.kernels.quantization.protocol import BLOCK, FP8
from moe_engine.kernels.quantization.triton_groups import scale_groups
from moe_engine.kernels.triton.aot import AotCase
from moe_engine.kernels.triton.dependent import announce_next, dependent_jit, wait_for_inputs
from moe_engine.kernels.triton.grid_barrier import COOPERATIVE, barrier_state, grid_barrier, resident_programs
from moe_engine.kernels.triton.launch import row_stride, with_contiguous_rows

_BLOCK = tl.constexpr(BLOCK)
_STEP = 64  # pairs that a program ranks at once, by all-pairs comparison
_MAX_CHUNKS = 128  # counting programs; every placing program reads all their counts
_ONE_LAUNCH = 1 << 12
"""Pairs up to which every placing program counts all pairs itself, which is shorter than a launch or a barrier: two
histograms of 2,048 pairs take about 0.6 us (increments of shared memory)."""
_ONE_LAUNCH_COUNTS = 1 << 19
"""The same for pairs times experts."""

_WIDE = 1024  # pairs that it counts at once
_READ = 1 << 12  # counts of other programs that it reads at once
_COMBINE_TILE = 1024
_PERMUTE_BYTES = 2048  # of a row, per program


@dependent_jit(do_not_specialize=["num_pairs", "num_steps"], do_not_specialize_on_alignment=["ids"])
def count_kernel(ids, counts, num_pairs, num_steps, EXPERTS: tl.constexpr, STEP: tl.constexpr):
    """counts [chunk, e]: pairs of a chunk of STEP * num_steps of expert e. EXPERTS is a power of two."""
    wait_for_inputs()
    _count_chunk(ids, counts, tl.program_id(0), num_pairs, num_steps, EXPERTS, STEP)


@triton.jit
def _count_chunk(ids, counts, chunk, num_pairs, num_steps, EXPERTS: tl.constexpr, STEP: tl.constexpr):
    experts = tl.arange(0, EXPERTS)
    total = tl.zeros((EXPERTS,), tl.int32)
    for step in range(num_steps):
        pairs = (chunk * num_steps + step) * STEP + tl.arange(0, STEP)
        chosen = tl.load(ids + pairs, mask=pairs < num_pairs, other=-1)
        total += tl.sum((chosen[:, None] == experts[None, :]).to(tl.int32), axis=0)
    tl.store(counts + chunk * EXPERTS + experts, total)


@dependent_jit(
    do_not_specialize=["num_pairs", "num_steps", "num_chunks", "capacity"], do_not_specialize_on_alignment=["ids"]
)
def place_kernel(
    ids, counts, offsets, ends_out, positions, source, barrier, num_pairs, num_steps, num_chunks, capacity,
    NUM_EXPERTS: tl.constexpr, EXPERTS: tl.constexpr, STEP: tl.constexpr, ALIGN: tl.constexpr, PADDED: tl.constexpr,
    COUNTED: tl.constexpr, WIDE_STEP: tl.constexpr, OTHERS: tl.constexpr, WAITS: tl.constexpr,
):  # fmt: skip
    """A pair's row = start of its expert's group + earlier pairs of that expert, in previous chunks and in its own.

    PADDED: groups start at multiples of `capacity`, pairs beyond it have no row, and ends_out receives counts.
    COUNTED: `count_kernel` has filled `counts`; otherwise every program counts all pairs, WIDE_STEP at once. WAITS:
    the programs of this launch fill `counts`, and wait for each other (cooperative).
    """
    wait_for_inputs()
    chunk = tl.program_id(0)
    if WAITS:
        _count_chunk(ids, counts, chunk, num_pairs, num_steps, EXPERTS, STEP)
        grid_barrier(barrier)
        announce_next()
    experts = tl.arange(0, EXPERTS)
    total = tl.zeros((EXPERTS,), tl.int32)
    before = tl.zeros((EXPERTS,), tl.int32)
    if COUNTED:
        for begin in range(0, num_chunks, OTHERS):
            other = (begin + tl.arange(0, OTHERS))[:, None]
            of_others = tl.load(counts + other * EXPERTS + experts[None, :], mask=other < num_chunks, other=0)
            total += tl.sum(of_others, axis=0)
            before += tl.sum(tl.where(other < chunk, of_others, 0), axis=0)
    else:
        for begin in range(0, num_pairs, WIDE_STEP):
            pair = begin + tl.arange(0, WIDE_STEP)
            expert = tl.load(ids + pair, mask=pair < num_pairs, other=-1)
            known = (expert >= 0) & (expert < EXPERTS)
            total += tl.histogram(expert, EXPERTS, known)
            before += tl.histogram(expert, EXPERTS, known & (pair < chunk * num_steps * STEP))
    if PADDED:
        first = experts * capacity
        if chunk == 0:
            tl.store(ends_out + experts, tl.minimum(total, capacity), mask=experts < NUM_EXPERTS)
    else:
        size = tl.where(experts < NUM_EXPERTS, tl.cdiv(total, ALIGN) * ALIGN, 0)
        first = tl.cumsum(size, 0) - size
        if chunk == 0:
            tl.store(offsets + experts, first, mask=experts < NUM_EXPERTS)
            tl.store(ends_out + experts, first + total, mask=experts < NUM_EXPERTS)
            tl.store(offsets + NUM_EXPERTS, tl.sum(size, 0))
    start = first + before
    lane = tl.arange(0, STEP)
    for step in range(num_steps):
        pairs = (chunk * num_steps + step) * STEP + lane
        chosen = tl.load(ids + pairs, mask=pairs < num_pairs, other=-1)
        known = (chosen >= 0) & (chosen < NUM_EXPERTS)
        named = chosen[:, None] == experts[None, :]
        earlier = (chosen[:, None] == chosen[None, :]) & (lane[None, :] < lane[:, None])
        row = tl.sum(tl.where(named, start[None, :], 0), axis=1) + tl.sum(earlier.to(tl.int32), axis=1)
        if PADDED:
            known = known & (row < (chosen + 1) * capacity)
        else:
            tl.store(source + row, pairs, mask=known)
        tl.store(positions + pairs, tl.where(known, row, -1), mask=pairs < num_pairs)
        start += tl.sum(named.to(tl.int32), axis=0)


@dependent_jit(do_not_specialize=["x_scale_row", "x_scale_column", "scale_row", "scale_column"])
def permute_kernel(
    x, positions, out, x_scales, scales, x_scale_row, x_scale_column, scale_row, scale_column,
    SLOTS: tl.constexpr, WIDTH: tl.constexpr, X_STRIDE: tl.constexpr, TILE: tl.constexpr, HAS_SCALES: tl.constexpr,
):  # fmt: skip
    """out[positions[t, s]] [WIDTH] = x[t] for every s < SLOTS with a position; with scales per 128 channels."""
    wait_for_inputs()
    token = tl.program_id(0).to(tl.int64)
    tile = tl.program_id(1)
    places = positions + token * SLOTS
    most = tl.load(places)
    for slot in tl.static_range(1, SLOTS):
        most = tl.maximum(most, tl.load(places + slot))
    read = tl.where(most >= 0, WIDTH, 0)  # a token without positions is not read
    cols = tile * TILE + tl.arange(0, TILE)
    value = tl.load(x + token * X_STRIDE + cols, mask=cols < read, other=0)
    for slot in tl.static_range(SLOTS):
        row = tl.load(places + slot).to(tl.int64)
        tl.store(out + row * WIDTH + cols, value, mask=cols < tl.where(row >= 0, WIDTH, 0))
    if HAS_SCALES:
        blocks = tile * (TILE // _BLOCK) + tl.arange(0, TILE // _BLOCK)
        begins = blocks * _BLOCK
        scale = tl.load(x_scales + token * x_scale_row + blocks * x_scale_column, mask=begins < read, other=0.0)
        for slot in tl.static_range(SLOTS):
            row = tl.load(places + slot).to(tl.int64)
            inside = begins < tl.where(row >= 0, WIDTH, 0)
            tl.store(scales + row * scale_row + blocks * scale_column, scale, mask=inside)


@triton.jit
def weighted_sum(
    rows, positions, weights, token, cols, TOP_K: tl.constexpr, WIDTH: tl.constexpr, W_STRIDE: tl.constexpr,
    HAS_WEIGHTS: tl.constexpr,
):  # fmt: skip
    """Channels `cols` of sum_k weights[token, k] * rows[positions[token, k]], in float32 and in the order of k."""
    total = tl.zeros(cols.shape, tl.float32)
    for k in tl.static_range(TOP_K):
        row = tl.load(positions + token * TOP_K + k).to(tl.int64)
        value = tl.load(rows + row * WIDTH + cols, mask=cols < tl.where(row >= 0, WIDTH, 0), other=0.0).to(tl.float32)
        if HAS_WEIGHTS:
            value *= tl.where(row >= 0, tl.load(weights + token * W_STRIDE + k), 0.0)
        total += value
    return total


@dependent_jit(do_not_specialize_on_alignment=["weights"])
def combine_kernel(
    rows, positions, weights, add, out,
    TOP_K: tl.constexpr, WIDTH: tl.constexpr, W_STRIDE: tl.constexpr, ADD_STRIDE: tl.constexpr, TILE: tl.constexpr,
    HAS_WEIGHTS: tl.constexpr, HAS_ADD: tl.constexpr,
):  # fmt: skip
    """out[t] = add[t] + sum_k weights[t, k] * rows[positions[t, k]]."""
    wait_for_inputs()
    token = tl.program_id(0).to(tl.int64)
    cols = tl.program_id(1) * TILE + tl.arange(0, TILE)
    total = weighted_sum(rows, positions, weights, token, cols, TOP_K, WIDTH, W_STRIDE, HAS_WEIGHTS)
    inside = cols < WIDTH
    if HAS_ADD:
        total += tl.load(add + token * ADD_STRIDE + cols, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + token * WIDTH + cols, total.to(out.dtype.element_ty), mask=inside)


class TritonPermutation(TorchPermutation):
    """`Permutation` on a GPU. `valid` and `route`, which serve normal-mode dispatch only, are torch's."""

    name = "triton"

    def __init__(self) -> None:
        self._barriers: dict[torch.device, Tensor] = {}

    def sort_in_one_launch(self, device: torch.device) -> None:
        """Programs of a sort wait for each other instead of a second launch. For owners whose calls on this device
        are all on one stream; before a graph is captured."""
        if device not in self._barriers:
            self._barriers[device] = barrier_state(device)

    def sort_by_expert(self, ids: Tensor, num_experts: int, align: int = 1, marks_padding: bool = True) -> ExpertOrder:
        ids = ids.to(torch.int32).contiguous()
        num_pairs, device = ids.numel(), ids.device
        offsets = torch.empty(num_experts + 1, dtype=torch.int32, device=device)
        ends = torch.empty(num_experts, dtype=torch.int32, device=device)
        if not num_pairs:
            return ExpertOrder(offsets.zero_(), ends.zero_(), torch.empty_like(ids), ids.new_empty(0))
        source = torch.empty(most_rows(num_pairs, num_experts, align), dtype=torch.int32, device=device)
        if marks_padding and align > 1:
            source.fill_(-1)
        positions = _place(ids, offsets, ends, source, num_experts, align, barrier=self._barriers.get(device))
        return ExpertOrder(offsets, ends, positions, source)

    def place(self, ids: Tensor, num_experts: int, capacity: int) -> tuple[Tensor, Tensor]:
        ids = ids.to(torch.int32).contiguous()
        counts = torch.empty(num_experts, dtype=torch.int32, device=ids.device)
        if not ids.numel():
            return counts.zero_(), torch.empty_like(ids)
        barrier = self._barriers.get(ids.device)
        return counts, _place(ids, None, counts, None, num_experts, capacity=capacity, barrier=barrier)

    def permute(
        self, x: Tensor, positions: Tensor, out: Tensor, scales: Tensor | None = None, out_scales: Tensor | None = None
    ) -> None:
        (tokens, slots), width = positions.shape, out.shape[1]
        if not tokens:
            return
        if x.dtype == FP8:
            x, out = x.view(torch.uint8), out.view(torch.uint8)
        x = with_contiguous_rows(x)
        constants = _permute_constants(slots, width, x.itemsize, row_stride(x), scales is not None)
        strides: tuple[int, ...] = (0, 0, 0, 0)
        if scales is not None and out_scales is not None:
            strides = (*scales.stride(), *out_scales.stride())
        permute_kernel[(tokens, triton.cdiv(width, constants["TILE"]))](
            x, positions, out, scales, out_scales, *strides, **constants, num_warps=4
        )

    def scale_rows(self, rows: Tensor, weights: Tensor, groups: RowGroups) -> Tensor:
        """See the protocol; other rows are unchanged."""
        return scale_groups(rows, weights, groups)

    def combine(
        self, rows: Tensor, positions: Tensor, weights: Tensor | None = None, add: Tensor | None = None
    ) -> Tensor:
        (tokens, top_k), width = positions.shape, rows.shape[1]
        out = torch.empty(tokens, width, dtype=rows.dtype, device=rows.device)
        if not tokens:
            return out
        weights = None if weights is None else with_contiguous_rows(weights.float())
        add = None if add is None else with_contiguous_rows(add)
        combine_kernel[(tokens, triton.cdiv(width, _COMBINE_TILE))](
            rows, positions, weights, add, out, TOP_K=top_k, WIDTH=width,
            W_STRIDE=0 if weights is None else row_stride(weights), ADD_STRIDE=0 if add is None else row_stride(add),
            TILE=_COMBINE_TILE, HAS_WEIGHTS=weights is not None, HAS_ADD=add is not None, num_warps=4,
        )  # fmt: skip
        return out


def _place(
    ids: Tensor,
    offsets: Tensor | None,
    ends: Tensor,
    source: Tensor | None,
    num_experts: int,
    align: int = 1,
    capacity: int = 0,
    barrier: Tensor | None = None,
) -> Tensor:
    """Fills the other tensors; returns the positions of ids int32 [T, K], contiguous and not empty."""
    num_pairs = ids.numel()
    num_steps = triton.cdiv(triton.cdiv(num_pairs, _STEP), _MAX_CHUNKS)
    num_chunks = triton.cdiv(num_pairs, _STEP * num_steps)
    experts = triton.next_power_of_2(num_experts)
    counted = num_pairs > _ONE_LAUNCH or num_pairs * experts > _ONE_LAUNCH_COUNTS
    waits = counted and barrier is not None and num_chunks <= resident_programs(ids.device)
    constants = _place_constants(num_experts, align, capacity > 0, counted, waits)
    positions, grid, counts = torch.empty_like(ids), (num_chunks,), None
    if counted:
        counts = torch.empty(num_chunks, experts, dtype=torch.int32, device=ids.device)
    if counted and not waits:
        count_kernel[grid](ids, counts, num_pairs, num_steps, EXPERTS=experts, STEP=_STEP, num_warps=4)
    place_kernel[grid](
        ids, counts, offsets, ends, positions, source, barrier if waits else None, num_pairs, num_steps, num_chunks,
        capacity, **constants, num_warps=4, **(COOPERATIVE if waits else {}),
    )  # fmt: skip
    return positions


def _place_constants(
    num_experts: int, align: int, padded: bool = False, counted: bool = True, waits: bool = False
) -> dict[str, Any]:
    experts = triton.next_power_of_2(num_experts)
    return {
        "NUM_EXPERTS": num_experts, "EXPERTS": experts, "STEP": _STEP, "ALIGN": align, "PADDED": padded,
        "COUNTED": counted, "WIDE_STEP": _WIDE, "OTHERS": max(1, _READ // experts),
        "WAITS": waits,
    }  # fmt: skip


def _permute_constants(slots: int, width: int, item_bytes: int, stride: int, has_scales: bool) -> dict[str, Any]:
    return {
        "SLOTS": slots, "WIDTH": width, "X_STRIDE": stride, "TILE": _PERMUTE_BYTES // item_bytes,
        "HAS_SCALES": has_scales,
    }  # fmt: skip


def aot_cases() -> list[AotCase]:
    """DeepSeek V3's 256 experts, V2-Lite's 64, and the 16 per rank of EP 16, which also serves padded batches."""
    cases = []
    ints = {"num_pairs": "i32", "num_steps": "i32"}
    for experts in (256, 64, 16):
        signature = {"ids": "*i32:1", "counts": "*i32", **ints}
        counting: dict[str, Any] = {"EXPERTS": experts, "STEP": _STEP}
        cases.append(AotCase(f"expert_count_{experts}", count_kernel, signature, counting, 4, 3, False))
        signature = signature | {"ends_out": "*i32", "positions": "*i32", "num_chunks": "i32", "capacity": "i32"}
        grouped = signature | {"offsets": "*i32", "source": "*i32"}
        constants = _place_constants(experts, 1) | {"barrier": None}
        cases.append(AotCase(f"expert_place_{experts}", place_kernel, grouped, constants, 4, 3, False))
        constants, waiting = _place_constants(experts, 1, waits=True), grouped | {"barrier": "*i64"}
        name = f"expert_count_and_place_{experts}"
        cases.append(AotCase(name, place_kernel, waiting, constants, 4, 3, False, COOPERATIVE))
        alone = _place_constants(experts, 1, counted=False) | {"counts": None, "barrier": None}
        named = {name: kind for name, kind in grouped.items() if name != "counts"}
        cases.append(AotCase(f"expert_place_alone_{experts}", place_kernel, named, alone, 4, 3, False))
    constants = _place_constants(16, 1, padded=True) | {"offsets": None, "source": None, "barrier": None}
    cases.append(AotCase("expert_place_padded_16", place_kernel, signature, constants, 4, 3, False))
    absent: dict[str, Any] = dict.fromkeys(("offsets", "source", "counts", "barrier"))
    constants = _place_constants(16, 1, True, counted=False) | absent
    named = {name: kind for name, kind in signature.items() if name != "counts"}
    cases.append(AotCase("expert_place_alone_padded_16", place_kernel, named, constants, 4, 3, False))
    strides = dict.fromkeys(("x_scale_row", "x_scale_column", "scale_row", "scale_column"), "i32")
    for width, top_k, quantized in ((7168, 8, True), (7168, 8, False), (2048, 6, False)):
        element = "*u8" if quantized else "*bf16"
        signature = {"x": element, "positions": "*i32", "out": element, **strides}
        constants = _permute_constants(top_k, width, 1 if quantized else 2, width, quantized)
        if quantized:
            signature |= {"x_scales": "*fp32", "scales": "*fp32"}
        else:
            constants |= {"x_scales": None, "scales": None}
        name = f"expert_permute_{width}{'_fp8' if quantized else ''}"
        cases.append(AotCase(name, permute_kernel, signature, constants, 4, 3, False))
    for width, top_k in ((7168, 8), (2048, 6)):
        signature = {"rows": "*bf16", "positions": "*i32", "weights": "*fp32:1", "add": "*bf16", "out": "*bf16"}
        constants = {"TOP_K": top_k, "WIDTH": width, "W_STRIDE": top_k, "ADD_STRIDE": width, "TILE": _COMBINE_TILE}
        constants |= {"HAS_WEIGHTS": True, "HAS_ADD": True}
        cases.append(AotCase(f"expert_combine_{width}", combine_kernel, signature, constants, 4, 3, False))
    return cases
