"""A layer around the gated delta rule: projections, the kernel's call, the output projection. Families differ in how
the inputs are stored (`gated_delta_net.py`, `kimi_delta_attention.py`).

Legend: T tokens, D hidden, Hk key heads of this rank, Hv value heads, Dv width of a value, C channels of a key head
that the convolution reads, K taps.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from moe_engine.kernels.backends import Backends
from moe_engine.kernels.delta.protocol import DeltaInputs, DeltaShape, DeltaStates, DeltaWeights
from moe_engine.kernels.linear.protocol import LinearKernel
from moe_engine.kernels.quantization.protocol import Activation, ActivationFormat, common_format
from moe_engine.models.batch import ForwardBatch
from moe_engine.models.checkpoint.cut import Cut
from moe_engine.models.layers.linear import Linear, Projection, format_for, load_stacked
from moe_engine.models.layers.norm import RMSNorm
from moe_engine.models.weights import WeightSource
from moe_engine.parallel.share import Share


class DeltaLayer:
    """hidden [T, D] -> [T, D]. On several ranks each has some key heads with their value heads, and the result is a
    partial sum."""

    fused = None
    """The layer in one call, for draft chains: no kernel has it."""
    inner_norms: Sequence[RMSNorm] = ()
    """Norms whose results linear layers read: none."""

    def __init__(
        self, layer_index: int, backends: Backends, shape: DeltaShape, weights: DeltaWeights, out: Linear
    ) -> None:
        assert backends.delta is not None
        self._layer_index, self._kernel, self._shape, self._out = layer_index, backends.delta, shape, out
        self._weights = weights

    def _load_inputs(
        self, kernel: LinearKernel, reader: WeightSource, wide: list[Projection], narrow: list[Projection]
    ) -> None:
        """The projections of the hidden states: rows of `wide` in the kernels' order, and of `narrow`, which are few
        and in the same product unless one of both stays quantized."""
        self._narrow_rows = sum(part.cut.shape(part.shape)[0] for part in narrow)
        plain = all(format_for(kernel.capabilities.quantized, reader, rows) is None for rows in (wide, narrow))
        self._wide = load_stacked(kernel, reader, [*wide, *narrow] if plain else wide)
        self._narrow = None if plain else load_stacked(kernel, reader, narrow)

    def _project(self, hidden: Activation) -> tuple[Tensor, Tensor]:
        """hidden [T, D] -> the products with the rows of `wide` and of `narrow`."""
        wide = self._wide(hidden)
        if self._narrow is None:
            return wide[:, : -self._narrow_rows], wide[:, -self._narrow_rows :]
        return wide, self._narrow(hidden)

    @property
    def input_format(self) -> ActivationFormat:
        """Activation format of the hidden states."""
        own = self._wide.input_format
        return own if self._narrow is None else common_format(own, self._narrow.input_format)

    def forward(self, hidden: Activation, batch: ForwardBatch, *_: Any) -> Tensor:
        states = DeltaStates(*batch.kv[self._layer_index][:2])  # others are of other parts of the layer
        inputs = self._inputs(hidden)
        mixed = self._kernel.run(inputs, self._weights, states, batch.state_runs, self._shape)  # [T, Hv Dv]
        return self._out(mixed)

    def _inputs(self, hidden: Activation) -> DeltaInputs:
        """The kernel's inputs of hidden [T, D]."""
        raise NotImplementedError


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
