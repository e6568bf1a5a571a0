"""Kimi Delta Attention: a gated delta net with a decay for each channel of a key (Kimi Linear, arXiv 2510.26692).

Legend: T tokens, D hidden, H heads of this rank, Dk width of a head's key and value, K taps.
"""

from __future__ import annotations

import torch

from moe_engine.kernels.backends import Backends
from moe_engine.kernels.delta.protocol import DeltaInputs, DeltaShape, DeltaWeights
from moe_engine.kernels.quantization.protocol import Activation, ActivationFormat, common_format
from moe_engine.models.config import ModelConfig
from moe_engine.models.cut import Cut
from moe_engine.models.layers.gated_delta_net import GatedDeltaNet, read_taps
from moe_engine.models.layers.linear import Projection, format_for, load_linear, load_stacked
from moe_engine.models.weights import WeightSource
from moe_engine.parallel.context import ParallelContext
from moe_engine.parallel.share import Share


class KimiDeltaAttention(GatedDeltaNet):
    """hidden [T, D] -> [T, D]. On several ranks each has some heads, and all have the first matrices of the products
    from which decays and output gates come."""

    def __init__(
        self, config: ModelConfig, layer_index: int, reader: WeightSource, backends: Backends, parallel: ParallelContext
    ) -> None:
        whole, kernel, hidden = config.delta, backends.delta, config.hidden_size
        assert whole is not None and kernel is not None
        self._layer_index, self._kernel, linear = layer_index, kernel, backends.linear
        share, key, width = Share.of(parallel.attn_tp), whole.key, whole.key_heads * whole.key
        heads, prefix = share.width(whole.key_heads), f"model.layers.{layer_index}.{whole.block}"
        self._shape = DeltaShape(heads, heads, key, key, whole.taps, decays=key, sigmoid=True)
        first = share.rank * heads
        wide = [
            Projection(f"{prefix}.{name}_proj", (width, hidden), Cut(slice(head * key, (head + 1) * key)))
            for head in range(first, first + heads)
            for name in "qkv"
        ]
        narrow = [Projection(f"{prefix}.{name}_a_proj", (key, hidden)) for name in "fg"]
        narrow.append(Projection(f"{prefix}.b_proj", (whole.key_heads, hidden), Cut(share.cut(whole.key_heads))))
        plain = all(format_for(linear.capabilities.quantized, reader, rows) is None for rows in (wide, narrow))
        self._qkvz = load_stacked(linear, reader, [*wide, *narrow] if plain else wide)
        """q, k and v of each head, with the rows of `_ba`, unless one of both stays quantized."""
        self._ba = None if plain else load_stacked(linear, reader, narrow)
        self._num_ba = 2 * key + heads
        self._decay, self._gate = (
            load_linear(linear, reader, [f"{prefix}.{name}_b_proj"], [width], key, out_shares=[share]) for name in "fg"
        )
        self._out = load_linear(linear, reader, [f"{prefix}.o_proj"], [hidden], width, in_share=share)
        a_log = reader.tensor(f"{prefix}.A_log", (1, 1, whole.key_heads, 1), dtype=torch.float32)
        bias = reader.tensor(f"{prefix}.dt_bias", (width,), Cut(share.cut(width)), dtype=torch.float32)
        norm = reader.tensor(f"{prefix}.o_norm.weight", (key,), dtype=torch.float32)
        conv = [(f"{prefix}.{name}_conv1d.weight", (width, 1, whole.taps), 0, width) for name in "qkv"]
        taps, own = read_taps(reader, conv, heads, share), a_log.flatten()[first : first + heads].clone()
        self._set_weights(DeltaWeights(taps, own, bias, norm, config.norm_eps))

    @property
    def input_format(self) -> ActivationFormat:
        """Activation format of the hidden states."""
        formats = [part.input_format for part in (self._qkvz, self._ba) if part is not None]
        return formats[0] if len(formats) == 1 else common_format(*formats)

    def _inputs(self, hidden: Activation) -> DeltaInputs:
        wide, shape = self._qkvz(hidden), self._shape
        if self._ba is None:
            wide, narrow = wide[:, : -self._num_ba], wide[:, -self._num_ba :]
        else:
            narrow = self._ba(hidden)
        decay, gate, b = narrow.split((shape.key, shape.key, shape.key_heads), 1)
        mixed, z, a = (x.unflatten(1, (shape.key_heads, -1)) for x in (wide, self._gate(gate), self._decay(decay)))
        return DeltaInputs(mixed, z, b.unsqueeze(2), a)
