"""One layer of a decoder on one rank: attention and a feed-forward on the residual stream.

Legend: T tokens, D hidden.
"""

from __future__ import annotations

from typing import Any, Protocol

from torch import Tensor

from moe_engine.kernels.quantization.protocol import Activation, ActivationFormat
from moe_engine.models.batch import ForwardBatch, RoutedTokens
from moe_engine.models.layers.feed_forward.moe import MoE
from moe_engine.models.layers.norm import RMSNorm
from moe_engine.models.layers.residual.deepstack import DeepstackRows
from moe_engine.models.layers.residual.ngram_input import NgramInput
from moe_engine.parallel.dispatch.protocol import Phase
from moe_engine.parallel.dp_gather_scatter import TokenLayout


class FeedForward(Protocol):
    tokens: TokenLayout
    """Input tokens, and whether the result is a partial sum, on many ranks."""

    @property
    def input_format(self) -> ActivationFormat:
        """Activation format of x."""

    def forward(self, x: Activation, phase: Phase = "prefill", tokens: RoutedTokens | None = None) -> Tensor:
        """x [T, D] -> [T, D], new memory. `phase`: the step's phase, the same on every rank. `tokens`: these
        tokens."""


class DecoderLayer:
    """norm'd hidden [T, D] -> norm'd hidden of the next layer; `residual` [T, D] is added to in place, twice. Without a
    feed-forward once; then `post_norm` is `next_norm`."""

    shares_out = False
    passes_on = True
    """The result of its last norm is the next layer's input."""

    def __init__(
        self, attention: Any, post_norm: RMSNorm, feed_forward: FeedForward | None, next_norm: RMSNorm
    ) -> None:
        self.attention = attention
        self.post_norm = post_norm
        self.feed_forward = feed_forward
        self.next_norm = next_norm
        if feed_forward is not None:
            post_norm.feed(feed_forward.input_format)
        moe = feed_forward if isinstance(feed_forward, MoE) else None
        self._moe = moe if moe is not None and moe.leaves_rows and next_norm.adds_rows else None
        """Set if `next_norm` sums the experts' rows."""
        self.deepstack: DeepstackRows | None = None
        self.ngrams: NgramInput | None = None

    def forward(self, hidden: Activation, residual: Tensor, batch: ForwardBatch, *more: Any) -> Tensor:
        """`batch` and `more` are the arguments of the attention after `hidden`."""
        if self.ngrams is not None:
            hidden = self.ngrams.add(hidden, residual, batch)
        mixed, chosen = self.attention.forward(hidden, batch, *more), None
        if self._moe is not None:
            hidden, chosen = self._moe.after_norm(self.post_norm, mixed, residual, tokens=batch.routed)
        else:
            hidden = self.post_norm.add(mixed, residual)
        if self.deepstack is not None:
            self.deepstack.add(residual, batch)
        if self.feed_forward is None:
            return hidden  # type: ignore[return-value]
        if self._moe is not None:
            return self.next_norm.add_rows(self._moe.expert_rows(hidden, batch.routed, chosen), residual)
        return self.next_norm.add(self.feed_forward.forward(hidden, tokens=batch.routed), residual)

    def whole_stream(self, residual: Tensor, batch: ForwardBatch) -> Tensor:
        """The residual stream [T, D] after this layer."""
        return self.next_norm.stream(residual)
