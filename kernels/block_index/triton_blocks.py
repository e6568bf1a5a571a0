"""The indexer of block-sparse attention in Triton: scores of blocks, and the slots of the best ones. The selection is
batch-invariant: a score depends on its token and its block's keys only.

A program of the scores keeps the queries of up to 64 / G neighboring tokens as rows of one matrix product, and takes
every n-th block of their request. Captured steps run the same launches: lengths are read from the device.

Legend: T query tokens, G KV heads, I channels of an index head, B blocks of a context, N records.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import triton.language as tl
from torch import Tensor
from triton import next_power_of_2

from moe_engine.kernels.attention.selected import Selected
from moe_engine.kernels.block_index.rule import MAX_SCORES, BlockRule
from moe_engine.kernels.block_index.selection import TokenPlaces
from moe_engine.kernels.queries import PagedQueries
from moe_engine.kernels.query_records import upload_records
from moe_engine.kernels.triton.aot import AotCase
from moe_engine.kernels.triton.dependent import dependent_jit, wait_for_inputs
from moe_engine.kernels.triton.launch import element, with_contiguous_rows

PRODUCT_ROWS = 64
"""Query rows of a matrix product: KV heads times tokens."""
KEYS = 64
"""Keys of a matrix product."""
PROGRAMS = 512
"""Programs of a launch, about four for each SM of an H200: fewer records have more programs each."""


def tokens_of_a_record(heads: int) -> int:
    """Tokens whose queries one program holds."""
    return max(1, PRODUCT_ROWS // next_power_of_2(heads))


@dependent_jit(
    do_not_specialize=["head_stride", "base", "out_stride"],
    do_not_specialize_on_alignment=["rows", "starts", "lens", "records"],
)
def block_scores_kernel(
    q, cache, out, rows, starts, lens, table, records, token_stride, head_stride, cache_stride, table_stride,
    out_stride, base,
    NUM_HEADS: tl.constexpr, HEADS: tl.constexpr, WIDTH: tl.constexpr, CHANNELS: tl.constexpr, TOKENS: tl.constexpr,
    KEYS: tl.constexpr, SIZE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """out[token - base, head, block] = the largest product with a visible key, for all blocks that the record's tokens
    see. records [N, 3]: request, first token, number of tokens. Grid (N, programs of a record)."""
    wait_for_inputs()
    record = records + tl.program_id(0) * 3
    request, first, count = tl.load(record), tl.load(record + 1), tl.load(record + 2)
    context = tl.load(lens + request)
    before = context - (tl.load(starts + request + 1) - first)  # positions before the record's first token
    index, channel, inside = tl.arange(0, TOKENS * HEADS), tl.arange(0, CHANNELS), tl.arange(0, KEYS)
    token, head = index // HEADS, index % HEADS
    whole = (token < count) & (head < NUM_HEADS)
    known = channel < WIDTH
    line = (first + token).to(tl.int64)
    place = q + line[:, None] * token_stride + (head * head_stride)[:, None] + channel[None, :]
    queries = tl.load(place, whole[:, None] & known[None, :], 0.0)
    table_row = table + tl.load(rows + request).to(tl.int64) * table_stride
    visible = before + token + 1
    seen = before + count  # of the last token
    line_out = out + ((first - base + token).to(tl.int64) * NUM_HEADS + head) * out_stride
    for block in range(tl.program_id(1), tl.cdiv(seen, SIZE), tl.num_programs(1)):
        best = tl.full((TOKENS * HEADS,), float("-inf"), tl.float32)
        for begin in range(0, SIZE, KEYS):
            position = block * SIZE + begin + inside
            live = (position < seen) & (begin + inside < SIZE)
            offset = tl.load(table_row + position, live, 0).to(tl.int64) * cache_stride
            keys = tl.load(cache + offset[:, None] + channel[None, :], live[:, None] & known[None, :], 0.0)
            products = tl.dot(queries, keys.trans(1, 0), input_precision=PRECISION)
            hidden = (position[None, :] >= visible[:, None]) | (begin + inside >= SIZE)[None, :]
            best = tl.maximum(best, tl.max(tl.where(hidden, float("-inf"), products), 1))
        tl.store(line_out + block, best, whole)


@dependent_jit(
    do_not_specialize=["score_stride", "out_stride", "base", "width"],
    do_not_specialize_on_alignment=["rows", "request_of", "after", "lens"],
)
def select_blocks_kernel(
    scores, out, rows, request_of, after, lens, table, table_stride, score_stride, out_stride, base, width,
    NUM_HEADS: tl.constexpr, BLOCKS: tl.constexpr, SIZE: tl.constexpr, LANES: tl.constexpr, TOP_K: tl.constexpr,
    LOCAL: tl.constexpr,
):  # fmt: skip
    """out[row] = the slots of the TOP_K best blocks of token `base` + row // NUM_HEADS, times NUM_HEADS plus the head,
    then -1 up to `width` blocks. Of equal scores the lower block is taken. One program for each row."""
    wait_for_inputs()
    row = tl.program_id(0).to(tl.int64)
    token, head = base + row // NUM_HEADS, (row % NUM_HEADS).to(tl.int32)
    request = tl.load(request_of + token)
    last = tl.load(lens + request) - 1 - tl.load(after + token)
    own = last // SIZE
    number = tl.arange(0, BLOCKS)
    seen = number <= own
    value = tl.load(scores + row * score_stride + number, seen, float("-inf"))
    value = tl.where(seen & (number > own - LOCAL), float("inf"), value)
    chosen = tl.zeros((BLOCKS,), tl.int32)
    for _ in range(TOP_K):
        best = tl.argmax(value, 0, tie_break_left=True)
        chosen = tl.where((number == best) & seen, 1, chosen)
        value = tl.where(number == best, float("-inf"), value)
    place, total = tl.cumsum(chosen, 0), tl.sum(chosen, 0)
    table_row = table + tl.load(rows + request).to(tl.int64) * table_stride
    inside = tl.arange(0, LANES)
    for index in range(width):
        block = tl.sum(tl.where((chosen > 0) & (place == index + 1), number, 0), 0)
        position = block * SIZE + inside
        live = (position <= tl.where(index < total, last, -1)) & (inside < SIZE)
        slot = tl.load(table_row + position, live, 0)
        found = tl.where(live, slot * NUM_HEADS + head, -1)
        tl.store(out + row * out_stride + index * SIZE + inside, found, inside < SIZE)


@dataclass(frozen=True)
class BlockPlan:
    """Host work of a group, once per step. `records` [N, 3] of the kernel for G heads, and the first token of each;
    `longest`: bound of the context lengths."""

    places: TokenPlaces
    longest: int
    records: dict[int, tuple[Tensor, np.ndarray]]

    def records_for(self, heads: int) -> tuple[Tensor, np.ndarray]:
        """Device records [N, 3], and the tokens before each of them [N + 1]."""
        if heads not in self.records:
            places, most = self.places, tokens_of_a_record(heads)
            self.records[heads] = upload_records(places.queries, most, places.request_of.device)
        return self.records[heads]


class TritonBlockIndex:
    """`BlockIndexKernel`.

    Args:
        max_scores: max scores of blocks at once.
    """

    name = "triton"

    def __init__(self, max_scores: int = MAX_SCORES) -> None:
        self._most = max_scores

    def plan(self, queries: PagedQueries) -> BlockPlan:
        return BlockPlan(TokenPlaces.of(queries), max(queries.context_lens, default=0), {})

    def plan_in_place(self, queries: PagedQueries, heads: int) -> BlockPlan:
        plan = BlockPlan(TokenPlaces.of(queries), queries.slot_table.shape[1], {})
        plan.records_for(heads)  # uploaded before the capture
        return plan

    def select(
        self, q: Tensor, cache: Tensor, queries: PagedQueries, rule: BlockRule, selected: Selected, plan: BlockPlan
    ) -> None:
        if not len(q):
            return
        heads = q.shape[1]
        q, (records, starts) = with_contiguous_rows(q), plan.records_for(heads)
        num_blocks = -(-plan.longest // rule.size)
        most = max(self._most // (heads * num_blocks), tokens_of_a_record(heads))
        begin = 0
        while begin < len(records):
            end = max(begin + 1, int(np.searchsorted(starts, starts[begin] + most, side="right")) - 1)
            first, stop = int(starts[begin]), int(starts[end])
            out = torch.empty((stop - first, heads, num_blocks), dtype=torch.float32, device=q.device)
            programs = max(1, min(num_blocks, PROGRAMS // (end - begin)))
            block_scores_kernel[(end - begin, programs)](
                q, cache, out, queries.rows, queries.query_starts, queries.context_lens_device, queries.slot_table,
                records[begin:end], q.stride(0), q.stride(1), cache.stride(0), queries.slot_table.stride(0),
                num_blocks, first, **_constants(heads, q.shape[2], rule.size, q.dtype), num_warps=4,
            )  # fmt: skip
            self._choose(out, first, rule, selected, plan.places)
            begin = end

    def _choose(self, scores: Tensor, first: int, rule: BlockRule, selected: Selected, places: TokenPlaces) -> None:
        """Sets the slots of the tokens with these scores [t, G, B], the first of which is token `first`."""
        count, heads, num_blocks = scores.shape
        out, queries = selected.slots[first * heads :], places.queries
        select_blocks_kernel[(count * heads,)](
            scores, out, queries.rows, places.request_of, places.after, queries.context_lens_device, queries.slot_table,
            queries.slot_table.stride(0), num_blocks, out.stride(0), first, out.shape[1] // rule.size,
            **_choice_constants(heads, num_blocks, rule), num_warps=_choice_warps(num_blocks),
        )  # fmt: skip


def _constants(heads: int, width: int, size: int, dtype: torch.dtype) -> dict[str, Any]:
    return {
        "NUM_HEADS": heads, "HEADS": next_power_of_2(heads), "WIDTH": width, "CHANNELS": next_power_of_2(width),
        "TOKENS": tokens_of_a_record(heads), "KEYS": max(16, min(KEYS, next_power_of_2(size))), "SIZE": size,
        "PRECISION": "ieee" if dtype == torch.float32 else "tf32",
    }  # fmt: skip


def _choice_constants(heads: int, num_blocks: int, rule: BlockRule) -> dict[str, Any]:
    return {
        "NUM_HEADS": heads, "BLOCKS": max(16, next_power_of_2(num_blocks)), "SIZE": rule.size,
        "LANES": next_power_of_2(rule.size), "TOP_K": rule.top_k, "LOCAL": rule.local,
    }  # fmt: skip


def _choice_warps(num_blocks: int) -> int:
    """More programs' registers for the scores of long contexts."""
    return 4 if num_blocks <= 2048 else 8


def aot_cases() -> list[AotCase]:
    """MiniMax-M3 on one rank, and with a KV head on each."""
    cases = []
    for heads in (4, 1):
        kind = element(torch.bfloat16)
        signature = {
            "q": f"*{kind}", "cache": f"*{kind}", "out": "*fp32", "rows": "*i32:1", "starts": "*i32:1",
            "lens": "*i32:1", "table": "*i32", "records": "*i32:1", "token_stride": "i32:16", "head_stride": "i32",
            "cache_stride": "i32:16", "table_stride": "i32:16", "out_stride": "i32", "base": "i32",
        }  # fmt: skip
        constants = _constants(heads, 128, 128, torch.bfloat16)
        name = f"block scores, {heads} heads, {kind}"
        cases.append(AotCase(name, block_scores_kernel, signature, constants, 4, 3, True))
    for context in (131072, 1048576):
        pointers = dict.fromkeys(("rows", "request_of", "after", "lens"), "*i32:1")
        strides = {"table_stride": "i32:16", **dict.fromkeys(("score_stride", "out_stride", "base", "width"), "i32")}
        signature = {"scores": "*fp32", "out": "*i32", "table": "*i32", **pointers, **strides}
        constants = _choice_constants(4, context // 128, BlockRule(128, 16))
        name = f"select blocks, 4 heads, {context} positions"
        warps = _choice_warps(context // 128)
        cases.append(AotCase(name, select_blocks_kernel, signature, constants, warps, 3, False))
    return cases
