"""Rows of n-gram tables in the residual streams (DeepSeek V4.1): ids of n-grams, numbers of rows, and their sum with
the streams.

A projection makes of a token's rows a key for each stream and one value. To each stream the value is added, times

    sigmoid(sign(d) sqrt(|d|)),  d = D^-0.5 sum(stream * weights * key) / (rms(stream) rms(key))

Legend: T tokens, D hidden, n streams, N tokens of the longest n-gram, C rows of a token, W numbers of a row.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from moe_engine.kernels.ops.streams import StreamWeights, write_streams

LEAST = 1e-6
"""Least |d|."""
SCALED = 32
"""Numbers of a row in FP8 with a common scale."""
ID_BYTES = 4
OUTSIDE = -(2**31)
"""Instead of the id of an image token, which no n-gram has; as float32 the bits are those of -0."""
IMAGE = -1
"""The id of image tokens in `NgramTokens.ids`."""


class NgramTokens(NamedTuple):
    """The tokens of a step, those of a request adjacent and with ascending positions."""

    ids: Tensor  # [T] int64, of the model's vocabulary; IMAGE for image tokens
    positions: Tensor  # [T] int64
    slots: Tensor  # [T] int64
    requests: Tensor  # [T / each] int32: row of the slot table of each `each` tokens
    each: int
    table: Tensor  # [max_rows, max_context] int32


class PutIds(Protocol):
    """Caches the ids of a step's tokens, and sets those of their n-grams in the residual."""

    def __call__(self, tokens: NgramTokens, map: Tensor, pad: int, cache: Tensor, residual: Tensor, count: int) -> None:
        """cache[slots] = map[ids], int32; the last `count` int32 numbers of residual rows [T, *] = ids of the token and
        of those before it, `pad` before the first token or an image. Image tokens have OUTSIDE in both.

        Args:
            map: [V] int32. cache: [num_slots] int32, may be strided.
        """


class NgramValues(Protocol):
    """Numbers of rows."""

    def __call__(self, rows: Tensor, scales: Tensor | None, dtype: torch.dtype) -> Tensor:
        """rows [T, C, W] -> [T, C W] of this dtype. scales: [T, C, W / 32] uint8, exponents of powers of two."""


class AddNgrams(Protocol):
    """The sum of a token's rows with its streams."""

    def __call__(
        self, found: Tensor, ids: Tensor, x: Tensor | None, residual: Tensor, weights: Tensor, streams: StreamWeights
    ) -> None:
        """Adds x [T, D] to the streams as `write_streams` does, if it is given; then found [T, (n + 1) D], keys of the
        streams and the value, in place. Image tokens get no value. ids [T, N] int32 of the residual; weights [n, D]
        float32."""


@dataclass(frozen=True)
class Ngrams:
    """Kernels of a device; a launch each."""

    put_ids: PutIds
    values: NgramValues
    add: AddNgrams


def put_ids(tokens: NgramTokens, map: Tensor, pad: int, cache: Tensor, residual: Tensor, count: int) -> None:
    """`PutIds` in torch."""
    ids = map[tokens.ids.clamp(min=0)].masked_fill_(tokens.ids == IMAGE, OUTSIDE)
    cache.index_copy_(0, tokens.slots, ids)
    requests = tokens.requests.long()
    if tokens.each > 1:
        requests = requests.unsqueeze(1).expand(-1, tokens.each).flatten()
    places = tokens.positions.unsqueeze(1) - torch.arange(count, device=cache.device)  # [T, N]
    found = cache[tokens.table[requests.unsqueeze(1), places.clamp(min=0)].long()]
    outside = ((places < 0) | (found == OUTSIDE)).cumsum(1) > 0
    outside[:, 0] = False
    bits = found.masked_fill(outside, pad).contiguous().view(residual.dtype)
    residual[:, -bits.shape[1] :] = bits


def values(rows: Tensor, scales: Tensor | None, dtype: torch.dtype) -> Tensor:
    """`NgramValues` in torch."""
    if scales is not None:
        exponents = (scales.float() - 127).exp2()
        rows = (rows.float().unflatten(2, (-1, SCALED)) * exponents.unsqueeze(3)).flatten(2)
    return rows.flatten(1).to(dtype)


def add(
    found: Tensor, ids: Tensor, x: Tensor | None, residual: Tensor, weights: Tensor, streams: StreamWeights
) -> None:
    """`AddNgrams` in torch."""
    if x is not None:
        write_streams(x, residual, streams)
    n, hidden = weights.shape
    found = found.float()
    key, value = found[:, : n * hidden].unflatten(1, (n, hidden)), found[:, n * hidden :]
    before = residual[:, : n * hidden].float().unflatten(1, (n, hidden))
    gate = stream_gates(before, key, weights, streams.eps)
    gate = gate.masked_fill(ids[:, :1] == OUTSIDE, 0.0)
    residual[:, : n * hidden] = (before + gate.unsqueeze(2) * value.unsqueeze(1)).flatten(1)


def stream_gates(streams: Tensor, keys: Tensor, weights: Tensor, eps: float) -> Tensor:
    """streams, keys [T, n, D], weights [n, D], float32 -> what the value is multiplied by in each stream, [T, n]."""
    norms = (streams.square().mean(2) + eps).rsqrt() * (keys.square().mean(2) + eps).rsqrt()
    dot = (streams * weights * keys).sum(2) * norms * streams.shape[2] ** -0.5
    return torch.copysign(dot.abs().clamp_min(LEAST).sqrt(), dot).sigmoid()


IN_TORCH = Ngrams(put_ids, values, add)
