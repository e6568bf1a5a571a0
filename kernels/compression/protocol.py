"""Compressed entries of a KV cache: a gated sum of the projections of a window of tokens (DeepSeek V4).

A window is `rate` adjacent tokens of a request, from a multiple of `rate` on. When its last token is projected, its
entry is, for each channel and in float32:

    x = sum over tokens t of softmax over t (gate[t] + bias[t % rate]) * value[t]
    entry = x / rms(x) * norm, the last R channels rotated at the window's first position

With overlap a token has two series of values and gates: an entry sums the first series of the window before (of window
0: nothing) and the second series of its own window.

Projections of a step's tokens are the kernel's input; of tokens before they are in `Kept` rows.

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
    starts: Tensor  # [T] int64: first position of each token's request in the step; its tokens are adjacent
    rows: Tensor  # [T] int32: row in `table` of each token's request
    table: Tensor  # [max_rows, max_context] int32: slot of each position of a request, by which its row is kept
    slots: Tensor  # [T] int64: KV slot of each token, by which its entry is written


class Kept(NamedTuple):
    """Projections of tokens before a step. `each` rows are a ring: of a block of `block` slots, or of a request
    (`block` 0), after the first ring, which is for padding. A ring holds at least the tokens that an entry reads and
    those of a step's drafts, or all of a block."""

    rows: Tensor  # [N, 2 S W]
    each: int
    block: int

    def places(self, positions: Tensor, requests: Tensor, slots: Tensor) -> Tensor:
        """The rows [T] int64 of tokens; requests [T] by row of the slot table, slots [T] of `table`."""
        if self.block:
            return (slots // self.block * self.each + slots % self.block % self.each).long()
        return (requests + 1).long() * self.each + positions % self.each


class DecodedTokens(NamedTuple):
    """The tokens of a captured step: requests with equally many."""

    positions: Tensor  # [T] int64
    slots: Tensor  # [T] int64: of `table`
    requests: Tensor  # [R] int32: row of each request in both tables
    real: Tensor | None  # [T] int32: 0: padding
    table: Tensor  # [max_rows, max_context] int32: slots of windows, as in `CompressedTokens`
    full: Tensor  # [max_rows, max_context] int32: slots by which entries are read


class PlannedRows(NamedTuple):
    """Memory of the rows of a step's tokens."""

    rows: Tensor  # [T, K] int32
    counts: Tensor  # [T] int32: of the rows
    starts: Tensor | None  # [T]: as in `CompressedTokens`; None: not set
    of_token: Tensor | None  # [T]: its `rows`


class SelectedEntries(NamedTuple):
    """Memory of what a selection needs, [T] int32 each."""

    columns: Tensor  # rows of the window, after which the entries are
    counts: Tensor  # entries that the token selects
    visible: Tensor  # entries that it sees; 1 if it sees none
    top_k: int


class PlanRows(Protocol):
    """The rows of a captured step for the layers of one rate, in one launch; no host read."""

    def __call__(
        self, tokens: DecodedTokens, window: int, rate: int, first_entry: int, kept: Kept | None, out: PlannedRows,
        selected: SelectedEntries | None = None,
    ) -> Tensor | None:  # fmt: skip
        """Sets `out`: slots of the token's window, then its entries of `rate` tokens plus `first_entry`, then -1; with
        `selected` -1 instead of entries, which count. rate 0: there are no entries. Returns the tokens' rows of `kept`
        [T], 0 for padding."""


class PairedEntries(NamedTuple):
    """For each token what it completes. A token that completes no entry has zeros, slot 0 (of padding) and position
    0."""

    entries: Tensor  # [T, W]
    slots: Tensor  # [T] int64, rows of the entries
    positions: Tensor  # [T] int64, of their first tokens


class SumPairs(Protocol):
    """Entries of two tokens (DeepSeek V4.1), normed and not rotated, in one launch; no host read."""

    def __call__(
        self, projected: Tensor, kept: Kept, norm: tuple[Tensor, float], tokens: CompressedTokens,
        places: Tensor | None = None,
    ) -> PairedEntries:  # fmt: skip
        """projected [T, 2 W], values and then gates: the norm of value + softmax of both gates * difference of the
        values, in float32 and rounded before the norm.

        Args:
            norm: weight [W] float32, and eps.
            kept, places: as in `CompressionKernel.compress`; rings of requests.
        """


class CompressionKernel(Protocol):
    """A kernel of the family."""

    name: str

    @property
    def sum_pairs(self) -> SumPairs | None:
        """None: by other operations."""

    @property
    def plan_rows(self) -> PlanRows | None:
        """None: steps cannot be captured."""

    def compress(
        self, projected: Tensor, kept: Kept, weights: CompressorWeights, rotary: RotaryTable, tokens: CompressedTokens,
        out: Tensor, places: Tensor | None = None,
    ) -> None:  # fmt: skip
        """out[slots[t] // rate] = the entry of each window that a token t of the step completes.

        Other rows of `out` do not change. Positions before the last S windows are not read, so that `table` may name
        any slot there. An entry does not depend on the other tokens of the step.

        Args:
            rotary: of interleaved pairs.
            projected: [T, 2 S W] (rows may be strided): S W values, then S W gates, of the step's tokens.
            kept: those of tokens before that their windows contain, in the dtype of `projected`.
            out: [M, W] (rows may be strided), in the dtype of `projected`.
            places: [T] int64, rows of `kept` that become the tokens' projections; no entry of the step may read one of
                them. None: `kept` does not change.

        Raises:
            ValueError: widths or dtypes do not fit; rows of some kernels also refuse other pairs.
        """
