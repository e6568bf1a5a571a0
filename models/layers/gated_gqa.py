"""Grouped-query attention with an output gate: each head's result is multiplied by the sigmoid of a gate (Qwen3-Next).

Legend: T tokens, D hidden, H query heads, G KV heads, Dh head width.
"""

from __future__ import annotations

from torch import Tensor

from moe_engine.kernels.quantization.protocol import Activation
from moe_engine.models.batch import ForwardBatch
from moe_engine.models.layers.gqa import GQAttention, Groups, ProjectedParts, group_inputs


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
        gate = parts.heads[:, 1 : 2 * self._gqa.num_heads : 2]
        gates = self._ops.capabilities.gates
        opened = mixed.mul_(gate.sigmoid()) if gates is None else gates.heads(mixed, gate)
        return self._o(opened.flatten(1))

    def _parts(self, projected: Tensor) -> ProjectedParts:
        gqa = self._gqa
        qkv = projected.view(-1, 2 * (gqa.num_heads + gqa.num_kv_heads), gqa.head_dim)
        first, second = 2 * gqa.num_heads, 2 * gqa.num_heads + gqa.num_kv_heads
        return ProjectedParts(qkv[:, 0:first:2], qkv[:, first:second], qkv[:, second:], qkv)
