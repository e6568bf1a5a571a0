"""MLA with DeepSeek sparse attention: beyond the indexer's top-k, a token attends to tokens that the indexer selects.

Legend: T tokens, D hidden, H heads, N qk_nope, R rotary width, V v_head.
Sources: DeepSeek-V3.2 technical report; layers that share a selection: arXiv 2603.12201 (GLM-5.2).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from moe_engine.kernels.backends import Backends
from moe_engine.kernels.ops.protocol import RotaryTable
from moe_engine.kernels.quantization.protocol import Activation, ActivationFormat, common_format
from moe_engine.models.batch import ForwardBatch
from moe_engine.models.config import MLAConfig, ModelConfig
from moe_engine.models.layers.attention import sparse_chunks
from moe_engine.models.layers.attention.indexer import Indexer, index_queries, joined_keys
from moe_engine.models.layers.attention.latent_queries import IndexedQueries
from moe_engine.models.layers.attention.mla import MLAAttention
from moe_engine.models.layers.attention.mla_chunks import AttentionChunk
from moe_engine.models.weights import WeightSource


class SparseMLAAttention(MLAAttention):
    """`MLAAttention` whose layer has an indexer, or uses the selection of the last layer before it that has one.

    ``batch.kv[layer]`` is a pair, the latents and the index keys, or what of these the layer has.
    """

    _joined = False
    """True if the product of the layer's input has the rows of the index keys."""

    def __init__(
        self, config: ModelConfig, layer_index: int, reader: WeightSource, backends: Backends, *others: Any,
        **options: Any,
    ) -> None:  # fmt: skip
        super().__init__(config, layer_index, reader, backends, *others, **options)
        whole = config.attention
        assert isinstance(whole, MLAConfig) and whole.indexer is not None and backends.indexer is not None
        if self._capabilities.sparse is None:
            raise ValueError(f"attention backend {self._backend.name} has no sparse attention")
        self._top_k, self._indexer_kernel = whole.indexer.top_k, backends.indexer
        self._indexer: Indexer | None = None
        if layer_index not in whole.shared_layers:
            prefix = f"model.layers.{layer_index}.self_attn.indexer"
            own = whole, config.hidden_size, reader, backends, self._index_rotary, prefix
            self._indexer = Indexer(*own, own_keys=not self._joined)

    @property
    def _index_rotary(self) -> RotaryTable:
        return self._rotary

    def _rows_between(self, mla: MLAConfig, reader: WeightSource, prefix: str) -> dict[str, int]:
        rows = {} if self._layer_index in mla.shared_layers else joined_keys(mla, reader, prefix)
        self._joined = bool(rows)
        return rows

    def _index_queries(self, mla: MLAConfig, prefix: str) -> dict[str, int]:
        return {} if self._layer_index in mla.shared_layers else index_queries(mla, prefix)

    @property
    def input_format(self) -> ActivationFormat:
        own = super().input_format
        return own if self._indexer is None else common_format(own, self._indexer.input_format)

    def chunks(self, batch: ForwardBatch) -> list[AttentionChunk]:
        return sparse_chunks.cut(
            batch.attention, self._backend, self._indexer_kernel, self._top_k, batch.attention_plan, self._limits,
            self._capabilities,
        )  # fmt: skip

    def forward(self, hidden: Activation, batch: ForwardBatch, chunks: list[AttentionChunk] | None = None) -> Tensor:
        mla, cache = self._mla, self.cache_of(batch)
        chunks = self.chunks(batch) if chunks is None else chunks
        latent, keys, kv_a = self._down(hidden, batch.positions)
        if self._indexer is not None:
            self._update_index(self._indexer, hidden, latent, keys, batch, chunks)
        q = latent.queries().view(-1, mla.num_heads, mla.qk_head_dim)
        if (
            self._absorb_and_write is not None
            and kv_a is not None
            and self._keys is not None
            and not self._adapted
            and _one_absorbed(chunks)
        ):
            norm, where = self._kv_norm, (batch.positions, self._rotary, batch.slots, cache)
            query = self._absorb_and_write(q, self._keys, kv_a, norm.weight, norm.eps, *where)
            return self.after(self._mixed(query, cache, chunks[0]))
        self._ops.rotate(q, batch.positions, self._rotary)
        self._write(kv_a, batch)
        out = q.new_empty(q.shape[0], mla.num_heads, mla.v_head_dim)  # [T, H, V]
        for chunk in chunks:
            self._attend(q[chunk.tokens], cache, chunk, out[chunk.tokens])
        return self._o(out.flatten(1))

    def remember(self, hidden: Activation, batch: ForwardBatch) -> None:
        keys, kv_a = self._kept_of(hidden)
        self._write(kv_a, batch)
        if self._indexer is not None:
            self._update_index(self._indexer, hidden, None, keys, batch, [])

    def _write(self, kv_a: Tensor | None, batch: ForwardBatch) -> None:
        """Writes the tokens' cache rows; None: they are another layer's."""
        if kv_a is not None:
            norm, where = self._kv_norm, (batch.positions, self._rotary, batch.slots, self.cache_of(batch))
            self._ops.write_latent(kv_a, norm.weight, norm.eps, *where)

    def _down(self, hidden: Activation, positions: Tensor) -> tuple[IndexedQueries, Tensor | None, Tensor | None]:
        """hidden [T, D] -> what gives the queries, index keys [T, I] if the product has them, and kv_a [T, C+R]; None:
        the cache rows are another layer's."""
        assert self._queries is not None
        down = self._kv_a(hidden)
        latent = down[:, : self._queries.norm.width]
        return self._queries(latent), self._keys_in(down), down[:, -self._mla.cache_width :]

    def _kept_of(self, hidden: Activation) -> tuple[Tensor | None, Tensor | None]:
        """`_down` without queries."""
        down = self._kv_a(hidden)
        return self._keys_in(down), down[:, -self._mla.cache_width :]

    def _keys_in(self, down: Tensor) -> Tensor | None:
        """The index keys [T, I] in the product of the layer's input, if they are part of it."""
        if not self._joined:
            return None
        return down[:, -self._mla.cache_width - self._mla.index_width : -self._mla.cache_width]

    def _update_index(
        self, indexer: Indexer, hidden: Activation, latent: IndexedQueries | None, keys: Tensor | None,
        batch: ForwardBatch, chunks: list[AttentionChunk],
    ) -> None:  # fmt: skip
        """Writes the tokens' index keys, and selects for the chunks."""
        own = batch.kv[self._layer_index]
        cache: Tensor = own[1] if isinstance(own, tuple) else own
        if self._mla.fp8_keys:
            cache = cache.view(torch.uint8)
        group = batch.attention.decode if batch.attention.prefill is None else batch.attention.prefill
        page_size = 1 if group is None else group.page_size
        indexer.update(hidden, latent, batch.positions, batch.slots, cache, page_size, chunks, keys)


def _one_absorbed(chunks: list[AttentionChunk]) -> bool:
    """True if all tokens of the step are in one chunk in the absorbed form, as those of decodes are."""
    return len(chunks) == 1 and chunks[0].absorbed
