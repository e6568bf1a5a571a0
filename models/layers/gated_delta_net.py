"""Gated delta net: a layer with a state of fixed size for each request in the place of KV (Qwen3-Next).

Legend: T tokens, D hidden, Hk key heads of this rank, r value heads of a key head, Hv = Hk r, Dk, Dv head widths,
C = 2 Dk + r Dv, K taps.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from moe_engine.kernels.backends import Backends
from moe_engine.kernels.delta.protocol import DeltaInputs, DeltaShape, DeltaStates, DeltaWeights
from moe_engine.kernels.quantization.protocol import Activation, ActivationFormat
from moe_engine.models.batch import ForwardBatch
from moe_engine.models.config import DeltaConfig, ModelConfig
from moe_engine.models.cut import Cut
from moe_engine.models.layers.linear import load_linear
from moe_engine.models.layers.norm import RMSNorm
from moe_engine.models.weights import WeightSource
from moe_engine.parallel.context import ParallelContext
from moe_engine.parallel.share import Share

NAME = "linear_attn"
"""Name of the block in the checkpoint."""


class GatedDeltaNet:
    """hidden [T, D] -> [T, D]. On several ranks each has some key heads with their value heads, and the result is a
    partial sum."""

    fused = None
    """The layer in one call, for draft chains: no kernel has it."""

    def __init__(
        self, config: ModelConfig, layer_index: int, reader: WeightSource, backends: Backends, parallel: ParallelContext
    ) -> None:
        whole, kernel, hidden = config.delta, backends.delta, config.hidden_size
        assert whole is not None and kernel is not None
        self._layer_index, self._kernel = layer_index, kernel
        share = Share.of(parallel.attn_tp)
        key_heads, value_heads = share.width(whole.key_heads), share.width(whole.value_heads)
        self._shape = DeltaShape(key_heads, value_heads, whole.key, whole.value, whole.taps)
        prefix, values = f"model.layers.{layer_index}.{NAME}", whole.value_heads * whole.value
        projected = 2 * whole.key_heads * whole.key + 2 * values
        linear = backends.linear
        self._qkvz = load_linear(linear, reader, [f"{prefix}.in_proj_qkvz"], [projected], hidden, out_shares=[share])
        self._ba = load_linear(
            linear, reader, [f"{prefix}.in_proj_ba"], [2 * whole.value_heads], hidden, out_shares=[share]
        )
        self._out = load_linear(linear, reader, [f"{prefix}.out_proj"], [hidden], values, in_share=share)
        heads = (whole.value_heads,)
        a_log, dt_bias = (
            reader.tensor(f"{prefix}.{name}", heads, Cut(share.cut(whole.value_heads)), dtype=torch.float32)
            for name in ("A_log", "dt_bias")
        )
        norm = reader.tensor(f"{prefix}.norm.weight", (whole.value,), dtype=torch.float32)
        taps = _read_taps(reader, f"{prefix}.conv1d.weight", whole, share)
        self._conv, self._a_log, self._dt_bias, self._norm = taps, a_log, dt_bias, norm
        self._weights = DeltaWeights(taps, a_log, dt_bias, norm, config.norm_eps)

    @property
    def inner_norms(self) -> list[RMSNorm]:
        """Norms whose results linear layers read: none."""
        return []

    @property
    def input_format(self) -> ActivationFormat:
        """Activation format of the hidden states."""
        return self._qkvz.input_format

    def forward(self, hidden: Activation, batch: ForwardBatch, *_: Any) -> Tensor:
        inputs = DeltaInputs(self._qkvz(hidden), self._ba(hidden))
        states = DeltaStates(*batch.kv[self._layer_index])
        mixed = self._kernel.run(inputs, self._weights, states, batch.state_runs, self._shape)  # [T, Hv Dv]
        return self._out(mixed)


def _read_taps(reader: WeightSource, name: str, whole: DeltaConfig, share: Share) -> Tensor:
    """The taps of this rank's channels, float32 [Hk, K, C]. Stored [channels, 1, K]: q of all heads, then k, then v."""
    keys, values = whole.key_heads * whole.key, whole.value_heads * whole.value
    stored = (2 * keys + values, 1, whole.taps)
    parts = []
    for begin, width in ((0, keys), (keys, keys), (2 * keys, values)):
        own = share.width(width)
        first = begin + share.rank * own
        part = reader.tensor(name, stored, Cut(slice(first, first + own)), dtype=torch.float32)
        parts.append(part.view(share.width(whole.key_heads), -1, whole.taps))
    return torch.cat(parts, 1).transpose(1, 2).contiguous()
