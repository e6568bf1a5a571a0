"""Attention in plain torch, float32 inside: a loop over the requests, a bounded block of scores at a time.

Legend: T query tokens (t of one request), H query heads, G KV heads, N qk_nope, P rotary width, C kv_lora_rank,
V v_head, Dh head width, S gathered context tokens (s of one request).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from moe_engine.kernels.attention.protocol import AttentionBatch, PagedQueries

MAX_SCORES = 1 << 22
"""Scores held at once (elements); longer query chunks are cut into blocks."""


class TorchMLA:
    """`MLABackend` without requirements."""

    name = "torch"

    def plan(self, batch: AttentionBatch) -> Any:
        return None

    def absorbed(
        self, q: Tensor, cache: Tensor, queries: PagedQueries, scale: float, plan: Any, value_width: int | None = None
    ) -> Tensor:
        """As the protocol says; `value_width` is C where the rotary width is not 64."""
        latent = q.shape[-1] - 64 if value_width is None else value_width
        out = q.new_empty(q.shape[0], q.shape[1], latent)
        for tokens, slots in _requests(queries):
            keys = cache.index_select(0, slots).float().unsqueeze(1)  # [s, 1, C+P]
            _attend(q[tokens], keys, keys[..., :latent], scale, out[tokens])
        return out

    def gather_latent(self, cache: Tensor, queries: PagedQueries, plan: Any) -> Tensor:
        parts = [slots for _, slots in _requests(queries)]
        return cache.index_select(0, torch.cat(parts)) if parts else cache[:0]

    def expanded(self, q: Tensor, kv: Tensor, k_rope: Tensor, queries: PagedQueries, scale: float, plan: Any) -> Tensor:
        num_heads, nope = q.shape[1], q.shape[2] - k_rope.shape[-1]
        out = q.new_empty(q.shape[0], num_heads, kv.shape[-1] - nope)
        query_start = context_start = 0
        for query_len, context_len in zip(queries.query_lens, queries.context_lens):
            tokens = slice(query_start, query_start + query_len)
            context = slice(context_start, context_start + context_len)
            shared = k_rope[context].unsqueeze(1).expand(-1, num_heads, -1)
            keys = torch.cat((kv[context, :, :nope], shared), -1).float()  # [s, H, N+P]
            _attend(q[tokens], keys, kv[context, :, nope:].float(), scale, out[tokens])
            query_start, context_start = tokens.stop, context.stop
        return out


class TorchGQA:
    """`GQABackend` without requirements."""

    name = "torch"

    def plan(self, batch: AttentionBatch) -> Any:
        return None

    def paged(
        self, q: Tensor, k_cache: Tensor, v_cache: Tensor, queries: PagedQueries, scale: float, plan: Any
    ) -> Tensor:
        out = q.new_empty(*q.shape[:2], v_cache.shape[-1])
        for tokens, slots in _requests(queries):
            keys = k_cache.index_select(0, slots).float()  # [s, G, Dh]
            _attend(q[tokens], keys, v_cache.index_select(0, slots).float(), scale, out[tokens])
        return out


def _requests(queries: PagedQueries) -> Iterator[tuple[slice, Tensor]]:
    """Of each request: its query tokens and the slots of its context."""
    start = 0
    rows = queries.rows.tolist()
    for row, query_len, context_len in zip(rows, queries.query_lens, queries.context_lens):
        yield slice(start, start + query_len), queries.slot_table[row, :context_len]
        start += query_len


def _attend(q: Tensor, keys: Tensor, values: Tensor, scale: float, out: Tensor) -> None:
    """q [t, H, W] against keys [s, G, W] and values [s, G, V] (float32) into out [t, H, V]; causal at the end."""
    num_queries, num_heads, width = q.shape
    num_keys, num_groups = keys.shape[:2]
    per_group = num_heads // num_groups
    keys, values = keys.permute(1, 2, 0), values.transpose(0, 1)  # [G, W, s], [G, s, V]
    block = max(1, MAX_SCORES // max(1, num_heads * num_keys))
    for start in range(0, num_queries, block):
        stop = min(start + block, num_queries)
        size = stop - start
        rows = q[start:stop].float().view(size, num_groups, per_group, width).transpose(0, 1)  # [G, t, H/G, W]
        scores = torch.bmm(rows.reshape(num_groups, size * per_group, width), keys).mul_(scale)
        if num_queries > 1:
            last_seen = torch.arange(start, stop, device=q.device).add_(num_keys - num_queries)  # [t]
            hidden = torch.arange(num_keys, device=q.device) > last_seen.unsqueeze(1)  # [t, s]
            scores.view(num_groups, size, per_group, num_keys).masked_fill_(hidden.unsqueeze(1), float("-inf"))
        mixed = torch.bmm(scores.softmax(-1), values)  # [G, t*H/G, V]
        out[start:stop] = mixed.view(num_groups, size, per_group, -1).transpose(0, 1).reshape(size, num_heads, -1)
