"""Attention to a window of tokens and to entries that several layers read (DeepSeek V4.1).

Some layers write entries of one or two tokens, with an index key made from each; some select entries by an indexer. All
other layers read the entries and the selection of the layer before them. Keys and entries are rounded to the numbers of
the formats with which the model was trained.

Legend: T tokens, E entries that a step completes, W channels of an entry, I of an index key.
Source: transformers' `modeling_deepseek_v41.py`; DeepSeek V4.1's technical report.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from moe_engine.kernels.backends import Backends
from moe_engine.kernels.compression.protocol import CompressedTokens, Kept
from moe_engine.kernels.indexer.candidates import best_blocks, select_among
from moe_engine.kernels.ops.block_rounding import round_e2m1, round_e2m1_small, round_e4m3
from moe_engine.kernels.ops.protocol import RotaryTable
from moe_engine.kernels.quantization.protocol import (
    UNQUANTIZED,
    Activation,
    ActivationFormat,
    unquantized,
)
from moe_engine.models.batch import ForwardBatch
from moe_engine.models.compressed_cache import CompressedCache
from moe_engine.models.compressed_config import SharedEntriesConfig
from moe_engine.models.config import ModelConfig
from moe_engine.models.layers.compressed_attention import CompressedAttention
from moe_engine.models.layers.compressed_rows import CompressedStep
from moe_engine.models.layers.compressed_step import StepRows
from moe_engine.models.layers.linear import Linear, load_linear
from moe_engine.models.layers.norm import RMSNorm
from moe_engine.models.weights import WeightSource


@dataclass
class SharedStep:
    """A step of the layers of one rate, and what a layer leaves to those behind it.

    Attributes:
        complete: [E] int64, the tokens that complete an entry.
        first_entry: the row of the first entry in the rows of attention as they are now.
        candidates: blocks [T, B] of `best_blocks`; None: all entries are candidates.
    """

    step: CompressedStep
    complete: Tensor
    first_entry: int
    candidates: Tensor | None = None

    def rows_of(self, rate: int, cache: CompressedCache, num_slots: int) -> Any:
        """The rows of a layer, whose entries have other numbers in each layer's cache."""
        rows = self.step.rows[rate]
        if cache.num_slots != self.first_entry:
            slots = rows.selected.slots
            slots.add_((slots >= num_slots) * (cache.num_slots - self.first_entry))
            self.first_entry = cache.num_slots
        return rows


class SharedSteps:
    """Builds the steps of all rates."""

    def __init__(self, attention: SharedEntriesConfig, backends: Backends) -> None:
        layers = {rate: layer for layer, rate in reversed([*enumerate(attention.rates)])}
        attend: Any = backends.attention
        self._rows = {
            rate: StepRows(_view(attention, rate), {rate: layer}, attend, backends.indexer)
            for rate, layer in layers.items()
        }
        self._layers = layers

    def of(self, batch: ForwardBatch) -> dict[int, SharedStep]:
        """By rate."""
        found = {}
        for rate, rows in self._rows.items():
            step = rows.of(batch)
            ends = (batch.positions + 1) % max(rate, 1) == 0
            complete = ends.nonzero().squeeze(1) if rate > 1 else batch.positions[:0]
            found[rate] = SharedStep(step, complete, batch.kv[self._layers[rate]].num_slots)
        return found


class EntryWriter:
    """Entries and index keys of tokens. On many ranks every rank has all of it."""

    def __init__(
        self, backends: Backends, reader: WeightSource, prefix: str, config: ModelConfig, rate: int, rotary: RotaryTable
    ) -> None:
        a = config.attention
        assert isinstance(a, SharedEntriesConfig)
        self._ops, self._rotary, self._rate, self._width = backends.ops, rotary, rate, a.head_dim
        names = [f"{prefix}.compressor.{name}" for name in ("kv_proj", "gate_proj")[: 1 + (rate > 1)]]
        self._project = load_linear(backends.linear, reader, names, [a.head_dim] * len(names), config.hidden_size)
        self._norm = RMSNorm(backends.ops, reader, f"{prefix}.compressor.norm", a.head_dim, config.norm_eps)
        self._key = load_linear(backends.linear, reader, [f"{prefix}.indexer.wk"], [a.index_width], a.head_dim)
        self._key_norm = RMSNorm(backends.ops, reader, f"{prefix}.indexer.k_norm", a.index_width, config.norm_eps)
        self.input_format = self._project.input_format
        """Activation format of the hidden states."""

    def update(self, hidden: Activation, shared: SharedStep, cache: CompressedCache) -> None:
        """Writes the entries that the tokens complete, and what they contribute to later ones."""
        projected, tokens = self._project(hidden), shared.step.tokens
        if self._rate == 1:
            latents, slots, positions = projected, tokens.slots, tokens.positions
        else:
            last = shared.complete
            latents = self._pairs(projected, cache.kept[0], tokens, last).to(projected.dtype)
            slots, positions = tokens.slots[last] // 2, tokens.positions[last] - 1
            shared.step.kept[2].keep(projected.to(cache.kept[0].rows.dtype), cache.kept[0])
        latents = self._norm(latents)
        assert cache.index_keys is not None
        keys = self._key_norm(self._key(latents))
        self._ops.rotate(keys.unsqueeze(1), positions, self._rotary)
        cache.index_keys.squeeze(1).index_copy_(0, slots, round_e2m1(keys).to(cache.index_keys.dtype))
        self._ops.rotate(latents.unsqueeze(1), positions, self._rotary)
        cache.entries.index_copy_(0, slots, round_e2m1_small(latents).to(cache.entries.dtype))

    def _pairs(self, projected: Tensor, kept: Kept, tokens: CompressedTokens, last: Tensor) -> Tensor:
        """The sums [E, W] of tokens `last` and those before them, weighted by the softmax of their gates; float32."""
        positions = tokens.positions[last]
        stored = kept.rows[kept.places(positions - 1, tokens.rows[last], tokens.slots[last])]
        in_step = positions > tokens.starts[last]
        before = torch.where(in_step.unsqueeze(1), projected[(last - 1).clamp(min=0)], stored).float()
        (value, gate), (first, first_gate) = (part.split(self._width, 1) for part in (projected[last].float(), before))
        return first + (gate - first_gate).sigmoid() * (value - first)


class SharedIndexer:
    """Selects entries for each query token. Replicated on the ranks of an attention group."""

    def __init__(
        self, backends: Backends, reader: WeightSource, prefix: str, config: ModelConfig, layer: int,
        rotary: RotaryTable,
    ) -> None:  # fmt: skip
        a = config.attention
        assert isinstance(a, SharedEntriesConfig) and backends.indexer is not None
        self._ops, self._kernel, self._rotary, self._config, self._layer = (
            backends.ops, backends.indexer, rotary, a, layer,
        )  # fmt: skip
        rows = [a.index_heads * a.index_width]
        self._q = load_linear(backends.linear, reader, [f"{prefix}.q_b_proj"], rows, a.q_lora_rank)
        gates = reader.tensor(f"{prefix}.weights_proj.weight", (a.index_heads, config.hidden_size), dtype=torch.float32)
        self._gates = Linear(backends.linear, gates * (a.index_heads * a.index_width) ** -0.5)
        self.input_format: ActivationFormat = UNQUANTIZED
        """Activation format of the hidden states: the head weights are products of unquantized numbers."""

    @property
    def latent_format(self) -> ActivationFormat:
        """Activation format of the query's latent."""
        return self._q.input_format

    def update(
        self, hidden: Activation, latent: Activation, positions: Tensor, shared: SharedStep, cache: CompressedCache,
        first_entry: int,
    ) -> None:  # fmt: skip
        """Sets the step's selection [T, K], if it has one. first_entry: of the step's rows when they were made."""
        if (selection := shared.step.selection) is None:
            return
        a, queries = self._config, selection.queries
        assert cache.index_keys is not None
        q = self._q(latent).view(-1, a.index_heads, a.index_width)
        self._ops.rotate(q, positions, self._rotary)
        q, weights = round_e2m1(q), self._gates(unquantized(hidden).float())
        if self._layer == a.candidate_source:
            limited = max(queries.context_lens) > a.candidate_blocks * a.candidate_size
            found = best_blocks(q, weights, cache.index_keys, queries, a.candidate_blocks, a.candidate_size)
            shared.candidates = found if limited else None
        if a.limits_candidates(self._layer) and shared.candidates is not None:
            select_among(q, weights, cache.index_keys, queries, shared.candidates, a.candidate_size, selection.selected)
        else:
            self._kernel.select(q, weights, cache.index_keys, queries, a.top_k, selection.selected, selection.plan)
        selection.place(shared.step.rows[a.rate(self._layer)].selected.slots)
        shared.first_entry = first_entry


class SharedAttention(CompressedAttention):
    """`CompressedAttention` of a layer that reads entries of its own or of a layer before it."""

    def _make_head_norm(self, eps: float, device: torch.device) -> None:
        return None

    def _load_entries(
        self, config: ModelConfig, backends: Backends, reader: WeightSource, prefix: str, rotary: RotaryTable
    ) -> None:
        a = self._attention
        assert isinstance(a, SharedEntriesConfig)
        if a.writes(self._layer_index):
            self._compressor = EntryWriter(backends, reader, prefix, config, self._rate, rotary)
        if a.selects(self._layer_index):
            self._indexer = SharedIndexer(backends, reader, f"{prefix}.indexer", config, self._layer_index, rotary)

    def _stored(self, keys: Tensor) -> Tensor:
        return round_e4m3(keys)

    def forward(  # type: ignore[override]
        self, hidden: Activation, batch: ForwardBatch, steps: dict[int, SharedStep]
    ) -> Tensor:
        a, cache = self._attention, self.cache_of(batch)
        assert isinstance(a, SharedEntriesConfig)
        shared = steps[self._rate]
        down = self._down(hidden)
        latent = self._q_norm(down[:, : a.q_lora_rank])
        group = a.group(self._layer_index)
        num_slots = cache.num_slots // (len(group) - group.index(self._layer_index))
        if self._compressor is not None:
            self._compressor.update(hidden, shared, cache)
        if self._indexer is not None:
            selection = shared.step.selection
            made = shared.first_entry if selection is None else selection.first_entry
            self._indexer.update(hidden, latent, batch.positions, shared, cache, made)
        q = self._q(latent).view(-1, a.num_heads, a.head_dim)
        q = self._written(q, down[:, a.q_lora_rank :], batch.positions, shared.step.slots, cache)
        return self._attend(q, batch, shared.rows_of(self._rate, cache, num_slots), cache)


def _view(attention: SharedEntriesConfig, rate: int) -> SharedEntriesConfig:
    """The config whose selecting layers have this rate."""
    return replace(attention, selected_rate=rate if rate else -1)
