"""DeepSeek V4.1 (V4.1-Flash): windows and entries that several layers read, residual streams with late sums,
images."""

from __future__ import annotations

from functools import cached_property
from typing import Any

from torch import Tensor

from moe_engine.kernels.attention.renewable import InPlacePlanner
from moe_engine.kernels.ops.hashed_rows import TextIds
from moe_engine.kernels.ops.protocol import RotaryTable
from moe_engine.models.batch import ForwardBatch
from moe_engine.models.config_sections.compressed import SharedEntriesConfig
from moe_engine.models.config_sections.engram import EngramConfig
from moe_engine.models.families.deepseek_v4 import DeepseekV4Model
from moe_engine.models.families.image_text import ImageInputs
from moe_engine.models.families.stream_residual import streams_of
from moe_engine.models.layers.attention.shared_entries import SharedAttention, SharedStep, SharedSteps
from moe_engine.models.layers.decoder_layer import FeedForward
from moe_engine.models.layers.feed_forward.moe import MoE
from moe_engine.models.layers.residual.engram import EngramNorm, load_text_ids, put_ids
from moe_engine.models.weights import WeightSource


class DeepseekV41Model(DeepseekV4Model, ImageInputs):
    """`Model` of the family. `batch.kv[layer]` is a `CompressedCache`. Image tokens have the positions of their places;
    their embeddings are in all streams."""

    @cached_property
    def _shared_steps(self) -> SharedSteps:
        attention = self.config.attention
        assert isinstance(attention, SharedEntriesConfig)
        return SharedSteps(attention, self.backends)

    _texts: TextIds | None = None
    """Text ids for the n-gram tables."""

    _in_order = True
    """Whether steps do not wait for rows of the tables."""

    @property
    def _engram(self) -> EngramConfig | None:
        return None if self.config.streams is None else self.config.streams.engram

    def make_norm(self, reader: WeightSource, prefix: str) -> Any:
        engram = self._engram
        if engram is None or prefix not in [f"model.layers.{i}.input_layernorm" for i in engram.layers]:
            return super().make_norm(reader, prefix)
        self._texts = self._texts or load_text_ids(self.config, reader)
        norm = EngramNorm(self.backends.ops, reader, streams_of(prefix), prefix, self.config, self.backends.linear)
        self._in_order &= norm.rows.in_order
        return norm

    def embed(self, batch: ForwardBatch) -> Tensor:
        residual, engram = super().embed(batch), self._engram
        if engram is not None:
            assert self._texts is not None
            put_ids(residual, batch, self._texts, engram.longest, self.backends.ops)
        return residual

    def norm_prefixes(self, prefix: str) -> tuple[str, ...]:
        if self._engram is not None and prefix.endswith(".input_layernorm"):
            block = prefix.rpartition(".")[0]
            return f"{prefix}.", f"{streams_of(prefix)}.", f"{block}.engram."
        return (f"{prefix}.",) if prefix.endswith(".norm") else (f"{prefix}.", f"{streams_of(prefix)}.")

    def make_attention(self, layer_index: int, reader: WeightSource, rotary: RotaryTable) -> SharedAttention:
        return SharedAttention(self.config, layer_index, reader, self.backends, self.parallel, rotary, self._steps)

    def make_feed_forward(self, layer_index: int, reader: WeightSource) -> FeedForward:
        own = self.config.moe_of(layer_index) != self.config.moe
        parallel = self.parallel.of_drafts if own else self.parallel
        return MoE(self.config, layer_index, self.backends, reader, parallel)

    def attention_args(self, batch: ForwardBatch) -> tuple[Any, ...]:
        return batch, self._shared_steps.of(batch)

    def block_args(self, batch: ForwardBatch) -> tuple[Any, ...]:
        batch, step = super().block_args(batch)
        return batch, {0: SharedStep(step, step.rows.get(0), None, batch.kv[self.config.num_layers].num_slots)}

    def planner_of_decodes(self, drafts: bool = False) -> InPlacePlanner:
        if drafts:
            return super().planner_of_decodes(drafts)
        return self._shared_steps.plan_in_place if self._in_order else lambda batch: None
