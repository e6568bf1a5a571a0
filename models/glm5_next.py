"""GLM-5.3-Flash: Kimi Delta Attention, MLA over pools of tokens in every fourth layer, residual streams."""

from __future__ import annotations

from typing import Any

from moe_engine.kernels.attention.renewable import InPlacePlanner
from moe_engine.kernels.ops.protocol import RotaryTable
from moe_engine.models.deepseek import DeepseekModel
from moe_engine.models.layers.kimi_delta_attention import KimiDeltaAttention
from moe_engine.models.layers.pooled_mla import PooledMLAAttention
from moe_engine.models.stream_residual import StreamResidual
from moe_engine.models.weights import WeightSource


class Glm5NextModel(StreamResidual, DeepseekModel):
    """`Model` of the family. ``batch.kv[layer]`` is (latents, index keys, gates of index keys); for Kimi Delta
    Attention, its state tensors."""

    has_mtp = False

    def make_attention(self, layer_index: int, reader: WeightSource, rotary: RotaryTable) -> Any:
        layer = self.config, layer_index, reader, self.backends, self.parallel
        if layer_index in self.config.state_layers:
            return KimiDeltaAttention(*layer)
        return PooledMLAAttention(*layer, rotary, max_expanded_tokens=self._max_expanded_tokens)

    def planner_of_decodes(self, drafts: bool = False) -> InPlacePlanner:
        return lambda batch: None  # pools of a context have no plan at fixed addresses: decodes are not captured
