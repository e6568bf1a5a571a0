"""Compressed entries of a KV cache: a gated sum of the projections of a window of tokens (DeepSeek V4).

A window is `rate` adjacent tokens of a request, from a multiple of `rate` on. When its last token is projected, its
entry is, for each channel and in float32:

    x = sum over tokens t of softmax over t (gate[t] + bias[t % rate]) * value[t]
    entry = x / rms(x) * norm, the last R channels rotated at the window's first position

With overlap a token has two series of values and gates: an entry sums the first series of the window before (of window
0: nothing) and the second series of its own window.

Legend: T tokens, W channels of an entry, S series (2 with overlap, else 1), N rows of projections, R rotary width.
Source: DeepSeek-V4 technical report (CSA: overlap, HCA: none); `inference/model.py` of its release.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple, Protocol

from torch import Tensor

from moe_engine.kernels.ops.protocol import RotaryTable


@dataclass(frozen=True)
class CompressorWeights:
    """Float32."""

    bias: Tensor  # [rate, S W], of gates
    norm: Tensor  # [W]
    eps: float

    @property
    def rate(self) -> int:
        """Tokens of a window."""
        return self.bias.shape[0]

    @property
    def series(self) -> int:
        """S."""
        return self.bias.shape[1] // self.norm.shape[0]


class CompressedTokens(NamedTuple):
    """The tokens of a step: the same in all layers of a cache group."""

    positions: Tensor  # [T] int64; of padding: 0, which completes no window
    rows: Tensor  # [T] int32: row in `table` of each token's request
    table: Tensor  # [max_rows, max_context] int32: row in the projections of each position of a request
    slots: Tensor  # [T] int64: KV slot of each token


class CompressionKernel(Protocol):
    """A kernel of the family."""

    name: str

    def compress(
        self, projected: Tensor, weights: CompressorWeights, rotary: RotaryTable, tokens: CompressedTokens, out: Tensor
    ) -> None:
        """out[slots[t] // rate] = the entry of each window that a token t of the step completes.

        Other rows of `out` do not change. Positions before the last S windows are not read, so that `table` may name
        any row there. An entry does not depend on the other tokens of the step.

        Args:
            rotary: of interleaved pairs.
            projected: [N, 2 S W] (rows may be strided): S W values, then S W gates, of the step's tokens and of those
                before that their windows contain.
            out: [M, W] (rows may be strided), in the dtype of `projected`.

        Raises:
            ValueError: widths or dtypes do not fit; rows of some kernels also refuse other pairs.
        """
