"""Rows of n-gram tables, added to the residual streams before some layers (DeepSeek V4.1).

The residual carries the ids of each token's n-gram behind its streams, as the bits of int32 numbers, so that every rank
has those of its rows. Ids of earlier tokens are cached beside the keys of the first layer.

Legend: T tokens, D hidden, n streams, N tokens of the longest n-gram.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from moe_engine.errors import CheckpointError
from moe_engine.kernels.ops.hashed_rows import SCALED, HashedRows, TextIds, token_map
from moe_engine.kernels.ops.protocol import Ops
from moe_engine.kernels.ops.streams import write_streams
from moe_engine.kernels.queries import PagedQueries
from moe_engine.kernels.uploads import upload
from moe_engine.models.batch import ForwardBatch
from moe_engine.models.config import ModelConfig
from moe_engine.models.layers.linear import load_linear
from moe_engine.models.layers.streams import StreamNorm
from moe_engine.models.safetensors_file import DTYPES
from moe_engine.models.weights import WeightSource

_LEAST = 1e-6
ID_BYTES = 4
OUTSIDE = -(2**31)
"""Instead of the id of an image token, which no n-gram has; as float32 the bits are those of -0."""


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


def put_ids(residual: Tensor, batch: ForwardBatch, texts: TextIds, count: int, has_images: bool = False) -> None:
    """Caches the ids of a step's tokens, and sets those of their n-grams of `count` tokens in the residual. An image
    (`has_images`: the model takes some) is between texts: n-grams behind it begin as those of a text, and its tokens
    have `OUTSIDE`."""
    groups = [group for group in (batch.attention.decode, batch.attention.prefill) if group is not None]
    if not groups:
        return
    full = groups[0].slot_table
    table, slots = (full, batch.slots) if batch.windows is None else (batch.windows.table, batch.windows.slots)
    cache = batch.kv[0].ids.view(torch.int32)[:, 0]
    ids = texts.of(batch.input_ids)
    if batch.images is not None:
        ids.index_fill_(0, batch.images.tokens, OUTSIDE)
    cache.index_copy_(0, slots, ids)
    requests = torch.cat([_requests(group) for group in groups])
    places = batch.positions.unsqueeze(1) - torch.arange(count, device=requests.device)  # [T, N]
    found = cache[table[requests.unsqueeze(1), places.clamp(min=0)].long()]
    outside = places < 0
    if has_images:
        outside = (outside | (found == OUTSIDE)).cumsum(1) > 0
        outside[:, 0] = False
    found = found.masked_fill(outside, texts.pad)
    bits = found.contiguous().view(residual.dtype)
    residual[:, -bits.shape[1] :] = bits


def _requests(group: PagedQueries) -> Tensor:
    """The row of each query token's request [T] int64; without an upload if all requests have as many tokens."""
    rows, counts = group.rows.long(), group.query_lens
    if len(set(counts)) == 1:
        return rows.unsqueeze(1).expand(-1, counts[0]).flatten()
    return rows.repeat_interleave(upload(np.array(counts), rows.device), output_size=sum(counts))


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
        self.rows = HashedRows(table, DTYPES[dtype], scales, engram.primes[place], engram.multipliers(layer))
        self._project = load_linear(
            backend, reader, [f"{own}.kv_proj"], [(streams.count + 1) * hidden], engram.columns * engram.width
        )
        weights = [
            reader.tensor(f"{own}.{name}", (streams.count, hidden), dtype=torch.float32)
            for name in ("q_weight", "k_weight")
        ]
        self._products = weights[0] * weights[1]
        self._count, self._longest = streams.count, engram.longest
        self._eps, self._dtype = config.norm_eps, reader.dtype
        self._has_images = config.vision is not None

    def _read(self, x: Tensor | None, residual: Tensor) -> Tensor:
        if not len(residual):
            return super()._read(x, residual)
        if x is not None:
            x = x if self._all_reduce is None else self._all_reduce.sum(x)
            write_streams(x, residual, self._weights)
        self._add_rows(residual)
        return self._mix(None, residual, self._weights)

    def _add_rows(self, residual: Tensor) -> None:
        n, hidden = self._count, self.width
        ids = residual[:, -self._longest * ID_BYTES // residual.element_size() :].contiguous().view(torch.int32)
        known = ids.clamp(min=0) if self._has_images else ids
        found = self._project(self.rows.read(known, self._dtype)).float()
        key, value = found[:, : n * hidden].unflatten(1, (n, hidden)), found[:, n * hidden :]
        streams = residual[:, : n * hidden].float().unflatten(1, (n, hidden))
        norms = (streams.square().mean(2) + self._eps).rsqrt() * (key.square().mean(2) + self._eps).rsqrt()
        dot = (streams * self._products * key).sum(2) * norms * hidden**-0.5
        gate = torch.copysign(dot.abs().clamp_min(_LEAST).sqrt(), dot).sigmoid()
        if self._has_images:
            gate = gate.masked_fill(ids[:, :1] == OUTSIDE, 0.0)
        residual[:, : n * hidden] = (streams + gate.unsqueeze(2) * value.unsqueeze(1)).flatten(1)
