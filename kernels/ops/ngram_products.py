"""Products of n-gram rows in residual streams (Qwen3.8-Flash-Next): ids of n-grams after those that a state keeps,
gated values of the streams, and a convolution over their norms in earlier tokens, `longest` tokens apart.

The value of a token is multiplied by a gate of each stream (`ngram_rows.stream_gates`). To each stream is added that
product, and SiLU of the convolution over the normed products.

Legend: T tokens, D hidden, n streams, N tokens of the longest n-gram, K taps, L = (K - 1) N products of a state.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor
from torch.nn import functional

from moe_engine.kernels.delta.protocol import StateRuns
from moe_engine.kernels.ops.gated_streams import norm_streams
from moe_engine.kernels.ops.ngram_rows import stream_gates
from moe_engine.kernels.ops.state_tails import Tails


class NgramIds(Protocol):
    """Ids of n-grams, of tokens and of those that states keep."""

    def __call__(self, tokens: Tensor, kept: Tensor, runs: StateRuns, end: int) -> Tensor:
        """tokens [T] int64 -> the ids of each token and of those before it, [T, N] int32: from the end of a text on,
        and before the first token, `end`. kept [rows, N - 1, 1] float32: ids plus 1, 0 is no token; the ids of the last
        tokens are stored."""


class GateValues(Protocol):
    """The products of a step's tokens."""

    def __call__(
        self, streams: Tensor, found: Tensor, weights: Tensor, norm: Tensor, eps: float
    ) -> tuple[Tensor, Tensor]:
        """streams [T, n D], found [T, (n + 1) D], keys of the streams and the value -> value times gates, and its norm
        in each stream, [T, n D] of the streams' dtype. weights: of keys times queries; norm: both [n, D] float32."""


class MixProducts(Protocol):
    """The products in the streams."""

    def __call__(
        self, gated: Tensor, normed: Tensor, kept: Tensor, taps: Tensor, runs: StateRuns, residual: Tensor, apart: int
    ) -> None:
        """Adds gated [T, n D], then SiLU of the convolution, to the first n D channels of residual [T, *], in place.
        The convolution reads normed [T, n D] of tokens `apart` from each other, and kept [rows, L, n D] of tokens
        before the step; the last L are stored. taps [K, n D] float32."""


@dataclass(frozen=True)
class NgramProducts:
    """Kernels of a device."""

    ids: NgramIds
    gate: GateValues
    mix: MixProducts


def ids(tokens: Tensor, kept: Tensor, runs: StateRuns, end: int) -> Tensor:
    """`NgramIds` in torch."""
    tails = Tails((tokens + 1).float().unsqueeze(1), kept, runs)
    found, ended = [tokens], torch.zeros_like(tokens, dtype=torch.bool)
    for back in range(1, kept.shape[1] + 1):
        before = tails.before(back).squeeze(1).long() - 1
        ended = ended | (before < 0) | (before == end)
        found.append(before.masked_fill(ended, end))
    tails.store()
    return torch.stack(found, 1).int()


def gate(streams: Tensor, found: Tensor, weights: Tensor, norm: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """`GateValues` in torch."""
    shape, wide, found = weights.shape, weights.numel(), found.float()
    keys, value = found[:, :wide].unflatten(1, shape), found[:, wide:]
    gates = stream_gates(streams.float().unflatten(1, shape), keys, weights, eps)
    gated = (gates.unsqueeze(2) * value.unsqueeze(1)).flatten(1).to(streams.dtype)
    return gated, norm_streams(gated, norm, eps)


def mix(
    gated: Tensor, normed: Tensor, kept: Tensor, taps: Tensor, runs: StateRuns, residual: Tensor, apart: int
) -> None:
    """`MixProducts` in torch."""
    tails, mixed = Tails(normed, kept, runs), torch.zeros(gated.shape, device=gated.device)
    for tap, weights in enumerate(taps):
        mixed.addcmul_(tails.before((len(taps) - 1 - tap) * apart).float(), weights)
    tails.store()
    streams = residual[:, : gated.shape[1]]
    streams.copy_(streams + gated + functional.silu(mixed.to(gated.dtype)))


IN_TORCH = NgramProducts(ids, gate, mix)
"""For any device."""
