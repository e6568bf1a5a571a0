"""The tokens that an EAGLE head drafts, and LM heads over them.

Legend: V vocabulary of the target, W draft vocabulary, D hidden.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch import Tensor

from moe_engine.errors import CheckpointError
from moe_engine.kernels.linear.protocol import LinearKernel
from moe_engine.models.checkpoint.cut import UNCUT, Cut
from moe_engine.models.config import ModelConfig
from moe_engine.models.drafts.token_map import read_token_map
from moe_engine.models.eagle_config import HeadConfig
from moe_engine.models.formats.plain import integer_tensor
from moe_engine.models.layers.decoder import Decoder
from moe_engine.models.layers.embedding import EMBEDDING, Embedding, Head
from moe_engine.models.weights import WeightReader, WeightSource
from moe_engine.parallel.context import ParallelContext

ROWS_AT_ONCE = 4096
"""Rows of the target's LM head read at once."""


def draft_ids(head: HeadConfig, reader: WeightSource) -> Tensor | None:
    """The target's ids [W] int64 of a head's tokens, on the device; None: they are the target's vocabulary. Random
    weights have the first W tokens.

    Raises:
        CheckpointError: d2t names tokens outside the vocabulary.
    """
    if head.num_mapped:
        return torch.from_numpy(read_token_map(head.token_map, head.layer.vocab_size)).to(reader.device)
    if not head.has_ids:
        return None
    ids = torch.arange(head.own_head)
    if isinstance(reader, WeightReader):  # d2t has the distance from a draft token's number to its id
        with reader.open(integer_tensor("d2t", (head.own_head,))) as distances:
            ids += distances
    if int(ids.min()) < 0 or int(ids.max()) >= head.layer.vocab_size:
        raise CheckpointError(
            f"{head.path}: d2t names tokens from {int(ids.min())} to {int(ids.max())}, the vocabulary has "
            f"{head.layer.vocab_size}; the head belongs to another model"
        )
    return ids.to(reader.device)


def own_head(head: HeadConfig, model: Decoder, reader: WeightSource, kernel: LinearKernel) -> Head | None:
    """The LM head [W, D] in a draft head's checkpoint; None: it uses the target's."""
    if not head.own_head:
        return None
    own = dataclasses.replace(head.layer, vocab_size=head.own_head, tie_word_embeddings=False)
    parallel = dataclasses.replace(model.parallel, all_reduce=None)
    return Head(own, reader, kernel, model.embedding, parallel)


def mapped_head(
    config: ModelConfig,
    source: WeightSource,
    kernel: LinearKernel,
    embedding: Embedding,
    parallel: ParallelContext,
    ids: Tensor,
) -> Head:
    """An LM head of the rows `ids` [W] of the target's, read again from its checkpoint.

    Args:
        config, source: those of the target.
    """
    rows: Any = _Rows(source, config, ids.cpu())
    own = dataclasses.replace(config, vocab_size=len(ids), tie_word_embeddings=False)
    return Head(own, rows, kernel, embedding, parallel)


class _Rows:
    """The part of `WeightSource` that an LM head reads: some rows of another LM head, as its own."""

    def __init__(self, source: WeightSource, config: ModelConfig, ids: Tensor) -> None:
        self.dtype, self.device, self.format = source.dtype, source.device, source.format
        self._source = source
        self._config = config
        self._ids = ids

    def linear(self, prefix: str, shape: tuple[int, int], cut: Cut = UNCUT, *, out: Tensor | None = None) -> Tensor:
        ids = self._ids if cut.rows is None else self._ids[cut.rows]
        if out is None:
            out = torch.empty(len(ids), shape[1], dtype=self.dtype, device=self.device)
        for start in range(0, self._config.vocab_size, ROWS_AT_ONCE):
            first, last = torch.searchsorted(ids, torch.tensor([start, start + ROWS_AT_ONCE])).tolist()
            if first == last:
                continue
            begin, end = int(ids[first]), int(ids[last - 1]) + 1
            rows = self._read(Cut(slice(begin, end)))
            out[first:last] = rows[(ids[first:last] - begin).to(rows.device)]
        return out

    def _read(self, cut: Cut) -> Tensor:
        shape = (self._config.vocab_size, self._config.hidden_size)
        if self._config.tie_word_embeddings:
            return self._source.tensor(EMBEDDING, shape, cut)
        rows: Tensor = self._source.linear("lm_head", shape, cut)
        return rows
