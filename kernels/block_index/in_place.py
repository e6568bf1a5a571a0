"""Decodes of block-sparse attention at fixed addresses, so that they can be captured as CUDA graphs.

A captured step selects for every request, also for contexts that are selected as a whole: one graph serves all context
lengths.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from moe_engine.kernels.attention.protocol import GQABackend
from moe_engine.kernels.attention.renewable import InPlacePlanner, RenewablePlan
from moe_engine.kernels.attention.selected import Selected
from moe_engine.kernels.block_index import selection
from moe_engine.kernels.block_index.protocol import BlockIndexKernel
from moe_engine.kernels.block_index.rule import BlockRule
from moe_engine.kernels.queries import AttentionBatch, PagedQueries
from moe_engine.kernels.uploads import upload


class BlocksInPlace:
    """`RenewablePlan` of a decode group.

    Attributes:
        dense: plan of the layers that see all positions. selected: memory of `rule.top_k` blocks for each token and KV
        head; `rows` are its queries, `attention` and `index` the plans of these and of the indexer.
    """

    on_device = False
    common = False

    def __init__(
        self, queries: PagedQueries, rule: BlockRule, heads: int, dense: RenewablePlan, selected: Selected,
        rows: PagedQueries, attention: RenewablePlan, index: Any,
    ) -> None:  # fmt: skip
        self.queries, self.dense, self.selected, self.rows = queries, dense, selected, rows
        self.attention, self.index = attention, index
        self._rule, self._heads = rule, heads

    @classmethod
    def of(
        cls, batch: AttentionBatch, rule: BlockRule, heads: int, backend: GQABackend, kernel: BlockIndexKernel
    ) -> BlocksInPlace | None:
        """None if one of the kernels cannot be captured."""
        queries, planner = batch.decode, backend.capabilities.plan_in_place
        if queries is None or planner is None or queries.visible is not None:
            return None
        selected = selection.empty(queries, rule, heads, longest=queries.slot_table.shape[1])
        rows = selected.queries()
        dense, index = planner(batch), kernel.plan_in_place(queries, heads)
        attention = planner(AttentionBatch(rows, None))
        if dense is None or attention is None or index is None:
            return None
        return cls(queries, rule, heads, dense, selected, rows, attention, index)

    def renew(self) -> None:
        selected = self.selected
        selected.counts[:] = selection.counts(self.queries, self._rule, self._heads)
        counts = np.asarray(selected.counts, dtype=np.int32)
        selected.counts_device.copy_(upload(counts, selected.counts_device.device))
        self.dense.renew()
        self.attention.renew()


def decode_planner(rule: BlockRule, heads: int, backend: GQABackend, kernel: BlockIndexKernel) -> InPlacePlanner:
    """Plans of a model with block-sparse attention, with `heads` KV heads on this rank."""
    return lambda batch: BlocksInPlace.of(batch, rule, heads, backend, kernel)
