"""The indexer of pools of adjacent tokens: the key of a pool is a mean of its tokens' keys, weighted in each channel
by gates (`kernels.indexer.pools`; GLM-5.3-Flash).

Legend: T tokens, D hidden, Q q_lora_rank, Hi index heads, I channels of an index head, P tokens of a pool.
Sources: transformers (glm5_next); vLLM (glm5next).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from moe_engine.kernels.backends import Backends
from moe_engine.kernels.indexer.key_norm import KeyNorm
from moe_engine.kernels.quantization.protocol import (
    UNQUANTIZED,
    Activation,
    ActivationFormat,
    common_format,
    unquantized,
)
from moe_engine.models.batch import ForwardBatch
from moe_engine.models.config import MLAConfig
from moe_engine.models.layers.attention.index_gates import IndexGates
from moe_engine.models.layers.attention.indexer import KEY_NORM_EPS
from moe_engine.models.layers.attention.latent_queries import NormedLatent
from moe_engine.models.layers.attention.mla_chunks import AttentionChunk
from moe_engine.models.layers.attention.pools_in_place import PoolChoice
from moe_engine.models.layers.linear import Linear, load_linear
from moe_engine.models.weights import WeightSource


class PoolIndexer:
    """Replicated on the ranks of an attention group: all compute the same selection from the same hidden states.

    Args:
        own_keys: as of `Indexer`.
    """

    def __init__(
        self, mla: MLAConfig, hidden_size: int, reader: WeightSource, backends: Backends, prefix: str,
        own_keys: bool = True,
    ) -> None:  # fmt: skip
        assert mla.indexer is not None and mla.q_lora_rank is not None and backends.indexer is not None
        self._config, self._width = mla.indexer, mla.index_width
        self._kernel, linear, heads, width = backends.indexer, backends.linear, mla.indexer.num_heads, mla.index_width
        self._k = load_linear(linear, reader, [f"{prefix}.wk"], [width], hidden_size) if own_keys else None
        self._norm_weight = reader.tensor(f"{prefix}.k_norm.weight", (width,), dtype=torch.float32)
        self._norm_bias = reader.tensor(f"{prefix}.k_norm.bias", (width,), dtype=torch.float32)
        self._norm = KeyNorm(self._norm_weight, self._norm_bias, KEY_NORM_EPS)
        self._gate = Linear(linear, reader.tensor(f"{prefix}.index_kpool_compress_gate", (width, hidden_size)))
        bias = f"{prefix}.index_kpool_compress_ape"
        self._bias = reader.tensor(bias, (mla.indexer.pool, width), dtype=torch.float32)
        weights = reader.tensor(f"{prefix}.weights_proj.weight", (heads, hidden_size), dtype=torch.float32)
        # the scale of the scores is part of the weights: a step has no launch for it
        self._weights = IndexGates(backends, weights * (heads * width) ** -0.5)

    @property
    def input_format(self) -> ActivationFormat:
        """Activation format of the hidden states; gates and head weights are products of unquantized numbers."""
        return UNQUANTIZED if self._k is None else common_format(self._k.input_format, UNQUANTIZED)

    def update(
        self, hidden: Activation, latent: NormedLatent | None, batch: ForwardBatch, cache: tuple[Tensor, Tensor],
        chunks: Sequence[AttentionChunk] = (), keys: Tensor | None = None,
    ) -> None:  # fmt: skip
        """Writes keys and gates of tokens, hidden [T, D] -> cache[slots], and keys of the pools that they complete;
        sets the slots of the chunks with a selection by latent, which is required for these. keys [T, I]:
        hidden's product, without `own_keys`."""
        gates, norm = self._gate(unquantized(hidden)), self._norm
        if self._k is not None:
            keys = self._k(hidden)
        assert keys is not None
        self._kernel.pools.write(keys, norm, gates, self._bias, batch.positions, batch.slots, cache)
        selecting = [chunk for chunk in chunks if isinstance(chunk.index_plan, PoolChoice)]
        if not selecting:
            return
        assert latent is not None
        q = latent.index_queries().view(-1, self._config.num_heads, self._width)
        weights = self._weights(hidden)
        for chunk in selecting:
            assert chunk.selected is not None
            part, out = chunk.tokens, chunk.selected.slots
            chunk.index_plan.select(self._kernel, q[part], weights[..., part, :], cache[0], out)
