"""Step 3.5, the text model of Step 3.7, Laguna and Trinity: windows in some layers, and a gate for each head's result,
or each channel of it."""

from __future__ import annotations

from moe_engine.kernels.ops.protocol import RotaryTable
from moe_engine.models.families.dense import DenseModel
from moe_engine.models.layers.attention.gated_gqa import HeadGatedGQAttention
from moe_engine.models.weights import WeightSource


class GatedHeadsModel(DenseModel):
    """`Model` of the families. `batch.kv[layer]` is (keys, values)."""

    def make_attention(self, layer_index: int, reader: WeightSource, rotary: RotaryTable) -> HeadGatedGQAttention:
        return HeadGatedGQAttention(self.config, layer_index, reader, self.backends, self.parallel, rotary)
