"""Grouped-query attention with an output gate: each head's result is multiplied by the sigmoid of a gate (Qwen3-Next).

Legend: T tokens, D hidden, H query heads, G KV heads, Dh head width.
"""

from __future__ import annotations

from torch import Tensor

from moe_engine.kernels.quantization.protocol import Activation
from moe_engine.models.batch import ForwardBatch
from moe_engine.models.layers.gqa import GQAttention, Groups, group_inputs


class GatedGQAttention(GQAttention):
    """`GQAttention` whose q_proj has a gate [Dh] after the query of each head. q and k are normed by head."""

    def forward(self, hidden: Activation, batch: ForwardBatch, groups: Groups | None = None) -> Tensor:
        k_cache, v_cache = self.cache_of(batch)
        groups = group_inputs(batch, self._all_groups, self._backend) if groups is None else groups
        q, gate, k, v = self._split(hidden, batch.positions)
        self._ops.write_kv(k, v, groups[self._group].slots, k_cache, v_cache)
        mixed = self._attend(q, k_cache, v_cache, groups)
        return self._o(mixed.mul_(gate.sigmoid()).flatten(1))

    def _project(self, hidden: Activation, positions: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        q, _, k, v = self._split(hidden, positions)
        return q, k, v

    def _split(self, hidden: Activation, positions: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """hidden [T, D] -> rotated q [T, H, Dh], its gate [T, H, Dh], rotated k and v [T, G, Dh]."""
        gqa = self._gqa
        assert self._q_norm is not None and self._k_norm is not None
        qkv = self._qkv(hidden).view(-1, 2 * (gqa.num_heads + gqa.num_kv_heads), gqa.head_dim)
        first, second = 2 * gqa.num_heads, 2 * gqa.num_heads + gqa.num_kv_heads
        q, k = self._q_norm(qkv[:, 0:first:2]), self._k_norm(qkv[:, first:second])
        self._ops.rotate_leading(q, positions, self._rotary)
        self._ops.rotate_leading(k, positions, self._rotary)
        return q, qkv[:, 1:first:2], k, qkv[:, second:]
