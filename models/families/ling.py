"""Ling: a state for each request (Ling 3.0: Kimi Delta Attention; Ling 2.6 and Ring 2.5: lightning attention), and MLA
in the last layer of each group (Ling 3.0: with an output gate)."""

from __future__ import annotations

from typing import Any

from moe_engine.kernels.ops.protocol import RotaryTable
from moe_engine.models.families.deepseek import DeepseekModel
from moe_engine.models.layers.states.kimi_delta_attention import KimiDeltaAttention
from moe_engine.models.layers.states.rotated_lightning import RotatedLightning
from moe_engine.models.weights import WeightSource


class LingModel(DeepseekModel):
    """`Model` of the family. `batch.kv[layer]` is the latent cache; for layers with a state, its tensors."""

    def make_attention(self, layer_index: int, reader: WeightSource, rotary: RotaryTable) -> Any:
        if layer_index not in self.config.state_layers:
            return super().make_attention(layer_index, reader, rotary)
        layer, delta = (self.config, layer_index, reader, self.backends, self.parallel), self.config.delta
        assert delta is not None
        return KimiDeltaAttention(*layer) if delta.by_channel else RotatedLightning(*layer, rotary)
