"""Rows of attention to windows and compressed entries, from lengths on the device.

Legend: T tokens, R requests, W tokens of a window, K rows of a query token, E entries of a request.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from moe_engine.kernels.attention.selected import Selected
from moe_engine.kernels.compression.protocol import CompressedTokens, Kept
from moe_engine.kernels.indexer.candidates import CandidateTable
from moe_engine.kernels.indexer.protocol import BlockChoice, IndexerKernel
from moe_engine.kernels.queries import PagedQueries


@dataclass(frozen=True)
class AttendedRows:
    """Rows of `CompressedCache.rows` of each query token, and the plan of attention to them."""

    selected: Selected
    plan: Any


@dataclass(frozen=True)
class EntrySelection:
    """The selection of entries by an indexer, and where it goes in the rows of attention."""

    queries: PagedQueries
    """Each query token as a request, whose context are the entries that it sees; one entry if it sees none."""
    selected: Selected | None
    """None: the kernel writes to the rows of attention."""
    plan: Any
    columns: Tensor  # [T] int32: of the rows, after those of the window
    counts: Tensor  # [T] int32: entries that each token selects
    width: int
    """Columns of the rows."""
    first_entry: int

    def select(
        self, kernel: IndexerKernel, q: Tensor, weights: Tensor, keys: Tensor, top_k: int, rows: Tensor,
        blocks: BlockChoice | None = None,
    ) -> None:  # fmt: skip
        """Sets the selected entries among rows [T, K]. q, weights, keys, blocks: as in `IndexerKernel.select`."""
        if self.selected is None:
            assert kernel.select_into is not None
            kernel.select_into(
                q, weights, keys, self.queries, top_k, rows, self.columns, self.counts, self.first_entry, self.plan,
                blocks,
            )  # fmt: skip
            return
        kernel.select(q, weights, keys, self.queries, top_k, self.selected, self.plan, blocks)
        is_entry, places = self._entries
        found = self.selected.slots.gather(1, places).add_(self.first_entry)
        torch.where(is_entry, found, rows, out=rows)

    def among(self, candidates: CandidateTable, tokens: slice) -> EntrySelection:
        """The selection of some tokens among their candidates."""
        own = self.selected
        if own is not None:
            own = Selected(own.slots[tokens], own.counts[tokens], own.counts_device[tokens])
        return replace(
            self, queries=candidates.queries, plan=candidates.plan, selected=own, columns=self.columns[tokens],
            counts=self.counts[tokens],
        )  # fmt: skip

    @cached_property
    def _entries(self) -> tuple[Tensor, Tensor]:
        assert self.selected is not None
        return entry_columns(self.columns, self.width, self.counts, self.selected.slots.shape[1])


@dataclass(frozen=True)
class KeptTokens:
    """Tokens of a step whose contributions to entries later steps read."""

    tokens: Tensor | None  # [n] int64: their numbers in the step; None: all of them
    places: Tensor  # [n] int64: their rows of `Kept`
    apart: bool = False
    """No entry of the step reads one of these rows, and `tokens` is None; otherwise they are written after it."""

    def keep(self, projected: Tensor, kept: Kept) -> None:
        """Stores the rows of projected [T, *]."""
        own = projected if self.tokens is None else projected.index_select(0, self.tokens)
        kept.rows.index_copy_(0, self.places, own)


@dataclass(frozen=True)
class CompressedStep:
    """Inputs of all layers. `rows`, `kept`: by rate of the layer; `selection`: None if each token sees all its
    entries."""

    slots: Tensor  # [T] int64: of the tokens, in the cache of the window
    tokens: CompressedTokens
    rows: dict[int, AttendedRows]
    kept: dict[int, KeptTokens]
    selection: EntrySelection | None


def window_rows(tokens: CompressedTokens, lens: Tensor, window: int, width: int) -> Tensor:
    """The rows [T, width] of each token's window, its own included, then -1. lens [T] int32: tokens that each sees."""
    columns = torch.arange(width, device=lens.device)
    count = lens.clamp(max=window).unsqueeze(1)
    at = (lens.unsqueeze(1) - count + columns).clamp_(max=tokens.table.shape[1] - 1)
    found = tokens.table[tokens.rows.long().unsqueeze(1), at.long()]
    return found.masked_fill_(columns >= count, -1)


def block_rows(queries: PagedQueries, ends: Tensor, counts: Tensor, window: int, width: int) -> tuple[Tensor, Tensor]:
    """Rows [R, width] of the tokens of each request's block: those of the window before the block and the block's own,
    then -1; and their numbers [R].

    Args:
        ends: [R], context tokens of each request, the block included.
        counts: [R], tokens of each block.
    """
    seen = counts + (ends - counts).clamp(max=window)
    columns = torch.arange(width, device=ends.device)
    at = ((ends - seen).unsqueeze(1) + columns).clamp_(max=queries.slot_table.shape[1] - 1)
    found = queries.slot_table[queries.rows.long().unsqueeze(1), at.long()]
    return found.masked_fill_(columns >= seen.unsqueeze(1), -1), seen


def entry_slots(table: Tensor, requests: Tensor, rate: int, most: int) -> Tensor:
    """The first `most` entries of requests [R] int32, [R, most]: the slots of their tokens in the table, divided by
    their number."""
    return table[requests.long(), : most * rate : rate] // rate


def to_select_from(entries: Tensor) -> Tensor:
    """The entries [R, E] with rows of a multiple of 16 elements: kernels that select are compiled before READY for
    tables of this alignment, as is that of all tokens."""
    return torch.nn.functional.pad(entries, (0, -entries.shape[1] % 16))


def entry_columns(first: Tensor, width: int, counts: Tensor, most: int) -> tuple[Tensor, Tensor]:
    """Which of the columns [T, width] are entries, of which a token has counts [T] from column first [T] on, and their
    numbers, below `most`."""
    places = torch.arange(width, device=first.device) - first.unsqueeze(1)
    behind = (places >= 0) & (places < counts.unsqueeze(1))
    return behind, places.clamp_(0, most - 1)


def with_entries(rows: Tensor, entries: Tensor, lens: Tensor, window: int, rate: int) -> Tensor:
    """The window's rows [T, W], then the first of entries [T, E], all that the token sees, then -1: [T, W + E]."""
    most = entries.shape[1]
    wide = torch.nn.functional.pad(rows, (0, most), value=-1)
    if not most:
        return wide
    behind, places = entry_columns(lens.clamp(max=window), wide.shape[1], lens // rate, most)
    return torch.where(behind, entries.gather(1, places), wide)
