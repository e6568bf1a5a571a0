"""DeepSeek V4 (V4-Flash, V4-Pro): windows beside compressed entries, residual streams, experts in every layer."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from torch import Tensor

from moe_engine.kernels.attention.renewable import InPlacePlanner
from moe_engine.kernels.backends import Backends
from moe_engine.kernels.ops.protocol import RotaryTable
from moe_engine.models.batch import ForwardBatch
from moe_engine.models.compressed_config import CompressedConfig
from moe_engine.models.config import ModelConfig
from moe_engine.models.layers.compressed_attention import CompressedAttention
from moe_engine.models.layers.compressed_step import StepRows
from moe_engine.models.layers.decoder import Decoder
from moe_engine.models.layers.decoder_layer import FeedForward
from moe_engine.models.layers.moe import MoE
from moe_engine.models.layers.streams import StreamNorm, spread
from moe_engine.models.rope_config import RopeConfig
from moe_engine.models.weights import WeightSource
from moe_engine.parallel.context import ParallelContext

_MIXES = {"input_layernorm": "hc_attn", "post_attention_layernorm": "hc_ffn", "norm": "hc_head"}
"""Norms, and the weights of the streams whose sum they norm."""


class DeepseekV4Model(Decoder):
    """`Model` of the family. `batch.kv[layer]` is a `CompressedCache`."""

    has_mtp = True

    def __init__(
        self,
        config: ModelConfig,
        reader: WeightSource,
        backends: Backends,
        parallel: ParallelContext,
        max_positions: int | None = None,
    ) -> None:
        attention = config.attention
        assert isinstance(attention, CompressedConfig)
        rates = sorted({attention.rate(layer) for layer in range(config.num_layers)})
        self._steps = StepRows(attention, rates, backends.attention, backends.indexer)  # type: ignore[arg-type]
        self._draft_steps = StepRows(attention, [0], backends.attention, None)  # type: ignore[arg-type]
        self._reverse: dict[RopeConfig, RotaryTable] = {}
        super().__init__(config, reader, backends, parallel, max_positions)

    def make_norm(self, reader: WeightSource, prefix: str) -> Any:
        streams, is_last = _streams_of(prefix), prefix.endswith(".norm")
        return StreamNorm(self.backends.ops, reader, streams, prefix, self.config, is_last)

    def norm_prefixes(self, prefix: str) -> tuple[str, ...]:
        return f"{prefix}.", f"{_streams_of(prefix)}."

    def make_attention(self, layer_index: int, reader: WeightSource, rotary: RotaryTable) -> CompressedAttention:
        return CompressedAttention(
            self.config,
            layer_index,
            reader,
            self.backends,
            self.parallel,
            rotary,
            self._reverse_of(layer_index, rotary),
            self._steps,
        )

    def _reverse_of(self, layer_index: int, rotary: RotaryTable) -> RotaryTable:
        """The table of the opposite rotations of a layer's."""
        rope = self.config.rope_of(layer_index)
        if rope not in self._reverse:
            self._reverse[rope] = rotary.reversed()
        return self._reverse[rope]

    def make_feed_forward(self, layer_index: int, reader: WeightSource) -> FeedForward:
        return MoE(self.config, layer_index, self.backends, reader, self.parallel)

    def embed(self, batch: ForwardBatch) -> Tensor:
        assert self.config.streams is not None
        return spread(super().embed(batch), self.config.streams)

    def attention_args(self, batch: ForwardBatch) -> tuple[Any, ...]:
        return batch, self._steps.of(batch, batch.kv[0])

    def planner_of_decodes(self, drafts: bool = False) -> InPlacePlanner:
        return (self._draft_steps if drafts else self._steps).plan_in_place

    def draft_args(self, batch: ForwardBatch) -> tuple[Any, ...]:
        """The tokens of MTP layers have slots of the full pool, also where windows have a pool of their own."""
        batch = self.begin_step(batch)
        return batch, self._draft_steps.of(replace(batch, windows=None), batch.kv[self.config.num_layers])


def _streams_of(norm: str) -> str:
    """Prefix of the weights of the streams, by the norm's."""
    block, _, name = norm.rpartition(".")
    return f"{block}.{_MIXES[name]}"
