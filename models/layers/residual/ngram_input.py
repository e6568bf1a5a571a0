"""Rows of n-gram tables, added to the residual streams before a layer's input is made of them (Qwen3.8-Flash-Next).

A projection makes of a token's rows a key for each stream and one value. To each stream is added the value times its
gate, and SiLU of a convolution over the normed products of earlier tokens (`kernels.ops.ngram_products`). The state of
a request keeps those products, and the ids of its last tokens.

Legend: T tokens, D hidden, n streams, N tokens of the longest n-gram, K taps.
Source: transformers (qwen4_exp).
"""

from __future__ import annotations

import torch
from torch import Tensor

from moe_engine.errors import CheckpointError
from moe_engine.kernels.backends import Backends
from moe_engine.kernels.ops.hashed_rows import HashedRows
from moe_engine.kernels.ops.ngram_products import IN_TORCH as PRODUCTS_IN_TORCH
from moe_engine.kernels.ops.ngram_rows import IN_TORCH
from moe_engine.kernels.quantization.protocol import Activation
from moe_engine.models.batch import ForwardBatch
from moe_engine.models.checkpoint.safetensors_file import DTYPES
from moe_engine.models.config import ModelConfig
from moe_engine.models.config_sections.engram import EngramConfig
from moe_engine.models.layers.linear import load_linear
from moe_engine.models.layers.residual.gated_streams import GatedStreamNorm
from moe_engine.models.weights import WeightSource


class NgramInput:
    """``batch.kv[layer]`` ends with the products [rows, (K-1) N, n D] and the ids plus 1, float32 [rows, N-1, 1]: 0 is
    no token.

    Args:
        name: of the layer in the checkpoint. norm: what makes the layer's input of the streams.
    """

    def __init__(
        self, config: ModelConfig, layer_index: int, reader: WeightSource, backends: Backends, norm: GatedStreamNorm
    ) -> None:
        streams, hidden = config.streams, config.hidden_size
        assert streams is not None and streams.engram is not None
        engram, count, name = streams.engram, streams.count, f"model.layers.{layer_index}.ple"
        self._engram, self._layer_index, self._eps = engram, layer_index, config.norm_eps
        self.norm, self._kernels = norm, backends.ops.capabilities.ngram_products or PRODUCTS_IN_TORCH
        shape, wide = (count, hidden), count * hidden
        self.rows = _table(engram, layer_index, reader, backends, f"{name}.ple_embedding")
        self._project = load_linear(
            backends.linear, reader, [f"{name}.key_proj", f"{name}.value_proj"], [wide, hidden],
            engram.columns * engram.width,
        )  # fmt: skip
        plus = 0.0 if reader.made_up else config.norm_plus
        key, query, conv = (
            reader.tensor(f"{name}.norm_{part}.weight", (wide,), dtype=torch.float32) + plus
            for part in ("key", "query", "conv")
        )
        self._products, self._conv_norm = (key * query).view(shape), conv.view(shape)
        taps = reader.tensor(f"{name}.conv1d.weight", (wide, 1, engram.taps), dtype=torch.float32)
        self._taps = taps.view(wide, -1).t().contiguous()
        self._dtype = reader.dtype

    def add(self, streams: Activation, residual: Tensor, batch: ForwardBatch) -> Tensor:
        """Sets the streams of residual [T, n D + n] to streams [T, n D] with what is added to them; returns the layer's
        input [T, D]."""
        assert isinstance(streams, Tensor)  # of `StreamAdder`
        if streams.data_ptr() != residual.data_ptr():  # gathered from ranks that each keep a share of the residual
            residual[:, : streams.shape[1]].copy_(streams)
        *_, products, ids = batch.kv[self._layer_index]
        ngrams = self._kernels.ids(batch.input_ids, ids, batch.state_runs, self._engram.pad_id)
        found = self._project(self.rows.read(ngrams, self._dtype))
        gated, normed = self._kernels.gate(streams, found, self._products, self._conv_norm, self._eps)
        self._kernels.mix(gated, normed, products, self._taps, batch.state_runs, residual, self._engram.longest)
        return self.norm(residual)


def _table(engram: EngramConfig, layer_index: int, reader: WeightSource, backends: Backends, name: str) -> HashedRows:
    """Raises CheckpointError: the checkpoint's factors or sizes are not those of config.json."""
    place = engram.layers.index(layer_index)
    primes, factors, rows = engram.primes[place], engram.multipliers(layer_index), engram.rows[place]
    for part, wanted in (("layer_multipliers", factors), ("ngram_heads_vocab_sizes", primes)):
        if reader.made_up or not reader.has(f"{name}.{part}"):
            continue
        stored = reader.tensor(f"{name}.{part}", (len(wanted),), dtype=torch.int64).tolist()
        if stored != list(wanted):
            raise CheckpointError(
                f"{name}.{part} is {stored}, config.json implies {list(wanted)}: check its n-gram fields"
            )
    whole, size = f"{name}.ngram_embedding", -(-rows // engram.parts)
    shards = [(f"{whole}.shard_{i}.weight", min(size, rows - i * size)) for i in range(-(-rows // size))]
    if reader.has(f"{whole}.weight") and not reader.made_up:
        shards = [(f"{whole}.weight", rows)]
    tables = [reader.mapped(shard, (count, engram.width)) for shard, count in shards]
    values = (backends.ops.capabilities.ngrams or IN_TORCH).values
    (first, dtype), *more = tables
    return HashedRows(first, DTYPES[dtype], None, primes, factors, values, [part for part, _ in more])
