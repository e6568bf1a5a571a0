"""The rows of a step's attention to windows and compressed entries, the same in all layers of a kind.

Legend: T tokens, W tokens of a window, K rows of a query token, E entries that it sees.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from moe_engine.kernels.attention.protocol import MLABackend
from moe_engine.kernels.attention.selected import Selected
from moe_engine.kernels.compression.protocol import CompressedTokens
from moe_engine.kernels.indexer.protocol import IndexerKernel
from moe_engine.kernels.queries import PagedQueries
from moe_engine.kernels.uploads import upload
from moe_engine.models.batch import ForwardBatch
from moe_engine.models.compressed_cache import CompressedCache
from moe_engine.models.compressed_config import CompressedConfig


@dataclass(frozen=True)
class AttendedRows:
    """Rows of `CompressedCache.rows` of each query token, and the plan of attention to them."""

    selected: Selected
    plan: Any


@dataclass(frozen=True)
class EntrySelection:
    """The selection of entries by an indexer, and where it goes in the rows of attention."""

    queries: PagedQueries
    """Each query token as a request, whose context are the entries that it sees."""
    selected: Selected
    plan: Any
    places: Tensor  # [T, K] int64: column of `selected` of each of the rows
    is_entry: Tensor  # [T, K]: which of them are entries
    first_entry: int

    def place(self, rows: Tensor) -> None:
        """Sets the entries among rows [T, K]."""
        found = self.selected.slots.gather(1, self.places).add_(self.first_entry)
        torch.where(self.is_entry, found, rows, out=rows)


@dataclass(frozen=True)
class CompressedStep:
    """Inputs of all layers. `rows`: by rate of the layer; `selection`: None if each token sees all its entries."""

    slots: Tensor  # [T] int64: of the tokens, in the cache of the window
    tokens: CompressedTokens
    rows: dict[int, AttendedRows]
    selection: EntrySelection | None


class StepRows:
    """Builds `CompressedStep`s.

    Args:
        rates: of the model's layers, each once.
    """

    def __init__(
        self, attention: CompressedConfig, rates: Sequence[int], backend: MLABackend, indexer: IndexerKernel | None
    ) -> None:
        sparse = backend.capabilities.sparse
        if sparse is None:
            raise ValueError(f"attention backend {backend.name} has no sparse attention")
        self._attention, self._rates, self._sparse, self._indexer = attention, rates, sparse, indexer

    def of(self, batch: ForwardBatch, cache: CompressedCache) -> CompressedStep:
        """cache: of any layer."""
        groups = [group for group in (batch.attention.decode, batch.attention.prefill) if group is not None]
        for group in groups:
            group.refuse_tree("compressed")
        device = batch.positions.device
        if not groups:
            none = CompressedTokens(batch.positions, batch.slots.int(), batch.slots.int()[None], batch.slots)
            return CompressedStep(batch.slots, none, {}, None)
        seen = np.concatenate([_context_lens(group) for group in groups])  # [T]
        requests = torch.cat([group.rows for group in groups])  # [R]
        numbers = _numbers([count for group in groups for count in group.query_lens], device)  # [T]
        full = groups[0].slot_table
        table, slots = (full, batch.slots) if batch.windows is None else (batch.windows.table, batch.windows.slots)
        tokens = CompressedTokens(batch.positions, requests[numbers], table, batch.slots)
        lens = upload(seen.astype(np.int32), device)
        window = self._window(tokens, lens, int(min(seen.max(), self._attention.window)))
        rows, selection = dict[int, AttendedRows](), None
        for rate in self._rates:
            if not rate:
                rows[0] = self._attended(window, np.minimum(seen, self._attention.window))
                continue
            most = int(seen.max() // rate)
            # slots of the tokens of each entry, divided by their number, [R, most]
            entries = full[requests.long(), : most * rate : rate] // rate
            if rate == self._attention.selected_rate and most > self._attention.top_k:
                rows[rate], selection = self._with_selection(window, entries, numbers, seen, lens, cache.num_slots)
            else:
                rows[rate] = self._with_entries(window, entries[numbers] + cache.num_slots, seen, lens, rate)
        return CompressedStep(slots, tokens, rows, selection)

    def _window(self, tokens: CompressedTokens, lens: Tensor, width: int) -> Tensor:
        """The rows [T, W] of each token's window, its own included, then -1."""
        columns = torch.arange(width, device=lens.device)
        count = lens.clamp(max=self._attention.window).unsqueeze(1)
        at = (lens.unsqueeze(1) - count + columns).clamp_(max=tokens.table.shape[1] - 1)
        found = tokens.table[tokens.rows.long().unsqueeze(1), at.long()]
        return found.masked_fill_(columns >= count, -1)

    def _attended(self, rows: Tensor, counts: np.ndarray) -> AttendedRows:
        selected = Selected(rows, counts.tolist(), upload(counts.astype(np.int32), rows.device))
        return AttendedRows(selected, self._sparse.plan(selected))

    def _with_entries(self, window: Tensor, entries: Tensor, seen: np.ndarray, lens: Tensor, rate: int) -> AttendedRows:
        """The window's rows [T, W], then the first of entries [T, E]: all that the token sees."""
        most = window.shape[1] + entries.shape[1]
        behind, places = self._columns(lens, most, lens // rate)
        rows = torch.nn.functional.pad(window, (0, entries.shape[1]), value=-1)
        if entries.shape[1]:
            rows = torch.where(behind, entries.gather(1, places.clamp(max=entries.shape[1] - 1)), rows)
        return self._attended(rows, np.minimum(seen, self._attention.window) + seen // rate)

    def _columns(self, lens: Tensor, width: int, counts: Tensor) -> tuple[Tensor, Tensor]:
        """Which of the columns [T, width] are entries, of which a token has counts [T], and their numbers."""
        before = lens.clamp(max=self._attention.window).unsqueeze(1)
        places = torch.arange(width, device=lens.device) - before
        behind = (places >= 0) & (places < counts.unsqueeze(1))
        return behind, places.clamp_(min=0)

    def _with_selection(
        self, window: Tensor, entries: Tensor, numbers: Tensor, seen: np.ndarray, lens: Tensor, first_entry: int
    ) -> tuple[AttendedRows, EntrySelection]:
        """The window's rows, with places for the entries that an indexer selects among entries [R, E] of the tokens'
        requests."""
        a = self._attention
        assert self._indexer is not None
        rate, visible = a.selected_rate, seen // a.selected_rate
        starts = torch.arange(len(seen) + 1, dtype=torch.int32, device=lens.device)
        # a token that sees no entry has a context of one, which `counts` leaves out
        context = np.maximum(visible, 1)
        queries = PagedQueries(
            [1] * len(seen), context.tolist(), numbers.int(), starts, (lens // rate).clamp(min=1), entries, 1
        )
        counts = np.minimum(visible, a.top_k)
        chosen = Selected(
            torch.zeros((len(seen), a.top_k), dtype=torch.int32, device=lens.device),
            np.minimum(context, a.top_k).tolist(),
            upload(np.minimum(context, a.top_k).astype(np.int32), lens.device),
        )
        width = window.shape[1] + a.top_k
        is_entry, places = self._columns(lens, width, (lens // rate).clamp(max=a.top_k))
        places = places.clamp_(max=a.top_k - 1)
        rows = torch.nn.functional.pad(window, (0, a.top_k), value=-1)
        attended = self._attended(rows, np.minimum(seen, a.window) + counts)
        plan = self._indexer.plan(queries)
        return attended, EntrySelection(queries, chosen, plan, places, is_entry, first_entry)


def _context_lens(queries: PagedQueries) -> np.ndarray:
    """Tokens that each query token sees, [T] int64."""
    pairs = zip(queries.query_lens, queries.context_lens)
    return np.concatenate([np.arange(context - count + 1, context + 1) for count, context in pairs])


def _numbers(query_lens: list[int], device: torch.device) -> Tensor:
    """The number of each query token's request, [T] int64."""
    return upload(np.repeat(np.arange(len(query_lens)), query_lens), device)
