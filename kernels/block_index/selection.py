"""The rows that attention reads, from the scores of blocks: common to all kernels.

A KV head of a query token is a request of its own, whose context is its selection, over a cache with the KV heads of a
slot in neighboring rows.

Legend: T query tokens, G KV heads, K selected blocks, B blocks of a context.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from moe_engine.kernels.attention.selected import Selected, num_visible
from moe_engine.kernels.block_index.rule import TOKENS_AT_ONCE, BlockRule
from moe_engine.kernels.queries import PagedQueries
from moe_engine.kernels.uploads import upload


def refuse_tree(queries: PagedQueries) -> None:
    """Raises ValueError for a draft tree."""
    if queries.visible is not None:
        raise ValueError("block-sparse attention is causal: a draft tree (visible) has no blocks of its own")


def counts(queries: PagedQueries, rule: BlockRule, heads: int) -> list[int]:
    """Selected tokens of each row of a selection."""
    return [rule.num_selected(visible) for visible in num_visible(queries) for _ in range(heads)]


def empty(queries: PagedQueries, rule: BlockRule, heads: int, longest: int | None = None) -> Selected:
    """Memory for the selection of some queries with `heads` KV heads; its slots are not set.

    Args:
        longest: the longest context; default: that of the queries.
    """
    longest = max(queries.context_lens, default=0) if longest is None else longest
    width = min(rule.top_k, -(-longest // rule.size)) * rule.size
    found, device = counts(queries, rule, heads), queries.rows.device
    slots = torch.empty((len(found), width), dtype=torch.int32, device=device)
    return Selected(slots, found, upload(np.asarray(found, dtype=np.int32), device))


@dataclass(frozen=True)
class TokenPlaces:
    """The request of each query token [T] int32, and the number of the request's query tokens after it."""

    queries: PagedQueries
    request_of: Tensor
    after: Tensor

    @classmethod
    def of(cls, queries: PagedQueries) -> TokenPlaces:
        refuse_tree(queries)
        lens, device = queries.query_lens, queries.rows.device
        request_of = np.repeat(np.arange(len(lens)), lens).astype(np.int32)
        ends = np.repeat(np.cumsum(lens, dtype=np.int64), lens)
        after = (ends - 1 - np.arange(len(ends))).astype(np.int32)
        return cls(queries, upload(request_of, device), upload(after, device))

    def last_positions(self, tokens: slice) -> Tensor:
        """Position of each query token [t] int32, computed on the device."""
        lens = self.queries.context_lens_device.index_select(0, self.request_of[tokens])
        return lens - 1 - self.after[tokens]

    def table_rows(self, tokens: slice) -> Tensor:
        """Row of each query token in the slot table, [t] int32."""
        return self.queries.rows.index_select(0, self.request_of[tokens])


def choose(scores: Tensor, tokens: slice, rule: BlockRule, selected: Selected, places: TokenPlaces) -> None:
    """Sets `selected.slots` of some query tokens from their scores [t, G, B], which this overwrites; scores of blocks
    after a token's own are not read."""
    for start in range(0, len(scores), TOKENS_AT_ONCE):
        part = scores[start : start + TOKENS_AT_ONCE]
        first = tokens.start + start
        _choose(part, slice(first, first + len(part)), rule, selected, places)


def _choose(scores: Tensor, tokens: slice, rule: BlockRule, selected: Selected, places: TokenPlaces) -> None:
    heads, num_blocks = scores.shape[1:]
    last = places.last_positions(tokens).view(-1, 1, 1)  # [t, 1, 1]
    own = last // rule.size
    number = torch.arange(num_blocks, dtype=torch.int32, device=scores.device)
    scores.masked_fill_(number > own, -math.inf)
    scores.masked_fill_((number <= own) & (number > own - rule.local), math.inf)
    width = selected.slots.shape[1] // rule.size
    order = scores.sort(dim=-1, descending=True, stable=True).indices[..., :width]  # [t, G, K]
    chosen = torch.arange(order.shape[2], device=scores.device) <= own
    blocks = order.masked_fill(~chosen, num_blocks).sort(-1).values
    inside = torch.arange(rule.size, device=scores.device)
    position = (blocks.unsqueeze(-1) * rule.size + inside).flatten(2)  # [t, G, K * size]
    table = places.queries.slot_table
    row = places.table_rows(tokens).long().view(-1, 1, 1) * table.stride(0)
    slots = table.as_strided((table.shape[0] * table.stride(0),), (1,)).take(
        row + position.clamp_(max=table.shape[1] - 1)
    )
    head = torch.arange(heads, dtype=torch.int32, device=scores.device).view(1, -1, 1)
    rows = slots.mul_(heads).add_(head)
    counted = selected.counts_device.view(-1, heads, 1)[tokens]
    rows.masked_fill_(torch.arange(rows.shape[2], device=scores.device) >= counted, -1)
    out = selected.slots.view(-1, heads, selected.slots.shape[1])[tokens]
    out[..., : rows.shape[2]] = rows
    out[..., rows.shape[2] :] = -1
