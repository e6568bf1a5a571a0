"""Grouped-query attention with an output gate over the pools of tokens that an indexer selects for all heads
(Qwen3.8-Flash-Next).

The key of a pool is the mean of its tokens' index keys, normed and rotated as its first token (`pool_turns`). It takes
the place of its last token's in the cache; the others keep their own, neither normed nor rotated.

Legend: T tokens, D hidden, H query heads, Dh head width, Hi index heads, I channels of an index head, P tokens of a
pool.
Source: transformers (qwen4_exp).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from moe_engine.kernels.backends import Backends
from moe_engine.kernels.indexer.pools import PoolTurns
from moe_engine.kernels.ops.protocol import RotaryTable
from moe_engine.kernels.quantization.protocol import Activation, ActivationFormat, common_format
from moe_engine.models.batch import ForwardBatch
from moe_engine.models.config import GQAConfig, ModelConfig
from moe_engine.models.layers.attention.gated_gqa import GatedGQAttention
from moe_engine.models.layers.attention.gqa import GroupInputs, Groups
from moe_engine.models.layers.attention.mla_chunks import AttentionChunk
from moe_engine.models.layers.attention.pools_in_place import PoolChoice
from moe_engine.models.layers.linear import load_linear
from moe_engine.models.layers.norm import RMSNorm
from moe_engine.models.weights import WeightSource
from moe_engine.parallel.context import ParallelContext


@dataclass(frozen=True, slots=True)
class PooledInputs(GroupInputs):
    """With the chunks of the step, and the rotations of the pools that it completes."""

    turns: PoolTurns = field(kw_only=True)

    @classmethod
    def of(cls, inputs: GroupInputs, chunks: Sequence[AttentionChunk], turns: PoolTurns) -> PooledInputs:
        return cls(inputs.queries, inputs.plan, inputs.slots, chunks, turns=turns)


class MeanPoolIndexer:
    """Replicated on the ranks of an attention group: all compute the same selection from the same hidden states."""

    def __init__(
        self, config: ModelConfig, reader: WeightSource, backends: Backends, prefix: str, rotary: RotaryTable
    ) -> None:
        attention = config.attention
        assert isinstance(attention, GQAConfig) and attention.indexer is not None and backends.indexer is not None
        self._kernel, self._ops, self._rotary = backends.indexer, backends.ops, rotary
        self._heads, self._width, self._pool = attention.indexer.num_heads, attention.index_width, attention.pool
        rows = (self._heads + 1) * self._width
        self._project = load_linear(backends.linear, reader, [f"{prefix}.index_qk_proj"], [rows], config.hidden_size)
        self._q_norm, self._k_norm = (
            RMSNorm(self._ops, reader, f"{prefix}.{part}_layernorm", self._width, config.norm_eps, config.norm_plus)
            for part in "qk"
        )

    @property
    def input_format(self) -> ActivationFormat:
        """Activation format of the hidden states."""
        return self._project.input_format

    def update(self, hidden: Activation, batch: ForwardBatch, cache: Tensor, inputs: PooledInputs) -> None:
        """Writes the index keys of tokens, hidden [T, D] -> cache[slots], [N, 1, I], and those of the pools that they
        complete; sets the slots of the chunks with a selection."""
        q = self.write(hidden, batch, cache, inputs.turns)
        selecting = [chunk for chunk in inputs.chunks if isinstance(chunk.index_plan, PoolChoice)]
        if not selecting:
            return
        q = self._q_norm(q.unflatten(1, (self._heads, self._width)))
        self._ops.rotate_leading(q, batch.positions, self._rotary)
        weights = torch.full((len(q), self._heads), self._width**-0.5, device=q.device)
        for chunk in selecting:
            assert chunk.selected is not None
            chunk.index_plan.select(self._kernel, q[chunk.tokens], weights[chunk.tokens], cache, chunk.selected.slots)

    def write(self, hidden: Activation, batch: ForwardBatch, cache: Tensor, turns: PoolTurns) -> Tensor:
        """The index keys of `update` alone. Returns the index queries before their norm, [T, Hi I]."""
        q, k = self._project(hidden).split((self._heads * self._width, self._width), 1)
        write_means, norm = self._kernel.pools.write_means, self._k_norm
        if write_means is None:
            self._write(k, turns, batch.slots, cache.squeeze(1))
        else:
            write_means(k, norm.weight, norm.eps, turns, batch.slots, cache)
        return q

    def _write(self, keys: Tensor, turns: PoolTurns, slots: Tensor, stored: Tensor) -> None:
        """keys [T, I] -> stored[slots], [N, I]. A page has whole pools: the tokens of one have adjacent slots. Tokens
        of a pool before those of the step are read from the cache."""
        own, size = keys.to(stored.dtype), self._pool
        stored.index_copy_(0, slots, own)
        places = (slots.unsqueeze(1) + torch.arange(1 - size, 1, device=slots.device)).clamp_(min=0)  # [T, P]
        pooled = self._k_norm(stored[places].float().mean(1).to(stored.dtype).unsqueeze(1))
        self._ops.rotate_leading(pooled, turns.rows, turns.table)
        completes = (turns.places + 1) % size == 0
        stored.index_copy_(0, slots, torch.where(completes.unsqueeze(1), pooled.squeeze(1), own))


class PooledGQAttention(GatedGQAttention):
    """`GatedGQAttention` with an indexer. ``batch.kv[layer]`` is (keys, values, index keys)."""

    def __init__(
        self, config: ModelConfig, layer_index: int, reader: WeightSource, backends: Backends,
        parallel: ParallelContext, rotary: RotaryTable,
    ) -> None:  # fmt: skip
        super().__init__(config, layer_index, reader, backends, parallel, rotary)
        prefix = f"model.layers.{layer_index}.self_attn.indexer"
        self._indexer = MeanPoolIndexer(config, reader, backends, prefix, rotary)

    @property
    def input_format(self) -> ActivationFormat:
        return common_format(super().input_format, self._indexer.input_format)

    def forward(self, hidden: Activation, batch: ForwardBatch, groups: Groups | None = None) -> Tensor:
        assert groups is not None
        inputs, cache = groups[self._group], self.cache_of(batch)
        assert isinstance(inputs, PooledInputs)
        parts = self._parts(self._qkv(hidden))
        q = self._rows(parts, batch.positions, inputs.slots, cache)
        self._indexer.update(hidden, batch, batch.kv[self._layer_index][2], inputs)
        mixed = [self._mixed(q[chunk.tokens], cache, chunk) for chunk in inputs.chunks]
        return self._gated(mixed[0] if len(mixed) == 1 else torch.cat(mixed), parts)

    def remember(self, hidden: Activation, batch: ForwardBatch, turns: PoolTurns | None = None) -> None:
        assert turns is not None
        super().remember(hidden, batch)
        self._indexer.write(hidden, batch, batch.kv[self._layer_index][2], turns)

    def _mixed(self, q: Tensor, cache: tuple[Tensor, Tensor], chunk: AttentionChunk) -> Tensor:
        """q [t, H, Dh] of the chunk's tokens -> the same shape."""
        if chunk.selected is None:
            return self._paged(q, *cache, chunk.queries, self._scale, chunk.plan)
        return self._paged(q, *cache, chunk.plan.queries, self._scale, chunk.plan.own)
