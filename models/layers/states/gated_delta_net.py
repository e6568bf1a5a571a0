"""Gated delta net: a layer with a state of fixed size for each request instead of KV (Qwen3-Next, Qwen3.5).

Legend: T tokens, D hidden, Hk key heads of this rank, r value heads of a key head, Hv = Hk r, Dk, Dv head widths,
C = 2 Dk + r Dv, K taps.
"""

from __future__ import annotations

import torch

from moe_engine.kernels.backends import Backends
from moe_engine.kernels.delta.protocol import DeltaInputs, DeltaShape, DeltaWeights
from moe_engine.kernels.quantization.protocol import Activation
from moe_engine.models.checkpoint.cut import Cut
from moe_engine.models.config import ModelConfig
from moe_engine.models.config_sections.state import DeltaConfig
from moe_engine.models.layers.linear import Projection, load_linear
from moe_engine.models.layers.states.delta_layer import DeltaLayer, read_taps
from moe_engine.models.weights import WeightSource
from moe_engine.parallel.context import ParallelContext
from moe_engine.parallel.share import Share

NAME = "linear_attn"
"""Name of the block in the checkpoint."""


class GatedDeltaNet(DeltaLayer):
    """A delta net with one decay for each value head, and z and the output gate's SiLU or sigmoid."""

    def __init__(
        self, config: ModelConfig, layer_index: int, reader: WeightSource, backends: Backends, parallel: ParallelContext
    ) -> None:
        whole, linear, share = config.delta, backends.linear, Share.of(parallel.attn_tp)
        assert whole is not None
        key_heads, value_heads = share.width(whole.key_heads), share.width(whole.value_heads)
        prefix, values = f"model.layers.{layer_index}.{NAME}", whole.value_heads * whole.value
        self._load_inputs(linear, reader, *input_rows(whole, prefix, config.hidden_size, share))
        out = load_linear(linear, reader, [f"{prefix}.out_proj"], [config.hidden_size], values, in_share=share)
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
        shape = DeltaShape(key_heads, value_heads, whole.key, whole.value, whole.taps, sigmoid=whole.sigmoid)
        super().__init__(layer_index, backends, shape, DeltaWeights(taps, a_log, dt_bias, norm, config.norm_eps), out)

    def _inputs(self, hidden: Activation) -> DeltaInputs:
        return DeltaInputs.adjacent(*self._project(hidden), self._shape)


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
