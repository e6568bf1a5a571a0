"""Attention in plain torch, computed in float32: a loop over requests, in bounded blocks of scores.

Legend: T query tokens (t of one request), H query heads, G KV heads, N qk_nope, P rotary width, C kv_lora_rank,
V v_head, Dh head width, S gathered context tokens (s of one request).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from moe_engine.kernels.attention.parts import Chunk, merge_chunks
from moe_engine.kernels.attention.protocol import AttentionCapabilities, ContextChunks
from moe_engine.kernels.attention.selected import Selected, SparseAttention
from moe_engine.kernels.attention_windows import lowest_seen
from moe_engine.kernels.kv_format import head_records, latent_records
from moe_engine.kernels.queries import AttentionBatch, PagedQueries

MAX_SCORES = 1 << 22
"""Max score elements in memory; longer query chunks are cut into blocks."""


class TorchMLA:
    """`MLABackend` for any device and shape."""

    name = "torch"

    @property
    def capabilities(self) -> AttentionCapabilities:
        return AttentionCapabilities(
            chunks=ContextChunks(self.plan_chunk, self.expanded_chunk, self.merge_chunks),
            sparse=SparseAttention(lambda selected: None, self.sparse, sinks=True),
        )

    def plan(self, batch: AttentionBatch) -> Any:
        return None

    def absorbed(
        self, q: Tensor, cache: Tensor, queries: PagedQueries, scale: float, plan: Any, value_width: int | None = None
    ) -> Tensor:
        """See the protocol; `value_width` is C where the rotary width is not 64."""
        latent = q.shape[-1] - 64 if value_width is None else value_width
        out = q.new_empty(q.shape[0], q.shape[1], latent)
        for tokens, slots, visible in requests_of(queries):
            rows = cache.index_select(0, slots)
            keys = latent_records.unpack(rows, latent, q.shape[-1] - latent).unsqueeze(1)  # [s, 1, C+P]
            _attend(q[tokens], keys, keys[..., :latent], scale, out[tokens], visible)
        return out

    def gather_latent(
        self, cache: Tensor, queries: PagedQueries, plan: Any, out: Tensor | None = None, value_width: int | None = None
    ) -> Tensor:
        """See the protocol; `value_width` is C where the rotary width is not 64."""
        queries.refuse_tree("gathered")
        if isinstance(plan, Chunk):
            rows = cache.index_select(0, plan.slots())
        else:
            parts = [slots for _, slots, _ in requests_of(queries)]
            rows = cache.index_select(0, torch.cat(parts)) if parts else cache[:0]
        if out is None:
            return rows
        latent = out.shape[1] - 64 if value_width is None else value_width
        return out.copy_(latent_records.unpack(rows, latent, out.shape[1] - latent))

    def expanded(self, q: Tensor, kv: Tensor, k_rope: Tensor, queries: PagedQueries, scale: float, plan: Any) -> Tensor:
        queries.refuse_tree("expanded")
        return _expanded(q, kv, k_rope, scale, queries, [0] * queries.num_requests, queries.context_lens)

    def sparse(
        self, q: Tensor, cache: Tensor, selected: Selected, scale: float, plan: Any, value_width: int,
        sinks: Tensor | None = None,
    ) -> Tensor:  # fmt: skip
        """See `SparseRun`."""
        out = q.new_empty(q.shape[0], q.shape[1], value_width)
        block = max(1, MAX_SCORES // max(1, q.shape[2] * selected.slots.shape[1]))
        for start in range(0, len(q), block):
            part = slice(start, start + block)
            slots = selected.slots[part]  # [t, K]
            rows = cache.index_select(0, slots.clamp(min=0).flatten())
            keys = latent_records.unpack(rows, value_width, q.shape[-1] - value_width).view(*slots.shape, -1)
            keys = keys.masked_fill((slots < 0).unsqueeze(-1), 0.0)  # [t, K, C+P]
            scores = torch.bmm(q[part].float(), keys.transpose(1, 2)).mul_(scale)  # [t, H, K]
            scores.masked_fill_((slots < 0).unsqueeze(1), float("-inf"))
            out[part] = torch.bmm(_weights(scores, sinks), keys[..., :value_width])
        return out

    # -- context chunks

    def plan_chunk(self, queries: PagedQueries, first_keys: Sequence[int], key_lens: Sequence[int]) -> Chunk:
        return Chunk(queries, first_keys, key_lens)

    def expanded_chunk(self, q: Tensor, kv: Tensor, k_rope: Tensor, scale: float, plan: Chunk) -> tuple[Tensor, Tensor]:
        lse = q.new_empty(q.shape[:2], dtype=torch.float32)
        return _expanded(q, kv, k_rope, scale, plan.queries, plan.first_keys, plan.key_lens, lse), lse

    def merge_chunks(self, out: Tensor, lse: Tensor, other: Tensor, other_lse: Tensor) -> None:
        merge_chunks(out, lse, other, other_lse)


class TorchGQA:
    """`GQABackend` for any device and shape."""

    name = "torch"

    @property
    def capabilities(self) -> AttentionCapabilities:
        return AttentionCapabilities(windows=True, chunked=True, sinks=self.paged, capped=self.paged)

    def plan(self, batch: AttentionBatch) -> Any:
        return None

    def paged(
        self, q: Tensor, k_cache: Tensor, v_cache: Tensor, queries: PagedQueries, scale: float, plan: Any,
        sinks: Tensor | None = None, cap: float = 0.0,
    ) -> Tensor:  # fmt: skip
        width, value = q.shape[-1], head_records.value_width(k_cache, v_cache, q.shape[-1])
        out = q.new_empty(*q.shape[:2], value)
        for tokens, slots, visible in requests_of(queries):
            keys = head_records.unpack(k_cache.index_select(0, slots), width)  # [s, G, Dh]
            values = head_records.unpack(v_cache.index_select(0, slots), value)
            more: dict[str, Any] = {"window": queries.window, "sinks": sinks, "cap": cap}
            _attend(q[tokens], keys, values, scale, out[tokens], visible, **more)
        return out


def _expanded(
    q: Tensor, kv: Tensor, k_rope: Tensor, scale: float, queries: PagedQueries, firsts: Sequence[int],
    lens: Sequence[int], lse: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Over tokens [firsts[i], firsts[i] + lens[i]) of request i's context: [T, H, V]; log-sum-exp into lse [T, H]."""
    num_heads, nope = q.shape[1], q.shape[2] - k_rope.shape[-1]
    out = q.new_empty(q.shape[0], num_heads, kv.shape[-1] - nope)
    query_start = key_start = 0
    for query_len, context_len, first, length in zip(queries.query_lens, queries.context_lens, firsts, lens):
        tokens, part = slice(query_start, query_start + query_len), slice(key_start, key_start + length)
        shared = k_rope[part].unsqueeze(1).expand(-1, num_heads, -1)
        keys = torch.cat((kv[part, :, :nope], shared), -1).float()  # [s, H, N+P]
        values, before = kv[part, :, nope:].float(), context_len - query_len - first
        sums = None if lse is None else lse[tokens]
        _attend(q[tokens], keys, values, scale, out[tokens], None, sums, before)
        query_start, key_start = tokens.stop, part.stop
    return out


def requests_of(queries: PagedQueries) -> Iterator[tuple[slice, Tensor, Tensor | None]]:
    """Per request: its query tokens, the slots of the context that they see, its slice of `visible`."""
    start = 0
    rows = queries.rows.tolist()
    for row, query_len, context_len, first in zip(rows, queries.query_lens, queries.context_lens, queries.first_seen):
        tokens = slice(start, start + query_len)
        visible = None if queries.visible is None else queries.visible[tokens]
        rate = queries.rate
        yield tokens, queries.slot_table[row, first * rate : context_len * rate : rate] // rate, visible
        start += query_len


def hidden_keys(
    queries: range, num_before: int, num_keys: int, visible: Tensor | None, window: int | None, device: torch.device
) -> Tensor:
    """[t, s] mask: keys that the t `queries` of a request must not see; the first `num_before` keys are no queries."""
    key = torch.arange(num_keys, device=device).sub_(num_before)  # the query token that a key belongs to, or < 0
    if visible is None:
        own = torch.arange(queries.start, queries.stop, device=device).unsqueeze(1)
        if window is None:
            return key > own
        # the keys of chunks begin with one, so that places among the keys are as good as positions
        return (key > own) | (key < lowest_seen(own + num_before, window) - num_before)
    seen = visible[queries.start : queries.stop].unsqueeze(1) >> key.clamp(min=0) & 1
    return (key >= 0) & (seen == 0)


def _attend(
    q: Tensor, keys: Tensor, values: Tensor, scale: float, out: Tensor, visible: Tensor | None = None,
    lse: Tensor | None = None, num_before: int | None = None, window: int | None = None,
    sinks: Tensor | None = None, cap: float = 0.0,
) -> None:  # fmt: skip
    """q [t, H, W] against keys [s, G, W] and values [s, G, V] (float32) into out [t, H, V] and lse [t, H]. Causal with
    `num_before` keys (default: s - t) before the first query token's own key, or masked by `visible` [t]; each sees its
    last `window` keys, or those of its chunk. `sinks` [H]: logits without a value. `cap`: bound of the scores; 0: none.
    """
    num_queries, num_heads, width = q.shape
    num_keys, num_groups = keys.shape[:2]
    per_group = num_heads // num_groups
    if num_before is None:
        num_before = num_keys - num_queries
    keys, values = keys.permute(1, 2, 0), values.transpose(0, 1)  # [G, W, s], [G, s, V]
    block = max(1, MAX_SCORES // max(1, num_heads * num_keys))
    for start in range(0, num_queries, block):
        stop = min(start + block, num_queries)
        size = stop - start
        rows = q[start:stop].float().view(size, num_groups, per_group, width).transpose(0, 1)  # [G, t, H/G, W]
        scores = torch.bmm(rows.reshape(num_groups, size * per_group, width), keys).mul_(scale)
        if cap:
            scores.div_(cap).tanh_().mul_(cap)
        if num_before + 1 < num_keys:  # otherwise the first query token sees all keys
            hidden = hidden_keys(range(start, stop), num_before, num_keys, visible, window, q.device)  # [t, s]
            scores.view(num_groups, size, per_group, num_keys).masked_fill_(hidden.unsqueeze(1), float("-inf"))
        if lse is not None:
            sums = scores.logsumexp(-1).view(num_groups, size, per_group)
            lse[start:stop] = sums.transpose(0, 1).reshape(size, num_heads)
        own = (
            None if sinks is None else sinks.view(num_groups, 1, per_group).expand(-1, size, -1).reshape(num_groups, -1)
        )
        mixed = torch.bmm(_weights(scores, own), values)  # [G, t*H/G, V]
        out[start:stop] = mixed.view(num_groups, size, per_group, -1).transpose(0, 1).reshape(size, num_heads, -1)


def _weights(scores: Tensor, sinks: Tensor | None) -> Tensor:
    """The softmax of scores [B, M, s]; sinks [B, M] or [M] take part, without a weight."""
    if sinks is None:
        return scores.softmax(-1)
    own = sinks.expand(scores.shape[:2]).unsqueeze(-1)
    return torch.cat((scores, own), -1).softmax(-1)[..., :-1]
