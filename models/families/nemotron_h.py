"""Nemotron-H and Nemotron-3: layers of one mixer each, which is Mamba2, attention without rotation, experts or an MLP;
and Granite 4, whose layers have a feed-forward each.

A mixer over tokens and the feed-forward after it are one layer of the decoder.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from moe_engine.kernels.ops.protocol import RotaryTable
from moe_engine.models.batch import ForwardBatch
from moe_engine.models.families.dense import DenseModel
from moe_engine.models.layers.states.mamba2 import Mamba2
from moe_engine.models.weights import WeightSource


class NemotronHModel(DenseModel):
    """`Model` of the families. `batch.kv[layer]` is (keys, values); for Mamba2, its state tensors; else ()."""

    def make_attention(self, layer_index: int, reader: WeightSource, rotary: RotaryTable) -> Any:
        if layer_index in self.config.state_layers:
            return Mamba2(self.config, layer_index, reader, self.backends, self.parallel)
        return super().make_attention(layer_index, reader, rotary)

    def place(self, batch: ForwardBatch) -> ForwardBatch:
        """Without positions all tokens read the only row of the rotary table, which rotates nothing."""
        if self.config.rope.kind != "none":
            return batch
        return replace(batch, positions=batch.positions.new_zeros(batch.num_tokens))
