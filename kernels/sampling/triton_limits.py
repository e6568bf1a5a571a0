"""Sampling filters (top_k, top_p, min_p) as a limit logit, found without a sort, in two launches over the logits.

`best_kernel` finds the best logit and the best of every chunk. `limits_kernel` sums the weights and collects the
candidates, the logits >= the k-th best chunk (k distinct chunks reach it, so at least k logits do). The limit is then a
bisection over the 2^32 ordered bit patterns of float32, among the candidates or, if there are too many or too few, over
the whole row. Sums are float64, so that the order of addition does not decide a token.

Legend: S rows, V vocabulary, C chunks of a row, M max candidates, P max programs of a row.
"""

from __future__ import annotations

import triton
import triton.language as tl

from moe_engine.kernels.sampling.row_programs import arrives_last
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
    """(largest logit, its lowest index) of the tiles at `begin`, `begin + step` and on; infinity if one is NaN.
    Logits in 16 bits too."""
    best = float("-inf")
    index = 0
    for first in range(begin, VOCAB, step):
        column = first + tl.arange(0, BLOCK)
        x = tl.load(row + column, column < VOCAB, float("-inf")).to(tl.float32)
        best, index = _better(x, first, best, index)
    return best, index


@triton.jit
def _better(x, first, best, index):
    """`best_of_part` with a further tile x."""
    x = tl.where(x != x, _INFINITY, x)  # either makes the row invalid
    value, at = tl.max(x, 0, return_indices=True, return_indices_tie_break_left=True)
    index = tl.where(value > best, first + at, index)
    return tl.maximum(value, best), index


@triton.jit
def best_of_parts(best_of, index_of, programs, VOCAB: tl.constexpr, PARTS: tl.constexpr):
    """(largest logit, its lowest index) of a row from those of its parts, [PARTS]."""
    part = tl.arange(0, PARTS)
    each = tl.load(best_of + part, part < programs, float("-inf"))
    place = tl.load(index_of + part, part < programs, VOCAB)
    best = tl.max(each, 0)
    return best, tl.min(tl.where(each == best, place, VOCAB), 0)


@triton.jit
def tiles_of_part(part, programs, VOCAB: tl.constexpr, BLOCK: tl.constexpr):
    """(first token, end) of a part of whole tiles; parts follow each other, the last ones may be empty."""
    span = tl.cdiv(tl.cdiv(VOCAB, BLOCK), programs) * BLOCK
    return part * span, tl.minimum((part + 1) * span, VOCAB)


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
def _gather(row, begin, end, values, tokens, reach, best, temperature, min_p, BLOCK: tl.constexpr):
    """Writes the logits >= `reach` of a part, and their tokens, in order; returns (count, their weight, total weight,
    weight after min_p)."""
    number = 0
    weight = tl.zeros((1,), tl.float64)
    whole = tl.zeros((1,), tl.float64)
    left = tl.zeros((1,), tl.float64)
    for first in range(begin, end, BLOCK):
        column = first + tl.arange(0, BLOCK)
        x = tl.load(row + column, column < end, float("-inf"))
        each = weight_of(x, best, temperature)
        wide = each.to(tl.float64)
        whole += tl.sum(wide, 0)
        left += tl.sum(tl.where(each >= min_p, wide, 0.0), 0)
        taken = (x >= reach) & (column < end)
        weight += tl.sum(tl.where(taken, wide, 0.0), 0)
        place = number + tl.cumsum(taken.to(tl.int32), 0) - 1
        stored = taken & (place < BLOCK)
        tl.store(values + place, x, stored)
        tl.store(tokens + place, column, stored)
        number += tl.sum(taken.to(tl.int32), 0)
    return number, tl.sum(weight, 0), tl.sum(whole, 0), tl.sum(left, 0)


@triton.jit
def _close_gaps(values, tokens, number_of, number, programs, BLOCK: tl.constexpr):
    """Moves the candidates of all parts, `BLOCK` places each, to the front. A place of the first part is written only
    from itself, or if it is free."""
    column = tl.arange(0, BLOCK)
    source = column
    end = 0
    for part in range(programs - 1):
        end += tl.load(number_of + part)
        source = tl.where(column >= end, (part + 1) * BLOCK + column - end, source)
    live = column < number
    x = tl.load(values + source, live, 0.0)
    token = tl.load(tokens + source, live, 0)
    tl.store(values + column, x, live)
    tl.store(tokens + column, token, live)


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
def _place_of_tie(values, length, limit, nth, BLOCK: tl.constexpr):
    """The place of the nth of values [length], counted from 1, that equals the limit."""
    found = length
    seen = tl.zeros((), tl.int64)
    for begin in range(0, length, BLOCK):
        column = begin + tl.arange(0, BLOCK)
        equal = (tl.load(values + column, column < length, float("-inf")) == limit) & (column < length)
        rank = seen + tl.cumsum(equal.to(tl.int64), 0)
        found = tl.minimum(found, tl.min(tl.where(equal & (rank == nth), column, length), 0))
        seen += tl.sum(equal.to(tl.int64), 0)
    return found


@triton.jit
def _limits_of_row(
    row, values, tokens, number, weight, whole, best, temperature, top_p, min_p, top_k,
    VOCAB: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """(lowest kept logit, last kept token id among its ties, total kept weight)."""
    last = VOCAB
    enough = tl.where(top_k < VOCAB, number >= top_k, weight >= top_p.to(tl.float64) * whole)
    if enough & (number <= BLOCK):
        limit, ties, equal = _limit(values, number, top_k, top_p, whole, best, temperature, BLOCK, VOCAB)
        total = _kept_weight(values, number, limit, ties, best, temperature, min_p, BLOCK)
        if ties < equal:
            last = tl.load(tokens + _place_of_tie(values, number, limit, ties, BLOCK))
    else:
        limit, ties, equal = _limit(row, VOCAB, top_k, top_p, whole, best, temperature, BLOCK, VOCAB)
        total = _kept_weight(row, VOCAB, limit, ties, best, temperature, min_p, BLOCK)
        if ties < equal:
            last = _place_of_tie(row, VOCAB, limit, ties, BLOCK)
    return limit, last, total


@dependent_jit(do_not_specialize=["programs"], do_not_specialize_on_alignment=["temperature", "top_p", "top_k"])
def best_kernel(
    logits, temperature, top_p, top_k, chunk_best, best_of, index_of, tickets,
    best_out, limit_out, last_out, total_out, reach_out, stride, programs,
    VOCAB: tl.constexpr, CHUNK: tl.constexpr, MOST: tl.constexpr, PARTS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """best [S] float32; reach [S] float32, the lowest candidate; limit, last and total as in `limits_kernel`, final for
    rows that are greedy or invalid. Grid (S, programs). Scratch: chunk_best [S, BLOCK], best_of and index_of [S, P];
    tickets [S] count arrivals and are 0 before and after."""
    wait_for_inputs()
    index, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    row = logits + index * stride
    chunk_best += index * BLOCK
    best_of += index * PARTS
    index_of += index * PARTS
    best = float("-inf")
    at = 0
    for first in range(part * BLOCK, VOCAB, programs * BLOCK):
        column = first + tl.arange(0, BLOCK)
        x = tl.load(row + column, column < VOCAB, float("-inf"))
        tile = tl.max(tl.reshape(x, [BLOCK // CHUNK, CHUNK]), 1)
        tl.store(chunk_best + first // CHUNK + tl.arange(0, BLOCK // CHUNK), tile)
        best, at = _better(x, first, best, at)
    tl.store(best_of + part, best)
    tl.store(index_of + part, at)
    if arrives_last(tickets + index, programs):
        best, at = best_of_parts(best_of, index_of, programs, VOCAB, PARTS)
        valid = (best < _INFINITY) & (best > -_INFINITY)
        count = tl.load(top_k + index)
        reach = _INFINITY
        if valid & (tl.load(temperature + index) > 0.0) & ((count < VOCAB) | (tl.load(top_p + index) < 1.0)):
            reach = _kth_chunk(chunk_best, tl.minimum(count, MOST), tl.cdiv(VOCAB, CHUNK), BLOCK)
        tl.store(best_out + index, best)
        tl.store(limit_out + index, best)
        tl.store(last_out + index, at)
        tl.store(total_out + index, tl.where(valid, 1.0, float("nan")).to(tl.float64))
        tl.store(reach_out + index, reach)


@dependent_jit(
    do_not_specialize=["programs"], do_not_specialize_on_alignment=["temperature", "top_p", "min_p", "top_k"]
)
def limits_kernel(
    logits, temperature, top_p, min_p, top_k, values, tokens, number_of, weight_of_parts, tickets,
    best_in, reach_in, limit_out, last_out, total_out, stride, programs,
    VOCAB: tl.constexpr, PARTS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """limit [S] float32, last [S] int32, total [S] float64, NaN for an invalid row.

    Token v of a row is kept if its logit is above the limit, or equals it and v <= last. A greedy row (temperature 0)
    keeps only its best token. Grid (S, programs). Scratch: values and tokens [S, programs, BLOCK], number_of [S, P],
    weight_of_parts [S, 3, P]; tickets as in `best_kernel`.
    """
    wait_for_inputs()
    index, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    row = logits + index * stride
    heat = tl.load(temperature + index)
    total = tl.load(total_out + index)
    if (heat > 0.0) & (total == total):
        values += index * programs * BLOCK
        tokens += index * programs * BLOCK
        number_of += index * PARTS
        weight_of_parts += index * 3 * PARTS
        best, least = tl.load(best_in + index), tl.load(min_p + index)
        begin, end = tiles_of_part(part, programs, VOCAB, BLOCK)
        number, weight, whole, left = _gather(
            row, begin, end, values + part * BLOCK, tokens + part * BLOCK, tl.load(reach_in + index), best, heat, least,
            BLOCK,
        )  # fmt: skip
        tl.store(number_of + part, number)
        tl.store(weight_of_parts + part, weight)
        tl.store(weight_of_parts + PARTS + part, whole)
        tl.store(weight_of_parts + 2 * PARTS + part, left)
        if arrives_last(tickets + index, programs):
            each = tl.arange(0, PARTS)
            number = tl.sum(tl.load(number_of + each, each < programs, 0), 0)
            weight = tl.sum(tl.load(weight_of_parts + each, each < programs, 0.0), 0)
            whole = tl.sum(tl.load(weight_of_parts + PARTS + each, each < programs, 0.0), 0)
            total = tl.sum(tl.load(weight_of_parts + 2 * PARTS + each, each < programs, 0.0), 0)
            limit = -_INFINITY
            last = VOCAB
            count, share = tl.load(top_k + index), tl.load(top_p + index)
            if (count < VOCAB) | (share < 1.0):
                if (number <= BLOCK) & (programs > 1):
                    _close_gaps(values, tokens, number_of, number, programs, BLOCK)
                    tl.debug_barrier()  # other threads wrote the candidates
                limit, last, total = _limits_of_row(
                    row, values, tokens, number, weight, whole, best, heat, share, least, count, VOCAB, BLOCK
                )
            tl.store(limit_out + index, limit)
            tl.store(last_out + index, last)
            tl.store(total_out + index, total)
