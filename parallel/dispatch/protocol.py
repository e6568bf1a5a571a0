"""Dispatcher: DeepEP-style dispatch and combine. Tokens are sent to their experts' ranks, weighted sums are returned.

    dispatch:  x, choices --encode--> Tokens --Exchange.deliver--> Tokens --Layout.expand--> ExpertBatch
    combine:   rows --Layout.reduce (router weights)--> partial sums --Exchange.collect--> [T, D]

An *exchange* moves tokens between ranks and is independent of expert kernels; a *layout* permutes rows on one rank and
is independent of ranks: any exchange works with any layout. Libraries with both in one kernel implement `Dispatcher`.

Experts are *physical* experts, numbered over all ranks: expert e is on rank e // num_local as its e % num_local.
Legend: T tokens of this rank, N received tokens, D hidden, K experts per token, E physical experts, R ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import torch
from torch import Tensor

from moe_engine.kernels.experts.protocol import ExpertBatch
from moe_engine.kernels.quantization.protocol import UNQUANTIZED, Activation, ActivationFormat

Phase = Literal["prefill", "decode"]
Mode = Literal["normal", "low_latency"]
NUM_LIVE = 2  # max pending results of a dispatcher: dispatched, not yet combined


@dataclass(frozen=True)
class DispatchShape:
    """The sizes of a dispatcher; equal on every rank.

    Attributes:
        num_experts: physical experts over all ranks, redundant ones included.
        num_ranks: R; divides num_experts.
        max_tokens: max tokens of a rank per call.
        dtype: of the activations.
        width: channels of an expert; 0: not known.
        fp8: tokens are sent as float8_e4m3 with a float32 scale per 128 channels; results are sent in `dtype`.
    """

    num_experts: int
    num_ranks: int
    top_k: int
    hidden: int
    max_tokens: int
    dtype: torch.dtype
    fp8: bool = False
    width: int = 0

    def __post_init__(self) -> None:
        if self.num_experts % self.num_ranks:
            raise ValueError(f"{self.num_experts} experts cannot be divided evenly among {self.num_ranks} ranks")
        if self.fp8 and self.hidden % 128:
            raise ValueError(f"FP8 dispatch scales blocks of 128 channels; hidden is {self.hidden}")

    @property
    def num_local(self) -> int:
        return self.num_experts // self.num_ranks

    def mean_rows(self, num_tokens: int) -> int:
        """Expected rows of an expert if every rank dispatches as many tokens as this one; 0: unknown."""
        return -(-num_tokens * self.num_ranks * self.top_k // self.num_experts)


@dataclass(frozen=True)
class Tokens:
    """Dispatched tokens.

    Attributes:
        data: [N, D] in the activation dtype, or float8_e4m3fn with `scales`.
        scales: float32 [N, D / 128], or None.
        ids: int32 [N, K], counted from the receiving side's first expert; outside its experts: none there.
        weights: float32 [N, K] router weights.
        counts: tokens of each local expert, if the host has read them; else None.
    """

    data: Tensor
    scales: Tensor | None
    ids: Tensor
    weights: Tensor
    counts: Sequence[int] | None = None

    def first(self, count: int) -> Tokens:
        """The first `count` tokens, as views."""
        scales = None if self.scales is None else self.scales[:count]
        return Tokens(self.data[:count], scales, self.ids[:count], self.weights[:count])

    def with_ids(self, ids: Tensor) -> Tokens:
        return Tokens(self.data, self.scales, ids, self.weights)


class Exchange(Protocol):
    """Sends tokens to their experts' ranks, and sums back. `slot` (0, 1) separates two pending results."""

    def deliver(self, tokens: Tokens, slot: int) -> tuple[Tokens, Any]:
        """Collective. Returns the tokens with a local expert (and maybe others), and the combine handle.

        Static exchanges return the same number of rows in every call and leave rows without expert unspecified.
        The result is valid until the slot's next use.
        """

    def collect(self, partial: Tensor, handle: Any) -> Tensor:
        """Collective. partial [N, D] in the order of arrival -> [T, D]: each token's sum over the ranks."""


class Layout(Protocol):
    """Permutes received tokens into an `ExpertBatch`, and sums its rows back (unpermute)."""

    def expand(self, tokens: Tokens, format: ActivationFormat, slot: int) -> tuple[ExpertBatch, Tensor]:
        """Returns the batch in the experts' `format`, with scales if it has rows and the tokens have scales, and for
        each (token, choice) its row of the batch: int32 [N, K], -1 if none."""

    def reduce(self, rows: Tensor, positions: Tensor, weights: Tensor) -> Tensor:
        """rows from the kernel -> [N, D]: sum_k weights[n, k] * rows[positions[n, k]], 0 without any."""


class NormedSum(Protocol):
    """The second half of a combine, whose sum goes into a residual stream."""

    def __call__(
        self, format: ActivationFormat, other: Tensor | None, residual: Tensor, weight: Tensor, eps: float
    ) -> Activation:
        """residual [T, D] += the sum (+ other), in place, contiguous; its RMSNorm in `format`. Sums are rounded as by
        `OpsCapabilities.add_pair_rms_norm`."""


class Dispatcher(Protocol):
    """The interface to the routed experts, and base class of its implementations. All ranks of the group make the same
    calls in the same order."""

    takes_rows: bool
    """True if `dispatch` accepts quantized tokens, since it sends FP8."""

    reads_int64: bool = False
    """True if `dispatch` copies ids that are not int64."""

    norms_sums: bool = False
    """True if `start_combine_norm` is supported."""

    def dispatch(
        self, x: Activation, topk_ids: Tensor, topk_weights: Tensor, format: ActivationFormat = UNQUANTIZED
    ) -> tuple[ExpertBatch, Any]:
        """Sends every token to its chosen experts.

        Args:
            x: [T, D], unquantized unless it `takes_rows`; T may differ between ranks and be 0.
            format: activation format of the experts: sets the scales of tokens sent in FP8, and if it has rows the
                batch may stay FP8.
            topk_ids: [T, K] physical experts, each at most once per token; -1 is skipped (dropped choice, lost rank).
            topk_weights: float32 [T, K]; sent with the tokens.

        Returns:
            The rows for this rank's experts, and the handle for `combine`. At most `NUM_LIVE` handles may be
            pending; the batch is valid until its handle is combined.

        Raises:
            ValueError: ids out of range or repeated (normal mode; low latency does not check).
            PeerLost: another rank is lost.
        """

    def combine(self, rows: Tensor, topk_weights: Tensor, handle: Any) -> Tensor:
        """Applies the router weights, here and nowhere else, and sums: [T, D].

        Args:
            rows: the experts' results in the layout of the batch; rows beyond its counts are never read.
            topk_weights: the ones passed to dispatch. Most backends have sent them to the experts' ranks, which sum
                before they send back; some apply them here.
        """

    # -- the same in halves. Backends whose kernels send and wait in one launch do all of it in the first half.

    def start_dispatch(
        self, x: Activation, topk_ids: Tensor, topk_weights: Tensor, format: ActivationFormat = UNQUANTIZED
    ) -> Callable[[], tuple[ExpertBatch, Any]]:
        """Sends. The returned call waits for the other ranks' tokens and returns as `dispatch`; it is made once, on any
        stream that has waited for this one. Launches that wait occupy the device, so it comes as late as possible."""
        result = self.dispatch(x, topk_ids, topk_weights, format)
        return lambda: result

    def start_combine(self, rows: Tensor, topk_weights: Tensor, handle: Any) -> Callable[[], Tensor]:
        """Likewise for `combine`; the handle is pending until the returned call."""
        result = self.combine(rows, topk_weights, handle)
        return lambda: result

    def start_combine_norm(self, rows: Tensor, topk_weights: Tensor, handle: Any) -> NormedSum:
        """`start_combine` for a sum that a norm follows: one launch does both, if the backend `norms_sums`."""
        raise TypeError(f"{type(self).__name__} leaves no sum to a norm")

    def check_peers(self) -> None:
        """Raises `PeerLost` if a kernel has reported a timeout on a peer; never waits. Overridden where kernels wait
        for peers without the host: calls in a captured graph cannot raise."""
        return
