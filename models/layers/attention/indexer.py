"""The indexer of a sparse attention layer: its projections, its keys in the cache, and the selection of a step.

Legend: T tokens, D hidden, Hi index heads, I channels of an index head, R rotary width.
A head is [rotated R | rest]: the reverse of MLA's order. Queries come from the normed latent of MLA's query,
or from the layer's input.
Source: DeepSeek-V3.2-Exp, `inference/model.py`.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor

from moe_engine.kernels.backends import Backends
from moe_engine.kernels.indexer.key_norm import KeyNorm
from moe_engine.kernels.ops.protocol import RotaryTable
from moe_engine.kernels.quantization.protocol import (
    UNQUANTIZED,
    Activation,
    ActivationFormat,
    common_format,
    unquantized,
)
from moe_engine.models.config import MLAConfig
from moe_engine.models.layers.attention.latent_queries import IndexedQueries
from moe_engine.models.layers.attention.mla_chunks import AttentionChunk
from moe_engine.models.layers.linear import Linear, load_linear
from moe_engine.models.weights import WeightSource

KEY_NORM_EPS = 1e-6
"""Epsilon of k_norm, a LayerNorm with bias, in every released model."""


def joined_keys(mla: MLAConfig, reader: WeightSource, prefix: str) -> dict[str, int]:
    """The rows of the index keys next to those of q_a, by name, if they are stored like q_a and whole blocks of it end
    before them. prefix: of the attention."""
    q_a, keys = f"{prefix}.q_a_proj", f"{prefix}.indexer.wk"
    format = reader.format.kernel_format(q_a)
    block = 1 if format is None else format.row_block
    same = reader.format.kernel_format(keys) == format
    assert mla.q_lora_rank is not None
    return {keys: mla.index_width} if same and mla.q_lora_rank % block == 0 and mla.index_width % block == 0 else {}


def index_queries(mla: MLAConfig, prefix: str) -> dict[str, int]:
    """The rows of the index queries, by name. prefix: of the attention."""
    assert mla.indexer is not None
    return {f"{prefix}.indexer.wq_b": mla.indexer.num_heads * mla.index_width}


class Indexer:
    """Replicated on the ranks of an attention group: all compute the same selection from the same hidden states.

    Args:
        own_keys: the projection of the keys is part of this layer; False: `update` gets its results.
    """

    def __init__(
        self,
        mla: MLAConfig,
        hidden_size: int,
        reader: WeightSource,
        backends: Backends,
        rotary: RotaryTable,
        prefix: str,
        own_keys: bool = True,
    ) -> None:
        assert mla.indexer is not None and backends.indexer is not None
        self._config, self._width = mla.indexer, mla.index_width
        self._ops, self._kernel, linear = backends.ops, backends.indexer, backends.linear
        self._rotary = RotaryTable(rotary.cos_sin, self._config.interleaved)
        heads, width = self._config.num_heads, self._width
        self._k = load_linear(linear, reader, [f"{prefix}.wk"], [width], hidden_size) if own_keys else None
        self._norm_weight = reader.tensor(f"{prefix}.k_norm.weight", (width,), dtype=torch.float32)
        self._norm_bias = reader.tensor(f"{prefix}.k_norm.bias", (width,), dtype=torch.float32)
        self._norm = KeyNorm(self._norm_weight, self._norm_bias, KEY_NORM_EPS)
        gates = reader.tensor(f"{prefix}.weights_proj.weight", (heads, hidden_size), dtype=torch.float32)
        self._gates, self._gate_product = None, self._kernel.gates
        if self._gate_product is None:
            self._gates = Linear(linear, gates)
        else:
            self._gate = self._ops.prepare_gate(gates)
        self._factor = heads**-0.5 * width**-0.5

    @property
    def input_format(self) -> ActivationFormat:
        """Activation format of the hidden states; the head weights are products of unquantized numbers."""
        return UNQUANTIZED if self._k is None else common_format(self._k.input_format, UNQUANTIZED)

    def update(
        self, hidden: Activation, latent: IndexedQueries | None, positions: Tensor, slots: Tensor, cache: Tensor,
        page_size: int, chunks: Sequence[AttentionChunk] = (), keys: Tensor | None = None,
    ) -> None:  # fmt: skip
        """Writes the index keys of tokens, hidden [T, D] -> cache[slots], and sets the selections of the chunks with
        one, for which latent is required. keys [T, I]: hidden's product, without `own_keys`."""
        selecting = [chunk for chunk in chunks if chunk.selected is not None and chunk.selects]
        if self._k is not None:
            keys = self._k(hidden)
        assert keys is not None
        q, gates = None, None
        if selecting:
            assert latent is not None
            q = latent.index_queries().view(-1, self._config.num_heads, self._width)
            gates = self._gates_of(unquantized(hidden))
        prepare = self._kernel.prepare or partial(self._prepare, page_size)
        found = prepare(keys, self._norm, q, gates, self._factor, positions, self._rotary, slots, cache)
        for chunk in selecting:
            assert found is not None and chunk.selected is not None
            query, weights = (part[chunk.tokens] for part in found)
            self._kernel.select(
                query, weights, cache, chunk.queries, self._config.top_k, chunk.selected, chunk.index_plan
            )  # fmt: skip

    def _gates_of(self, hidden: Tensor) -> Tensor:
        """[T, D] -> [P, T, Hi] float32, whose sum over P are the gates."""
        if self._gates is not None:
            return self._gates(hidden.float())[None]
        assert self._gate_product is not None
        return self._gate_product(hidden, self._gate)

    def _prepare(
        self, page_size: int, keys: Tensor, norm: KeyNorm, q: Tensor | None, gates: Tensor | None, factor: float,
        positions: Tensor, table: RotaryTable, slots: Tensor, cache: Tensor,
    ) -> tuple[Tensor, Tensor] | None:  # fmt: skip
        """`PrepareIndex` in operations of their own; the kernel quantizes. Changes q."""
        keys = norm.run(keys)
        if table.width:
            self._ops.rotate_leading(keys.unsqueeze(1), positions, table)
        self._kernel.write(keys, slots, cache, page_size)
        if q is None or gates is None:
            return None
        if table.width:
            self._ops.rotate_leading(q, positions, table)
        return q, gates.sum(0) * factor
