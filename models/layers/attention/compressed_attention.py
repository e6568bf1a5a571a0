"""Attention to a window of tokens and to compressed entries of those before (DeepSeek V4).

Legend: T tokens, D hidden, H heads, Dh channels of a key, R rotary width, Q q_lora_rank, G groups of heads, O channels
of a group's projection, I channels of an index head.
Source: DeepSeek-V4 technical report; `inference/model.py` of its release.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from moe_engine.kernels.attention.selected import Turn
from moe_engine.kernels.backends import Backends
from moe_engine.kernels.compression.protocol import CompressorWeights, Kept
from moe_engine.kernels.ops.protocol import HeadNorms, RotaryTable
from moe_engine.kernels.quantization.protocol import UNQUANTIZED, Activation, ActivationFormat, common_format
from moe_engine.models.batch import ForwardBatch
from moe_engine.models.checkpoint.cut import Cut
from moe_engine.models.compressed_cache import CompressedCache
from moe_engine.models.config import ModelConfig
from moe_engine.models.config_sections.compressed import CompressedConfig
from moe_engine.models.layers.attention.compressed_rows import AttendedRows, CompressedStep
from moe_engine.models.layers.attention.compressed_step import StepRows
from moe_engine.models.layers.attention.index_gates import IndexGates
from moe_engine.models.layers.attention.latent_queries import LatentQueries, NormedLatent
from moe_engine.models.layers.attention.rotated_norm import UnweightedNorm
from moe_engine.models.layers.linear import Projection, load_linear
from moe_engine.models.layers.norm import RMSNorm
from moe_engine.models.sharding import local_attention
from moe_engine.models.weights import WeightSource
from moe_engine.parallel.context import ParallelContext
from moe_engine.parallel.share import Share, heads_share


class Compressor:
    """What a token contributes to entries, and the entries. On many ranks every rank has all of it."""

    def __init__(
        self, backends: Backends, reader: WeightSource, prefix: str, config: ModelConfig, rate: int, width: int,
        series: int, rotary: RotaryTable,
    ) -> None:  # fmt: skip
        assert backends.compression is not None
        self._kernel, self._rotary = backends.compression, rotary
        self.projections = {f"{prefix}.{name}": series * width for name in ("kv_proj", "gate_proj")}
        """Rows of the projections of hidden states that `update` takes side by side, by name."""
        bias = reader.tensor(f"{prefix}.position_bias", (rate, series * width), dtype=torch.float32)
        norm = reader.tensor(f"{prefix}.norm.weight", (width,), dtype=torch.float32)
        self._weights = CompressorWeights(bias, norm, config.norm_eps)

    @property
    def rate(self) -> int:
        """Tokens of an entry."""
        return self._weights.rate

    @property
    def width(self) -> int:
        """Channels of the projections."""
        return sum(self.projections.values())

    def update(self, projected: Tensor, step: CompressedStep, kept: Kept, entries: Tensor) -> None:
        """Writes the entries [E, W] that the tokens complete, and what they contribute to later ones."""
        projected, own = projected.to(kept.rows.dtype), step.kept[self.rate]
        places = own.places if own.apart else None
        self._kernel.compress(projected, kept, self._weights, self._rotary, step.tokens, entries, places)
        if not own.apart:
            own.keep(projected, kept)


class EntryIndexer:
    """Selects entries for each query token. Replicated on the ranks of an attention group."""

    def __init__(
        self, backends: Backends, reader: WeightSource, prefix: str, config: ModelConfig, rotary: RotaryTable
    ) -> None:
        a = config.attention
        assert isinstance(a, CompressedConfig) and backends.indexer is not None
        self._ops, self._kernel, self._rotary = backends.ops, backends.indexer, rotary
        self._heads, self._width, self._top_k = a.index_heads, a.index_width, a.top_k
        self.compressor = Compressor(
            backends, reader, f"{prefix}.compressor", config, a.selected_rate, a.index_width, 2, rotary
        )
        gates = reader.tensor(f"{prefix}.weights_proj.weight", (a.index_heads, config.hidden_size), dtype=torch.float32)
        # the scale of the scores is part of the weights: a step has no launch for it
        self._gates = IndexGates(backends, gates * (a.index_heads * a.index_width) ** -0.5)

    @property
    def input_format(self) -> ActivationFormat:
        """Activation format of the hidden states: the head weights are products of unquantized numbers."""
        return UNQUANTIZED

    def update(
        self, projected: Tensor, hidden: Activation, latent: NormedLatent, positions: Tensor, step: CompressedStep,
        cache: CompressedCache,
    ) -> None:  # fmt: skip
        """Writes the index keys of new entries, by their projections; sets the step's selection [T, K], if it has
        one."""
        assert cache.index_keys is not None
        self.compressor.update(projected, step, cache.kept[1], cache.index_keys.squeeze(1))
        if (selection := step.selection) is None:
            return
        q = latent.index_queries().view(-1, self._heads, self._width)
        self._ops.rotate(q, positions, self._rotary)
        weights = self._gates(hidden)
        rows = step.rows[self.compressor.rate].selected.slots
        selection.select(self._kernel, q, weights, cache.index_keys, self._top_k, rows)


class CompressedAttention:
    """hidden [T, D] -> [T, D]; on many ranks H and G count this rank's heads and groups, and the result is their
    partial sum."""

    def __init__(
        self,
        config: ModelConfig,
        layer_index: int,
        reader: WeightSource,
        backends: Backends,
        parallel: ParallelContext,
        rotary: RotaryTable,
        steps: StepRows,
    ) -> None:
        whole = config.attention
        assert isinstance(whole, CompressedConfig) and backends.attention.capabilities.sparse is not None
        self._attention = a = local_attention(whole, parallel)
        self._layer_index, self._rotary, self._steps = layer_index, rotary, steps
        self._ops, self._linear, self._sparse = backends.ops, backends.linear, backends.attention.capabilities.sparse
        self._scale, self._rate = a.head_dim**-0.5, a.rate(layer_index)
        prefix, share, eps = f"model.layers.{layer_index}.self_attn", Share.of(parallel.attn_tp), config.norm_eps
        hidden, heads = config.hidden_size, whole.num_heads
        down = [f"{prefix}.q_a_proj", f"{prefix}.kv_proj"]
        self._down = load_linear(backends.linear, reader, down, [a.q_lora_rank, a.head_dim], hidden)
        norm, queries = RMSNorm(self._ops, reader, f"{prefix}.q_a_layernorm", a.q_lora_rank, eps), heads * a.head_dim
        indexed = {f"{prefix}.indexer.q_b_proj": a.index_heads * a.index_width} if a.selects(layer_index) else {}
        self._queries = LatentQueries(backends.linear, reader, norm, {f"{prefix}.q_b_proj": queries}, share, indexed)
        self._head_norm = self._make_head_norm(eps, reader.device)
        self._kv_norm = RMSNorm(self._ops, reader, f"{prefix}.kv_layernorm", a.head_dim, eps)
        both = self._head_norm
        self._norms = None if both is None else HeadNorms(both.weight, self._kv_norm.weight, eps)
        self._sinks = reader.tensor(f"{prefix}.sinks", (heads,), Cut(share.cut(heads)), dtype=torch.float32)
        self._load_output(whole, config, reader, prefix, share)
        self._compressor: Any = None
        self._projected: Any = None
        self._readers: list[Any] = []  # parts that read the hidden states, in addition to `_down`
        self._indexer: Any = None
        self._load_entries(config, backends, reader, prefix, rotary)

    def _make_head_norm(self, eps: float, device: torch.device) -> UnweightedNorm | None:
        """The norm of a head's query."""
        return UnweightedNorm(self._ops, self._attention.head_dim, eps, device)

    def _load_entries(
        self, config: ModelConfig, backends: Backends, reader: WeightSource, prefix: str, rotary: RotaryTable
    ) -> None:
        """What writes and selects the layer's entries."""
        if self._rate:
            series = 2 if self._attention.selects(self._layer_index) else 1
            self._compressor = Compressor(
                backends, reader, f"{prefix}.compressor", config, self._rate, self._attention.head_dim, series, rotary
            )
        if self._attention.selects(self._layer_index):
            self._indexer = EntryIndexer(backends, reader, f"{prefix}.indexer", config, rotary)
        parts = [self._compressor, *([] if self._indexer is None else [self._indexer.compressor])]
        if self._compressor is not None:  # one product for both, whose results are few channels
            names = {name: rows for part in parts for name, rows in part.projections.items()}
            self._projected = load_linear(backends.linear, reader, [*names], [*names.values()], config.hidden_size)
            self._readers = [self._projected, *([] if self._indexer is None else [self._indexer])]

    def _load_output(
        self, whole: CompressedConfig, config: ModelConfig, reader: WeightSource, prefix: str, share: Share
    ) -> None:
        """The projections of groups of heads, and that of all groups. A rank with fewer heads than a group has its part
        of the columns of the group's projection."""
        a, groups = self._attention, heads_share(share, whole.output_groups)
        rows, columns = whole.output_groups * whole.output_rank, whole.num_heads * whole.head_dim // whole.output_groups
        own = a.num_heads * a.head_dim // a.output_groups
        first = share.rank * own % columns
        cut = Cut(groups.cut(rows), None if own == columns else slice(first, first + own))
        weight = reader.linear(*Projection(f"{prefix}.o_a_proj", (rows, columns), cut))
        self._groups = self._linear.prepare_heads(weight.view(a.output_groups, a.output_rank, own).contiguous())
        self._o = load_linear(self._linear, reader, [f"{prefix}.o_b_proj"], [config.hidden_size], rows, in_share=groups)

    @property
    def inner_norms(self) -> list[RMSNorm]:
        """Norms whose results linear layers read."""
        return [self._queries.norm]

    @property
    def input_format(self) -> ActivationFormat:
        """Activation format of the hidden states."""
        return common_format(self._down.input_format, *(part.input_format for part in self._readers))

    def forward(self, hidden: Activation, batch: ForwardBatch, step: CompressedStep | None = None) -> Tensor:
        a, cache = self._attention, self.cache_of(batch)
        step = self._steps.of(batch) if step is None else step
        down = self._down(hidden)
        latent = self._queries(down[:, : a.q_lora_rank])
        if self._projected is not None:
            projected, width = self._projected(hidden), self._compressor.width
            self._compressor.update(projected[:, :width], step, cache.kept[0], cache.entries)
            if self._indexer is not None:
                self._indexer.update(projected[:, width:], hidden, latent, batch.positions, step, cache)
        q = latent.queries().view(-1, a.num_heads, a.head_dim)
        q = self._written(q, down[:, a.q_lora_rank :], batch.positions, step.slots, cache)
        return self._attend(q, batch, step.rows[self._rate], cache)

    def _attend(self, q: Tensor, batch: ForwardBatch, rows: AttendedRows, cache: CompressedCache) -> Tensor:
        """The layer's result [T, D] by rotated queries [T, H, Dh]."""
        a = self._attention
        given = q, cache.rows, rows.selected, self._scale, rows.plan, a.head_dim, self._sinks
        if self._sparse.turned is not None and self._rotary.interleaved:  # a key is also the value
            mixed = self._sparse.turned(*given, Turn(batch.positions, self._rotary))
        else:
            mixed = self._sparse.run(*given)
            self._ops.rotate(mixed, batch.positions, self._rotary, inverse=True)
        grouped = mixed.view(-1, a.output_groups, a.num_heads * a.head_dim // a.output_groups)
        able = self._linear.capabilities
        quantized, better = able.heads_quantized, able.quantizes_heads
        if quantized is not None and better is not None and better(len(grouped), self._groups, self._o.weight):
            return self._o(quantized(grouped, self._groups, self._o.input_format))
        return self._o(self._linear.run_heads(grouped, self._groups).flatten(1))

    def cache_of(self, batch: ForwardBatch) -> CompressedCache:
        """This layer's cache."""
        cache: CompressedCache = batch.kv[self._layer_index]
        return cache

    def remember(self, hidden: Activation, batch: ForwardBatch) -> None:
        """Only writes the cache, of an MTP layer: it has no entries, and its tokens have slots of the full pool."""
        kv = self._down(hidden)[:, self._attention.q_lora_rank :]
        self._written(kv.new_empty(len(kv), 0, kv.shape[1]), kv, batch.positions, batch.slots, self.cache_of(batch))

    def _written(self, q: Tensor, kv: Tensor, positions: Tensor, slots: Tensor, cache: CompressedCache) -> Tensor:
        """Writes the normed, rotated keys of kv [T, Dh] to the cache. Returns the normed, rotated q [T, H, Dh]."""
        fused = self._ops.capabilities.grouped_rows
        if fused is not None and self._norms is not None:
            keys, rows = kv.unsqueeze(1), cache.rows.unsqueeze(1)
            return fused(q, keys, None, self._norms, positions, self._rotary, slots, rows, None, trailing=True)
        keys = self._kv_norm(kv)
        self._ops.rotate(keys.unsqueeze(1), positions, self._rotary)
        cache.rows.index_copy_(0, slots, keys.to(cache.rows.dtype))
        if not q.shape[1]:
            return q
        q = q if self._head_norm is None else self._head_norm(q)
        self._ops.rotate(q, positions, self._rotary)
        return q
