"""Triton helpers shared by the attention kernels: loads of padded rows, visibility masks, the running softmax.

Legend: M rows of a block (query tokens times heads), N context tokens of a tile, W columns.
"""

from __future__ import annotations

import triton
import triton.language as tl

from moe_engine.kernels.kv_format.formats import FP8_RANGE, PLAIN

_PLAIN, _RANGE = tl.constexpr(PLAIN), tl.constexpr(FP8_RANGE)

LOWEST = tl.constexpr(-1e30)
"""Initial running maximum: finite and below every score."""
LOG2_E = 1.4426950408889634
"""Factor of scores for softmax with base 2."""
_LOG2_E = tl.constexpr(LOG2_E)


@triton.jit
def columns(base, rows, first, WIDTH: tl.constexpr, BLOCK: tl.constexpr, PADDED: tl.constexpr):
    """[., BLOCK]: columns [first, first + BLOCK) of the rows at `base + rows`, zero from WIDTH on if PADDED."""
    column = first + tl.arange(0, BLOCK)
    place = base + rows[:, None] + column[None, :]
    if PADDED:
        return tl.load(place, mask=(column < WIDTH)[None, :], other=0.0)
    return tl.load(place)


@triton.jit
def stored_values(values, KV_FORMAT: tl.constexpr, DTYPE: tl.constexpr):
    """Values of a cache row in that format: FP8 bytes converted to DTYPE, not yet scaled; other formats unchanged."""
    if KV_FORMAT == _RANGE:
        values = values.to(tl.float8e5, bitcast=True).to(DTYPE)
    elif KV_FORMAT != _PLAIN:
        values = values.to(tl.float8e4nv, bitcast=True).to(DTYPE)
    return values


@triton.jit
def stored_columns(
    base, rows, first, WIDTH: tl.constexpr, BLOCK: tl.constexpr, KV_FORMAT: tl.constexpr, DTYPE: tl.constexpr
):
    """`columns` of cache rows in that format, converted by `stored_values`."""
    return stored_values(columns(base, rows, first, WIDTH, BLOCK, WIDTH != BLOCK), KV_FORMAT, DTYPE)


@triton.jit
def next_slots(table_row, position, stop):
    """Slots of context tokens `position`. Positions from `stop` on repeat the last token: every address then belongs to
    this request and holds finite values, and loads need no mask."""
    return tl.load(table_row + tl.minimum(position, stop - 1))


@triton.jit
def first_position(end, WINDOW: tl.constexpr):
    """The first position that a query token sees: its last visible one is `end` - 1. May be negative."""
    if WINDOW < 0:
        return (end - 1) // -WINDOW * -WINDOW
    else:
        return end - WINDOW


@triton.jit
def inside_window(position, lowest, WINDOW: tl.constexpr):
    """With a window, positions [N] before `lowest` become `lowest`: memory outside the window is not read."""
    if WINDOW != 0:
        position = tl.maximum(position, lowest)
    return position


@triton.jit
def seen_tokens(record, lens, query_len, BOUNDS: tl.constexpr):
    """(first, end) context token of a segment, and tokens visible to the request's first query token. BOUNDS: the
    record has upper bounds; `lens` are the context tokens of requests of `query_len` query tokens each."""
    begin, stop, first = tl.load(record + 5), tl.load(record + 6), tl.load(record + 4)
    if BOUNDS:
        length = tl.load(lens + tl.load(record))
        first, stop = length - query_len + 1, tl.minimum(stop, length)
    return begin, stop, first


@triton.jit
def moved_window(record, lens, lowest, BLOCK_N: tl.constexpr):
    """First and end context token of a segment that counts from the first tile of its block's window, which begins at
    `lowest`; `lens` as in `seen_tokens`."""
    shift = lowest // BLOCK_N * BLOCK_N
    stop = tl.minimum(tl.load(record + 6) + shift, tl.load(lens + tl.load(record)))
    return tl.load(record + 5) + shift, stop


@triton.jit
def hide(scores, position, limit, word, before, stop, TREE: tl.constexpr, ALIKE: tl.constexpr):
    """-inf where row m must not see context token `position` [N]: from `limit` [M] on, or with TREE where bit
    `position - before` of `word` [M] is not set; and from `stop` on. ALIKE: limit and word are scalars, common to all
    rows."""
    if TREE:
        query = position - before
        bit = tl.minimum(tl.maximum(query, 0), 63).to(tl.int64)
        if ALIKE:
            seen = (((word >> bit) & 1) != 0)[None, :]
        else:
            seen = ((word[:, None] >> bit[None, :]) & 1) != 0
        seen = (seen | (query < 0)[None, :]) & (position < stop)[None, :]
    else:
        bound = tl.minimum(limit, stop)
        if ALIKE:
            seen = (position < bound)[None, :]
        else:
            seen = position[None, :] < bound[:, None]
    return tl.where(seen, scores, float("-inf"))


@triton.jit
def bounded(scores, scale, CAP: tl.constexpr):
    """With a cap, CAP * tanh(score / CAP) of scores to base 2, which `scale` > 0 multiplies afterwards."""
    if CAP > 0:
        tanh = 1.0 - 2.0 / (1.0 + tl.exp2(scores * (2.0 * scale / CAP)))
        scores = tanh * (CAP * _LOG2_E / scale)
    return scores


@triton.jit
def softmax_step(scores, best, total, scale):
    """Updates the running softmax (base 2) with a tile of scores [M, N]; `scale` > 0 is multiplied in here.

    Returns the tile's weights [M, N], the new maximum and sum [M], and the rescaling factor [M] of the earlier tiles.
    """
    new = tl.maximum(best, tl.max(scores, 1) * scale)
    decay = tl.exp2(best - new)
    weights = tl.exp2(scores * scale - new[:, None])
    return weights, new, total * decay + tl.sum(weights, 1), decay


@triton.jit
def with_sinks(total, best, sinks, head, target, SINKS: tl.constexpr):
    """Sums of weights [M] with those of `sinks[head]`, logits without a value; the merge adds those of partial results
    (`target` is not negative)."""
    if SINKS:  # noqa: SIM102 - a constant, and a value of the device
        if target < 0:
            total += tl.exp2(tl.load(sinks + head) * _LOG2_E - best)
    return total


@triton.jit
def finish(best, total):
    """(factor, log-sum-exp to base 2) of each row; 0 and -inf for a row without visible keys."""
    some = total > 0.0
    return tl.where(some, 1.0 / total, 0.0), tl.where(some, best + tl.log2(total), float("-inf"))
