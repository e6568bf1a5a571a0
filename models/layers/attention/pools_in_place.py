"""Decodes over selected pools at fixed addresses, so that they can be captured as CUDA graphs.

A captured step computes its counts from the tokens' positions, and selects for every request: one graph serves all
lengths.

Legend: T query tokens, K pools that a token selects at most, W slots.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from moe_engine.kernels.attention.renewable import RenewablePlan
from moe_engine.kernels.attention.selected import PlansSelected, Selected
from moe_engine.kernels.indexer.pools import PooledTokens, PoolKernels, PoolRule
from moe_engine.kernels.indexer.protocol import IndexerKernel
from moe_engine.kernels.queries import PagedQueries
from moe_engine.models.layers.attention.mla_chunks import AttentionChunk
from moe_engine.models.layers.fixed_memory import FixedMemory


@dataclass(frozen=True)
class PoolChoice:
    """The selection of pools by an indexer, and the tokens that attend to them."""

    queries: PagedQueries
    """Each query token as a request of its own, whose context are the pools that it sees; one pool if it sees none."""
    chosen: Selected
    plan: Any
    tokens: PooledTokens

    def select(self, kernel: IndexerKernel, q: Tensor, weights: Tensor, keys: Tensor, out: Tensor) -> None:
        """Sets slots [T, W] of attention. q, weights: as in `IndexerKernel.select`; keys [N, 1, I]: cached index keys
        of tokens and pools."""
        size, most = self.tokens.rule
        kernel.select(q, weights, keys[size - 1 :: size], self.queries, most, self.chosen, self.plan)
        kernel.pools.place(self.chosen.slots, self.tokens, out)


class PoolsInPlace:
    """`RenewablePlan` of a decode group, whose requests have the same number of query tokens.

    Args:
        selected: memory of the slots of each token. attention: their plan.
        lens: [T] int32, memory of the pools that each token sees.
        choice: None: no request can see more pools than are selected.
    """

    common = False

    def __init__(
        self, queries: PagedQueries, kernels: PoolKernels, tokens: PooledTokens, selected: Selected,
        attention: RenewablePlan, lens: Tensor, choice: PoolChoice | None,
    ) -> None:  # fmt: skip
        self._queries, self._kernels, self._tokens, self._selected = queries, kernels, tokens, selected
        self._attention, self._lens, self._choice = attention, lens, choice
        self._requests = torch.arange(len(lens), device=lens.device) // queries.query_lens[0]

    @classmethod
    def of(
        cls, rule: PoolRule, heads: int, queries: PagedQueries, sparse: PlansSelected, kernel: IndexerKernel,
        memory: FixedMemory,
    ) -> PoolsInPlace | None:  # fmt: skip
        """None if one of the kernels cannot be captured, and for a draft tree.

        Args:
            heads: of the index queries.
        """
        if sparse.plan_in_place is None or queries.visible is not None:
            return None
        device, table, num_tokens = queries.rows.device, queries.slot_table, queries.num_tokens
        (size, most), pools = rule, table.shape[1] // rule.size
        lens, counts, rows = (memory.take(name, (num_tokens,), device) for name in ("pools", "counts", "rows"))
        width = min(most * size + size - 1, table.shape[1])
        slots = memory.take("slots", (num_tokens, width), device)
        selected = Selected(slots, _counts(rule, queries, bounds=True), counts)
        attention = sparse.plan_in_place(selected)
        if attention is None:
            return None
        tokens, choice = PooledTokens(lens, rows, table, rule), None
        if pools > most:
            starts = torch.arange(num_tokens + 1, dtype=torch.int32, device=device)
            own = PagedQueries([1] * num_tokens, [pools] * num_tokens, rows, starts, lens, table, 1, rate=size)
            plan = kernel.plan_in_place(own, heads)
            if plan is None:
                return None
            chosen = Selected(memory.take("chosen", (num_tokens, most), device), [most] * num_tokens, lens)
            choice = PoolChoice(own, chosen, plan, tokens)
        return cls(queries, kernel.pools, tokens, selected, attention, lens, choice)

    @property
    def on_device(self) -> bool:
        return self._attention.on_device

    def renew(self) -> None:
        counts = _counts(self._tokens.rule, self._queries, self.on_device)
        if self._attention.common or counts != self._selected.counts:
            self._selected.counts[:] = counts
            self._attention.renew()

    def chunk(self, positions: Tensor) -> AttentionChunk:
        """The chunk of a step with these numbers of requests and tokens, in memory that the next step overwrites; no
        host read. positions [T] int64."""
        selected, choice, tokens = self._selected, self._choice, self._tokens._replace(positions=positions)
        torch.index_select(self._queries.rows, 0, self._requests, out=tokens.rows)
        self._kernels.count(tokens, self._lens, selected.counts_device)
        if choice is None:
            self._kernels.place(None, tokens, selected.slots)
        else:
            choice = replace(choice, tokens=tokens)
        own = slice(0, len(positions))
        return AttentionChunk(own, self._queries, self._attention, absorbed=True, selected=selected, index_plan=choice)


def _counts(rule: PoolRule, queries: PagedQueries, bounds: bool) -> list[int]:
    """Slots that each query token attends to; `bounds`: also an upper bound for shorter contexts."""
    size, most = rule
    seen = np.asarray(queries.context_lens)[:, None] + np.arange(1 - queries.query_lens[0], 1)
    counts = np.minimum(seen, most * size + (size - 1 if bounds else seen % size))
    found: list[int] = counts.ravel().tolist()
    return found
