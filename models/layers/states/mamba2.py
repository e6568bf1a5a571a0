"""Mamba2: a layer with an additive state for each request instead of KV (arXiv 2405.21060; Nemotron-H, Granite 4).

Legend: T tokens, D hidden, G groups of this rank, r heads of a group, N width of the state's keys (B and C), P channels
of a head, K taps. A group is a key head of the kernel, C its query, B its key, and x the values of its heads.
"""

from __future__ import annotations

import torch

from moe_engine.kernels.backends import Backends
from moe_engine.kernels.delta.protocol import UNBOUNDED, DeltaInputs, DeltaShape, DeltaWeights
from moe_engine.kernels.quantization.protocol import Activation
from moe_engine.models.checkpoint.cut import Cut
from moe_engine.models.config import ModelConfig
from moe_engine.models.config_sections.state import DeltaConfig
from moe_engine.models.layers.linear import Projection, load_linear
from moe_engine.models.layers.states.delta_layer import DeltaLayer, read_taps
from moe_engine.models.weights import WeightSource
from moe_engine.parallel.context import ParallelContext
from moe_engine.parallel.share import Share


class Mamba2(DeltaLayer):
    """On several ranks each has some groups with their heads."""

    def __init__(
        self, config: ModelConfig, layer_index: int, reader: WeightSource, backends: Backends, parallel: ParallelContext
    ) -> None:
        whole, hidden, share = config.delta, config.hidden_size, Share.of(parallel.attn_tp)
        assert whole is not None and whole.additive
        groups, heads, width = share.width(whole.key_heads), share.width(whole.value_heads), whole.value
        prefix, values = f"model.layers.{layer_index}.{whole.block}", whole.value_heads * width
        self._load_inputs(backends.linear, reader, *_input_rows(whole, f"{prefix}.in_proj", hidden, share))
        out = load_linear(backends.linear, reader, [f"{prefix}.out_proj"], [hidden], values, in_share=share)
        a_log, dt_bias, skip, norm = (
            reader.tensor(f"{prefix}.{name}", (count,), Cut(share.cut(count)), dtype=torch.float32)
            for name, count in (
                ("A_log", whole.value_heads), ("dt_bias", whole.value_heads), ("D", whole.value_heads),
                ("norm.weight", values),
            )
        )  # fmt: skip
        keys = whole.key_heads * whole.key
        channels, begins = values + 2 * keys, ((values + keys, keys), (values, keys), (0, values))  # of C, B and x
        stored = f"{prefix}.conv1d.weight", (channels, 1, whole.taps)
        taps = read_taps(reader, [(*stored, *part) for part in begins], groups, share)
        bias = None
        if whole.conv_bias:
            parts = [
                reader.tensor(
                    f"{prefix}.conv1d.bias", (channels,), _part(share, begin, count), dtype=torch.float32
                ).view(groups, -1)
                for begin, count in begins
            ]
            bias = torch.cat(parts, 1)
        low, high = whole.step_limits or (0.0, UNBOUNDED)
        shape = DeltaShape(
            groups, heads, whole.key, width, whole.taps, additive=True, shortest=low, longest=min(high, UNBOUNDED)
        )
        weights = DeltaWeights(taps, a_log, dt_bias, norm, whole.eps or config.norm_eps, bias, skip)
        super().__init__(layer_index, backends, shape, weights, out)

    def _inputs(self, hidden: Activation) -> DeltaInputs:
        wide, narrow = self._project(hidden)
        both, steps = (x.unflatten(1, (self._shape.key_heads, -1)) for x in (wide, narrow))
        mixed = self._shape.mixed
        return DeltaInputs(both[..., :mixed], both[..., mixed:], steps, steps)


def _part(share: Share, begin: int, count: int) -> Cut:
    """This rank's part of `count` rows from row `begin` on."""
    own = share.width(count)
    return Cut(slice(begin + share.rank * own, begin + (share.rank + 1) * own))


def _input_rows(d: DeltaConfig, name: str, hidden: int, share: Share) -> tuple[list[Projection], list[Projection]]:
    """This rank's rows of the input projection in the kernels' order: C, B, x and z of each group; and the step widths
    of its heads. Stored are z, x, B, C and the step widths of all."""
    keys, values, own = d.key_heads * d.key, d.value_heads * d.value, d.shared * d.value
    shape, wide = (2 * (keys + values) + d.value_heads, hidden), []
    groups = share.width(d.key_heads)
    for group in range(share.rank * groups, (share.rank + 1) * groups):
        for begin, width in ((2 * values + keys, d.key), (2 * values, d.key), (values, own), (0, own)):
            first = begin + group * width
            wide.append(Projection(name, shape, Cut(slice(first, first + width))))
    return wide, [Projection(name, shape, _part(share, 2 * (keys + values), d.value_heads))]
