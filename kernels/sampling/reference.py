"""Sampling in plain torch: correct on any device, the reference of all other rows.

Every filter ends in the same form: a limit logit from which on tokens are kept, and a number of kept ties. Rows of the
same sampling class run together, a bounded number at a time.

Legend: S sampled rows, G rows of one sampling class, V vocabulary, K best tokens considered, B blocks of tokens.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from moe_engine.kernels.sampling.protocol import INVALID_TOKEN, LARGE_TOP_K, SMALL_TOP_K, Draw, SamplingParameters
from moe_engine.kernels.sampling.scratch import CACHED_ELEMENTS, MAX_ELEMENTS

_TRIES: dict[Draw, tuple[int, ...]] = {
    Draw.WHOLE: (),
    Draw.SMALL_TOP: (SMALL_TOP_K + 1,),
    Draw.LARGE_TOP: (LARGE_TOP_K + 1,),
    Draw.NUCLEUS: (SMALL_TOP_K, LARGE_TOP_K, 16384),
}
"""Best tokens tried before the whole vocabulary; at V = 129280 each costs a CPU a third or less of the next."""

_BLOCK = 256


@dataclass(frozen=True)
class _Group:
    """Rows of one sampling class: their logits, parameters as columns, and the caller's extra column."""

    draw: Draw
    asynchronous: bool
    logits: Tensor  # [G, V]
    temperature: Tensor  # [G, 1]
    top_p: Tensor  # [G, 1]
    min_p: Tensor  # [G, 1]
    top_k: Tensor  # [G, 1]
    asked: Tensor  # [G, *]

    def take(self, index: Tensor | slice) -> _Group:
        """The rows of an ascending index."""
        if not isinstance(index, slice) and len(index) == len(self.logits):
            return self
        columns = (self.logits, self.temperature, self.top_p, self.min_p, self.top_k, self.asked)
        return _Group(self.draw, self.asynchronous, *(column[index] for column in columns))


class TorchSampling:
    """`SamplingKernel` for any device."""

    name = "torch"
    reads_half = False

    def greedy(self, logits: Tensor) -> Tensor:
        value, index = first_argmax(logits)
        return torch.where(value.isfinite(), index, INVALID_TOKEN)

    def sample(self, logits: Tensor, parameters: SamplingParameters, uniform: Tensor) -> Tensor:
        return _by_group(self._draw, logits, parameters, uniform[:, None])[:, 0]

    def probabilities(self, logits: Tensor, parameters: SamplingParameters, tokens: Tensor) -> Tensor:
        return _by_group(self._look_up, logits, parameters, tokens)

    def _draw(self, group: _Group) -> Tensor:
        if group.draw == Draw.GREEDY:
            return self.greedy(group.logits)[:, None]
        tokens = torch.empty_like(group.top_k)
        for rows, weights, ids in _choices(group):
            index = invert(weights, group.asked[rows])
            tokens[rows] = index if ids is None else torch.where(index < 0, index, ids.gather(1, index.clamp_min(0)))
        return tokens

    def _look_up(self, group: _Group) -> Tensor:
        if group.draw == Draw.GREEDY:
            return ((group.asked == self.greedy(group.logits)[:, None]) & (group.asked >= 0)).float()
        found = torch.empty_like(group.asked, dtype=torch.float32)
        for rows, weights, ids in _choices(group):
            asked = group.asked[rows]
            place, known = asked.clamp_min(0), asked >= 0
            if ids is not None:
                place = torch.searchsorted(ids, place).clamp_max(ids.shape[-1] - 1)
                known = ids.gather(1, place) == asked
            total = weights.sum(-1, keepdim=True, dtype=torch.float64)
            share = weights.gather(1, place) / total
            found[rows] = torch.where(known & (total > 0), share, 0.0).float()
        return found


def _by_group(
    work: Callable[[_Group], Tensor], logits: Tensor, parameters: SamplingParameters, asked: Tensor
) -> Tensor:
    """Results [G, *] of `work` for groups of rows of one sampling class, in row order."""
    p = parameters
    columns = (p.temperature[:, None], p.top_p[:, None], p.min_p[:, None], p.top_k[:, None])
    present = [Draw(draw) for draw in np.unique(p.draws).tolist()]
    at_once = max(1, (MAX_ELEMENTS if p.asynchronous else CACHED_ELEMENTS) // logits.shape[-1])
    results: list[Tensor] = []
    order: list[Tensor] = []
    for draw in present:
        group = _Group(draw, p.asynchronous, logits, *columns, asked)
        if len(present) > 1:
            index = torch.from_numpy(np.nonzero(p.draws == draw)[0]).to(logits.device, non_blocking=True)
            order.append(index)
            group = group.take(index)
        for begin in range(0, len(group.logits), at_once):
            results.append(work(group.take(slice(begin, begin + at_once))))
    done = torch.cat(results)
    return torch.empty_like(done).index_copy_(0, torch.cat(order), done) if order else done


def first_argmax(logits: Tensor) -> tuple[Tensor, Tensor]:
    """Largest values [S] and their lowest indices [S]; NaN sorts as largest.

    Two levels, blocks and then the winning block: on a CPU torch's argmax is scalar code, its amax is not (measured
    at V = 129280: 0.20 ms and 0.01 ms per row).
    """
    vocab = logits.shape[-1]
    whole = vocab - vocab % _BLOCK
    if vocab < 4 * _BLOCK or not logits.is_contiguous():
        index = logits.argmax(-1)
        return logits.gather(1, index[:, None])[:, 0], index
    blocks = logits[:, :whole].unflatten(1, (-1, _BLOCK))  # [S, B, 256]
    best = blocks.amax(-1)  # [S, B]
    block = best.argmax(-1, keepdim=True)  # [S, 1]
    columns = block * _BLOCK + torch.arange(_BLOCK, device=logits.device)  # [S, 256]
    inner = logits.gather(1, columns)
    index = columns.gather(1, inner.argmax(-1, keepdim=True))  # [S, 1]
    value = logits.gather(1, index)
    if whole < vocab:
        tail, tail_index = logits[:, whole:].max(-1, keepdim=True)
        later = (tail > value) | (tail.isnan() & ~value.isnan())
        index = torch.where(later, tail_index + whole, index)
        value = torch.where(later, tail, value)
    return value[:, 0], index[:, 0]


def _choices(group: _Group) -> Iterator[tuple[Tensor, Tensor, Tensor | None]]:
    """(rows of the group, weights, token ids): candidates of these rows, in id order; None means all ids.

    A weight is 1 for the best token and 0 outside the limits; NaN in all of a row with invalid logits. If reading
    flags causes no stall, few best tokens are tried first, then more. Each row's path depends on that row only.
    """
    vocab = group.logits.shape[-1]
    left = torch.arange(len(group.logits), device=group.logits.device)
    for most in () if group.asynchronous else _TRIES[group.draw]:
        if most >= vocab or not len(left):
            break
        rest = group.take(left)
        best, ids = rest.logits.topk(most)
        value, ties = _limit(best, rest)
        inside = (value > best[:, -1:])[:, 0]  # no token outside equals the limit
        rows = inside.nonzero()[:, 0]
        in_order, order = ids[rows].sort(-1)
        few = dataclasses.replace(rest.take(rows), logits=best[rows].gather(1, order))
        yield left[rows], _kept(few, value[rows], ties[rows]), in_order
        left = left[(~inside).nonzero()[:, 0]]
    if len(left):
        rest = group.take(left)
        if group.draw == Draw.WHOLE:
            weights = _weights(rest.logits, rest)
            yield left, weights.masked_fill_(weights < rest.min_p, 0.0), None
            return
        yield left, _kept(rest, *_limit(_best(rest), rest)), None


def _best(group: _Group) -> Tensor:
    """The best logits [G, K], descending: more than the limits can keep, or all."""
    most = _TRIES[group.draw][-1]
    if group.draw == Draw.NUCLEUS or most >= group.logits.shape[-1]:
        return group.logits.sort(-1, descending=True).values
    return group.logits.topk(most).values


def _weights(logits: Tensor, group: _Group) -> Tensor:
    """Weights of logits [G, *] that include the best of each row."""
    return (logits - logits.amax(-1, keepdim=True)).div_(group.temperature).exp_()


def _limit(best: Tensor, group: _Group) -> tuple[Tensor, Tensor]:
    """The lowest logit that top_k and top_p keep [G, 1], and the number of kept logits equal to it [G, 1].

    best [G, K] are the best logits, descending. If the limits keep more than these, it is the last of them.
    """
    few = _weights(best, group).double()
    allowed = torch.arange(best.shape[-1], device=best.device) < group.top_k
    few.masked_fill_(~allowed, 0.0)
    cdf = few.cumsum(-1)
    whole = cdf[:, -1:]
    if group.draw == Draw.NUCLEUS:
        every = _weights(group.logits, group).sum(-1, keepdim=True, dtype=torch.float64)
        every = torch.where(group.top_k < group.logits.shape[-1], torch.inf, every)  # not known yet
        whole = torch.where(group.top_k <= best.shape[-1], whole, every)
    count = ((cdf - few < group.top_p * whole) & allowed).sum(-1, keepdim=True).clamp_min(1)  # [G, 1]
    value = best.gather(1, count - 1)
    return value, count - (best > value).sum(-1, keepdim=True)


def _kept(group: _Group, value: Tensor, ties: Tensor) -> Tensor:
    """Weights [G, V], 0 for logits below `value`, for ties after the first `ties`, and below min_p."""
    weights = _weights(group.logits, group)
    weights.masked_fill_((group.logits < value) | (weights < group.min_p), 0.0)
    equal = group.logits == value
    rows = torch.arange(len(weights), device=weights.device)
    if not group.asynchronous:
        rows = (equal.sum(-1, keepdim=True) > ties)[:, 0].nonzero()[:, 0]
        if not len(rows):
            return weights
    crowd = equal[rows]
    weights[rows] = weights[rows].masked_fill(crowd & (crowd.cumsum(-1, dtype=torch.int32) > ties[rows]), 0.0)
    return weights


def invert(weights: Tensor, uniform: Tensor) -> Tensor:
    """The index [G, 1] where the running sum of weights [G, V] first passes uniform [G, 1] times their total.

    By blocks, then inside one block: a running sum over the vocabulary is scalar code on a CPU.
    """
    if weights.shape[-1] % _BLOCK:
        weights = F.pad(weights, (0, -weights.shape[-1] % _BLOCK))
    blocks = weights.unflatten(1, (-1, _BLOCK))  # [G, B, 256]
    cdf = blocks.sum(-1, dtype=torch.float64).cumsum(-1)  # [G, B]
    total = cdf[:, -1:]
    valid = total.isfinite() & (total > 0)
    target = torch.where(valid, uniform * total, 0.0)
    block = torch.searchsorted(cdf, target, right=True).clamp_max(cdf.shape[-1] - 1)  # [G, 1]
    inner = blocks.gather(1, block[..., None].expand(-1, 1, _BLOCK))[:, 0].cumsum(-1, dtype=torch.float64)  # [G, 256]
    before = torch.where(block > 0, cdf.gather(1, (block - 1).clamp_min(0)), 0.0)
    most = inner[:, -1:]
    inside = torch.minimum(target - before, most.nextafter(torch.zeros_like(most)))
    index = block * _BLOCK + torch.searchsorted(inner, inside, right=True)
    return torch.where(valid, index, INVALID_TOKEN)
