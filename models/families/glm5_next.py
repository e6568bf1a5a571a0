"""GLM-5.3-Flash: Kimi Delta Attention, MLA over pools of tokens in every fourth layer, residual streams; images."""

from __future__ import annotations

from functools import cached_property
from typing import Any

from moe_engine.kernels.attention.renewable import InPlacePlanner
from moe_engine.kernels.ops.protocol import RotaryTable
from moe_engine.models.config import MLAConfig
from moe_engine.models.families.deepseek import DeepseekModel
from moe_engine.models.families.image_text import ImageInputs
from moe_engine.models.families.stream_residual import StreamResidual
from moe_engine.models.layers.attention.pool_chunks import PoolSteps
from moe_engine.models.layers.attention.pooled_mla import PooledMLAAttention
from moe_engine.models.layers.states.kimi_delta_attention import KimiDeltaAttention
from moe_engine.models.weights import WeightSource


class Glm5NextModel(StreamResidual, ImageInputs, DeepseekModel):
    """`Model` of the family. ``batch.kv[layer]`` is (latents, index keys, gates of index keys); for Kimi Delta
    Attention, its state tensors. An image token has its embedding in all streams."""

    @cached_property
    def _steps(self) -> PoolSteps:
        attention, kernels = self.config.attention, self.backends
        assert isinstance(attention, MLAConfig) and attention.indexer is not None and kernels.indexer is not None
        sparse = kernels.attention.capabilities.sparse
        assert sparse is not None
        return PoolSteps(attention.indexer, sparse, kernels.indexer)

    def make_attention(self, layer_index: int, reader: WeightSource, rotary: RotaryTable) -> Any:
        layer = self.config, layer_index, reader, self.backends, self.parallel
        if layer_index in self.config.state_layers:
            return KimiDeltaAttention(*layer)
        return PooledMLAAttention(*layer, rotary, steps=self._steps)

    def planner_of_decodes(self, drafts: bool = False) -> InPlacePlanner:
        return self._steps.plan_in_place
