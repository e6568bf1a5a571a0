"""Grouped-query attention to selected blocks of the context (MiniMax-M3): each KV head has an index head, which selects
the blocks for the head's query heads.

Attention over a selection needs no kernel of its own: a KV head of a query token is a request of its own, with the list
of its selected slots as its row of the slot table.

Legend: T tokens, D hidden, H query heads, G KV heads, Dh width of a key, V width of a value, I width of an index key.
"""

from __future__ import annotations

import torch
from torch import Tensor

from moe_engine.kernels.backends import Backends
from moe_engine.kernels.indexer import index_keys
from moe_engine.kernels.ops.protocol import HeadNorms, RotaryTable
from moe_engine.kernels.quantization.protocol import Activation, ActivationFormat, common_format
from moe_engine.models.batch import ForwardBatch
from moe_engine.models.config import GQAConfig, ModelConfig
from moe_engine.models.layers.attention.block_chunks import BlockChunk
from moe_engine.models.layers.attention.gqa import GQAttention, Groups
from moe_engine.models.layers.linear import load_linear
from moe_engine.models.layers.norm import RMSNorm
from moe_engine.models.weights import WeightSource
from moe_engine.parallel.context import ParallelContext
from moe_engine.parallel.share import WHOLE, Share, heads_share


class BlockSparseGQAttention(GQAttention):
    """`GQAttention` with an indexer. ``batch.kv[layer]`` is (keys, values, index keys), the last [num_slots, 1, I], in
    bytes of bfloat16 with FP8 rows. Index keys are on all ranks of an attention group, index heads with their KV
    heads."""

    def __init__(
        self, config: ModelConfig, layer_index: int, reader: WeightSource, backends: Backends,
        parallel: ParallelContext, rotary: RotaryTable,
    ) -> None:  # fmt: skip
        super().__init__(config, layer_index, reader, backends, parallel, rotary)
        whole = config.attention_of(layer_index)
        assert isinstance(whole, GQAConfig) and whole.blocks is not None and backends.block_index is not None
        self._rule, self._width, self._index_kernel = whole.blocks.rule, whole.blocks.width, backends.block_index
        share = heads_share(Share.of(parallel.attn_tp), whole.num_kv_heads)
        prefix, width = f"model.layers.{layer_index}.self_attn", self._width
        names, sizes = [f"{prefix}.index_{part}_proj" for part in "qk"], [whole.num_kv_heads * width, width]
        self._index = load_linear(backends.linear, reader, names, sizes, config.hidden_size, False, [share, WHOLE])
        self._index_q_norm, self._index_k_norm = (
            RMSNorm(self._ops, reader, f"{prefix}.index_{part}_norm", width, config.norm_eps, config.norm_plus)
            for part in "qk"
        )
        self._index_norms = HeadNorms(self._index_q_norm.weight, self._index_k_norm.weight, config.norm_eps)

    @property
    def input_format(self) -> ActivationFormat:
        return common_format(super().input_format, self._index.input_format)

    def forward(self, hidden: Activation, batch: ForwardBatch, groups: Groups | None = None) -> Tensor:
        assert groups is not None
        inputs, cache = groups[self._group], self.cache_of(batch)
        q = self.before(hidden, batch.positions, inputs.slots, cache)
        index_cache = _as_keys(batch.kv[self._layer_index][2])
        index_q = self._update_index(hidden, batch.positions, inputs.slots, index_cache)
        parts = [self._mixed(q[chunk.tokens], cache, chunk, index_q, index_cache) for chunk in inputs.chunks]
        return self.after(parts[0] if len(parts) == 1 else torch.cat(parts))

    def _update_index(self, hidden: Activation, positions: Tensor, slots: Tensor, cache: Tensor) -> Tensor:
        """Writes the tokens' index keys, and returns their index queries [T, G, I] in the cache's dtype."""
        heads = self._gqa.num_kv_heads
        q, k = self._index(hidden).split((heads * self._width, self._width), 1)
        q, k = q.unflatten(1, (heads, self._width)), k.unsqueeze(1)
        if self._grouped_rows is not None and cache.dtype == q.dtype:
            norms, rotary = self._index_norms, self._rotary
            return self._grouped_rows(q, k, None, norms, positions, rotary, slots, cache, None)
        q, k = self._index_q_norm(q), self._index_k_norm(k)
        self._ops.rotate_leading(q, positions, self._rotary)
        self._ops.rotate_leading(k, positions, self._rotary)
        index_keys.write(k.squeeze(1), slots, cache)
        return q.to(cache.dtype)

    def _mixed(
        self, q: Tensor, cache: tuple[Tensor, Tensor], chunk: BlockChunk, index_q: Tensor, index_cache: Tensor
    ) -> Tensor:
        """q [t, H, Dh] of the chunk's tokens -> [t, H, V]."""
        if chunk.selected is None or chunk.rows is None:
            return self._paged(q, *cache, chunk.queries, self._scale, chunk.plan)
        self._index_kernel.select(
            index_q[chunk.tokens], index_cache, chunk.queries, self._rule, chunk.selected, chunk.index_plan
        )
        heads = self._gqa.num_kv_heads
        keys, values = (part.view(-1, 1, part.shape[-1]) for part in cache)
        by_head = q.reshape(len(q) * heads, -1, q.shape[-1])
        return self._paged(by_head, keys, values, chunk.rows, self._scale, chunk.plan).view(len(q), q.shape[1], -1)


def _as_keys(cache: Tensor) -> Tensor:
    """The index keys [num_slots, 1, I] of a cache of any dtype."""
    return cache.view(torch.bfloat16) if cache.element_size() == 1 else cache
