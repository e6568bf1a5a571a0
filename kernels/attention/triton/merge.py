"""Merges attention results over parts of a context by their log-sum-exp: result = sum_i exp(lse_i - lse) result_i.

Legend: T query tokens, H query heads, G KV heads, V value width, M merges, B rows of a block.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton import next_power_of_2

from moe_engine.kernels.attention.schedule import RECORD, Schedule
from moe_engine.kernels.attention.triton.tiles import LOG2_E
from moe_engine.kernels.triton.aot import AotCase
from moe_engine.kernels.triton.dependent import dependent_jit, wait_for_inputs
from moe_engine.kernels.triton.launch import element

_ROWS = 4
"""Rows per program."""

_RECORD = tl.constexpr(RECORD)
_LOG2_E = tl.constexpr(LOG2_E)


@dependent_jit
def merge_partials_kernel(
    partial, lse, merges, out, sinks,
    PER_GROUP: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr, BLOCK_M: tl.constexpr, ROWS: tl.constexpr,
    SINKS: tl.constexpr,
):  # fmt: skip
    """partial [P, G, B, WIDTH] and lse [P, G, B] (base 2) -> out [T, G * PER_GROUP, WIDTH], by `merges`; `sinks` [H]
    are logits without a value."""
    wait_for_inputs()
    record = merges + tl.program_id(0) * _RECORD
    group, groups = tl.program_id(2), tl.num_programs(2)
    row = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    left = tl.load(record + 1)
    if tl.program_id(1) * ROWS < left:
        first, count = tl.load(record + 3), tl.load(record + 4)
        column = tl.arange(0, BLOCK)
        whole = (row < left) & (row < BLOCK_M)
        live = whole[:, None] & (column < WIDTH)[None, :]
        best = tl.full([ROWS], float("-inf"), tl.float32)
        for i in range(first, first + count):
            best = tl.maximum(best, tl.load(lse + (i * groups + group) * BLOCK_M + row, whole, 0.0))
        inner = tl.load(record + 2) + row
        head = group * PER_GROUP + inner % PER_GROUP
        total = tl.zeros([ROWS], tl.float32)
        if SINKS:
            total += tl.exp2(tl.load(sinks + head) * _LOG2_E - best)
        mixed = tl.zeros([ROWS, BLOCK], tl.float32)
        for i in range(first, first + count):
            place = (i * groups + group) * BLOCK_M + row
            weight = tl.exp2(tl.load(lse + place, whole, 0.0) - best)
            total += weight
            values = tl.load(partial + place.to(tl.int64)[:, None] * WIDTH + column[None, :], live, 0.0)
            mixed += weight[:, None] * values
        token = tl.load(record) + inner // PER_GROUP
        place = (token.to(tl.int64) * groups * PER_GROUP + head)[:, None] * WIDTH + column[None, :]
        tl.store(out + place, (mixed / total[:, None]).to(out.dtype.element_ty), live)


@dependent_jit
def merge_chunk_kernel(out, lse, other, other_lse, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    """Merges (other, other_lse) into (out, lse) of row n; log-sum-exps are natural, -inf for an empty chunk."""
    wait_for_inputs()
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    live = column < WIDTH
    a, b = tl.load(lse + row), tl.load(other_lse + row)
    best = tl.maximum(a, b)
    best = tl.where(best == float("-inf"), 0.0, best)
    weight_a, weight_b = tl.exp(a - best), tl.exp(b - best)
    total = weight_a + weight_b
    norm = tl.where(total > 0.0, 1.0 / total, 0.0)
    place = row * WIDTH + column
    own = tl.load(out + place, live, 0.0).to(tl.float32)
    added = tl.load(other + place, live, 0.0).to(tl.float32)
    mixed = (own * weight_a + added * weight_b) * norm
    tl.store(out + place, mixed.to(out.dtype.element_ty), live)
    tl.store(lse + row, best + tl.log(total))


def merge_partials(partial: Tensor, lse: Tensor, schedule: Schedule, out: Tensor, sinks: Tensor | None = None) -> None:
    """Writes to out [T, H, V] the rows that were split over several programs.

    Args:
        partial: [P, G, B, V] float32, each normalized.
        lse: [P, G, B] float32, to base 2.
        sinks: float32 [H], logits without a value.
    """
    num_merges = len(schedule.merges)
    if num_merges == 0:
        return
    groups, width = partial.shape[1], partial.shape[3]
    grid = (num_merges, triton.cdiv(schedule.block_m, _ROWS), groups)
    merge_partials_kernel[grid](
        partial, lse, schedule.merges, out, sinks, out.shape[1] // groups, width, next_power_of_2(width),
        schedule.block_m, _ROWS, sinks is not None, num_warps=4,
    )  # fmt: skip


def merge_chunk(out: Tensor, lse: Tensor, other: Tensor, other_lse: Tensor) -> None:
    """Merges the attention over another context chunk into `out` and `lse`, in place.

    out and other [T, H, V], lse and other_lse [T, H] float32 (natural logarithm); all contiguous. For contexts whose
    keys and values are expanded in chunks. A row that sees no key in either chunk becomes 0 with lse -inf.
    """
    if out.numel():
        width = out.shape[-1]
        merge_chunk_kernel[(lse.numel(),)](out, lse, other, other_lse, width, next_power_of_2(width), num_warps=1)


def aot_cases() -> list[AotCase]:
    cases = []
    sizes = [(*size, False) for size in ((128, 512, 64), (16, 512, 16), (16, 512, 32), (4, 128, 16), (8, 128, 16))]
    sizes += [(8, 64, 16, True), (8, 128, 16, True)]  # gpt-oss, MiMo-V2-Flash
    sizes += [(128, 512, 128, True), (64, 512, 64, True), (8, 512, 16, True)]  # DeepSeek V4
    for per_group, width, block_m, sinks in sizes:
        signature = {"partial": "*fp32", "lse": "*fp32", "merges": "*i32", "out": "*bf16"}
        constants: dict[str, object] = {
            "PER_GROUP": per_group, "WIDTH": width, "BLOCK": width, "BLOCK_M": block_m, "ROWS": _ROWS, "SINKS": sinks,
        }  # fmt: skip
        signature |= {"sinks": "*fp32"} if sinks else {}
        constants |= {} if sinks else {"sinks": None}
        name = f"attention merge of {width} channels, {per_group} heads, blocks of {block_m}{', sinks' * sinks}"
        cases.append(AotCase(name, merge_partials_kernel, signature, constants, 4, 3, False))
    for dtype in (torch.bfloat16, torch.float32):
        kind = f"*{element(dtype)}"
        signature = {"out": kind, "lse": "*fp32", "other": kind, "other_lse": "*fp32"}
        name = f"attention merge of two chunks, {element(dtype)}"
        cases.append(AotCase(name, merge_chunk_kernel, signature, {"WIDTH": 128, "BLOCK": 128}, 1, 3, False))
    return cases
