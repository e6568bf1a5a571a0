"""Rows of n-gram tables, added to the residual streams before some layers (DeepSeek V4.1).

The residual carries the ids of each token's n-gram after its streams, as the bits of int32 numbers, so that every rank
has those of its rows. Ids of earlier tokens are cached with the keys of the first layer.

Legend: T tokens, D hidden, n streams, N tokens of the longest n-gram.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from moe_engine.errors import CheckpointError
from moe_engine.kernels.ops.hashed_rows import HashedRows, TextIds, token_map
from moe_engine.kernels.ops.ngram_rows import ID_BYTES, IMAGE, IN_TORCH, SCALED, Ngrams, NgramTokens
from moe_engine.kernels.ops.protocol import Ops
from moe_engine.kernels.queries import PagedQueries
from moe_engine.kernels.uploads import upload
from moe_engine.models.batch import ForwardBatch
from moe_engine.models.checkpoint.safetensors_file import DTYPES
from moe_engine.models.config import ModelConfig
from moe_engine.models.layers.linear import load_linear
from moe_engine.models.layers.residual.streams import StreamNorm
from moe_engine.models.weights import WeightSource


def load_text_ids(config: ModelConfig, reader: WeightSource) -> TextIds:
    """Raises CheckpointError: the tokenizer is missing, or is not that of the tables."""
    streams, file = config.streams, Path(config.source).parent / "tokenizer.json"
    assert streams is not None and streams.engram is not None
    engram = streams.engram
    if reader.made_up:
        return TextIds(range(config.vocab_size), config.vocab_size, engram.pad_id, reader.device)
    try:
        ids, count = token_map(file)
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{file}: n-gram tables need the tokenizer: {error}") from None
    if count != engram.num_ids:
        raise CheckpointError(
            f"{file}: has {count} different texts, config.json's engram_compressed_vocab_size is {engram.num_ids}: "
            "the tables belong to another tokenizer"
        )
    return TextIds(ids, config.vocab_size, engram.pad_id, reader.device)


def kernels_of(ops: Ops) -> Ngrams:
    return ops.capabilities.ngrams or IN_TORCH


def put_ids(residual: Tensor, batch: ForwardBatch, texts: TextIds, count: int, ops: Ops) -> None:
    """Caches the ids of a step's tokens, and sets those of their n-grams of `count` tokens in the residual. An image is
    between texts."""
    groups = [group for group in (batch.attention.decode, batch.attention.prefill) if group is not None]
    if not groups:
        return
    full = groups[0].slot_table
    table, slots = (full, batch.slots) if batch.windows is None else (batch.windows.table, batch.windows.slots)
    cache = batch.kv[0].ids.view(torch.int32)[:, 0]
    ids = batch.input_ids
    if batch.images is not None:
        ids = ids.index_fill(0, batch.images.tokens, IMAGE)
    tokens = NgramTokens(ids, batch.positions, slots, *_requests(groups), table)
    kernels_of(ops).put_ids(tokens, texts.map, texts.pad, cache, residual, count)


def _requests(groups: Sequence[PagedQueries]) -> tuple[Tensor, int]:
    """Rows of requests, and the tokens of each; without an upload if all requests have as many."""
    counts = [count for group in groups for count in group.query_lens]
    rows = groups[0].rows if len(groups) == 1 else torch.cat([group.rows for group in groups])
    if len(set(counts)) == 1:
        return rows, counts[0]
    return rows.repeat_interleave(upload(np.array(counts), rows.device), output_size=sum(counts)), 1


class EngramNorm(StreamNorm):
    """`StreamNorm` of a layer before which rows of a table are added."""

    def __init__(
        self, ops: Ops, reader: WeightSource, prefix: str, norm: str, config: ModelConfig, backend: Any
    ) -> None:
        super().__init__(ops, reader, prefix, norm, config)
        streams, hidden = config.streams, config.hidden_size
        assert streams is not None and streams.engram is not None
        engram = streams.engram
        own = f"{norm.rpartition('.')[0]}.engram"
        layer = int(norm.split(".")[2])
        place = engram.layers.index(layer)
        shape = (engram.rows[place], engram.width)
        table, dtype = reader.mapped(f"{own}.embed.weight", shape)
        scales = None
        if dtype == "F8_E4M3":
            scales, _ = reader.mapped(f"{own}.embed.scale", (shape[0], engram.width // SCALED))
        self._kernels = kernels_of(ops)
        self.rows = HashedRows(
            table, DTYPES[dtype], scales, engram.primes[place], engram.multipliers(layer), self._kernels.values
        )
        self._project = load_linear(
            backend, reader, [f"{own}.kv_proj"], [(streams.count + 1) * hidden], engram.columns * engram.width
        )
        weights = [
            reader.tensor(f"{own}.{name}", (streams.count, hidden), dtype=torch.float32)
            for name in ("q_weight", "k_weight")
        ]
        self._products = weights[0] * weights[1]
        self._longest, self._dtype = engram.longest, reader.dtype
        self._has_images = config.vision is not None

    def _to_add(self, x: Tensor | None, residual: Tensor) -> None:
        self._add_rows(super()._to_add(x, residual), residual)

    def _add_rows(self, x: Tensor | None, residual: Tensor) -> None:
        ids = residual[:, -self._longest * ID_BYTES // residual.element_size() :].contiguous().view(torch.int32)
        known = ids.clamp(min=0) if self._has_images else ids
        found = self._project(self.rows.read(known, self._dtype))
        self._kernels.add(found, ids, x, residual, self._products, self._weights)
