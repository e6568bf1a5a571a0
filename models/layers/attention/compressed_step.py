"""The rows of a step's attention to windows and compressed entries, the same in all layers of a kind.

The host plans a step by its lengths; a captured step has its widths from `compressed_in_place`.

Legend: T tokens, R requests, W tokens of a window, E entries of a request.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad

from moe_engine.kernels.attention.protocol import MLABackend
from moe_engine.kernels.attention.selected import Selected
from moe_engine.kernels.compression.protocol import CompressedTokens, CompressionKernel, Kept
from moe_engine.kernels.indexer.protocol import IndexerKernel
from moe_engine.kernels.queries import AttentionBatch, PagedQueries
from moe_engine.kernels.uploads import upload
from moe_engine.models.batch import ForwardBatch
from moe_engine.models.compressed_cache import CompressedCache
from moe_engine.models.config_sections.compressed import CompressedConfig
from moe_engine.models.layers.attention.compressed_in_place import BlocksInPlace, StepInPlace
from moe_engine.models.layers.attention.compressed_rows import (
    AttendedRows,
    CompressedStep,
    EntrySelection,
    KeptTokens,
    block_rows,
    entry_slots,
    to_select_from,
    window_rows,
    with_entries,
)
from moe_engine.models.layers.fixed_memory import FixedMemory


class StepRows:
    """Builds `CompressedStep`s.

    Args:
        layers: a layer of each rate.
    """

    def __init__(
        self, attention: CompressedConfig, layers: Mapping[int, int], backend: MLABackend,
        indexer: IndexerKernel | None, compression: CompressionKernel | None = None,
    ) -> None:  # fmt: skip
        sparse = backend.capabilities.sparse
        if sparse is None:
            raise ValueError(f"attention backend {backend.name} has no sparse attention")
        self._attention, self._layers, self._sparse, self._indexer = attention, layers, sparse, indexer
        self._compression, self._memory = compression, FixedMemory()

    def plan_in_place(self, batch: AttentionBatch) -> StepInPlace | None:
        """The plan of captured decodes; None if one of the kernels cannot be captured."""
        assert batch.decode is not None
        return StepInPlace.of(
            self._attention, self._layers, batch.decode, self._sparse, self._indexer, self._compression, self._memory
        )

    def of(self, batch: ForwardBatch) -> CompressedStep:
        caches: dict[int, CompressedCache] = {rate: batch.kv[layer] for rate, layer in self._layers.items()}
        first_entry = next(iter(caches.values())).num_slots
        if isinstance(batch.attention_plan, StepInPlace):
            return batch.attention_plan.step(batch, first_entry, caches)
        groups = [group for group in (batch.attention.decode, batch.attention.prefill) if group is not None]
        for group in groups:
            group.refuse_tree("compressed")
        device = batch.positions.device
        if not groups:
            no = batch.positions
            nothing = CompressedTokens(no, no, no.int(), no.int()[None], no)
            return CompressedStep(no, nothing, {}, dict.fromkeys(caches, KeptTokens(None, no)), None)
        counts = np.concatenate([group.query_lens for group in groups])  # [R]
        ends = np.repeat(np.concatenate([group.context_lens for group in groups]), counts)  # [T]
        seen = ends - np.repeat(counts.cumsum(), counts) + np.arange(1, len(ends) + 1)  # [T]
        requests = torch.cat([group.rows for group in groups])  # [R]
        numbers = upload(np.repeat(np.arange(len(counts)), counts), device)  # [T]
        starts = upload(ends - np.repeat(counts, counts), device)  # [T]
        full = groups[0].slot_table
        table, slots = (full, batch.slots) if batch.windows is None else (batch.windows.table, batch.windows.slots)
        tokens = CompressedTokens(batch.positions, starts, requests[numbers], table, batch.slots)
        kept = {rate: _kept(cache.kept[0], tokens, slots, seen, ends) for rate, cache in caches.items() if cache.kept}
        lens = upload(seen.astype(np.int32), device)
        of_window = np.minimum(seen, self._attention.window)
        window = window_rows(tokens, lens, self._attention.window, int(of_window.max()))
        rows, selection = dict[int, AttendedRows](), None
        for rate in self._layers:
            if not rate:
                rows[0] = self._attended(window, of_window)
                continue
            most = int(seen.max() // rate)
            entries = entry_slots(full, requests, rate, most)
            if rate == self._attention.selected_rate and most > self._attention.top_k:
                rows[rate], selection = self._with_selection(window, entries, numbers, seen, lens, first_entry)
            else:
                own = entries[numbers] + first_entry
                all_ = with_entries(window, own, lens, self._attention.window, rate)
                rows[rate] = self._attended(all_, of_window + seen // rate)
        return CompressedStep(slots, tokens, rows, kept, selection)

    def of_blocks(self, batch: ForwardBatch) -> CompressedStep:
        """The step of layers without entries: each token of a request attends to the whole block of the request's query
        tokens, and to a window before the block."""
        no = batch.positions[:0]
        nothing = CompressedTokens(no, no, no.int(), no.int()[None], no)
        group = batch.attention.decode
        if group is None:
            return CompressedStep(batch.slots, nothing, {}, {}, None)
        if isinstance(batch.attention_plan, BlocksInPlace):
            return CompressedStep(batch.slots, nothing, {0: batch.attention_plan.rows(group)}, {}, None)
        counts, ends = np.array(group.query_lens), np.array(group.context_lens)  # [R]
        seen, window = counts + np.minimum(ends - counts, self._attention.window), self._attention.window
        both = upload(np.stack((ends, counts)), no.device)
        found, _ = block_rows(group, both[0], both[1], window, int(seen.max()))
        numbers = upload(np.repeat(np.arange(len(counts)), counts), no.device)  # [T]
        rows = self._attended(found[numbers], np.repeat(seen, counts))
        return CompressedStep(batch.slots, nothing, {0: rows}, {}, None)

    def plan_blocks_in_place(self, batch: AttentionBatch) -> BlocksInPlace | None:
        """The plan of captured blocks; None if attention cannot be captured."""
        assert batch.decode is not None
        return BlocksInPlace.of(self._attention.window, batch.decode, self._sparse, self._memory)

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
        lens_of_entries, table = (lens // rate).clamp(min=1), to_select_from(entries)
        queries = PagedQueries([1] * len(seen), context.tolist(), numbers.int(), starts, lens_of_entries, table, 1)
        counts = np.minimum(visible, a.top_k)
        chosen = None
        if self._indexer.select_into is None:
            chosen = Selected(
                torch.zeros((len(seen), a.top_k), dtype=torch.int32, device=lens.device),
                np.minimum(context, a.top_k).tolist(),
                upload(np.minimum(context, a.top_k).astype(np.int32), lens.device),
            )
        width = window.shape[1] + a.top_k
        attended = self._attended(pad(window, (0, a.top_k), value=-1), np.minimum(seen, a.window) + counts)
        plan = self._indexer.plan(queries)
        most = (lens // rate).clamp(max=a.top_k)
        return attended, EntrySelection(queries, chosen, plan, lens.clamp(max=a.window), most, width, first_entry)


def _kept(kept: Kept, tokens: CompressedTokens, slots: Tensor, seen: np.ndarray, ends: np.ndarray) -> KeptTokens:
    """The tokens that are the last ones of a ring's rows.

    Args:
        slots: [T], of `tokens.table`.
        seen, ends: [T], tokens that each token sees, and that its request has.
    """
    last = ends - seen < kept.each
    if kept.block:
        last |= (seen - 1) % kept.block + kept.each >= kept.block
    places = kept.places(tokens.positions, tokens.rows, slots)
    if last.all():
        return KeptTokens(None, places)
    chosen = upload(last.nonzero()[0], places.device)
    return KeptTokens(chosen, places.index_select(0, chosen))
