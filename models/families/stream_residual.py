"""Decoders whose residual is several streams (DeepSeek V4, GLM-5.3-Flash). MTP layers may have one residual alone."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from moe_engine.models.batch import ForwardBatch
from moe_engine.models.layers.decoder import Decoder
from moe_engine.models.layers.residual.streams import StreamNorm, spread
from moe_engine.models.tensors.model import layer_index
from moe_engine.models.weights import WeightSource

_MIXES = {"input_layernorm": "hc_attn", "post_attention_layernorm": "hc_ffn", "norm": "hc_head"}
"""Norms, and the weights of the streams whose sum they norm."""


class StreamResidual(Decoder):
    """Added before a model's class: its norms read sums of the streams and write to all of them."""

    def make_norm(self, reader: WeightSource, prefix: str) -> Any:
        if self._is_plain(prefix):
            return super().make_norm(reader, prefix)
        streams, is_last = streams_of(prefix), prefix.endswith(".norm")
        return StreamNorm(self.backends.ops, reader, streams, prefix, self.config, is_last)

    def norm_prefixes(self, prefix: str) -> tuple[str, ...]:
        own = super().norm_prefixes(prefix)
        return own if self._is_plain(prefix) else (*own, f"{streams_of(prefix)}.")

    def _is_plain(self, norm: str) -> bool:
        """Whether the norm is of an MTP layer with one residual."""
        return self.config.draft_streams is None and layer_index(norm) >= self.config.num_layers

    def make_stack(self, first_norm: Any) -> None:
        return None

    def embed(self, batch: ForwardBatch) -> Tensor:
        assert self.config.streams is not None
        return spread(super().embed(batch), self.config.streams)


def streams_of(norm: str) -> str:
    """Prefix of the weights of the streams, by the norm's."""
    block, _, name = norm.rpartition(".")
    return f"{block}.{_MIXES[name]}"
