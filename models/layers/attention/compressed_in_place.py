"""Decodes with windows and compressed entries at fixed addresses, so that they can be captured as CUDA graphs.

A captured step computes its rows from the tokens' positions. Its lists are as wide as those of the longest request
that the slot table holds: one graph serves all lengths.

Legend: T tokens, R requests, W tokens of a window, K rows of a query token, E entries of a request.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

import numpy as np
import torch
from torch import Tensor

from moe_engine.kernels.attention.selected import Selected, SparseAttention
from moe_engine.kernels.compression.protocol import (
    CompressedTokens,
    CompressionKernel,
    DecodedTokens,
    Kept,
    PlannedRows,
    PlanRows,
    SelectedEntries,
)
from moe_engine.kernels.indexer.protocol import IndexerKernel
from moe_engine.kernels.queries import PagedQueries
from moe_engine.models.batch import ForwardBatch
from moe_engine.models.compressed_cache import CompressedCache
from moe_engine.models.config_sections.compressed import CompressedConfig
from moe_engine.models.layers.attention.compressed_rows import (
    AttendedRows,
    CompressedStep,
    EntrySelection,
    KeptTokens,
    block_rows,
)
from moe_engine.models.layers.fixed_memory import FixedMemory


class _Selecting:
    """An indexer's part of the plan: the entries of the requests, of which each token selects."""

    def __init__(
        self, attention: CompressedConfig, queries: PagedQueries, tokens: int, indexer: IndexerKernel,
        memory: FixedMemory,
    ) -> None:  # fmt: skip
        device, rate, top_k = queries.rows.device, attention.selected_rate, attention.top_k
        most, table = queries.slot_table.shape[1] // rate, queries.slot_table
        starts = torch.arange(tokens + 1, dtype=torch.int32, device=device)
        columns, counts, lens, rows = (
            memory.take(name, (tokens,), device)
            for name in ("columns of entries", "chosen counts", "visible entries", "rows of requests")
        )
        self.queries = PagedQueries([1] * tokens, [most] * tokens, rows, starts, lens, table, 1, rate=rate)
        self.entries = SelectedEntries(columns, counts, lens, top_k)
        self.plan = indexer.plan_in_place(self.queries, attention.index_heads)
        """None: its launches cannot be captured."""

    def of(self, width: int, first_entry: int) -> EntrySelection:
        """The step's selection for rows of `width` columns, by `entries`."""
        own = self.entries
        return EntrySelection(self.queries, None, self.plan, own.columns, own.counts, width, first_entry)


class StepInPlace:
    """`RenewablePlan` of a decode group, whose requests have the same number of query tokens.

    Args:
        plan_rows: of the compression kernel.
        attended: by rate.
    """

    common = False

    def __init__(
        self, attention: CompressedConfig, queries: PagedQueries, plan_rows: PlanRows,
        attended: dict[int, AttendedRows], selecting: _Selecting | None,
    ) -> None:  # fmt: skip
        self._attention, self._queries, self._plan_rows = attention, queries, plan_rows
        self._attended, self._selecting = attended, selecting

    @classmethod
    def of(
        cls, attention: CompressedConfig, rates: Collection[int], queries: PagedQueries, sparse: SparseAttention,
        indexer: IndexerKernel | None, compression: CompressionKernel | None, memory: FixedMemory,
    ) -> StepInPlace | None:  # fmt: skip
        """None if one of the kernels cannot be captured, and for a draft tree."""
        plan_rows = None if compression is None else compression.plan_rows
        if sparse.plan_in_place is None or plan_rows is None or queries.visible is not None:
            return None
        width, device, selecting = queries.slot_table.shape[1], queries.rows.device, None
        if attention.selected_rate in rates and width // attention.selected_rate > attention.top_k:
            assert indexer is not None
            if indexer.select_into is None:
                return None
            selecting = _Selecting(attention, queries, queries.num_tokens, indexer, memory)
            if selecting.plan is None:
                return None
        attended = {}
        for rate in rates:
            most = min(attention.window, width) + _most_entries(attention, rate, width)
            counts = _counts(attention, rate, _seen(queries)).tolist()
            slots, lens = (memory.take(f"{name} of rate {rate}", shape, device) for name, shape in
                           (("rows", (len(counts), most)), ("counts", (len(counts),))))  # fmt: skip
            selected = Selected(slots, counts, lens)
            plan = sparse.plan_in_place(selected)
            if plan is None:
                return None
            attended[rate] = AttendedRows(selected, plan)
        return cls(attention, queries, plan_rows, attended, selecting)

    @property
    def on_device(self) -> bool:
        return all(rows.plan.on_device for rows in self._attended.values())

    def renew(self) -> None:
        seen = _seen(self._queries)
        for rate, rows in self._attended.items():
            counts = _counts(self._attention, rate, seen).tolist()
            if rows.plan.common or counts != rows.selected.counts:
                rows.selected.counts[:] = counts
                rows.plan.renew()

    def step(self, batch: ForwardBatch, first_entry: int, caches: Mapping[int, CompressedCache]) -> CompressedStep:
        """The rows of a step with these numbers of requests and tokens, in memory that the next step overwrites; no
        host read.

        Args:
            first_entry: as in `EntrySelection`.
            caches: of a layer of each rate.
        """
        a, queries = self._attention, batch.attention.decode
        assert queries is not None
        full = queries.slot_table
        table, slots = (full, batch.slots) if batch.windows is None else (batch.windows.table, batch.windows.slots)
        starts = torch.empty_like(batch.positions)
        requests = starts.new_empty(len(starts), dtype=torch.int32)
        if self._selecting is not None:
            requests = self._selecting.queries.rows
        given = DecodedTokens(batch.positions, slots, queries.rows, batch.real, table, full)
        known: tuple[Tensor | None, Tensor | None] = (starts, requests)
        kept, selection = dict[int, KeptTokens](), None
        for rate, rows in self._attended.items():
            selected, own = rows.selected, next(iter(caches[rate].kept), None)
            selecting = self._selecting if rate == a.selected_rate else None
            out = PlannedRows(selected.slots, selected.counts_device, *known)
            entries = None if selecting is None else selecting.entries
            places = self._plan_rows(given, a.window, rate, first_entry, own, out, entries)
            known = (None, None)
            if own is not None and places is not None:
                kept[rate] = KeptTokens(None, places, self._apart(rate, own))
            if selecting is not None:
                selection = selecting.of(selected.slots.shape[1], first_entry)
        tokens = CompressedTokens(batch.positions, starts, requests, table, batch.slots)
        return CompressedStep(slots, tokens, {**self._attended}, kept, selection)

    def _apart(self, rate: int, kept: Kept) -> bool:
        """Whether no entry reads a row that a token of the step writes."""
        reach = self._attention.spanned(rate) + self._queries.query_lens[0] - 1
        return kept.each == kept.block or kept.each >= reach  # positions of a request that the step reads or writes


class BlocksInPlace:
    """`RenewablePlan` of blocks, which all have the same number of tokens, of layers without entries."""

    common = False

    def __init__(self, window: int, queries: PagedQueries, attended: AttendedRows) -> None:
        self._window, self._queries, self._attended = window, queries, attended
        self._count = queries.query_lens[0]
        requests = torch.arange(queries.num_requests, device=queries.rows.device)
        self._numbers = requests.repeat_interleave(self._count)

    @classmethod
    def of(
        cls, window: int, queries: PagedQueries, sparse: SparseAttention, memory: FixedMemory
    ) -> BlocksInPlace | None:
        """None if attention cannot be captured."""
        if sparse.plan_in_place is None:
            return None
        device, most = queries.rows.device, window + queries.query_lens[0]
        counts = _of_blocks(queries, window)
        slots = memory.take(f"rows of blocks of {queries.query_lens[0]}", (len(counts), most), device)
        lens = memory.take("counts of blocks", (len(counts),), device)
        selected = Selected(slots, counts, lens)
        plan = sparse.plan_in_place(selected)
        return None if plan is None else cls(window, queries, AttendedRows(selected, plan))

    @property
    def on_device(self) -> bool:
        on_device: bool = self._attended.plan.on_device
        return on_device

    def renew(self) -> None:
        rows, counts = self._attended, _of_blocks(self._queries, self._window)
        if rows.plan.common or counts != rows.selected.counts:
            rows.selected.counts[:] = counts
            rows.plan.renew()

    def rows(self, queries: PagedQueries) -> AttendedRows:
        """The rows by the lengths on the device, in memory that the next step overwrites; no host read."""
        selected = self._attended.selected
        lens = queries.context_lens_device
        found, seen = block_rows(
            queries, lens, torch.full_like(lens, self._count), self._window, selected.slots.shape[1]
        )
        selected.slots.copy_(found[self._numbers])
        selected.counts_device.copy_(seen[self._numbers])
        return self._attended


def _of_blocks(queries: PagedQueries, window: int) -> list[int]:
    """Rows of each token of blocks."""
    both = zip(queries.query_lens, queries.context_lens)
    return [count + min(end - count, window) for count, end in both for _ in range(count)]


def _most_entries(attention: CompressedConfig, rate: int, tokens: int) -> int:
    """Entries of this rate that a token attends to, of a context of at most `tokens`."""
    if not rate:
        return 0
    return min(tokens // rate, attention.top_k) if rate == attention.selected_rate else tokens // rate


def _counts(attention: CompressedConfig, rate: int, seen: np.ndarray) -> np.ndarray:
    """Rows of tokens that see seen [T] tokens."""
    entries = seen // rate if rate else 0
    if rate == attention.selected_rate:
        entries = np.minimum(entries, attention.top_k)
    return np.minimum(seen, attention.window) + entries


def _seen(queries: PagedQueries) -> np.ndarray:
    """Tokens that each query token sees [T], or their upper bounds."""
    count = queries.num_tokens // queries.num_requests
    return (np.asarray(queries.context_lens)[:, None] + np.arange(1 - count, 1)).ravel()
