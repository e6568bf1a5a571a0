"""Qwen3-Next and the text model of Qwen3.5: gated delta nets, and gated attention in every fourth layer."""

from __future__ import annotations

from typing import Any

from moe_engine.kernels.ops.protocol import RotaryTable
from moe_engine.models.families.dense import DenseModel
from moe_engine.models.layers.attention.gated_gqa import GatedGQAttention
from moe_engine.models.layers.states.gated_delta_net import GatedDeltaNet
from moe_engine.models.weights import WeightSource


class Qwen3NextModel(DenseModel):
    """`Model` of the family. `batch.kv[layer]` is (keys, values); for a gated delta net, its state tensors."""

    def make_attention(self, layer_index: int, reader: WeightSource, rotary: RotaryTable) -> Any:
        if layer_index in self.config.state_layers:
            return GatedDeltaNet(self.config, layer_index, reader, self.backends, self.parallel)
        return GatedGQAttention(self.config, layer_index, reader, self.backends, self.parallel, rotary)
