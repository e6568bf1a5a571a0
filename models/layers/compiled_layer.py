"""A decoder layer in few compiled calls: the code between its attention, its experts and the next layer.

Used for decodes of few tokens; other steps run `DecoderLayer`. Functions here take weight-holding objects and tensors:
no object that changes between steps, and none that differs between layers of the same kind.

Legend: T tokens, D hidden, K experts per token.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from torch import Tensor

from moe_engine.kernels.torch_regions import CompiledRegions
from moe_engine.models.batch import ForwardBatch
from moe_engine.models.layers.decoder_layer import DecoderLayer, FeedForward
from moe_engine.models.layers.feed_forward.moe import MoE


class CompiledLayer:
    """`DecoderLayer` with compiled regions, built from its parts."""

    shares_out = False
    passes_on = True

    def __init__(self, layer: DecoderLayer, regions: CompiledRegions) -> None:
        assert layer.feed_forward is not None
        self.attention = layer.attention
        self.post_norm = layer.post_norm
        self.feed_forward: FeedForward = layer.feed_forward
        self.next_norm = layer.next_norm
        self.whole = layer
        """The layer for steps that are not compiled."""
        self._regions = regions
        self._before = regions.compile(_before_attention, (1, 2, 3))
        self._routed = layer.feed_forward if isinstance(layer.feed_forward, MoE) else None
        after: Callable[..., Any] = _to_next_layer if self._routed is None else _to_experts
        self._after = regions.compile(after, (1, 2))

    def forward(self, hidden: Tensor, residual: Tensor, batch: ForwardBatch, *more: Any) -> Tensor:
        routed, is_decode = self._routed, batch.attention.prefill is None and batch.images is None
        if not (is_decode and self._regions.serves(len(hidden)) and (routed is None or routed.is_plain)):
            return self.whole.forward(hidden, residual, batch, *more)
        attention = self.attention
        query = self._before(
            attention, hidden, batch.positions, attention.slots_of(batch, *more), attention.cache_of(batch)
        )
        mixed = attention.attend(query, batch, *more)
        if routed is None:
            return self._after(self, mixed, residual)
        hidden, weights, ids, shared = self._after(self, mixed, residual)
        return self.next_norm.add(routed.after(hidden, weights, ids, shared), residual)

    def whole_stream(self, residual: Tensor, batch: ForwardBatch) -> Tensor:
        return self.next_norm.stream(residual)


def for_regions(batch: ForwardBatch, regions: CompiledRegions) -> ForwardBatch:
    """The batch for compiled regions, once per step: positions and slots are copied, since they are slices of
    uploads or buffers, and torch recompiles for tensors with another storage offset or inference mode."""
    if not regions.serves(batch.num_tokens):
        return batch
    windows = batch.windows
    if windows is not None:
        windows = replace(windows, slots=windows.slots.clone())
    return replace(batch, positions=batch.positions.clone(), slots=batch.slots.clone(), windows=windows)


def _before_attention(attention: Any, hidden: Tensor, positions: Tensor, slots: Tensor, cache: Any) -> Tensor:
    return attention.before(hidden, positions, slots, cache)


def _to_next_layer(layer: CompiledLayer, mixed: Tensor, residual: Tensor) -> Tensor:
    """Attention output -> norm'd hidden [T, D] of the next layer; `residual` [T, D] is added to in place."""
    hidden = layer.post_norm.add(layer.attention.after(mixed), residual)
    return layer.next_norm.add(layer.feed_forward.forward(hidden), residual)


def _to_experts(layer: CompiledLayer, mixed: Tensor, residual: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """Attention output -> input of `MoE.after`; `residual` [T, D] is added to in place."""
    hidden = layer.post_norm.add(layer.attention.after(mixed), residual)
    return hidden, *layer.feed_forward.before(hidden)  # type: ignore[attr-defined]
