"""Sparse attention of backends without a kernel of its own for it.

Legend: T query tokens, H heads, C kv_lora_rank, P rotary width.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from moe_engine.kernels.attention.protocol import MLABackend
from moe_engine.kernels.attention.queries import AttentionBatch, PagedQueries
from moe_engine.kernels.attention.selected import Selected, SparseAttention


def over_absorbed(backend: MLABackend) -> SparseAttention:
    """Sparse attention by a backend's `absorbed`: each query token as a request of its own, on pages of one token. A
    token's result has the bits of `absorbed` over the same tokens, if the backend is batch-invariant."""

    def plan(selected: Selected) -> tuple[PagedQueries, Any]:
        queries = selected.queries()
        return queries, backend.plan(AttentionBatch(queries, None))

    def run(q: Tensor, cache: Tensor, selected: Selected, scale: float, plan: Any, value_width: int) -> Tensor:
        queries, own = plan
        return backend.absorbed(q, cache, queries, scale, own, value_width)

    return SparseAttention(plan, run)
