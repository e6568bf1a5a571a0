"""Kimi Delta Attention: a gated delta net with a decay for each channel of a key (arXiv 2510.26692). Decays and output
gates come from products of low rank (Kimi Linear), or each from a whole matrix (Ling); Kimi K3 has one of both.

Legend: T tokens, D hidden, H heads of this rank, Dk width of a head's key and value, K taps.
"""

from __future__ import annotations

import torch

from moe_engine.kernels.backends import Backends
from moe_engine.kernels.delta.protocol import DeltaInputs, DeltaShape, DeltaWeights
from moe_engine.kernels.quantization.protocol import Activation
from moe_engine.models.checkpoint.cut import Cut
from moe_engine.models.config import ModelConfig
from moe_engine.models.config_sections.state import DeltaConfig
from moe_engine.models.layers.linear import Linear, Projection, load_linear
from moe_engine.models.layers.states.delta_layer import DeltaLayer, read_taps
from moe_engine.models.weights import WeightSource
from moe_engine.parallel.context import ParallelContext
from moe_engine.parallel.share import Share


class KimiDeltaAttention(DeltaLayer):
    """A delta net whose heads have q, k and v of one width. Of products of low rank each rank has the whole first
    matrices."""

    def __init__(
        self, config: ModelConfig, layer_index: int, reader: WeightSource, backends: Backends, parallel: ParallelContext
    ) -> None:
        whole, hidden, linear = config.delta, config.hidden_size, backends.linear
        assert whole is not None
        share, key, width = Share.of(parallel.attn_tp), whole.key, whole.key_heads * whole.key
        heads, prefix = share.width(whole.key_heads), f"model.layers.{layer_index}.{whole.block}"
        own = range(share.rank * heads, (share.rank + 1) * heads)
        wide = [
            Projection(f"{prefix}.{name}_proj", (width, hidden), Cut(slice(head * key, (head + 1) * key)))
            for head in own
            for name in ("q", "k", "v", *(name for name in "gf" if name not in whole.low_rank))
        ]
        narrow = [Projection(f"{prefix}.{name}_a_proj", (key, hidden)) for name in whole.low_rank]
        narrow.append(Projection(f"{prefix}.b_proj", (whole.key_heads, hidden), Cut(share.cut(whole.key_heads))))
        self._load_inputs(linear, reader, wide, narrow)
        self._decay: Linear | None = None
        self._gate: Linear | None = None
        """The second matrices of decays and gates; None: their rows are with q, k and v."""
        if "f" in whole.low_rank:
            self._decay = load_linear(linear, reader, [f"{prefix}.f_b_proj"], [width], key, out_shares=[share])
        if "g" in whole.low_rank:
            self._gate = load_linear(linear, reader, [f"{prefix}.g_b_proj"], [width], key, out_shares=[share])
        out = load_linear(linear, reader, [f"{prefix}.o_proj"], [hidden], width, in_share=share)
        shape = DeltaShape(heads, heads, key, key, whole.taps, decays=key, bound=whole.bound, sigmoid=True)
        weights = _weights(whole, reader, prefix, own, share, config.norm_eps)
        super().__init__(layer_index, backends, shape, weights, out)

    def _inputs(self, hidden: Activation) -> DeltaInputs:
        (wide, narrow), shape = self._project(hidden), self._shape
        heads, key = shape.key_heads, shape.key
        wide, b = wide.unflatten(1, (heads, -1)), narrow[:, -heads:].unsqueeze(2)
        mixed, z, a = wide[..., : shape.mixed], wide[..., shape.mixed : shape.mixed + key], wide[..., -key:]
        if self._decay is not None:
            a = self._decay(narrow[:, :key]).unflatten(1, (heads, -1))
        if self._gate is not None:
            z = self._gate(narrow[:, -heads - key : -heads]).unflatten(1, (heads, -1))
        return DeltaInputs(mixed, z, b, a)


def _weights(
    whole: DeltaConfig, reader: WeightSource, prefix: str, own: range, share: Share, eps: float
) -> DeltaWeights:
    """The kernel's weights of this rank's heads `own`."""
    width = whole.key_heads * whole.key
    a_log = reader.tensor(f"{prefix}.A_log", whole.a_log_shape, dtype=torch.float32)
    bias = reader.tensor(f"{prefix}.dt_bias", (width,), Cut(share.cut(width)), dtype=torch.float32)
    norm = reader.tensor(f"{prefix}.o_norm.weight", (whole.key,), dtype=torch.float32)
    conv = [(f"{prefix}.{name}_conv1d.weight", (width, 1, whole.taps), 0, width) for name in "qkv"]
    taps = read_taps(reader, conv, len(own), share)
    return DeltaWeights(taps, a_log.flatten()[own.start : own.stop].clone(), bias, norm, eps)
