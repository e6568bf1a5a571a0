"""Kimi Linear: Kimi Delta Attention, and MLA without positions in every fourth layer."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from moe_engine.kernels.ops.protocol import RotaryTable
from moe_engine.models.batch import ForwardBatch
from moe_engine.models.deepseek import DeepseekModel
from moe_engine.models.layers.kimi_delta_attention import KimiDeltaAttention
from moe_engine.models.weights import WeightSource


class KimiLinearModel(DeepseekModel):
    """`Model` of the family. `batch.kv[layer]` is the latent cache; for Kimi Delta Attention, its state tensors."""

    has_mtp = False

    def make_attention(self, layer_index: int, reader: WeightSource, rotary: RotaryTable) -> Any:
        if layer_index in self.config.state_layers:
            return KimiDeltaAttention(self.config, layer_index, reader, self.backends, self.parallel)
        return super().make_attention(layer_index, reader, rotary)

    def attention_args(self, batch: ForwardBatch) -> tuple[Any, ...]:
        return super().attention_args(self.place(batch))

    def place(self, batch: ForwardBatch) -> ForwardBatch:
        """All tokens read the only row of the rotary table, which rotates nothing."""
        return replace(batch, positions=batch.positions.new_zeros(batch.num_tokens))
