"""MLA without rotary positions, over the pools of tokens that an indexer selects (GLM-5.3-Flash).

Legend: T tokens, D hidden, H heads, N channels of a query, V of a value, C kv_lora_rank, Q q_lora_rank.
All tokens run in the absorbed form: a cached latent is key and value as a whole.
"""

from __future__ import annotations

from math import inf
from typing import Any

import torch
from torch import Tensor

from moe_engine.kernels.backends import Backends
from moe_engine.kernels.quantization.protocol import Activation, ActivationFormat, common_format
from moe_engine.models.batch import ForwardBatch
from moe_engine.models.config import MLAConfig, ModelConfig
from moe_engine.models.layers.attention.indexer import index_queries, joined_keys
from moe_engine.models.layers.attention.latent_queries import NormedLatent
from moe_engine.models.layers.attention.mla import MLAAttention
from moe_engine.models.layers.attention.mla_chunks import AttentionChunk
from moe_engine.models.layers.attention.pool_chunks import PoolSteps
from moe_engine.models.layers.attention.pool_indexer import PoolIndexer
from moe_engine.models.weights import WeightSource


class PooledMLAAttention(MLAAttention):
    """`MLAAttention` with a `PoolIndexer`. ``batch.kv[layer]`` is (latents, index keys, gates of index keys)."""

    _joined = False
    """True if the product of the layer's input has the rows of the index keys."""

    def __init__(
        self, config: ModelConfig, layer_index: int, reader: WeightSource, backends: Backends, *others: Any,
        steps: PoolSteps, **options: Any,
    ) -> None:  # fmt: skip
        super().__init__(config, layer_index, reader, backends, *others, **options)
        whole = config.attention
        assert isinstance(whole, MLAConfig)
        sparse = backends.attention.capabilities.sparse
        assert sparse is not None
        self._sparse, self._steps, prefix = sparse, steps, f"model.layers.{layer_index}.self_attn.indexer"
        self._indexer = PoolIndexer(whole, config.hidden_size, reader, backends, prefix, not self._joined)
        # kernels for rows that are key and value as a whole take sinks: these have no weight
        self._sinks = torch.full((self._mla.num_heads,), -inf, device=reader.device)

    def _rows_between(self, mla: MLAConfig, reader: WeightSource, prefix: str) -> dict[str, int]:
        rows = joined_keys(mla, reader, prefix)
        self._joined = bool(rows)
        return rows

    def _index_queries(self, mla: MLAConfig, prefix: str) -> dict[str, int]:
        return index_queries(mla, prefix)

    @property
    def input_format(self) -> ActivationFormat:
        return common_format(super().input_format, self._indexer.input_format)

    def chunks(self, batch: ForwardBatch) -> list[AttentionChunk]:
        return self._steps.of(batch)

    def forward(self, hidden: Activation, batch: ForwardBatch, chunks: list[AttentionChunk] | None = None) -> Tensor:
        mla, cache, chunks = self._mla, self.cache_of(batch), self.chunks(batch) if chunks is None else chunks
        assert self._queries is not None
        down = self._kv_a(hidden)
        latent = self._queries(down[:, : self._queries.norm.width])
        self._write(down, hidden, latent, batch, chunks)
        q = latent.queries().view(-1, mla.num_heads, mla.qk_nope_head_dim)
        out = q.new_empty(q.shape[0], mla.num_heads, mla.v_head_dim)  # [T, H, V]
        for chunk in chunks:
            self._absorbed(q[chunk.tokens], cache, chunk, out[chunk.tokens])
        return self._o(out.flatten(1))

    def remember(self, hidden: Activation, batch: ForwardBatch) -> None:
        self._write(self._kv_a(hidden), hidden, None, batch, [])

    def _write(
        self, down: Tensor, hidden: Activation, latent: NormedLatent | None, batch: ForwardBatch,
        chunks: list[AttentionChunk],
    ) -> None:  # fmt: skip
        """The tokens' cache rows by the product of the layer's input [T, .], and the selections of the chunks."""
        width, norm = self._mla.kv_lora_rank, self._kv_norm
        where = (batch.positions, self._rotary, batch.slots, self.cache_of(batch))
        self._ops.write_latent(down[:, -width:], norm.weight, norm.eps, *where)
        keys = down[:, -width - self._mla.index_width : -width] if self._joined else None
        self._indexer.update(hidden, latent, batch, batch.kv[self._layer_index][1:], chunks, keys)

    def _mixed(self, query: Tensor, cache: Tensor, chunk: AttentionChunk) -> Tensor:
        assert chunk.selected is not None
        width = self._mla.kv_lora_rank
        return self._sparse.run(query, cache, chunk.selected, self._scale, chunk.plan, width, self._sinks)
