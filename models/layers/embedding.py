"""Tokens in, logits out.

Legend: T tokens, S rows, D hidden, V vocabulary.
"""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from moe_engine.kernels.linear.protocol import LinearKernel, PreparedLinear
from moe_engine.models.config import ModelConfig
from moe_engine.models.layers.linear import Linear
from moe_engine.models.weights import WeightSource


class Embedding:
    """ids [T] -> [T, D], new memory (the residual stream is added to in place)."""

    def __init__(self, config: ModelConfig, reader: WeightSource, name: str = "model.embed_tokens.weight") -> None:
        self.weight = reader.tensor(name, (config.vocab_size, config.hidden_size))

    def __call__(self, ids: Tensor) -> Tensor:
        return F.embedding(ids, self.weight)


class Head:
    """hidden [S, D] -> logits [S, V] float32. A tied head shares the embedding's memory if its kernel allows."""

    def __init__(self, config: ModelConfig, reader: WeightSource, kernel: LinearKernel, embedding: Embedding) -> None:
        tied = config.tie_word_embeddings
        shape = (config.vocab_size, config.hidden_size)
        self._linear = Linear(kernel, embedding.weight if tied else reader.linear("lm_head", shape))

    @property
    def weight(self) -> PreparedLinear:
        return self._linear.weight

    def __call__(self, hidden: Tensor) -> Tensor:
        return self._linear(hidden).float()
