"""A short convolution between two gates, with a state for each request instead of KV (LFM2).

A projection makes of a token's input two gates and a value for each channel. The convolution reads the products of
value and first gate of the last tokens; the second gate multiplies its result. Source: transformers (lfm2).

Legend: T tokens, D hidden, W channels of this rank, K taps.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from moe_engine.kernels.backends import Backends
from moe_engine.kernels.ops.short_conv import gated_conv
from moe_engine.kernels.quantization.protocol import Activation, ActivationFormat
from moe_engine.models.batch import ForwardBatch
from moe_engine.models.checkpoint.cut import Cut
from moe_engine.models.config import ModelConfig
from moe_engine.models.layers.linear import Projection, load_linear, load_stacked
from moe_engine.models.layers.norm import RMSNorm
from moe_engine.models.weights import WeightSource
from moe_engine.parallel.context import ParallelContext
from moe_engine.parallel.share import Share


class ShortConv:
    """hidden [T, D] -> [T, D]. On several ranks each has some channels, and the result is a partial sum.
    ``batch.kv[layer]`` is the convolution's last inputs [rows, K - 1, W]."""

    fused = in_stack = None
    inner_norms: Sequence[RMSNorm] = ()
    """Norms whose results linear layers read: none."""

    def __init__(
        self, config: ModelConfig, layer_index: int, reader: WeightSource, backends: Backends, parallel: ParallelContext
    ) -> None:
        own, share, hidden = config.short_conv, Share.of(parallel.attn_tp), config.hidden_size
        assert own is not None
        prefix, shape = f"model.layers.{layer_index}.{own.block}", (3 * own.width, hidden)
        width = share.width(own.width)
        starts = (begin + share.rank * width for begin in range(0, shape[0], own.width))
        parts = (Cut(slice(start, start + width)) for start in starts)
        rows = [Projection(f"{prefix}.in_proj", shape, part) for part in parts]
        self._layer_index, self._kernel = layer_index, backends.ops.capabilities.gated_conv or gated_conv
        self._inputs = load_stacked(backends.linear, reader, rows)
        self._out = load_linear(backends.linear, reader, [f"{prefix}.out_proj"], [hidden], own.width, in_share=share)
        stored = (own.width, 1, own.taps)
        taps = reader.tensor(f"{prefix}.conv.weight", stored, Cut(share.cut(own.width)), dtype=torch.float32)
        self._taps = taps.view(-1, own.taps).t().contiguous()

    @property
    def input_format(self) -> ActivationFormat:
        """Activation format of the hidden states."""
        return self._inputs.input_format

    def forward(self, hidden: Activation, batch: ForwardBatch, *_: Any) -> Tensor:
        (kept,) = batch.kv[self._layer_index]
        return self._out(self._kernel(self._inputs(hidden), self._taps, kept, batch.state_runs))
