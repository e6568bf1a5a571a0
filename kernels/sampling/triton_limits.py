"""Sampling filters (top_k, top_p, min_p) as a limit logit, found without a sort: one program per row.

Two passes over the logits: the best logit and the best of every chunk; then the weights' sum and the candidates, the
logits >= the k-th best chunk (k distinct chunks reach it, so at least k logits do). The limit is then a bisection over
the 2^32 ordered bit patterns of float32, among the candidates or, if there are too many or too few, over the whole row.
Sums are float64, so that the order of addition does not decide a token.

Legend: S rows, V vocabulary, C chunks of a row, M max candidates.
"""

from __future__ import annotations

import triton
import triton.language as tl

from moe_engine.kernels.triton.dependent import dependent_jit, wait_for_inputs

BLOCK = 4096
"""Elements of a tile; also the max chunks of a row and max candidates, which fit one tile."""

_LOWEST_KEY = tl.constexpr(-2139095041)  # of -inf
_INFINITY = tl.constexpr(float("inf"))


@triton.jit
def ordered_key(x):
    """int64 keys in float32 order; -0.0 and 0.0 are equal."""
    bits = tl.where(x == 0.0, 0.0, x).to(tl.int32, bitcast=True)
    return (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.int64)


@triton.jit
def from_key(key):
    """The float32 value of a key."""
    bits = key.to(tl.int32)
    return (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def weight_of(x, best, temperature):
    """1 for the best logit."""
    return tl.exp((x - best) / temperature)


@triton.jit
def best_of_part(row, begin, step, VOCAB: tl.constexpr, BLOCK: tl.constexpr):
    """(largest logit, its lowest index, whether no logit is NaN) of the tiles at `begin`, `begin + step` and on."""
    best = float("-inf")
    index = 0
    broken = 0
    for first in range(begin, VOCAB, step):
        column = first + tl.arange(0, BLOCK)
        x = tl.load(row + column, column < VOCAB, float("-inf"))
        best, index, broken = _better(x, first, best, index, broken)
    return best, index, broken == 0


@triton.jit
def _better(x, first, best, index, broken):
    """`best_of_part` with a further tile; a NaN is not a best logit."""
    broken = tl.maximum(broken, tl.max((x != x).to(tl.int32), 0))
    value, at = tl.max(tl.where(x != x, float("-inf"), x), 0, return_indices=True, return_indices_tie_break_left=True)
    index = tl.where(value > best, first + at, index)
    return tl.maximum(value, best), index, broken


@triton.jit
def best_of_row(row, chunk_best, VOCAB: tl.constexpr, CHUNK: tl.constexpr, BLOCK: tl.constexpr):
    """(largest logit, its lowest index, 1 if the row is valid); stores the best of every chunk."""
    best = float("-inf")
    index = 0
    broken = 0
    for begin in range(0, VOCAB, BLOCK):
        column = begin + tl.arange(0, BLOCK)
        x = tl.load(row + column, column < VOCAB, float("-inf"))
        tile = tl.max(tl.reshape(tl.where(x != x, float("-inf"), x), [BLOCK // CHUNK, CHUNK]), 1)
        tl.store(chunk_best + begin // CHUNK + tl.arange(0, BLOCK // CHUNK), tile)
        best, index, broken = _better(x, begin, best, index, broken)
    valid = (broken == 0) & (best < _INFINITY) & (best > -_INFINITY)
    return best, index, valid


@triton.jit
def _above(values, length, key, best, temperature, BLOCK: tl.constexpr):
    """(number of values [length] above `key`, number equal to it, weight of those above)."""
    count = 0
    equal = 0
    weight = tl.zeros((1,), tl.float64)
    for begin in range(0, length, BLOCK):
        column = begin + tl.arange(0, BLOCK)
        live = column < length
        x = tl.load(values + column, live, float("-inf"))
        own = ordered_key(x)
        count += tl.sum((live & (own > key)).to(tl.int32), 0)
        equal += tl.sum((live & (own == key)).to(tl.int32), 0)
        each = tl.where(live & (own > key), weight_of(x, best, temperature), 0.0)
        weight += tl.sum(each.to(tl.float64), 0)
    return count, equal, tl.sum(weight, 0)


@triton.jit
def _lowest_kept(values, length, top_k, bound, best, temperature, BLOCK: tl.constexpr):
    """The key of the worst logit with fewer than top_k logits, and less weight than bound, above it."""
    low = tl.full((), _LOWEST_KEY, tl.int64)
    high = ordered_key(best)
    while low < high:
        middle = (low + high) >> 1
        count, _equal, weight = _above(values, length, middle, best, temperature, BLOCK)
        kept = (count < top_k) & (weight < bound)
        high = tl.where(kept, middle, high)
        low = tl.where(kept, low, middle + 1)
    return high


@triton.jit
def _limit(values, length, top_k, top_p, whole, best, temperature, BLOCK: tl.constexpr, VOCAB: tl.constexpr):
    """(lowest kept logit, number of its ties kept, number of its ties) among values [length].

    whole is the total weight, used if top_k is unlimited.
    """
    key = tl.full((), _LOWEST_KEY, tl.int64)
    if top_k < VOCAB:
        key = _lowest_kept(values, length, top_k, _INFINITY, best, temperature, BLOCK)
        count, equal, weight = _above(values, length, key, best, temperature, BLOCK)
        whole = weight + (top_k - count).to(tl.float64) * weight_of(from_key(key), best, temperature).to(tl.float64)
    bound = top_p.to(tl.float64) * whole
    if top_p < 1.0:
        key = _lowest_kept(values, length, top_k, bound, best, temperature, BLOCK)
    count, equal, weight = _above(values, length, key, best, temperature, BLOCK)
    ties = tl.minimum(equal.to(tl.int64), top_k - count)
    own = weight_of(from_key(key), best, temperature).to(tl.float64)
    if (top_p < 1.0) & (own > 0.0):  # tie j is kept while the weight before it is below the bound
        ties = tl.minimum(ties, tl.ceil((bound - weight) / own).to(tl.int64))
    return from_key(key), tl.maximum(ties, 1), equal.to(tl.int64)


@triton.jit
def _kth_chunk(chunk_best, k, CHUNKS: tl.constexpr, BLOCK: tl.constexpr):
    """A lower bound of the k-th best logit: the k-th best chunk; -inf if there are fewer chunks."""
    column = tl.arange(0, BLOCK)
    key = ordered_key(tl.load(chunk_best + column, column < CHUNKS, float("-inf")))
    low = tl.full((), _LOWEST_KEY, tl.int64)
    high = tl.max(key, 0)
    while low < high:
        middle = (low + high + 1) >> 1
        enough = tl.sum((key >= middle).to(tl.int64), 0) >= k
        low = tl.where(enough, middle, low)
        high = tl.where(enough, high, middle - 1)
    return from_key(low)


@triton.jit
def _gather(row, candidates, reach, best, temperature, min_p, VOCAB: tl.constexpr, BLOCK: tl.constexpr):
    """Writes the logits >= `reach`, in order; returns (count, their weight, total weight, weight after min_p)."""
    number = 0
    weight = tl.zeros((1,), tl.float64)
    whole = tl.zeros((1,), tl.float64)
    left = tl.zeros((1,), tl.float64)
    for begin in range(0, VOCAB, BLOCK):
        column = begin + tl.arange(0, BLOCK)
        x = tl.load(row + column, column < VOCAB, float("-inf"))
        each = weight_of(x, best, temperature)
        wide = each.to(tl.float64)
        whole += tl.sum(wide, 0)
        left += tl.sum(tl.where(each >= min_p, wide, 0.0), 0)
        taken = (x >= reach) & (column < VOCAB)
        weight += tl.sum(tl.where(taken, wide, 0.0), 0)
        place = number + tl.cumsum(taken.to(tl.int32), 0) - 1
        tl.store(candidates + place, x, taken & (place < BLOCK))
        number += tl.sum(taken.to(tl.int32), 0)
    return number, tl.sum(weight, 0), tl.sum(whole, 0), tl.sum(left, 0)


@triton.jit
def _kept_weight(values, length, limit, ties, best, temperature, min_p, BLOCK: tl.constexpr):
    """The weight of values [length] above the limit, plus `ties` equal to it, after min_p."""
    total = tl.zeros((1,), tl.float64)
    for begin in range(0, length, BLOCK):
        column = begin + tl.arange(0, BLOCK)
        x = tl.load(values + column, column < length, float("-inf"))
        each = weight_of(x, best, temperature)
        total += tl.sum(tl.where((x > limit) & (each >= min_p), each, 0.0).to(tl.float64), 0)
    own = weight_of(limit, best, temperature)
    return tl.sum(total, 0) + tl.where(own >= min_p, own.to(tl.float64) * ties.to(tl.float64), 0.0)


@triton.jit
def _place_of_tie(row, limit, nth, VOCAB: tl.constexpr, BLOCK: tl.constexpr):
    """The token id of the nth logit, counted from 1, that equals the limit."""
    found = VOCAB
    seen = tl.zeros((), tl.int64)
    for begin in range(0, VOCAB, BLOCK):
        column = begin + tl.arange(0, BLOCK)
        equal = (tl.load(row + column, column < VOCAB, float("-inf")) == limit) & (column < VOCAB)
        rank = seen + tl.cumsum(equal.to(tl.int64), 0)
        found = tl.minimum(found, tl.min(tl.where(equal & (rank == nth), column, VOCAB), 0))
        seen += tl.sum(equal.to(tl.int64), 0)
    return found


@triton.jit
def _limits_of_row(
    row, candidates, chunk_best, best, temperature, top_p, min_p, top_k,
    VOCAB: tl.constexpr, CHUNK: tl.constexpr, MOST: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """(lowest kept logit, last kept token id among its ties, total kept weight)."""
    limited = (top_k < VOCAB) | (top_p < 1.0)
    tl.debug_barrier()  # other threads wrote the chunks
    reach = _INFINITY
    if limited:
        reach = _kth_chunk(chunk_best, tl.minimum(top_k, MOST), triton.cdiv(VOCAB, CHUNK), BLOCK)
    number, weight, whole, total = _gather(row, candidates, reach, best, temperature, min_p, VOCAB, BLOCK)
    tl.debug_barrier()
    limit = -_INFINITY
    last = VOCAB
    if limited:
        enough = tl.where(top_k < VOCAB, number >= top_k, weight >= top_p.to(tl.float64) * whole)
        if enough & (number <= BLOCK):
            limit, ties, equal = _limit(candidates, number, top_k, top_p, whole, best, temperature, BLOCK, VOCAB)
            total = _kept_weight(candidates, number, limit, ties, best, temperature, min_p, BLOCK)
        else:
            limit, ties, equal = _limit(row, VOCAB, top_k, top_p, whole, best, temperature, BLOCK, VOCAB)
            total = _kept_weight(row, VOCAB, limit, ties, best, temperature, min_p, BLOCK)
        if ties < equal:
            last = _place_of_tie(row, limit, ties, VOCAB, BLOCK)
    return limit, last, total


@dependent_jit(do_not_specialize_on_alignment=["temperature", "top_p", "min_p", "top_k"])
def limits_kernel(
    logits, temperature, top_p, min_p, top_k, chunk_best, candidates, best_out, limit_out, last_out, total_out, stride,
    VOCAB: tl.constexpr, CHUNK: tl.constexpr, MOST: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """best, limit [S] float32, last [S] int32, total [S] float64, NaN for an invalid row.

    Token v of a row is kept if its logit is above the limit, or equals it and v <= last. Scratch: chunk_best
    [S, BLOCK], candidates [S, BLOCK]. A greedy row (temperature 0) keeps only its best token.
    """
    wait_for_inputs()
    index = tl.program_id(0).to(tl.int64)
    row = logits + index * stride
    chunk_best += index * BLOCK
    candidates += index * BLOCK
    heat = tl.load(temperature + index)
    best, at, valid = best_of_row(row, chunk_best, VOCAB, CHUNK, BLOCK)
    limit = best
    last = at
    total = tl.full((), 1.0, tl.float64)
    if valid & (heat > 0.0):
        limit, last, total = _limits_of_row(
            row, candidates, chunk_best, best, heat, tl.load(top_p + index), tl.load(min_p + index),
            tl.load(top_k + index), VOCAB, CHUNK, MOST, BLOCK,
        )  # fmt: skip
    tl.store(best_out + index, best)
    tl.store(limit_out + index, limit)
    tl.store(last_out + index, last)
    tl.store(total_out + index, tl.where(valid, total, float("nan")))
