"""Selection of the best scores in Triton: an exact radix selection, one program a query token.

Scores become unsigned numbers of the same order. Three passes over them, with 11, 11 and 10 bits a digit, find the
lowest selected number by histograms; the last pass writes the selected slots by ascending position, and of equal scores
the lower positions. The result is that of a stable sort, whatever the number of scores.

Legend: T query tokens, K selected tokens, S context tokens.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from moe_engine.kernels.indexer.protocol import BlockChoice
from moe_engine.kernels.queries import PagedQueries
from moe_engine.kernels.triton.aot import AotCase
from moe_engine.kernels.triton.dependent import dependent_jit, wait_for_inputs

BLOCK = 2048
"""Scores of a loop iteration."""


@triton.jit
def _ordered(scores):
    """float32 -> uint32 in the same order; both zeros become one."""
    scores = tl.where(scores == 0.0, 0.0, scores)
    bits = scores.to(tl.uint32, bitcast=True)
    return tl.where((bits >> 31) != 0, ~bits, bits | 0x80000000)


@triton.jit
def _digit(
    line, count, known, wanted, SHIFT: tl.constexpr, BITS: tl.constexpr, ABOVE: tl.constexpr, BLOCK: tl.constexpr
):
    """The next digit of the `wanted`-th highest number among those that begin with the bits `known`, and the number of
    those with higher digits. ABOVE: bits that are known."""
    bins = tl.arange(0, 1 << BITS)
    counts = tl.zeros((1 << BITS,), tl.int32)
    for begin in range(0, count, BLOCK):
        position = begin + tl.arange(0, BLOCK)
        live = position < count
        numbers = _ordered(tl.load(line + position, live, 0.0))
        if ABOVE > 0:
            live &= (numbers >> (32 - ABOVE)) == known
        digits = ((numbers >> SHIFT) & ((1 << BITS) - 1)).to(tl.int32)
        counts += tl.histogram(digits, 1 << BITS, live)
    from_here = tl.sum(counts) - tl.cumsum(counts, 0) + counts  # numbers with this digit or a higher one
    digit = tl.sum((from_here >= wanted).to(tl.int32)) - 1
    higher = tl.sum(tl.where(bins > digit, counts, 0))
    return digit, higher


@dependent_jit(
    do_not_specialize=["first", "scores_stride", "width", "added"],
    do_not_specialize_on_alignment=["rows", "starts", "lens", "request_of", "columns", "counts", "scores_stride"],
)
def select_kernel(
    scores, out, request_of, rows, starts, lens, table, columns, counts, first, scores_stride, table_stride, out_stride,
    width, added, TOP_K: tl.constexpr, BLOCK: tl.constexpr, RATE: tl.constexpr, PLACED: tl.constexpr,
):  # fmt: skip
    """scores [tokens, S] of the tokens from `first` on -> `width` columns of out[token], ascending positions' slots,
    then -1. RATE: `PagedQueries.rate`. PLACED: from columns[token] on, slots plus `added`; none if counts[token] is
    0."""
    wait_for_inputs()
    row = tl.program_id(0)
    token = first + row
    request = tl.load(request_of + token)
    count = tl.load(lens + request) - tl.load(starts + request + 1) + token + 1  # visible positions
    line = scores + row.to(tl.int64) * scores_stride
    target = out + token.to(tl.int64) * out_stride
    if PLACED:
        target += tl.load(columns + token)
        count = tl.where(tl.load(counts + token) > 0, count, 0)
    table_row = table + tl.load(rows + request).to(tl.int64) * table_stride
    wanted = tl.minimum(TOP_K, count)
    bound = tl.full((), 0, tl.uint32)
    ties = wanted  # selected numbers that equal the bound
    if count > TOP_K:
        high, above = _digit(line, count, bound, ties, 21, 11, 0, BLOCK)
        ties -= above
        bound = high.to(tl.uint32)
        middle, above = _digit(line, count, bound, ties, 10, 11, 11, BLOCK)
        ties -= above
        bound = (bound << 11) | middle.to(tl.uint32)
        low, above = _digit(line, count, bound, ties, 0, 10, 22, BLOCK)
        ties -= above
        bound = (bound << 10) | low.to(tl.uint32)
    written, equal = 0, 0
    for begin in range(0, count, BLOCK):
        position = begin + tl.arange(0, BLOCK)
        live = position < count
        chosen = live
        if count > TOP_K:
            numbers = _ordered(tl.load(line + position, live, 0.0))
            same = live & (numbers == bound)
            order = equal + tl.cumsum(same.to(tl.int32), 0)
            chosen = (live & (numbers > bound)) | (same & (order <= ties))
            equal += tl.sum(same.to(tl.int32))
        place = written + tl.cumsum(chosen.to(tl.int32), 0) - 1
        slots = tl.load(table_row + position * RATE, chosen, 0) // RATE
        if PLACED:
            slots += added
        tl.store(target + place, slots, chosen)
        written += tl.sum(chosen.to(tl.int32))
    for begin in range(0, width, BLOCK):
        place = begin + tl.arange(0, BLOCK)
        tl.store(target + place, tl.full((BLOCK,), -1, tl.int32), (place >= wanted) & (place < width))


@dataclass(frozen=True)
class Selection:
    """Where the slots of `top_k` selected positions go: to rows [T, *] int32; with `columns` as in `SelectInto`."""

    rows: Tensor
    top_k: int
    columns: Tensor | None = None
    counts: Tensor | None = None
    added: int = 0


def select(scores: Tensor, queries: PagedQueries, request_of: Tensor, first: int, target: Selection) -> None:
    """Sets the rows of the tokens from `first` on, one for each row of scores [rows, S] float32.

    Args:
        request_of: [T] int32, request of each token.
    """
    if not len(scores):
        return
    out, placed = target.rows, target.columns is not None
    select_kernel[(len(scores),)](
        scores, out, request_of, queries.rows, queries.query_starts, queries.context_lens_device, queries.slot_table,
        target.columns, target.counts, first, scores.stride(0), queries.slot_table.stride(0), out.stride(0),
        target.top_k if placed else out.shape[1], target.added, target.top_k, BLOCK, queries.rate, placed,
        num_warps=8,
    )  # fmt: skip


@dependent_jit(
    do_not_specialize=["first", "scores_stride", "out_stride"], do_not_specialize_on_alignment=["lens", "counts"]
)
def block_maxima_kernel(
    scores, out, lens, counts, first, scores_stride, out_stride, SIZE: tl.constexpr, BLOCKS: tl.constexpr
):
    """out[row] = the highest of SIZE adjacent scores [rows, S] of the tokens from `first` on, infinity for the last
    block of a token; counts[first + row] = its blocks. lens: positions that each token sees. Grid (rows, parts)."""
    wait_for_inputs()
    row, block = tl.program_id(0), tl.program_id(1) * BLOCKS + tl.arange(0, BLOCKS)
    seen = tl.load(lens + first + row)
    count = tl.cdiv(seen, SIZE)
    if tl.program_id(1) == 0:
        tl.store(counts + first + row, count)
    if tl.program_id(1) * BLOCKS < count:
        position = block[:, None] * SIZE + tl.arange(0, SIZE)[None, :]
        line = scores + row.to(tl.int64) * scores_stride
        most = tl.max(tl.load(line + position, position < seen, float("-inf")), 1)
        most = tl.where(block == count - 1, float("inf"), most)
        tl.store(out + row.to(tl.int64) * out_stride + block, most, block < count)


def select_blocks(scores: Tensor, queries: PagedQueries, request_of: Tensor, first: int, blocks: BlockChoice) -> None:
    """Sets `blocks.found` of the tokens from `first` on, one for each row of scores [rows, S] float32.

    Raises:
        ValueError: blocks have another size than a power of two.
    """
    if not len(scores):
        return
    out, size, lens = blocks.found, blocks.size, queries.context_lens_device
    if size & (size - 1):
        raise ValueError(f"blocks of {size} positions: the triton indexer needs a power of two")
    most, each = -(-scores.shape[1] // size), max(1, BLOCK // size)
    maxima = torch.empty((len(scores), most), dtype=torch.float32, device=scores.device)
    counts, numbers = torch.empty_like(lens), torch.arange(most, dtype=torch.int32, device=scores.device)
    block_maxima_kernel[(len(scores), -(-most // each))](
        scores, maxima, lens, counts, first, scores.stride(0), maxima.stride(0), SIZE=size, BLOCKS=each, num_warps=8
    )
    select_kernel[(len(scores),)](  # the blocks of a token are a context whose slots are their numbers
        maxima, out, request_of, queries.rows, queries.query_starts, counts, numbers, None, None, first,
        maxima.stride(0), 0, out.stride(0), out.shape[1], 0, out.shape[1], BLOCK, 1, False, num_warps=8,
    )  # fmt: skip


def aot_cases() -> list[AotCase]:
    """DeepSeek V3.2; V4-Flash, whose slots go after those of a window; V4.1's blocks of entries."""
    cases = []
    for label, top_k, rate, placed in (("", 2048, 1, False), (" of entries", 512, 4, True)):
        signature = {
            "scores": "*fp32", "out": "*i32", "request_of": "*i32:1", "rows": "*i32:1", "starts": "*i32:1",
            "lens": "*i32:1", "table": "*i32", "first": "i32", "scores_stride": "i32", "table_stride": "i32:16",
            "out_stride": "i32:16", "width": "i32", "added": "i32",
        }  # fmt: skip
        constants: dict[str, object] = {"TOP_K": top_k, "BLOCK": BLOCK, "RATE": rate, "PLACED": placed}
        if placed:
            signature |= dict.fromkeys(("columns", "counts"), "*i32:1")
        else:
            constants |= dict.fromkeys(("columns", "counts"))
        cases.append(AotCase(f"index selection{label}", select_kernel, signature, constants, 8, 3, False))
    signature = {"scores": "*fp32", "out": "*fp32", "lens": "*i32:1", "counts": "*i32:1"}
    signature |= dict.fromkeys(("first", "scores_stride", "out_stride"), "i32")
    sizes = {"SIZE": 8, "BLOCKS": BLOCK // 8}
    return [*cases, AotCase("index maxima of blocks", block_maxima_kernel, signature, sizes, 8, 3, False)]
