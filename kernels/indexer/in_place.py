"""Sparse decodes at fixed addresses, so that they can be captured as CUDA graphs.

A captured step selects for every request, also for requests within the top-k, which select all tokens that they see:
one graph serves all context lengths.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from moe_engine.kernels.attention.protocol import MLABackend
from moe_engine.kernels.attention.renewable import InPlacePlanner, RenewablePlan
from moe_engine.kernels.attention.selected import Selected, num_visible
from moe_engine.kernels.device import IndexWidths
from moe_engine.kernels.indexer.protocol import IndexerKernel
from moe_engine.kernels.queries import AttentionBatch, PagedQueries
from moe_engine.kernels.uploads import upload


class SelectionInPlace:
    """`RenewablePlan` of a decode group whose tokens attend to a selection.

    Attributes:
        selected: its memory, of `top_k` slots a token. attention, index: plans of sparse attention and of the indexer.
    """

    on_device = False
    common = False

    def __init__(
        self, queries: PagedQueries, top_k: int, selected: Selected, attention: RenewablePlan, index: Any
    ) -> None:
        self.queries, self.selected, self.attention, self.index = queries, selected, attention, index
        self._top_k = top_k

    @classmethod
    def of(
        cls, queries: PagedQueries, index: IndexWidths, backend: MLABackend, indexer: IndexerKernel
    ) -> SelectionInPlace | None:
        """None if one of the kernels cannot be captured."""
        sparse = backend.capabilities.sparse
        if sparse is None or sparse.plan_in_place is None:
            return None
        selected = Selected.of_width(queries, index.top_k)
        attention, own = sparse.plan_in_place(selected), indexer.plan_in_place(queries, index.heads)
        return None if attention is None or own is None else cls(queries, index.top_k, selected, attention, own)

    def renew(self) -> None:
        selected = self.selected
        selected.counts[:] = [min(count, self._top_k) for count in num_visible(self.queries)]
        counts = np.asarray(selected.counts, dtype=np.int32)
        selected.counts_device.copy_(upload(counts, selected.counts_device.device))
        self.attention.renew()


def decode_planner(backend: MLABackend, indexer: IndexerKernel, index: IndexWidths) -> InPlacePlanner:
    """Plans of a model with sparse attention."""

    def plan(batch: AttentionBatch) -> SelectionInPlace | None:
        assert batch.decode is not None
        return SelectionInPlace.of(batch.decode, index, backend, indexer)

    return plan
