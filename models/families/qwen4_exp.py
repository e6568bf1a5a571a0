"""Qwen3.8-Flash-Next: gated delta nets, gated attention over pools of tokens in every fourth layer, residual streams
with gates of low rank, rows of n-gram tables; images."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cached_property, partial
from typing import Any

from moe_engine.kernels.attention.renewable import InPlacePlanner
from moe_engine.kernels.indexer.pools import PoolTurns
from moe_engine.kernels.ops.protocol import RotaryTable
from moe_engine.kernels.queries import AttentionBatch
from moe_engine.models.batch import ForwardBatch
from moe_engine.models.config import GQAConfig
from moe_engine.models.families.image_text import ImageInputs
from moe_engine.models.families.qwen3_next import Qwen3NextModel
from moe_engine.models.families.stream_residual import StreamResidual
from moe_engine.models.layers.attention.gqa import group_inputs
from moe_engine.models.layers.attention.grouped_pools import GroupedPoolSteps
from moe_engine.models.layers.attention.pool_turns import turns_of
from moe_engine.models.layers.attention.pooled_gqa import PooledGQAttention, PooledInputs
from moe_engine.models.layers.attention.pools_in_place import PoolsInPlace
from moe_engine.models.layers.compiled_layer import CompiledLayer
from moe_engine.models.layers.decoder import Reloadable
from moe_engine.models.layers.residual.gated_streams import GatedStreamNorm, StreamAdder
from moe_engine.models.layers.residual.ngram_input import NgramInput
from moe_engine.models.layers.states.gated_delta_net import GatedDeltaNet
from moe_engine.models.tensors.model import layer_index
from moe_engine.models.tensors.stream import STREAM_GATES
from moe_engine.models.weights import WeightSource


class Qwen4ExpModel(StreamResidual, ImageInputs, Qwen3NextModel):
    """`Model` of the family. `batch.kv[layer]` is (keys, values, index keys); for a gated delta net its state tensors,
    and those of `NgramInput` if rows of a table are added before it. An image token has its embedding in all streams,
    and the n-grams of its placeholder."""

    @cached_property
    def _steps(self) -> GroupedPoolSteps:
        attention, kernels = self.config.attention, self.backends
        assert isinstance(attention, GQAConfig) and attention.indexer is not None and kernels.indexer is not None
        return GroupedPoolSteps(attention.indexer, kernels.attention, kernels.indexer)  # type: ignore[arg-type]

    def make_attention(self, layer_index: int, reader: WeightSource, rotary: RotaryTable) -> Any:
        layer = self.config, layer_index, reader, self.backends, self.parallel
        if layer_index in self.config.state_layers:
            return GatedDeltaNet(*layer)
        return PooledGQAttention(*layer, rotary)

    def make_norm(self, reader: WeightSource, prefix: str) -> Any:
        streams = self.config.streams
        if self._has_ngrams(prefix) and streams is not None:
            return StreamAdder(streams.count, self.config.hidden_size)
        return self._gates(reader, prefix)

    def norm_prefixes(self, prefix: str) -> tuple[str, ...]:
        return () if self._has_ngrams(prefix) else (f"{_gates_of(prefix)}.",)

    def make_layer(self, layer_index: int, *given: Any, **options: Any) -> Any:
        layer: Any = super().make_layer(layer_index, *given, **options)
        if self._has_ngrams(f"model.layers.{layer_index}.input_layernorm"):
            reader: WeightSource = given[0]
            layer.ngrams = self._ngrams(reader, layer_index)
        return layer

    def layer_modules(self, layer_index: int, layer: Any, next_norm: str) -> Iterator[Reloadable]:
        yield from super().layer_modules(layer_index, layer, next_norm)
        if layer.ngrams is not None:
            name = f"model.layers.{layer_index}"
            prefixes = f"{name}.ple.", f"{_gates_of(f'{name}.input_layernorm')}."
            yield Reloadable(prefixes, layer.ngrams, partial(self._ngrams, layer_index=layer_index))

    def step_args(self, batch: ForwardBatch) -> tuple[Any, ...]:
        given = self.begin_step(batch)
        batch = self.place(given)
        (inputs,) = group_inputs(batch, self.config.cache_groups, self.backends.attention)  # type: ignore[arg-type]
        return batch, [PooledInputs.of(inputs, self._steps.of(batch), self._turns_of(given))]

    def remember_args(self, batch: ForwardBatch) -> tuple[Any, ...]:
        return self.place(batch), self._turns_of(batch)

    def _turns_of(self, batch: ForwardBatch) -> PoolTurns:
        return turns_of(batch, self.rotary, self._steps.rule.size, self._axis_rows)

    def planner_of_decodes(self, drafts: bool = False) -> InPlacePlanner:
        return self._plan_in_place

    def _plan_in_place(self, batch: AttentionBatch) -> PoolsInPlace | None:
        layers = [layer for layer in self.layers if not isinstance(layer, CompiledLayer)]
        rows = [layer.ngrams.rows for layer in layers if layer.ngrams is not None]
        return self._steps.plan_in_place(batch) if all(part.in_order for part in rows) else None

    def _has_ngrams(self, norm: str) -> bool:
        """Whether the norm is that before a layer to whose streams rows of a table are added."""
        streams = self.config.streams
        engram = None if streams is None else streams.engram
        return engram is not None and norm.endswith(".input_layernorm") and layer_index(norm) in engram.layers

    def _gates(self, reader: WeightSource, norm: str) -> GatedStreamNorm:
        is_last = norm.endswith(".norm")
        return GatedStreamNorm(self.backends.ops, self.backends.linear, reader, _gates_of(norm), self.config, is_last)

    def _ngrams(self, reader: WeightSource, layer_index: int) -> NgramInput:
        norm = self._gates(reader, f"model.layers.{layer_index}.input_layernorm")
        return NgramInput(self.config, layer_index, reader, self.backends, norm)


def _gates_of(norm: str) -> str:
    """Prefix of the gates of the streams, by the norm's."""
    block, _, name = norm.rpartition(".")
    return f"{block}.{STREAM_GATES[name]}"
