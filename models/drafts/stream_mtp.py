"""MTP layers of a model with several residual streams (DeepSeek V4, Qwen3.8-Flash-Next).

Legend: T tokens, S rows, D hidden, n streams.

Such a layer takes the streams at position i (the main model's after its last layer, or the previous draft step's) and
the following token, and predicts the token after that:

    z_j = e_proj(enorm(embedding(token i+1))) + h_proj(hnorm(stream j at i))      for each stream j
    v = decoder_layer(z)                                                          n streams
    logits for token i+2: head(shared_head.norm(weighted sum of v))               weights by shared_head.hc_head

Streams with gates of low rank: hnorm norms all streams of a token together, and the head reads their gated mean
(`layers.residual.gated_streams`).
Source: DeepSeek-V4's release, `inference/model.py`; SGLang, `qwen4_exp_mtp.py`.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any, cast

from torch import Tensor

from moe_engine.models.drafts.mtp_layer import JoiningLayer, ResidualOnly
from moe_engine.models.layers.decoder import Decoder, Reloadable
from moe_engine.models.layers.linear import load_linear
from moe_engine.models.layers.norm import RMSNorm
from moe_engine.models.layers.residual.gated_streams import GatedStreamNorm
from moe_engine.models.layers.residual.streams import StreamNorm, spread
from moe_engine.models.weights import WeightSource

_NORMS, _PROJECTIONS = ("enorm", "hnorm"), ("e_proj", "h_proj")


class StreamMTPLayer(JoiningLayer):
    """embedding [T, D] of the next tokens, hidden [T, n D] -> v [T, n D]."""

    def __init__(self, model: Decoder, layer_index: int, reader: WeightSource) -> None:
        name, streams = f"model.layers.{layer_index}", model.config.streams
        assert streams is not None
        self._model, self._streams = model, streams
        self._embedding_norm, self._hidden_norm = (self._norm(reader, f"{name}.{norm}") for norm in _NORMS)
        self._embedding, self._hidden = (self._projection(reader, f"{name}.{part}") for part in _PROJECTIONS)
        self._input_norm = model.make_norm(reader, f"{name}.input_layernorm")
        self._output_norm: StreamNorm | GatedStreamNorm = cast(Any, model.make_norm(reader, f"{name}.shared_head.norm"))
        self._decoder = model.make_layer(layer_index, reader, cast(Any, ResidualOnly(self._output_norm)))
        self._input_norm.feed(self._decoder.attention.input_format)

    def modules(self, model: Decoder, layer_index: int) -> Iterator[Reloadable]:
        name = f"model.layers.{layer_index}"
        for norm, module in zip(_NORMS, (self._embedding_norm, self._hidden_norm)):
            yield Reloadable((f"{name}.{norm}.",), module, partial(self._norm, prefix=f"{name}.{norm}"))
        for part, module in zip(_PROJECTIONS, (self._embedding, self._hidden)):
            yield Reloadable((f"{name}.{part}.",), module, partial(self._projection, prefix=f"{name}.{part}"))
        first, last = f"{name}.input_layernorm", f"{name}.shared_head.norm"
        *inner, _ = model.layer_modules(layer_index, self._decoder, last)
        yield from inner
        yield Reloadable(model.norm_prefixes(first), self._input_norm, partial(model.make_norm, prefix=first))
        yield Reloadable(model.norm_prefixes(last), self._output_norm, partial(model.make_norm, prefix=last))

    def output(self, v: Tensor) -> Tensor:
        return cast(Tensor, self._output_norm(v))

    def _join(self, embedding: Tensor, hidden: Tensor) -> Tensor:
        residual = spread(self._embedding(self._embedding_norm(embedding)), self._streams)
        normed = self._hidden_norm(hidden.reshape(-1, self._hidden_norm.width))
        streams = normed.reshape(-1, self._model.config.hidden_size)
        residual[:, : hidden.shape[1]] += self._hidden(streams).view_as(hidden)
        return residual

    def _norm(self, reader: WeightSource, prefix: str) -> RMSNorm:
        config, count = self._model.config, self._streams.normed if prefix.endswith(_NORMS[1]) else 1
        width = count * config.hidden_size
        return RMSNorm(self._model.backends.ops, reader, prefix, width, config.norm_eps, config.norm_plus)

    def _projection(self, reader: WeightSource, prefix: str) -> Any:
        size = self._model.config.hidden_size
        return load_linear(self._model.backends.linear, reader, [prefix], [size], size)
