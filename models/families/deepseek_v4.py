"""DeepSeek V4 (V4-Flash, V4-Pro): windows and compressed entries, residual streams, experts in every layer."""

from __future__ import annotations

from dataclasses import replace
from functools import cached_property
from typing import Any

from moe_engine.kernels.attention.renewable import InPlacePlanner
from moe_engine.kernels.ops.protocol import RotaryTable
from moe_engine.models.batch import ForwardBatch
from moe_engine.models.config_sections.compressed import CompressedConfig
from moe_engine.models.families.stream_residual import StreamResidual
from moe_engine.models.layers.attention.compressed_attention import CompressedAttention
from moe_engine.models.layers.attention.compressed_step import StepRows
from moe_engine.models.weights import WeightSource


class DeepseekV4Model(StreamResidual):
    """`Model` of the family. `batch.kv[layer]` is a `CompressedCache`."""

    has_mtp = True

    @cached_property
    def _steps(self) -> StepRows:
        attention = self.config.attention
        assert isinstance(attention, CompressedConfig)
        layers = {attention.rate(layer): layer for layer in range(self.config.num_layers)}
        kernels = self.backends
        backend: Any = kernels.attention
        return StepRows(attention, layers, backend, kernels.indexer, kernels.compression)

    @cached_property
    def _draft_steps(self) -> StepRows:
        attention = self.config.attention
        assert isinstance(attention, CompressedConfig)
        layers, kernels = {0: self.config.num_layers}, self.backends
        return StepRows(attention, layers, kernels.attention, None, kernels.compression)  # type: ignore[arg-type]

    def make_attention(self, layer_index: int, reader: WeightSource, rotary: RotaryTable) -> CompressedAttention:
        return CompressedAttention(self.config, layer_index, reader, self.backends, self.parallel, rotary, self._steps)

    def attention_args(self, batch: ForwardBatch) -> tuple[Any, ...]:
        return batch, self._steps.of(batch)

    def planner_of_decodes(self, drafts: bool = False) -> InPlacePlanner:
        return (self._draft_steps if drafts else self._steps).plan_in_place

    @property
    def planner_of_blocks(self) -> InPlacePlanner:
        """Plans of captured blocks of drafts."""
        return self._draft_steps.plan_blocks_in_place

    def draft_args(self, batch: ForwardBatch) -> tuple[Any, ...]:
        """The tokens of MTP layers have slots of the full pool, also where windows have a pool of their own."""
        batch = self.begin_step(batch)
        return batch, self._draft_steps.of(replace(batch, windows=None))

    def block_args(self, batch: ForwardBatch) -> tuple[Any, ...]:
        """`draft_args` of blocks, whose tokens see each other in both directions."""
        batch = self.begin_step(batch)
        return batch, self._draft_steps.of_blocks(replace(batch, windows=None))
