"""Kimi Linear: Kimi Delta Attention, and MLA without positions in every fourth layer. Kimi K3: the same with an output
gate of MLA, and attention over blocks of the residual."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from torch import Tensor

from moe_engine.kernels.ops.protocol import RotaryTable
from moe_engine.models.batch import ForwardBatch
from moe_engine.models.families.deepseek import DeepseekModel
from moe_engine.models.families.image_text import ImageInputs
from moe_engine.models.layers.residual.block_norm import BlockNorm, block_prefix, spread_blocks
from moe_engine.models.layers.stack import LayerStack
from moe_engine.models.layers.states.kimi_delta_attention import KimiDeltaAttention
from moe_engine.models.weights import WeightSource


class KimiLinearModel(DeepseekModel):
    """`Model` of the family. `batch.kv[layer]` is the latent cache; for Kimi Delta Attention, its state tensors."""

    has_mtp = False

    def make_attention(self, layer_index: int, reader: WeightSource, rotary: RotaryTable) -> Any:
        if layer_index in self.config.state_layers:
            return KimiDeltaAttention(self.config, layer_index, reader, self.backends, self.parallel)
        return super().make_attention(layer_index, reader, rotary)

    def make_norm(self, reader: WeightSource, prefix: str) -> Any:
        if not self.config.residual_block:
            return super().make_norm(reader, prefix)
        return BlockNorm(self.backends.ops, reader, prefix, self.config)

    def norm_prefixes(self, prefix: str) -> tuple[str, ...]:
        own = super().norm_prefixes(prefix)
        return (*own, f"{block_prefix(prefix)}_") if self.config.residual_block else own

    def make_stack(self, first_norm: Any) -> LayerStack | None:
        return None if self.config.residual_block else super().make_stack(first_norm)

    def embed(self, batch: ForwardBatch) -> Tensor:
        embedded = super().embed(batch)
        return spread_blocks(embedded, self.config) if self.config.residual_block else embedded

    def place(self, batch: ForwardBatch) -> ForwardBatch:
        """All tokens read the only row of the rotary table, which rotates nothing."""
        return replace(batch, positions=batch.positions.new_zeros(batch.num_tokens))


class KimiK3Model(ImageInputs, KimiLinearModel):
    """`Model` for images and text: an image token's embedding is the first row of its residual."""

    place = KimiLinearModel.place
