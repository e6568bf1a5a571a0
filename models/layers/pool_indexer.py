"""The indexer of pools of adjacent tokens: the key of a pool is a mean of its tokens' keys, weighted in each channel
by gates (GLM-5.3-Flash).

    key of a pool = sum over its tokens of softmax(gate + position bias) * key

Legend: T tokens, D hidden, Q q_lora_rank, Hi index heads, I channels of an index head, P tokens of a pool.
Sources: transformers (glm5_next); vLLM (glm5next).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.functional import layer_norm

from moe_engine.kernels.backends import Backends
from moe_engine.kernels.quantization.protocol import (
    UNQUANTIZED,
    Activation,
    ActivationFormat,
    common_format,
    unquantized,
)
from moe_engine.models.batch import ForwardBatch
from moe_engine.models.config import MLAConfig
from moe_engine.models.layers.indexer import KEY_NORM_EPS
from moe_engine.models.layers.linear import Linear, load_linear
from moe_engine.models.layers.mla_chunks import AttentionChunk
from moe_engine.models.layers.pool_chunks import PoolSelection
from moe_engine.models.weights import WeightSource


class PoolIndexer:
    """Replicated on the ranks of an attention group: all compute the same selection from the same hidden states."""

    def __init__(self, mla: MLAConfig, hidden_size: int, reader: WeightSource, backends: Backends, prefix: str) -> None:
        assert mla.indexer is not None and mla.q_lora_rank is not None and backends.indexer is not None
        self._config, self._width = mla.indexer, mla.index_width
        self._kernel, linear, heads, width = backends.indexer, backends.linear, mla.indexer.num_heads, mla.index_width
        self._q = load_linear(linear, reader, [f"{prefix}.wq_b"], [heads * width], mla.q_lora_rank)
        self._k = load_linear(linear, reader, [f"{prefix}.wk"], [width], hidden_size)
        self._norm_weight = reader.tensor(f"{prefix}.k_norm.weight", (width,), dtype=torch.float32)
        self._norm_bias = reader.tensor(f"{prefix}.k_norm.bias", (width,), dtype=torch.float32)
        self._gate = Linear(linear, reader.tensor(f"{prefix}.index_kpool_compress_gate", (width, hidden_size)))
        bias = f"{prefix}.index_kpool_compress_ape"
        self._bias = reader.tensor(bias, (mla.indexer.pool, width), dtype=torch.float32)
        weights = reader.tensor(f"{prefix}.weights_proj.weight", (heads, hidden_size), dtype=torch.float32)
        # the scale of the scores is part of the weights: a step has no launch for it
        self._weights = Linear(linear, weights * (heads * width) ** -0.5)

    @property
    def latent_format(self) -> ActivationFormat:
        """Activation format of the query's latent."""
        return self._q.input_format

    @property
    def input_format(self) -> ActivationFormat:
        """Activation format of the hidden states; gates and head weights are products of unquantized numbers."""
        return common_format(self._k.input_format, UNQUANTIZED)

    def update(
        self, hidden: Activation, latent: Activation, batch: ForwardBatch, cache: tuple[Tensor, Tensor],
        chunks: Sequence[AttentionChunk],
    ) -> None:  # fmt: skip
        """Writes keys and gates of tokens, hidden [T, D] -> cache[slots], and keys of the pools that they complete;
        sets the selections of the chunks with one by latent [T, Q]."""
        self._write(hidden, batch.positions, batch.slots, *(part.squeeze(1) for part in cache))
        selecting = [chunk for chunk in chunks if isinstance(chunk.index_plan, PoolSelection)]
        if not selecting:
            return
        q = self._q(latent).view(-1, self._config.num_heads, self._width)
        weights = self._weights(unquantized(hidden).float())
        for chunk in selecting:
            own, tokens = chunk.index_plan, chunk.tokens
            self._kernel.select(
                q[tokens], weights[tokens], cache[0], own.queries, self._config.top_k // self._config.pool, own.chosen,
                own.plan,
            )  # fmt: skip
            assert chunk.selected is not None
            own.place(chunk.selected.slots)

    def _write(self, hidden: Activation, positions: Tensor, slots: Tensor, keys: Tensor, gates: Tensor) -> None:
        """hidden [T, D] -> keys and gates [num_slots, I]. The key of a pool takes the place of its last token's: that
        token's own key and gate are needed only here, where the pool is completed."""
        size, own = self._config.pool, self._k(hidden)
        own = layer_norm(own.float(), (self._width,), self._norm_weight, self._norm_bias, KEY_NORM_EPS).to(keys.dtype)
        keys.index_copy_(0, slots, own)
        gates.index_copy_(0, slots, self._gate(unquantized(hidden)).to(gates.dtype))
        offsets = torch.arange(1 - size, 1, device=slots.device)
        places = (slots[:, None] + offsets).clamp_(min=0)  # [T, P]
        shares = (gates[places].float() + self._bias).softmax(1).to(keys.dtype)
        pooled = (shares.float() * keys[places].float()).sum(1).to(keys.dtype)
        completes = (positions + 1) % size == 0
        keys.index_copy_(0, slots, torch.where(completes[:, None], pooled, own))
