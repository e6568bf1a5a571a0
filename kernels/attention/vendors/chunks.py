"""Context chunks for libraries whose attention returns a log-sum-exp: code shared by their adapters.

Legend: H query heads, N qk_nope, P rotary width, V v_head, S keys of all requests.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from moe_engine.kernels.attention import parts
from moe_engine.kernels.attention.vendors.paging import SLOTS, StepPlan, gathered_slots
from moe_engine.kernels.queries import AttentionBatch, PagedQueries


class ChunkPlan(StepPlan):
    """A context chunk of some requests, and the adapter's per-chunk state for all layers."""

    def __init__(self, part: parts.Chunk) -> None:
        super().__init__(AttentionBatch(None, part.queries))
        self.part = part
        self.get(part.queries, SLOTS, part.slots)


class MergesChunks:
    """Base of the MLA adapters: the gather of the latent, and context chunks by their `expanded_chunk`."""

    def gather_latent(
        self, cache: Tensor, queries: PagedQueries, plan: Any, out: Tensor | None = None, value_width: int | None = None
    ) -> Tensor:
        """See the protocol; `cache` may hold unscaled e4m3 numbers."""
        slots = gathered_slots(plan, queries)
        if cache.dtype != torch.float8_e4m3fn:
            return torch.index_select(cache, 0, slots, out=out)
        rows = cache.view(torch.uint8).index_select(0, slots).view(cache.dtype)
        return rows.to(torch.bfloat16) if out is None else out.copy_(rows)

    def plan_chunk(self, queries: PagedQueries, first_keys: Sequence[int], key_lens: Sequence[int]) -> ChunkPlan:
        """See the protocol. Raises ValueError for chunks that need more than one causal mask, or none."""
        return ChunkPlan(parts.Chunk(queries, first_keys, key_lens))

    def merge_chunks(self, out: Tensor, lse: Tensor, other: Tensor, other_lse: Tensor) -> None:
        _merge(out.device)(out, lse, other, other_lse)


@lru_cache
def compile_merge(dtype: torch.dtype, width: int, device: torch.device) -> None:
    """Runs the merge for values of this width once, with the first prompt. Otherwise the first long prompt of a serving
    engine would wait for the compiler."""
    out, lse = torch.zeros(1, 1, width, dtype=dtype, device=device), torch.zeros(1, 1, device=device)
    _merge(device)(out, lse, out.clone(), lse.clone())


def keys_and_values(kv: Tensor, k_rope: Tensor, nope: int) -> tuple[Tensor, Tensor]:
    """kv [S, H, N+V] and k_rope [S, P] -> keys [S, H, N+P], a copy, and values [S, H, V], a view."""
    return torch.cat((kv[..., :nope], k_rope.unsqueeze(1).expand(-1, kv.shape[1], -1)), -1), kv[..., nope:]


def _merge(device: torch.device) -> Callable[[Tensor, Tensor, Tensor, Tensor], None]:
    """In Triton where that is installed and the tensors are on a GPU, else in torch."""
    if device == torch.device("cpu"):
        return parts.merge_chunks
    try:
        return importlib.import_module("moe_engine.kernels.attention.triton.merge").merge_chunk
    except ImportError:
        return parts.merge_chunks
