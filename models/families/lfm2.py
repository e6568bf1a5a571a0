"""LFM2 and LFM2-MoE: short convolutions, and attention with norms of q and k in a few layers."""

from __future__ import annotations

from typing import Any

from moe_engine.kernels.ops.protocol import RotaryTable
from moe_engine.models.families.dense import DenseModel
from moe_engine.models.layers.states.short_conv import ShortConv
from moe_engine.models.weights import WeightSource


class Lfm2Model(DenseModel):
    """`Model` of the family. `batch.kv[layer]` is (keys, values); for a short convolution, its state tensor."""

    has_mtp = False

    def make_attention(self, layer_index: int, reader: WeightSource, rotary: RotaryTable) -> Any:
        if layer_index in self.config.state_layers:
            return ShortConv(self.config, layer_index, reader, self.backends, self.parallel)
        return super().make_attention(layer_index, reader, rotary)
