"""Lightning attention with norms and rotation of q and k (Ling 2.6 and Ring 2.5, `modeling_bailing_moe_v2_5.py`).

Legend: T tokens, D hidden, H heads of this rank, Dh width of a head.
"""

from __future__ import annotations

import torch
from torch import Tensor

from moe_engine.kernels.backends import Backends
from moe_engine.kernels.ops.protocol import HeadNorms, RotaryTable
from moe_engine.kernels.quantization.protocol import Activation
from moe_engine.models.batch import ForwardBatch
from moe_engine.models.checkpoint.cut import Cut
from moe_engine.models.config import ModelConfig
from moe_engine.models.layers.linear import Linear, Projection, load_stacked
from moe_engine.models.layers.states.lightning_attention import LightningAttention
from moe_engine.models.tensors.gqa import ROTATED_NORMS
from moe_engine.models.weights import WeightSource
from moe_engine.parallel.context import ParallelContext
from moe_engine.parallel.share import Share


def decay_rates(layer_index: int, num_layers: int, heads: int) -> Tensor:
    """Log decays of heads, negated, float32 [H]: slopes of ALiBi, smaller in later layers. As in the published file and
    in transformers; SGLang and vLLM have the rates of the next layer."""
    factor = 1 - (layer_index - 1) / (num_layers - 1) + 1e-5
    return torch.tensor([slope * factor for slope in _slopes(heads)], dtype=torch.float64).float()


def _slopes(heads: int) -> list[float]:
    """2^(-8 i / H), i from 1; for a number of heads that is no power of two those of the next lower power, then every
    second one of the next higher power."""
    lower = 1 << (heads.bit_length() - 1)
    found = [2.0 ** (-8 * i / lower) for i in range(1, lower + 1)]
    return found if lower == heads else found + _slopes(2 * lower)[::2][: heads - lower]


class RotatedLightning(LightningAttention):
    """`LightningAttention` whose q and k are normed by head and rotated, and whose results are normed in groups. The
    scale Dh^-0.5 of q is in the epsilon of the norm of the results."""

    norm, out = "g_norm", "o_proj"
    decay_rates = staticmethod(decay_rates)

    def __init__(
        self, config: ModelConfig, layer_index: int, reader: WeightSource, backends: Backends,
        parallel: ParallelContext, rotary: RotaryTable,
    ) -> None:  # fmt: skip
        super().__init__(config, layer_index, reader, backends, parallel)
        self._rotary, self._grouped_rows = rotary, backends.ops.capabilities.grouped_rows
        width, prefix = self._shape.key, f"model.layers.{layer_index}.self_attn"
        self._query_norm, self._key_norm = (
            reader.tensor(f"{prefix}.{name}.weight", (width,), dtype=torch.float32) for name in ROTATED_NORMS
        )
        self._head_norms = HeadNorms(self._query_norm, self._key_norm, config.norm_eps)

    def _load_inputs(self, reader: WeightSource, backends: Backends, prefix: str, share: Share, hidden: int) -> Linear:
        rows, channels = f"{prefix}.query_key_value", self._channels
        own = share.cut(channels) or slice(0, channels)
        parts = [
            Projection(rows, (3 * channels, hidden), Cut(slice(i * channels + own.start, i * channels + own.stop)))
            for i in range(3)
        ]
        parts.append(Projection(f"{prefix}.g_proj", (channels, hidden), Cut(own)))
        return load_stacked(backends.linear, reader, parts)

    def _mixed(self, hidden: Activation, batch: ForwardBatch) -> tuple[Tensor, Tensor]:
        parts = self._inputs(hidden).unflatten(1, (4, self._shape.value_heads, -1))
        q, k, v, gate = parts.unbind(1)  # [T, H, Dh] each
        norms, table = self._head_norms, self._rotary
        if self._grouped_rows is not None:
            turned, runs = k.new_empty(k.shape), batch.state_runs
            # each token has a place of its own: 0, 1, 2 ...
            places = runs.starts if runs.is_decode else torch.arange(len(k), dtype=torch.int32, device=k.device)
            q = self._grouped_rows(q, k, None, norms, batch.positions, table, places, turned, None)
            return torch.cat((q, turned, v), 2), gate
        q, k = (self._ops.rms_norm(x, weight, norms.eps) for x, weight in ((q, norms.q), (k, norms.k)))
        for x in (q, k):
            self._ops.rotate_leading(x, batch.positions, table)
        return torch.cat((q, k, v), 2), gate
