"""Gated delta net: a layer with a state of fixed size for each request instead of KV (Qwen3-Next, Qwen3.5).

Legend: T tokens, D hidden, Hk key heads of this rank, r value heads of a key head, Hv = Hk r, Dk, Dv head widths,
C = 2 Dk + r Dv, K taps.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from moe_engine.kernels.backends import Backends
from moe_engine.kernels.delta.protocol import DeltaInputs, DeltaShape, DeltaStates, DeltaWeights
from moe_engine.kernels.quantization.protocol import Activation, ActivationFormat
from moe_engine.models.batch import ForwardBatch
from moe_engine.models.config import ModelConfig
from moe_engine.models.cut import Cut
from moe_engine.models.layers.linear import Projection, format_for, load_linear, load_stacked
from moe_engine.models.layers.norm import RMSNorm
from moe_engine.models.state_config import DeltaConfig
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
        linear = backends.linear
        qkvz, ba = input_rows(whole, prefix, hidden, share)
        self._num_ba = sum(part.cut.shape(part.shape)[0] for part in ba)
        plain = all(format_for(linear.capabilities.quantized, reader, rows) is None for rows in (qkvz, ba))
        self._qkvz = load_stacked(linear, reader, [*qkvz, *ba] if plain else qkvz)
        """With the rows of `ba`, which are few, unless one of both stays quantized."""
        self._ba = None if plain else load_stacked(linear, reader, ba)
        self._out = load_linear(linear, reader, [f"{prefix}.out_proj"], [hidden], values, in_share=share)
        heads = (whole.value_heads,)
        a_log, dt_bias = (
            reader.tensor(f"{prefix}.{name}", heads, Cut(share.cut(whole.value_heads)), dtype=torch.float32)
            for name in ("A_log", "dt_bias")
        )
        norm = reader.tensor(f"{prefix}.norm.weight", (whole.value,), dtype=torch.float32)
        keys = whole.key_heads * whole.key
        begins = ((0, keys), (keys, keys), (2 * keys, values))
        conv = [(f"{prefix}.conv1d.weight", (2 * keys + values, 1, whole.taps), *part) for part in begins]
        taps = read_taps(reader, conv, key_heads, share)
        self._set_weights(DeltaWeights(taps, a_log, dt_bias, norm, config.norm_eps))

    def _set_weights(self, weights: DeltaWeights) -> None:
        self._weights = weights
        # weight updates and the memory count (`models/footprint.py`) find tensors in attributes only
        self._conv, self._a_log, self._dt_bias, self._norm = weights.conv, weights.a_log, weights.dt_bias, weights.norm

    @property
    def inner_norms(self) -> list[RMSNorm]:
        """Norms whose results linear layers read: none."""
        return []

    @property
    def input_format(self) -> ActivationFormat:
        """Activation format of the hidden states."""
        return self._qkvz.input_format

    def forward(self, hidden: Activation, batch: ForwardBatch, *_: Any) -> Tensor:
        states = DeltaStates(*batch.kv[self._layer_index])
        inputs = self._inputs(hidden)
        mixed = self._kernel.run(inputs, self._weights, states, batch.state_runs, self._shape)  # [T, Hv Dv]
        return self._out(mixed)

    def _inputs(self, hidden: Activation) -> DeltaInputs:
        qkvz = self._qkvz(hidden)
        if self._ba is None:
            qkvz, ba = qkvz[:, : -self._num_ba], qkvz[:, -self._num_ba :]
        else:
            ba = self._ba(hidden)
        return DeltaInputs.adjacent(qkvz, ba, self._shape)


def input_rows(d: DeltaConfig, prefix: str, hidden: int, share: Share) -> tuple[list[Projection], list[Projection]]:
    """This rank's rows of the input projections, in the kernels' order: for each key head q, k, and v and z of its
    value heads; and for each key head b and a of its value heads."""
    keys, values, heads = d.key_heads * d.key, d.value_heads * d.value, d.value_heads
    if d.joined:
        wide, narrow = 2 * (keys + values), 2 * heads
        return (
            [Projection(f"{prefix}.in_proj_qkvz", (wide, hidden), Cut(share.cut(wide)))],
            [Projection(f"{prefix}.in_proj_ba", (narrow, hidden), Cut(share.cut(narrow)))],
        )
    own = range(*(share.cut(d.key_heads) or slice(None)).indices(d.key_heads))
    mixed, value, shared = 2 * keys + values, d.shared * d.value, d.shared
    qkvz, ba = [], []
    for head in own:
        for name, rows, first, width in (
            ("qkv", mixed, head * d.key, d.key),
            ("qkv", mixed, keys + head * d.key, d.key),
            ("qkv", mixed, 2 * keys + head * value, value),
            ("z", values, head * value, value),
        ):
            qkvz.append(Projection(f"{prefix}.in_proj_{name}", (rows, hidden), Cut(slice(first, first + width))))
        part = Cut(slice(head * shared, (head + 1) * shared))
        ba += [Projection(f"{prefix}.in_proj_{name}", (heads, hidden), part) for name in ("b", "a")]
    return qkvz, ba


def read_taps(
    reader: WeightSource, parts: Sequence[tuple[str, tuple[int, int, int], int, int]], key_heads: int, share: Share
) -> Tensor:
    """The taps of this rank's channels, float32 [Hk, K, C]. parts: of q, k and v, name and shape [channels, 1, K] of
    the stored tensor, first channel and number of channels of all heads."""
    found = []
    for name, stored, begin, width in parts:
        own = share.width(width)
        first = begin + share.rank * own
        part = reader.tensor(name, stored, Cut(slice(first, first + own)), dtype=torch.float32)
        found.append(part.view(key_heads, -1, stored[2]))
    return torch.cat(found, 1).transpose(1, 2).contiguous()
