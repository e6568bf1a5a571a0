"""Lightning attention: linear attention with a constant decay for each head, and a state for each request instead of KV
(MiniMax-Text-01; arXiv 2501.08313).

Legend: T tokens, D hidden, H heads of this rank, Dh width of a head.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import silu

from moe_engine.kernels.backends import Backends
from moe_engine.kernels.delta.protocol import DeltaInputs, DeltaShape, DeltaStates, DeltaWeights
from moe_engine.kernels.quantization.protocol import Activation, ActivationFormat
from moe_engine.models.batch import ForwardBatch
from moe_engine.models.config import ModelConfig
from moe_engine.models.layers.attention.gated_gqa import opened
from moe_engine.models.layers.linear import Linear, load_linear
from moe_engine.models.layers.norm import RMSNorm
from moe_engine.models.layers.states.head_group_norm import HeadGroupNorm
from moe_engine.models.weights import WeightSource
from moe_engine.parallel.context import ParallelContext
from moe_engine.parallel.share import Share

EPS = 1e-6
"""Of the norm over all heads, whatever the model's is."""


def decay_rates(layer_index: int, num_layers: int, heads: int) -> Tensor:
    """Log decays of heads, negated, float32 [H]: slopes of ALiBi, smaller in later layers."""
    slopes = 2.0 ** (-8 / heads * torch.arange(1, heads + 1, dtype=torch.float64))
    return (slopes * (1 - layer_index / (num_layers - 1 + 1e-5) + 1e-5)).float()


class LightningAttention:
    """hidden [T, D] -> [T, D]: SiLU of q, k and v, the recurrence, a norm over all heads of all ranks, a gate. On
    several ranks each has some heads, and the result is a partial sum."""

    fused = in_stack = None
    inner_norms: Sequence[RMSNorm] = ()
    """Norms whose results linear layers read: none."""
    norm, out = "norm", "out_proj"
    """Names of tensors."""
    decay_rates = staticmethod(decay_rates)

    def __init__(
        self, config: ModelConfig, layer_index: int, reader: WeightSource, backends: Backends, parallel: ParallelContext
    ) -> None:
        assert config.delta is not None and backends.delta is not None
        whole, share, prefix = config.delta, Share.of(parallel.attn_tp), f"model.layers.{layer_index}.self_attn"
        heads, width, hidden = share.width(whole.value_heads), whole.value, config.hidden_size
        self._layer_index, self._kernel, self._ops = layer_index, backends.delta, backends.ops
        self._channels = whole.value_heads * width
        self._shape = DeltaShape(heads, heads, width, width, 0, additive=True, shortest=1.0, longest=1.0)
        self._inputs = self._load_inputs(reader, backends, prefix, share, hidden)
        self._out = load_linear(
            backends.linear, reader, [f"{prefix}.{self.out}"], [hidden], self._channels, in_share=share
        )
        eps = EPS if whole.rope is None else config.norm_eps * width
        self._norm = HeadGroupNorm(
            backends.ops, reader, f"{prefix}.{self.norm}.weight", self._channels, whole.norm_groups, eps,
            parallel.attn_tp,
        )  # fmt: skip
        rates = self.decay_rates(layer_index, config.num_layers, whole.value_heads)[share.cut(whole.value_heads)]
        a_log = torch.zeros_like(rates) if reader.made_up else rates.log()
        a_log, none = a_log.to(reader.device), torch.zeros(heads, device=reader.device)
        self._weights = DeltaWeights(none, a_log, none, none, eps)

    def _load_inputs(self, reader: WeightSource, backends: Backends, prefix: str, share: Share, hidden: int) -> Linear:
        """The projections of the hidden states: q, k, v and gates."""
        rows, names = [3 * self._channels, self._channels], [f"{prefix}.{name}" for name in ("qkv_proj", "output_gate")]
        return load_linear(backends.linear, reader, names, rows, hidden, out_shares=[share, share])

    @property
    def input_format(self) -> ActivationFormat:
        """Activation format of the hidden states."""
        return self._inputs.input_format

    def forward(self, hidden: Activation, batch: ForwardBatch, *_: Any) -> Tensor:
        (memory,) = batch.kv[self._layer_index]
        mixed, gate = self._mixed(hidden, batch)
        one = mixed[..., :1]  # of gates, which step widths of 1 leave without effect
        states = DeltaStates(memory, memory)
        found = self._kernel.run(
            DeltaInputs(mixed, mixed, one, one), self._weights, states, batch.state_runs, self._shape
        )
        normed = self._norm(found).unflatten(1, (self._shape.value_heads, -1))
        return self._out(opened(self._ops, normed, gate).flatten(1))

    def _mixed(self, hidden: Activation, batch: ForwardBatch) -> tuple[Tensor, Tensor]:
        """q, k and v [T, H, 3 Dh], and the gates [T, H, Dh]."""
        heads, width = self._shape.value_heads, self._shape.value
        qkv, gate = self._inputs(hidden).split((3 * heads * width, heads * width), 1)
        return silu(qkv).unflatten(1, (heads, -1)), gate.unflatten(1, (heads, -1))
