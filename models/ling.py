"""Ling: a state for each request (Ling 3.0: Kimi Delta Attention; Ling 2.6 and Ring 2.5: lightning attention), and MLA
in the last layer of each group (Ling 3.0: with an output gate)."""

from __future__ import annotations

from typing import Any

from moe_engine.kernels.ops.protocol import RotaryTable
from moe_engine.models.config import MLAConfig
from moe_engine.models.deepseek import DeepseekModel
from moe_engine.models.layers.gated_mla import GatedMLAAttention
from moe_engine.models.layers.kimi_delta_attention import KimiDeltaAttention
from moe_engine.models.layers.rotated_lightning import RotatedLightning
from moe_engine.models.weights import WeightSource


class LingModel(DeepseekModel):
    """`Model` of the family. `batch.kv[layer]` is the latent cache; for layers with a state, its tensors."""

    def make_attention(self, layer_index: int, reader: WeightSource, rotary: RotaryTable) -> Any:
        config, layer = self.config, (self.config, layer_index, reader, self.backends, self.parallel)
        if layer_index in config.state_layers:
            assert config.delta is not None
            return KimiDeltaAttention(*layer) if config.delta.by_channel else RotatedLightning(*layer, rotary)
        assert isinstance(config.attention, MLAConfig)
        if not config.attention.gate_width:
            return super().make_attention(layer_index, reader, rotary)
        return GatedMLAAttention(*layer, rotary, max_expanded_tokens=self._max_expanded_tokens)
