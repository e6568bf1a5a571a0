"""The chunks of a step whose query tokens attend to selected pools of `pool` adjacent tokens, and to the tokens behind
the last whole pool (GLM-5.3-Flash).

Host work once per step, shared by all layers. A pool has the slot of its last token; its tokens have the slots before,
because a page has whole pools.

Legend: T query tokens, R requests, E pools of a request, K pools that are selected, P tokens of a pool, W slots.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from moe_engine.kernels.attention.selected import Selected, SparseAttention, num_visible
from moe_engine.kernels.indexer.protocol import IndexerKernel
from moe_engine.kernels.queries import AttentionBatch, PagedQueries
from moe_engine.kernels.uploads import upload
from moe_engine.models.config import IndexerConfig
from moe_engine.models.layers.mla_chunks import AttentionChunk


@dataclass(frozen=True)
class PoolSelection:
    """Selects pools, and places their tokens among the slots of attention."""

    queries: PagedQueries
    """Each query token as a request of its own, whose context are the whole pools that it sees."""
    chosen: Selected
    plan: Any
    pools: Tensor  # [T, W] int64: number of the selected pool whose token a slot is
    behind: Tensor  # [T, W] int32: tokens of the pool behind it
    is_pooled: Tensor  # [T, W]: which slots are of pools

    def place(self, slots: Tensor) -> None:
        """Sets the tokens of the chosen pools among slots [T, W]."""
        found = self.chosen.slots.gather(1, self.pools).sub_(self.behind)
        torch.where(self.is_pooled, found, slots, out=slots)


def cut(
    batch: AttentionBatch, indexer: IndexerConfig, kernel: IndexerKernel, sparse: SparseAttention, max_tokens: int
) -> list[AttentionChunk]:
    """The chunks of a step, in token order, each of at most `max_tokens` tokens of one group. `index_plan` is a
    `PoolSelection`; None where the tokens see no more pools than are selected."""
    chunks: list[AttentionChunk] = []
    start = 0
    for group in (batch.decode, batch.prefill):
        if group is None or not group.num_tokens:
            continue
        group.refuse_tree("pooled")
        for part, visible, requests in _parts(group, max_tokens):
            tokens = slice(start + part.start, start + part.stop)
            chunks.append(_chunk(group, tokens, visible, requests, indexer, kernel, sparse))
        start += group.num_tokens
    return chunks


def _parts(group: PagedQueries, size: int) -> Iterator[tuple[slice, np.ndarray, np.ndarray]]:
    """Tokens of the group, the context tokens that each sees, and the numbers of their requests."""
    visible = np.array(num_visible(group))
    requests = np.repeat(np.arange(group.num_requests), group.query_lens)
    for first in range(0, len(visible), size):
        part = slice(first, min(first + size, len(visible)))
        yield part, visible[part], requests[part]


def _chunk(
    group: PagedQueries, tokens: slice, visible: np.ndarray, requests: np.ndarray, indexer: IndexerConfig,
    kernel: IndexerKernel, sparse: SparseAttention,
) -> AttentionChunk:  # fmt: skip
    device, size = group.rows.device, indexer.pool
    most, pools = indexer.top_k // size, visible // size
    counts = np.minimum(pools, most) * size + visible % size  # slots of each token
    rows = group.rows.long()[upload(requests, device)]
    seen, own = upload(visible, device)[:, None], upload(np.minimum(pools, most) * size, device)[:, None]
    columns = torch.arange(int(counts.max()), device=device)[None]
    is_pooled = columns < own
    # the tokens behind the last whole pool follow those of the selected pools
    positions = torch.where(is_pooled, columns, columns - own + seen - seen % size)
    slots = group.slot_table[rows[:, None], positions.clamp_(max=group.slot_table.shape[1] - 1)]
    slots = slots.masked_fill_(columns >= upload(counts, device)[:, None], -1)
    selected = Selected(slots, counts.tolist(), upload(counts.astype(np.int32), device))
    selection = None
    if pools.max() > most:
        selection = _selection(group, rows, pools, most, size, kernel, is_pooled)
    return AttentionChunk(tokens, group, sparse.plan(selected), True, selected=selected, index_plan=selection)


def _selection(
    group: PagedQueries, rows: Tensor, pools: np.ndarray, most: int, size: int, kernel: IndexerKernel,
    is_pooled: Tensor,
) -> PoolSelection:  # fmt: skip
    device, width = rows.device, is_pooled.shape[1]
    table = group.slot_table[:, size - 1 :: size][:, : int(pools.max())].contiguous()
    context = np.maximum(pools, 1)  # a token that sees no pool has a context of one, which no slot names
    starts = torch.arange(len(pools) + 1, dtype=torch.int32, device=device)
    lens = upload(context.astype(np.int32), device)
    queries = PagedQueries([1] * len(pools), context.tolist(), rows.int(), starts, lens, table, 1)
    count = np.minimum(context, most)
    chosen = torch.zeros((len(pools), most), dtype=torch.int32, device=device)
    columns = torch.arange(width, device=device)
    behind = (size - 1 - columns % size).int()[None].expand(len(pools), -1)
    places = (columns // size).clamp(max=most - 1)[None].expand(len(pools), -1)
    return PoolSelection(
        queries, Selected(chosen, count.tolist(), upload(count.astype(np.int32), device)), kernel.plan(queries),
        places, behind, is_pooled,
    )  # fmt: skip
