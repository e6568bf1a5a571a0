"""What dispatchers are made of: tokens travel to the ranks of their experts, and weighted sums travel back.

    dispatch:  x, choices --encode--> Tokens --Exchange.deliver--> Tokens --Layout.expand--> ExpertBatch
    combine:   rows --Layout.reduce (router weights)--> partial sums --Exchange.collect--> [T, D]

An *exchange* moves tokens between ranks and knows no experts' kernels; a *layout* permutes rows on one rank and knows
no ranks: any exchange goes with any layout. Libraries that do both in one kernel implement `Dispatcher` directly.

Experts are *physical* experts, numbered over all ranks: expert e lives on rank e // num_local as its e % num_local.
Legend: T tokens of this rank, N tokens arrived here, D hidden, K experts per token, E physical experts, R ranks.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, Protocol, runtime_checkable

import torch
from torch import Tensor

from moe_engine.kernels.experts.protocol import ExpertBatch
from moe_engine.kernels.quantization.protocol import UNQUANTIZED, Activation, ActivationFormat

Phase = Literal["prefill", "decode"]
Mode = Literal["normal", "low_latency"]
NUM_LIVE = 2  # results of one dispatcher that may be alive: dispatched, not yet combined


@dataclass(frozen=True)
class DispatchShape:
    """The sizes of a dispatcher; equal on every rank.

    Attributes:
        num_experts: physical experts over all ranks, redundant ones included.
        num_ranks: R; divides num_experts.
        max_tokens: most tokens that a rank brings to one call.
        dtype: of the activations.
        fp8: tokens travel as float8_e4m3 with a float32 scale for each 128 channels; results travel in `dtype`.
    """

    num_experts: int
    num_ranks: int
    top_k: int
    hidden: int
    max_tokens: int
    dtype: torch.dtype
    fp8: bool = False

    def __post_init__(self) -> None:
        if self.num_experts % self.num_ranks:
            raise ValueError(f"{self.num_experts} experts cannot be shared evenly by {self.num_ranks} ranks")
        if self.fp8 and self.hidden % 128:
            raise ValueError(f"FP8 dispatch scales blocks of 128 channels; hidden is {self.hidden}")

    @property
    def num_local(self) -> int:
        return self.num_experts // self.num_ranks


@dataclass(frozen=True)
class Tokens:
    """Tokens on their way to experts.

    Attributes:
        data: [N, D] in the activation dtype, or float8_e4m3fn with `scales`.
        scales: float32 [N, D / 128], or None.
        ids: int32 [N, K], counted from the receiving side's first expert; -1: none, or not on the receiving side.
        weights: float32 [N, K] router weights.
    """

    data: Tensor
    scales: Tensor | None
    ids: Tensor
    weights: Tensor

    def first(self, count: int) -> Tokens:
        """The first of them, as views."""
        scales = None if self.scales is None else self.scales[:count]
        return Tokens(self.data[:count], scales, self.ids[:count], self.weights[:count])


class Exchange(Protocol):
    """Moves tokens to the ranks that hold their experts, and sums back. `slot` (0, 1) keeps two results apart."""

    def deliver(self, tokens: Tokens, slot: int) -> tuple[Tokens, Any]:
        """Collective. Returns the tokens that have an expert here (and maybe more, with ids -1), and the way back.

        Static exchanges return the same number of rows in every call and leave rows without expert unspecified.
        The result is valid until the slot's next use.
        """

    def collect(self, partial: Tensor, handle: Any) -> Tensor:
        """Collective. partial [N, D] in the order of arrival -> [T, D]: each token's sum over the ranks."""


class Layout(Protocol):
    """Permutes arrived tokens into what the experts' kernel takes, and sums its rows back."""

    def expand(self, tokens: Tokens, slot: int) -> tuple[ExpertBatch, Tensor]:
        """Returns the batch and, for each (token, choice), its row of the batch: int64 [N, K], -1 without one."""

    def reduce(self, rows: Tensor, positions: Tensor, weights: Tensor) -> Tensor:
        """rows as the kernel returns them -> [N, D]: sum_k weights[n, k] * rows[positions[n, k]], 0 without any."""


@runtime_checkable
class KeepsRows(Protocol):
    """A layout that can leave tokens in FP8."""

    def expand_rows(self, tokens: Tokens, slot: int) -> tuple[ExpertBatch, Tensor]:
        """As `Layout.expand`, of tokens with scales: a batch with scales."""


class Dispatcher(Protocol):
    """The face towards the routed experts. All ranks of the group call dispatch and combine alike, in one order."""

    @property
    def takes_rows(self) -> bool:
        """Whether `dispatch` takes tokens that were quantised before, because they travel so."""

    def dispatch(
        self, x: Activation, topk_ids: Tensor, topk_weights: Tensor, format: ActivationFormat = UNQUANTIZED
    ) -> tuple[ExpertBatch, Any]:
        """Sends every token to the experts it chose.

        Args:
            x: [T, D], numbers unless it `takes_rows`; T may differ between ranks and be 0.
            format: of the experts' input: tokens that travel in FP8 get such scales, and where it names rows
                the batch may come in FP8.
            topk_ids: [T, K] physical experts, each at most once a token; -1 is skipped (a dropped choice, a dead rank).
            topk_weights: float32 [T, K]; they travel with the tokens.

        Returns:
            The rows for this rank's experts, and the handle that `combine` consumes. At most `NUM_LIVE` handles are
            alive; the batch is valid until its handle is combined.

        Raises:
            ValueError: ids out of range or named twice (normal mode; low latency never waits to look).
            PeerLost: another rank is gone.
        """

    def combine(self, rows: Tensor, topk_weights: Tensor, handle: Any) -> Tensor:
        """Applies the router weights, here and nowhere else, and sums: [T, D].

        Args:
            rows: the experts' results in the layout of the batch; rows beyond its counts are never read.
            topk_weights: the ones given to dispatch. Most backends have sent them to the experts' ranks, which sum
                before they send back; some weigh here.
        """


@runtime_checkable
class WatchesPeers(Protocol):
    """A dispatcher whose device waits for peers while no host looks on: no call of a captured graph could raise."""

    def check_peers(self) -> None:
        """Raises `PeerLost` if the device has given up a peer, as far as it has said so; never waits."""
