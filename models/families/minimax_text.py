"""MiniMax-Text-01 and MiniMax-M1: lightning attention, softmax attention in every eighth layer, and norms whose results
are the residual."""

from __future__ import annotations

from typing import Any

from moe_engine.kernels.ops.protocol import RotaryTable
from moe_engine.models.families.dense import DenseModel
from moe_engine.models.layers.residual.post_norm import PostNorm
from moe_engine.models.layers.states.lightning_attention import LightningAttention
from moe_engine.models.weights import WeightSource


class MiniMaxTextModel(DenseModel):
    """`Model` of the family. `batch.kv[layer]` is (keys, values); for lightning attention, its state tensor."""

    def make_attention(self, layer_index: int, reader: WeightSource, rotary: RotaryTable) -> Any:
        if layer_index in self.config.state_layers:
            return LightningAttention(self.config, layer_index, reader, self.backends, self.parallel)
        return super().make_attention(layer_index, reader, rotary)

    def make_norm(self, reader: WeightSource, prefix: str) -> Any:
        return PostNorm(self.backends.ops, reader, prefix, self.config)
