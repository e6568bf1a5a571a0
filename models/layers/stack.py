"""A decoder in one call, if the attention backend supports it.

Legend: T tokens, D hidden, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from moe_engine.kernels.decoder.calls import DecoderCalls
from moe_engine.kernels.decoder.layers import MAX_TOKENS
from moe_engine.kernels.decoder.stack import FusedStack, StackedLayer
from moe_engine.kernels.gate_form import SILU
from moe_engine.models.batch import ForwardBatch
from moe_engine.models.layers.attention.gqa import GroupInputs
from moe_engine.models.layers.attention.mla_chunks import AttentionChunk
from moe_engine.models.layers.feed_forward.mlp import MLP
from moe_engine.models.layers.feed_forward.moe import MoE
from moe_engine.models.layers.norm import RMSNorm

StepPart = AttentionChunk | GroupInputs


class LayerStack:
    """Runs steps of few tokens in one group of queries; bit-identical to the layers' own `forward`."""

    def __init__(self, fused: FusedStack, feed_forwards: Sequence[Any]) -> None:
        self.fused = fused
        self._moes = [part if isinstance(part, MoE) else None for part in feed_forwards]
        self.records_experts = False
        """True if layers record expert choices."""

    @classmethod
    def of(
        cls, decoder: DecoderCalls | None, embedding: Tensor, first_norm: RMSNorm, layers: Sequence[Any]
    ) -> LayerStack | None:
        """The layers of one rank as one call; None if it is not supported for one of them.

        `embedding` [V, D] and `first_norm` come before the first layer; each layer ends with the norm of the next.
        """
        known = [part for part in map(stacked, layers) if part is not None]
        if decoder is None or len(known) < len(layers):
            return None
        fused = decoder.fuse_stack(embedding, first_norm.weight, known)
        return None if fused is None else cls(fused, [layer.feed_forward for layer in layers])

    def takes(self, batch: ForwardBatch, parts: Sequence[StepPart]) -> bool:
        """`parts`: the attention's arguments of the step."""
        few = len(parts) == 1 and batch.num_tokens <= MAX_TOKENS and batch.images is None
        return few and (parts[0].absorbed if isinstance(parts[0], AttentionChunk) else len(parts[0].queries) == 1)

    def forward(self, batch: ForwardBatch, parts: Sequence[StepPart]) -> Tensor:
        """`Model.forward` of a supported step."""
        part = parts[0]
        if isinstance(part, AttentionChunk):
            queries, slots = part.queries, batch.slots
        else:
            queries, slots = part.queries[0][1], part.slots
        buffers = self._ids_buffers(batch.num_tokens) if self.records_experts else None
        out = self.fused.run(batch.input_ids, batch.positions, slots, batch.kv, queries, part.plan, buffers)
        if buffers is not None:
            for moe, ids in zip(self._moes, buffers):
                if moe is not None and ids is not None:
                    moe.record_expert_ids(ids)
        return out

    def _ids_buffers(self, num_tokens: int) -> list[Tensor | None] | None:
        """Buffers for the choices of each layer; None while not recording."""
        buffers = [None if moe is None else moe.expert_ids_buffer(num_tokens) for moe in self._moes]
        return None if all(buffer is None for buffer in buffers) else buffers


def stacked(layer: Any) -> StackedLayer | None:
    """A layer as the backend's input, from the calls of its modules; None if one of them has none."""
    attention, part = layer.attention.in_stack, layer.feed_forward
    experts = part.in_one_call if isinstance(part, MoE) else None
    mlp = part.weights if isinstance(part, MLP) and part.is_fused and part.activation == SILU else None
    if attention is None or (experts is None and mlp is None):
        return None
    norms = layer.post_norm, layer.next_norm
    return StackedLayer(attention, norms[0].weight, norms[1].weight, norms[0].eps, experts, mlp)
