"""Ling 3.0: Kimi Delta Attention, and MLA with an output gate in the last layer of each group."""

from __future__ import annotations

from typing import Any

from moe_engine.kernels.ops.protocol import RotaryTable
from moe_engine.models.deepseek import DeepseekModel
from moe_engine.models.layers.gated_mla import GatedMLAAttention
from moe_engine.models.layers.kimi_delta_attention import KimiDeltaAttention
from moe_engine.models.weights import WeightSource


class LingModel(DeepseekModel):
    """`Model` of the family. `batch.kv[layer]` is the latent cache; for Kimi Delta Attention, its state tensors."""

    def make_attention(self, layer_index: int, reader: WeightSource, rotary: RotaryTable) -> Any:
        layer = self.config, layer_index, reader, self.backends, self.parallel
        if layer_index in self.config.state_layers:
            return KimiDeltaAttention(*layer)
        return GatedMLAAttention(*layer, rotary, max_expanded_tokens=self._max_expanded_tokens)
