"""MiniMax-M3: block-sparse attention after dense first layers, experts with a shared one; images."""

from __future__ import annotations

from dataclasses import replace
from functools import cached_property
from typing import Any

from moe_engine.kernels.attention.renewable import InPlacePlanner
from moe_engine.kernels.block_index.in_place import BlocksInPlace, decode_planner
from moe_engine.kernels.ops.protocol import RotaryTable
from moe_engine.models.batch import ForwardBatch
from moe_engine.models.config import GQAConfig
from moe_engine.models.families.dense import DenseModel
from moe_engine.models.families.image_text import ImageInputs
from moe_engine.models.layers.attention.block_chunks import BlockAttention
from moe_engine.models.layers.attention.block_sparse_gqa import BlockSparseGQAttention
from moe_engine.models.layers.attention.gqa import GQAttention, group_inputs
from moe_engine.models.sharding import local_attention
from moe_engine.models.weights import WeightSource


class MiniMaxM3Model(ImageInputs, DenseModel):
    """`Model` of the family. `batch.kv[layer]` is (keys, values), with an indexer (keys, values, index keys)."""

    @cached_property
    def _blocks(self) -> BlockAttention | None:
        """None: the config has no block-sparse layers."""
        attention = self.config.attention
        assert isinstance(attention, GQAConfig)
        if attention.blocks is None:
            return None
        heads, kernel = local_attention(attention, self.parallel).num_kv_heads, self.backends.block_index
        assert kernel is not None
        return BlockAttention(attention.blocks.rule, heads, self.backends.attention, kernel)  # type: ignore[arg-type]

    def make_attention(self, layer_index: int, reader: WeightSource, rotary: RotaryTable) -> GQAttention:
        attention = self.config.attention
        dense = self._blocks is None or layer_index in attention.shared_layers
        kind = GQAttention if dense else BlockSparseGQAttention
        return kind(self.config, layer_index, reader, self.backends, self.parallel, rotary)

    def attention_args(self, batch: ForwardBatch) -> tuple[Any, ...]:
        plan = batch.attention_plan
        if isinstance(plan, BlocksInPlace):
            batch = replace(batch, attention_plan=plan.dense)
        (inputs,) = group_inputs(batch, self.config.cache_groups, self.backends.attention)  # type: ignore[arg-type]
        blocks = self._blocks
        if blocks is None:
            return batch, [inputs]
        if isinstance(plan, BlocksInPlace):
            return batch, [replace(inputs, chunks=blocks.in_place(plan))]
        decode = batch.attention.decode
        is_decode = decode is not None and decode.num_tokens > 0
        return batch, [replace(inputs, chunks=blocks.cut(inputs.queries, inputs.plan, is_decode))]

    def planner_of_decodes(self, drafts: bool = False) -> InPlacePlanner | None:
        blocks = self._blocks
        return None if blocks is None else decode_planner(blocks.rule, blocks.heads, blocks.backend, blocks.index)
