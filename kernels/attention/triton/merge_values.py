"""The end of MLA's absorbed form for few tokens in one launch: split results are merged by their log-sum-exp, and
multiplied by W_UV.

    out[t, h] = W_UV[h] (sum_i exp(lse_i - lse) result_i[t, h])

Two launches (merge, product) would each be about as short as a launch's own cost. A program reads its head's results
and its rows of the weight, so a weight is read once for each token, after the first from L2: more tokens than
`MAX_TOKENS` are quicker in two launches.

Legend: T query tokens, H heads, C kv_lora_rank, V v_head, M merges, B rows of a block.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton import next_power_of_2

from moe_engine.kernels.attention.schedule import RECORD, Schedule
from moe_engine.kernels.triton.aot import AotCase
from moe_engine.kernels.triton.dependent import dependent_jit, wait_for_inputs
from moe_engine.kernels.triton.launch import element

MAX_TOKENS = 8

_ROWS = 32
"""Values of a head that a program computes."""
_AT_ONCE = 128
"""Records that are searched at once."""

_RECORD = tl.constexpr(RECORD)


@triton.jit
def _parts_of(merges, num_merges, token, head, HEADS: tl.constexpr, BLOCK_M: tl.constexpr, AT_ONCE: tl.constexpr):
    """(first partial result, number of them, row in their block) of a row; number 0: it was not split."""
    first = tl.full((), 0, tl.int32)
    count, inner = first, first
    for begin in range(0, num_merges, AT_ONCE):
        index = begin + tl.arange(0, AT_ONCE)
        record, known = merges + index * _RECORD, index < num_merges
        row = (token - tl.load(record, known, 0)) * HEADS + head - tl.load(record + 2, known, 0)
        mine = known & (row >= 0) & (row < tl.minimum(tl.load(record + 1, known, 0), BLOCK_M))
        first += tl.sum(tl.where(mine, tl.load(record + 3, known, 0), 0), 0)
        count += tl.sum(tl.where(mine, tl.load(record + 4, known, 0), 0), 0)
        inner += tl.sum(tl.where(mine, row, 0), 0)
    return first, count, inner


@dependent_jit(do_not_specialize=["num_merges"])
def merge_values_kernel(
    mixed, partial, lse, merges, weight, out, num_merges,
    HEADS: tl.constexpr, LATENT: tl.constexpr, VALUE: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_C: tl.constexpr,
    ROWS: tl.constexpr, PARTS: tl.constexpr, AT_ONCE: tl.constexpr,
):  # fmt: skip
    """Grid (V / ROWS, HEADS, T). Rows that were not split are read from mixed [T, HEADS, LATENT], the others from
    partial [P, BLOCK_M, LATENT] with lse [P, BLOCK_M] (base 2), PARTS at once. weight [HEADS, VALUE, LATENT]."""
    wait_for_inputs()
    head, token = tl.program_id(1), tl.program_id(2)
    line = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, BLOCK_C)
    inside = column < LATENT
    matrix = weight + (head.to(tl.int64) * VALUE + line)[:, None] * LATENT + column[None, :]
    rows = tl.load(matrix, (line < VALUE)[:, None] & inside[None, :], 0.0)
    first, count, inner = _parts_of(merges, num_merges, token, head, HEADS, BLOCK_M, AT_ONCE)
    place = (token.to(tl.int64) * HEADS + head) * LATENT + column
    latent = tl.load(mixed + place, inside & (tl.zeros([BLOCK_C], tl.int32) == count), 0.0).to(tl.float32)
    if count > 0:
        lane = tl.arange(0, PARTS)
        best = tl.full([PARTS], float("-inf"), tl.float32)
        for begin in range(0, count, PARTS):
            at = (first + begin + lane) * BLOCK_M + inner
            best = tl.maximum(best, tl.load(lse + at, begin + lane < count, float("-inf")))
        highest = tl.max(best, 0)
        total = tl.zeros([PARTS], tl.float32)
        for begin in range(0, count, PARTS):
            live = begin + lane < count
            at = (first + begin + lane) * BLOCK_M + inner
            share = tl.exp2(tl.load(lse + at, live, float("-inf")) - highest)
            values = partial + at.to(tl.int64)[:, None] * LATENT + column[None, :]
            latent += tl.sum(share[:, None] * tl.load(values, live[:, None] & inside[None, :], 0.0), 0)
            total += share
        latent = latent / tl.sum(total, 0)
    latent = latent.to(mixed.dtype.element_ty).to(tl.float32)  # as a merge of its own stores it
    values = tl.sum(rows.to(tl.float32) * latent[None, :], 1)
    target = out + (token.to(tl.int64) * HEADS + head) * VALUE + line
    tl.store(target, values.to(out.dtype.element_ty), line < VALUE)


def merge_values(mixed: Tensor, partial: Tensor, lse: Tensor, schedule: Schedule, weight: Tensor) -> Tensor:
    """Results of the absorbed form before their merge, and W_UV [H, V, C] -> values [T, H, V].

    Args:
        mixed: [T, H, C], valid where rows were not split.
        partial: [P, 1, B, C] float32, each normalized.
        lse: [P, 1, B] float32, to base 2.

    Raises:
        ValueError: if the widths or dtypes differ.
    """
    tokens, heads, latent = mixed.shape
    if weight.shape[::2] != (heads, latent) or weight.dtype != mixed.dtype:
        raise ValueError(f"rows {list(mixed.shape)} {mixed.dtype} do not fit {list(weight.shape)} {weight.dtype}")
    value = weight.shape[1]
    out = mixed.new_empty(tokens, heads, value)
    if tokens:
        merge_values_kernel[(triton.cdiv(value, _ROWS), heads, tokens)](
            mixed, partial, lse, schedule.merges, weight.contiguous(), out, len(schedule.merges),
            **_constants(heads, latent, value, schedule.block_m), num_warps=4,
        )  # fmt: skip
    return out


def _constants(heads: int, latent: int, value: int, block_m: int) -> dict[str, object]:
    return {
        "HEADS": heads, "LATENT": latent, "VALUE": value, "BLOCK_M": block_m, "BLOCK_C": next_power_of_2(latent),
        "ROWS": _ROWS, "PARTS": 8, "AT_ONCE": _AT_ONCE,
    }  # fmt: skip


def aot_cases() -> list[AotCase]:
    """DeepSeek V3 and V2-Lite (V3's share of eight ranks), for a block of one or more query tokens."""
    cases = []
    for heads, block_m, dtype in ((128, 128, torch.bfloat16), (16, 16, torch.bfloat16), (16, 32, torch.bfloat16),
                                  (16, 16, torch.float32)):  # fmt: skip
        kind = f"*{element(dtype)}"
        signature = dict.fromkeys(("mixed", "weight", "out"), kind) | dict.fromkeys(("partial", "lse"), "*fp32")
        signature |= {"merges": "*i32", "num_merges": "i32"}
        name = f"attention merge and values, {heads} heads, blocks of {block_m}, {element(dtype)}"
        constants = _constants(heads, 512, 128, block_m)
        cases.append(AotCase(name, merge_values_kernel, signature, constants, 4, 3, False))
    return cases
