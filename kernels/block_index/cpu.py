"""The indexer of block-sparse attention in C++. The selection is batch-invariant: a score depends on its token and its
block's keys only."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from moe_engine.kernels.attention.selected import Selected
from moe_engine.kernels.block_index.rule import MAX_SCORES, BlockRule
from moe_engine.kernels.block_index.selection import refuse_tree
from moe_engine.kernels.cpu.library import Library, load
from moe_engine.kernels.cpu.tensors import Plan, find, kind_of, rows
from moe_engine.kernels.queries import AttentionBatch, PagedQueries


class CpuBlockIndex:
    """`BlockIndexKernel`.

    Args:
        max_scores: max scores of blocks at once.
    """

    name = "cpu"

    def __init__(self, library: Library | None = None, max_scores: int = MAX_SCORES) -> None:
        self._lib = library or load()
        self._budget = max_scores

    def plan(self, queries: PagedQueries) -> Plan:
        refuse_tree(queries)
        return Plan.of(AttentionBatch(queries, None))

    def plan_in_place(self, queries: PagedQueries, heads: int) -> None:
        return None

    def select(
        self, q: Tensor, cache: Tensor, queries: PagedQueries, rule: BlockRule, selected: Selected, plan: Any
    ) -> None:
        q, out, struct = rows(q), selected.slots, find(queries, plan)
        self._lib.moe_block_select(
            kind_of(q.dtype), q.data_ptr(), q.stride(0), q.stride(1), cache.data_ptr(), cache.stride(0), struct.address,
            q.shape[1], q.shape[2], rule.size, rule.top_k, rule.local, self._budget, out.data_ptr(), out.stride(0),
        )  # fmt: skip
