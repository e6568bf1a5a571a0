"""Logits to tokens. A row's token depends on its own logits, parameters, seed and position, never on its neighbours.

Semantics: divide by the temperature; keep the top_k best; of these, renormalised, the smallest set of best tokens whose
probability reaches top_p; of these, those with at least min_p times the probability of the best; draw by inverse CDF
with one uniform number. Equal logits: greedy takes the lowest token id.

A row with NaN or +inf among its logits, or with nothing left to choose, yields `INVALID_TOKEN`; other rows are not
affected.

Legend: S sampled rows, G rows of a group drawn alike, V vocabulary, K best tokens looked at.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from moe_engine.worker.device_stream import DeviceStream
from moe_engine.worker.sampling_state import LARGE_TOP_K, SMALL_TOP_K, Draw, SamplingState, uniforms

INVALID_TOKEN = -1
"""The scheduler ends a request that gets this with status 500."""

MAX_ELEMENTS = 1 << 24
"""Logits worked on at once where a draw needs several copies of them (64 MiB each)."""

_NUCLEUS_TRIES = (SMALL_TOP_K, LARGE_TOP_K, 16384)
"""Best tokens looked at for top_p before a sort; at V = 129280 each costs a CPU a third or less of the next."""

_BLOCK = 256


@dataclass(frozen=True)
class SampledRows:
    """The rows of a step that sample, in plan order. A step that samples the same rows gets the same `rows` object."""

    rows: np.ndarray  # [S] int64
    lengths: np.ndarray  # [S] int64: tokens before the one to be sampled, which is the position of that one
    rows_device: Tensor  # [S] int64


@dataclass(frozen=True)
class _Params:
    """Parameters of rows as columns on the device."""

    temperature: Tensor  # [G, 1] float32
    top_p: Tensor  # [G, 1] float32
    min_p: Tensor  # [G, 1] float32
    uniform: Tensor  # [G, 1] float32
    top_k: Tensor  # [G, 1] int64

    def take(self, index: Tensor | slice) -> _Params:
        columns = (self.temperature, self.top_p, self.min_p, self.uniform, self.top_k)
        return _Params(*(column[index] for column in columns))


class Sampler:
    """Draws tokens for the rows of a step."""

    def __init__(self, state: SamplingState, stream: DeviceStream) -> None:
        self._state = state
        self._stream = stream
        self._greedy_rows: np.ndarray | None = None
        self._greedy_version = -1

    def sample(self, logits: Tensor, sampled: SampledRows) -> Tensor:
        """logits [S, V] float32 (not changed) -> tokens [S] int64, `INVALID_TOKEN` where a row's logits are broken."""
        if self._all_greedy(sampled.rows):
            return _greedy(logits)
        draws = self._state.draw[sampled.rows]
        params = self._params(sampled)
        present = np.unique(draws).tolist()
        if len(present) == 1:
            return self._draw(present[0], logits, params)
        tokens = torch.empty(len(draws), dtype=torch.int64, device=logits.device)
        for draw in present:
            index = self._stream.from_list(np.nonzero(draws == draw)[0].tolist(), torch.int64)
            tokens[index] = self._draw(draw, logits[index], params.take(index))
        return tokens

    def _all_greedy(self, rows: np.ndarray) -> bool:
        if rows is self._greedy_rows and self._state.version == self._greedy_version:
            return True
        if self._state.draw[rows].any():
            return False
        self._greedy_rows, self._greedy_version = rows, self._state.version
        return True

    def _params(self, sampled: SampledRows) -> _Params:
        """One upload: top_k as int64, then four rows of float32."""
        state, rows, count = self._state, sampled.rows, len(sampled.rows)
        staging = self._stream.staging(3 * count)
        floats = staging[count:].view(torch.float32).view(4, count).numpy()
        staging[:count].numpy()[:] = state.top_k[rows]
        floats[0] = state.temperature[rows]
        floats[1] = state.top_p[rows]
        floats[2] = state.min_p[rows]
        floats[3] = uniforms(state.mixed_seed[rows], sampled.lengths)
        device = self._stream.upload(staging)
        columns = device[count:].view(torch.float32).view(4, count, 1)
        return _Params(columns[0], columns[1], columns[2], columns[3], device[:count].view(count, 1))

    def _draw(self, draw: int, logits: Tensor, params: _Params) -> Tensor:
        """logits [G, V] of rows that are all drawn the same way -> tokens [G]; a bounded number of rows at a time."""
        if draw == Draw.GREEDY:
            return _greedy(logits)
        at_once = max(1, MAX_ELEMENTS // logits.shape[-1])
        if len(logits) <= at_once:
            return self._draw_piece(draw, logits, params)
        pieces = [slice(begin, begin + at_once) for begin in range(0, len(logits), at_once)]
        return torch.cat([self._draw_piece(draw, logits[piece], params.take(piece)) for piece in pieces])

    def _draw_piece(self, draw: int, logits: Tensor, params: _Params) -> Tensor:
        if draw == Draw.WHOLE:
            return _draw_whole(logits, params)
        if draw == Draw.NUCLEUS:
            probs = (logits / params.temperature).softmax(-1)  # [G, V]
            return _draw_sorted(probs, params) if self._stream.asynchronous else _draw_nucleus(probs, params)
        return _draw_top(logits, params, SMALL_TOP_K if draw == Draw.SMALL_TOP else LARGE_TOP_K)


def first_argmax(logits: Tensor) -> tuple[Tensor, Tensor]:
    """Largest values [S] and the lowest indices [S] where they are; NaN counts as largest.

    Two levels, blocks and then the winning block: on a CPU torch's argmax is scalar code, its amax is not (measured
    at V = 129280: 0.20 ms and 0.01 ms a row).
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


def _greedy(logits: Tensor) -> Tensor:
    value, index = first_argmax(logits)
    return torch.where(value.isfinite(), index, INVALID_TOKEN)


def _draw_whole(logits: Tensor, params: _Params) -> Tensor:
    probs = (logits / params.temperature).softmax(-1)  # [G, V]
    probs.masked_fill_(probs < params.min_p * probs.amax(-1, keepdim=True), 0.0)
    return _invert(probs, params.uniform)


def _draw_top(logits: Tensor, params: _Params, most: int) -> Tensor:
    best, ids = logits.topk(min(most, logits.shape[-1]))  # [G, K], descending
    weights = ((best - best[:, :1]) / params.temperature).exp()
    weights.masked_fill_(torch.arange(weights.shape[-1], device=logits.device) >= params.top_k, 0.0)
    return _pick(weights, ids, weights.cumsum(-1)[:, -1:], params)


def _draw_nucleus(probs: Tensor, params: _Params) -> Tensor:
    """top_p over the whole vocabulary, probs [G, V]: tries the few best tokens, then more, and sorts as a last resort.

    Reads flags, so it is for devices where that stalls nothing. How far a row goes depends on that row only.
    """
    vocab = probs.shape[-1]
    tokens = torch.full((len(probs),), INVALID_TOKEN, dtype=torch.int64, device=probs.device)
    left = torch.arange(len(probs), device=probs.device)
    for most in _NUCLEUS_TRIES:
        if most >= vocab or not len(left):
            break
        best, ids = probs.topk(most)
        reached = best.cumsum(-1)[:, -1:] >= params.top_p
        fits = ((reached & (params.top_k >= vocab)) | best[:, :1].isnan())[:, 0]
        inside, outside = fits.nonzero()[:, 0], (~fits).nonzero()[:, 0]
        few = params.take(inside)
        tokens[left[inside]] = _pick(best[inside], ids[inside], torch.ones_like(few.top_p), few)
        probs, params, left = probs[outside], params.take(outside), left[outside]
    if len(left):
        tokens[left] = _draw_sorted(probs, params)
    return tokens


def _draw_sorted(probs: Tensor, params: _Params) -> Tensor:
    best, ids = probs.sort(dim=-1, descending=True, stable=True)
    best.masked_fill_(torch.arange(best.shape[-1], device=probs.device) >= params.top_k, 0.0)
    limited = params.top_k < probs.shape[-1]
    norm = torch.where(limited, best.cumsum(-1)[:, -1:], torch.ones_like(params.top_p))
    return _pick(best, ids, norm, params)


def _pick(weights: Tensor, ids: Tensor, norm: Tensor, params: _Params) -> Tensor:
    """Applies top_p and min_p to descending weights [G, K] whose sum before any cut is `norm` [G, 1], and draws."""
    before = weights.cumsum(-1) - weights
    cut = (before >= params.top_p * norm) | (weights < params.min_p * weights[:, :1])
    cut[:, 0] = False
    kept = weights.masked_fill(cut, 0.0)
    place = _invert(kept, params.uniform)
    token = ids.gather(1, place.clamp_min(0)[:, None])[:, 0]
    return torch.where(place < 0, INVALID_TOKEN, token)


def _invert(weights: Tensor, uniform: Tensor) -> Tensor:
    """The index where the running sum of weights [G, K] first passes uniform [G, 1] times their total."""
    cdf = weights.cumsum(-1)
    total = cdf[:, -1:].contiguous()
    target = torch.minimum(uniform * total, total.nextafter(torch.zeros_like(total)))
    index = torch.searchsorted(cdf, target, right=True)
    valid = total.isfinite() & (total > 0)
    return torch.where(valid, index.clamp_max(weights.shape[-1] - 1), INVALID_TOKEN)[:, 0]
