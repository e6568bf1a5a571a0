"""Llama, Mistral, Qwen2 and Qwen3, and the mixture-of-experts models on the same attention (Qwen3-MoE, Mixtral,
MiniMax-M2, MiMo-V2-Flash, GLM-4.5, gpt-oss)."""

from __future__ import annotations

from typing import Any

from moe_engine.kernels.ops.protocol import RotaryTable
from moe_engine.models.batch import ForwardBatch
from moe_engine.models.layers.attention.gqa import GQAttention, group_inputs
from moe_engine.models.layers.decoder import Decoder
from moe_engine.models.layers.norm import RMSNorm
from moe_engine.models.layers.stack import LayerStack
from moe_engine.models.weights import WeightSource


class DenseModel(Decoder):
    """`Model` of the GQA families. `batch.kv[layer]` is (keys, values), [num_slots, G, Dh] and [num_slots, G, V]."""

    has_mtp = True

    def make_attention(self, layer_index: int, reader: WeightSource, rotary: RotaryTable) -> GQAttention:
        return GQAttention(self.config, layer_index, reader, self.backends, self.parallel, rotary)

    def make_stack(self, first_norm: RMSNorm) -> LayerStack | None:
        # Subclasses, also models from outside, may compute embeddings or layers in another way.
        return self.stack_of_layers(first_norm) if type(self) is DenseModel else None

    def attention_args(self, batch: ForwardBatch) -> tuple[Any, ...]:
        return batch, group_inputs(batch, self.config.cache_groups, self.backends.attention)  # type: ignore[arg-type]
