"""The rows of a step's attention to windows and compressed entries, the same in all layers of a kind.

The host plans a step by its lengths; a captured step has its widths from `compressed_in_place`.

Legend: T tokens, R requests, W tokens of a window, E entries of a request.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad

from moe_engine.kernels.attention.protocol import MLABackend
from moe_engine.kernels.attention.selected import Selected
from moe_engine.kernels.compression.protocol import CompressedTokens
from moe_engine.kernels.indexer.protocol import IndexerKernel
from moe_engine.kernels.queries import AttentionBatch, PagedQueries
from moe_engine.kernels.uploads import upload
from moe_engine.models.batch import ForwardBatch
from moe_engine.models.compressed_cache import CompressedCache
from moe_engine.models.compressed_config import CompressedConfig
from moe_engine.models.layers.compressed_in_place import FixedMemory, StepInPlace
from moe_engine.models.layers.compressed_rows import (
    AttendedRows,
    CompressedStep,
    EntrySelection,
    entry_columns,
    entry_slots,
    window_rows,
    with_entries,
)


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
        self._memory = FixedMemory()

    def plan_in_place(self, batch: AttentionBatch) -> StepInPlace | None:
        """The plan of captured decodes; None if one of the kernels cannot be captured."""
        assert batch.decode is not None
        return StepInPlace.of(self._attention, self._rates, batch.decode, self._sparse, self._indexer, self._memory)

    def of(self, batch: ForwardBatch, cache: CompressedCache) -> CompressedStep:
        """cache: of any layer."""
        if isinstance(batch.attention_plan, StepInPlace):
            return batch.attention_plan.step(batch, cache.num_slots)
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
        of_window = np.minimum(seen, self._attention.window)
        window = window_rows(tokens, lens, self._attention.window, int(of_window.max()))
        rows, selection = dict[int, AttendedRows](), None
        for rate in self._rates:
            if not rate:
                rows[0] = self._attended(window, of_window)
                continue
            most = int(seen.max() // rate)
            entries = entry_slots(full, requests, rate, most)
            if rate == self._attention.selected_rate and most > self._attention.top_k:
                rows[rate], selection = self._with_selection(window, entries, numbers, seen, lens, cache.num_slots)
            else:
                own = entries[numbers] + cache.num_slots
                all_ = with_entries(window, own, lens, self._attention.window, rate)
                rows[rate] = self._attended(all_, of_window + seen // rate)
        return CompressedStep(slots, tokens, rows, selection)

    def _attended(self, rows: Tensor, counts: np.ndarray) -> AttendedRows:
        selected = Selected(rows, counts.tolist(), upload(counts.astype(np.int32), rows.device))
        return AttendedRows(selected, self._sparse.plan(selected))

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
        is_entry, places = entry_columns(lens, a.window, width, (lens // rate).clamp(max=a.top_k))
        attended = self._attended(pad(window, (0, a.top_k), value=-1), np.minimum(seen, a.window) + counts)
        plan = self._indexer.plan(queries)
        return attended, EntrySelection(queries, chosen, plan, places.clamp_(max=a.top_k - 1), is_entry, first_entry)


def _context_lens(queries: PagedQueries) -> np.ndarray:
    """Tokens that each query token sees, [T] int64."""
    pairs = zip(queries.query_lens, queries.context_lens)
    return np.concatenate([np.arange(context - count + 1, context + 1) for count, context in pairs])


def _numbers(query_lens: list[int], device: torch.device) -> Tensor:
    """The number of each query token's request, [T] int64."""
    return upload(np.repeat(np.arange(len(query_lens)), query_lens), device)
