"""Grouped-query attention with an output gate: each head's result is multiplied by the sigmoid of a gate for each
channel (Qwen3-Next) or of one number (Step 3.5), or by its softplus (Laguna).

Legend: T tokens, D hidden, H query heads, G KV heads, Dh head width.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.nn.functional import softplus

from moe_engine.kernels.backends import Backends
from moe_engine.kernels.ops.protocol import Ops
from moe_engine.kernels.quantization.protocol import Activation, ActivationFormat, common_format
from moe_engine.models.batch import ForwardBatch
from moe_engine.models.config import GQAConfig, ModelConfig
from moe_engine.models.layers.attention.gqa import GQAttention, Groups, ProjectedParts, group_inputs
from moe_engine.models.layers.linear import load_linear
from moe_engine.models.tensors.model import gate_name
from moe_engine.models.weights import WeightSource
from moe_engine.parallel.context import ParallelContext
from moe_engine.parallel.share import Share


class GatedGQAttention(GQAttention):
    """`GQAttention` whose q_proj has a gate [Dh] after the query of each head. q and k are normed by head."""

    def forward(self, hidden: Activation, batch: ForwardBatch, groups: Groups | None = None) -> Tensor:
        k_cache, v_cache = cache = self.cache_of(batch)
        groups = group_inputs(batch, self._all_groups, self._backend) if groups is None else groups
        parts = self._parts(self._qkv(hidden))
        q = self._rows(parts, batch.positions, groups[self._group].slots, cache)
        return self._gated(self._attend(q, k_cache, v_cache, groups), parts)

    def _gated(self, mixed: Tensor, parts: ProjectedParts) -> Tensor:
        """[T, H, V] -> [T, D]."""
        return self._o(opened(self._ops, mixed, parts.heads[:, 1 : 2 * self._gqa.num_heads : 2]).flatten(1))

    def _parts(self, projected: Tensor) -> ProjectedParts:
        gqa = self._gqa
        qkv = projected.view(-1, 2 * (gqa.num_heads + gqa.num_kv_heads), gqa.head_dim)
        first, second = 2 * gqa.num_heads, 2 * gqa.num_heads + gqa.num_kv_heads
        return ProjectedParts(qkv[:, 0:first:2], qkv[:, first:second], qkv[:, second:], qkv)


class HeadGatedGQAttention(GQAttention):
    """`GQAttention` with a projection of the gates, [H, D] or [H Dh, D]. No whole-layer call has the gate."""

    def __init__(
        self, config: ModelConfig, layer_index: int, reader: WeightSource, backends: Backends,
        parallel: ParallelContext, *others: Any, **options: Any,
    ) -> None:  # fmt: skip
        super().__init__(config, layer_index, reader, backends, parallel, *others, **options)
        whole = config.attention_of(layer_index)
        name = f"model.layers.{layer_index}.self_attn.{gate_name(config)}"
        assert isinstance(whole, GQAConfig)
        rows, share = [whole.num_heads * whole.gate_width], Share.of(parallel.attn_tp)
        self._gate = load_linear(backends.linear, reader, [name], rows, config.hidden_size, out_shares=[share])

    @property
    def input_format(self) -> ActivationFormat:
        return common_format(super().input_format, self._gate.input_format)

    def forward(self, hidden: Activation, batch: ForwardBatch, groups: Groups | None = None) -> Tensor:
        k_cache, v_cache = cache = self.cache_of(batch)
        groups = group_inputs(batch, self._all_groups, self._backend) if groups is None else groups
        gate = self._gate(hidden).unflatten(1, (-1, self._gqa.gate_width))  # [T, H, 1]
        q = self.before(hidden, batch.positions, groups[self._group].slots, cache)
        mixed = self._attend(q, k_cache, v_cache, groups)
        return self._o(opened(self._ops, mixed, gate, self._gqa.gate_softplus).flatten(1))


def opened(ops: Ops, mixed: Tensor, gate: Tensor, by_softplus: bool = False) -> Tensor:
    """mixed [T, H, V] * sigmoid(gate [T, H, V] or [T, H, 1]), or softplus, in place."""
    if (gates := ops.capabilities.gates) is not None:
        return gates.heads(mixed, gate, by_softplus)
    return mixed.mul_(softplus(gate.float()).to(gate.dtype) if by_softplus else gate.sigmoid())
