"""The Triton attention backends: plans on the host, once per step, and the launches of each layer.

A plan depends on the layer's heads and dtype, which `plan` does not receive. The first layer run sets them; later
`plan` calls do all the work, and layer calls only launch kernels.

Legend: T query tokens, R requests, H query heads, G KV heads, C kv_lora_rank, P rotary width, S context tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import numpy as np
import torch
from torch import Tensor

from moe_engine.kernels.attention.protocol import AbsorbedValues, AttentionCapabilities, ContextChunks
from moe_engine.kernels.attention.schedule import Schedule, ScheduleBuffers, Split, schedule, upload
from moe_engine.kernels.attention.selected import Shift, Turn
from moe_engine.kernels.attention.sparse import over_absorbed
from moe_engine.kernels.attention.triton.expanded import ExpandedTile, blocks, expanded_attention, expanded_tile
from moe_engine.kernels.attention.triton.gather import GATHER_ROWS, gather
from moe_engine.kernels.attention.triton.latent import LatentTile, latent_attention, latent_tile
from moe_engine.kernels.attention.triton.merge import merge_chunk
from moe_engine.kernels.attention.triton.merge_values import MAX_TOKENS
from moe_engine.kernels.attention.triton.paged import PagedTile, paged_attention, paged_tile
from moe_engine.kernels.kv_format.latent_records import FP8_GROUPS, FP8_TOKEN, PLAIN, form_of, record_bytes
from moe_engine.kernels.queries import AttentionBatch, PagedQueries

FIXED_TOKENS = 512
"""Context tokens per segment in deterministic mode."""

_FEW_PROGRAMS = 4  # devices without multiprocessors: the interpreter


@lru_cache
def num_multiprocessors(device: torch.device) -> int:
    """SM count of a GPU; a small number for other devices."""
    try:
        return torch.get_device_module(device).get_device_properties(device).multi_processor_count
    except (AttributeError, RuntimeError):
        return _FEW_PROGRAMS


class GroupPlan:
    """Device data of one group of queries, built on first use and cached.

    Args:
        first_keys, key_lens: the tokens of each context that the expanded form is planned for; None: all.
    """

    def __init__(
        self,
        queries: PagedQueries,
        buffers: ScheduleBuffers | None = None,
        first_keys: Sequence[int] | None = None,
        key_lens: Sequence[int] | None = None,
    ) -> None:
        self.queries = queries
        self._buffers = buffers
        self._first_keys = np.zeros(len(queries.query_lens), dtype=np.int64)
        if first_keys is not None:
            self._first_keys = np.asarray(first_keys, dtype=np.int64)
        self._key_lens = key_lens
        self._schedules: dict[tuple[int, Split], Schedule] = {}
        self._blocks: dict[int, Tensor] = {}
        self._gather: Tensor | None = None

    @property
    def _lens(self) -> Sequence[int]:
        return self.queries.context_lens if self._key_lens is None else self._key_lens

    @property
    def _device(self) -> torch.device:
        return self.queries.slot_table.device

    def schedule(self, rows_per_token: int, split: Split) -> Schedule:
        key = (rows_per_token, split)
        if key not in self._schedules:
            queries = self.queries
            self._schedules[key] = schedule(
                queries.query_lens, queries.context_lens, rows_per_token, split, self._device,
                tree=queries.visible is not None, window=queries.window, buffers=self._buffers,
            )  # fmt: skip
        return self._schedules[key]

    def blocks(self, block_m: int) -> Tensor:
        """Records of the expanded form."""
        if block_m not in self._blocks:
            queries = self.queries
            seen = np.subtract(queries.context_lens, queries.query_lens) + 1 - self._first_keys
            records = blocks(queries.query_lens, self._lens, seen.tolist(), block_m)
            self._blocks[block_m] = upload(records, self._device)
        return self._blocks[block_m]

    def gather(self) -> Tensor:
        """[N, 4]: records for `gather`."""
        if self._gather is None:
            contexts = np.asarray(self._lens, dtype=np.int64)
            count = -(-contexts // GATHER_ROWS)
            request = np.repeat(np.arange(len(contexts)), count)
            first = (np.arange(len(request)) - np.repeat(np.cumsum(count) - count, count)) * GATHER_ROWS
            starts = (np.cumsum(contexts) - contexts)[request]
            left = np.minimum(contexts[request] - first, GATHER_ROWS)
            begin = self._first_keys[request] + first
            records = np.stack((request, begin, left, starts + first), 1).astype(np.int32)
            self._gather = upload(records, self._device)
        return self._gather


class PlanInPlace(GroupPlan):
    """`RenewablePlan`, and the plan of its only group: one schedule, at fixed addresses, for queries of one size."""

    on_device = True
    common = False

    def __init__(self, queries: PagedQueries, rows_per_token: int, split: Split) -> None:
        count = max(queries.query_lens)
        buffers = ScheduleBuffers.for_decodes(
            queries.num_requests, count, rows_per_token, split, queries.slot_table.device, queries.window
        )
        super().__init__(queries, buffers)
        self._key = (rows_per_token, split)
        self.renew()

    def serves(self, queries: PagedQueries) -> bool:
        mine = self.queries
        alike = mine.window == queries.window and (mine.visible is None) == (queries.visible is None)
        return alike and mine.query_lens == queries.query_lens

    def renew(self) -> None:
        self._schedules.clear()
        self.schedule(*self._key)


class StepPlan:
    """The plans of a step's groups, keyed by their queries."""

    def __init__(self, *groups: GroupPlan) -> None:
        self._groups = groups

    def of(self, queries: PagedQueries) -> GroupPlan:
        """The group's plan; a new one for unplanned queries."""
        for group in self._groups:
            if group.queries is queries:
                return group
        return GroupPlan(queries)


def _find(plan: object, queries: PagedQueries) -> GroupPlan:
    if isinstance(plan, GroupPlan) and plan.queries is queries:
        return plan
    if isinstance(plan, PlanInPlace) and plan.serves(queries):
        return plan
    return plan.of(queries) if isinstance(plan, StepPlan) else GroupPlan(queries)


class _Backend:
    """
    Args:
        deterministic: contexts are cut at fixed places, so that a token's result is batch-invariant, bit for bit.
        num_programs: concurrent programs on the device; None queries the device.
    """

    name = "triton"

    def __init__(self, deterministic: bool = False, num_programs: int | None = None) -> None:
        self._deterministic = deterministic
        self._num_programs = num_programs

    def _rows(self, queries: PagedQueries, rows_per_token: int) -> int:
        """Rows of the largest request, for the tile choice: a model constant in deterministic mode."""
        return rows_per_token * (1 if self._deterministic else max(queries.query_lens, default=1))

    def _split(self, tile: LatentTile | PagedTile, device: torch.device, programs: int, groups: int) -> Split:
        fixed = FIXED_TOKENS // tile.block_n if self._deterministic else None
        total = (self._num_programs or num_multiprocessors(device)) * programs
        return Split(tile.block_m, tile.block_n, max(1, total // groups), fixed)


class TritonMLA(_Backend):
    """`MLABackend`. The cache may also hold FP8 rows (`kv_format`)."""

    def __init__(self, deterministic: bool = False, num_programs: int | None = None) -> None:
        super().__init__(deterministic, num_programs)
        self._absorbed_as: tuple[int, torch.dtype, int] | None = None
        self._expanded_as: ExpandedTile | None = None

    @property
    def capabilities(self) -> AttentionCapabilities:
        chunks = ContextChunks(self.plan_chunk, self.expanded_chunk, self.merge_chunks)
        # in deterministic mode the number of tokens may not choose the kernel
        values = None if self._deterministic else AbsorbedValues(self.absorbed_values, MAX_TOKENS)
        return AttentionCapabilities(
            self.plan_in_place, chunks, sparse=over_absorbed(self, shifts=True, turns=True), absorbed_values=values
        )

    def plan(self, batch: AttentionBatch, buffers: ScheduleBuffers | None = None) -> StepPlan:
        """See the protocol.

        Args:
            buffers: destination of the decode group's schedule, for CUDA graphs.
        """
        groups = []
        if batch.decode is not None:
            groups.append(GroupPlan(batch.decode, buffers))
            if self._absorbed_as is not None:
                self._absorbed_schedule(groups[-1], *self._absorbed_as)
        if batch.prefill is not None:
            groups.append(GroupPlan(batch.prefill))
            if self._expanded_as is not None:
                groups[-1].blocks(self._expanded_as.block_m)
                groups[-1].gather()
        return StepPlan(*groups)

    def plan_in_place(self, batch: AttentionBatch) -> PlanInPlace | None:
        """See `AttentionCapabilities`. None in deterministic mode: fixed cuts have no maximum size."""
        if self._absorbed_as is None or self._deterministic or batch.decode is None:
            return None
        _, split = self._absorbed_cut(batch.decode, *self._absorbed_as)
        return PlanInPlace(batch.decode, self._absorbed_as[0], split)

    def _absorbed_cut(
        self, queries: PagedQueries, heads: int, dtype: torch.dtype, form: int
    ) -> tuple[LatentTile, Split]:
        tile = latent_tile(self._rows(queries, heads), dtype, form)
        return tile, self._split(tile, queries.slot_table.device, 1, tile.shares)

    def _absorbed_schedule(
        self, group: GroupPlan, heads: int, dtype: torch.dtype, form: int
    ) -> tuple[LatentTile, Schedule]:
        tile, split = self._absorbed_cut(group.queries, heads, dtype, form)
        return tile, group.schedule(heads, split)

    def absorbed(
        self, q: Tensor, cache: Tensor, queries: PagedQueries, scale: float, plan: object,
        value_width: int | None = None, sinks: Tensor | None = None, shift: Shift | None = None,
        turn: Turn | None = None,
    ) -> Tensor:  # fmt: skip
        """See `AbsorbsSinks`. turn: of requests of one query token each."""
        latent = q.shape[2] - 64 if value_width is None else value_width
        return self._over_latent(q, cache, queries, scale, plan, latent, sinks=sinks, shift=shift, turn=turn)

    def absorbed_values(
        self, q: Tensor, cache: Tensor, queries: PagedQueries, scale: float, plan: object, weight: Tensor
    ) -> Tensor:
        """See `AbsorbedValues`."""
        return self._over_latent(q, cache, queries, scale, plan, weight.shape[2], weight)

    def _over_latent(
        self, q: Tensor, cache: Tensor, queries: PagedQueries, scale: float, plan: object, latent: int,
        weight: Tensor | None = None, sinks: Tensor | None = None, shift: Shift | None = None,
        turn: Turn | None = None,
    ) -> Tensor:  # fmt: skip
        form = form_of(cache, latent, q.shape[2] - latent)
        self._absorbed_as = (q.shape[1], q.dtype, form)
        tile, segments = self._absorbed_schedule(_find(plan, queries), *self._absorbed_as)
        return latent_attention(q, cache, queries, segments, tile, scale, latent, form, weight, sinks, shift, turn)

    def gather_latent(
        self, cache: Tensor, queries: PagedQueries, plan: object, out: Tensor | None = None,
        value_width: int | None = None,
    ) -> Tensor:  # fmt: skip
        """See the protocol; FP8 records become bfloat16 unless `out` has another dtype."""
        queries.refuse_tree("gathered")
        form, latent, rotary = PLAIN, cache.shape[1], 0
        if cache.element_size() == 1:
            if out is None or value_width is None:
                form, latent, rotary = _record_form(cache.shape[1])
            else:
                latent, rotary = value_width, out.shape[1] - value_width
                form = form_of(cache, latent, rotary)
        if out is None:
            dtype = cache.dtype if form == PLAIN else torch.bfloat16
            out = cache.new_empty(queries.num_context_tokens, latent + rotary, dtype=dtype)
        gather(cache, queries, _find(plan, queries).gather(), out, latent, form)
        return out

    def expanded(
        self, q: Tensor, kv: Tensor, k_rope: Tensor, queries: PagedQueries, scale: float, plan: object
    ) -> Tensor:
        queries.refuse_tree("expanded")
        if self._expanded_as is None:  # the chunk merge, compiled with the first prompt
            part, lse = q.new_zeros(1, 1, kv.shape[2] - q.shape[2] + k_rope.shape[1]), q.new_zeros(1, 1).float()
            merge_chunk(part, lse, part, lse)
        self._expanded_as = tile = _expanded_tile(q, kv, k_rope)
        return expanded_attention(q, kv, k_rope, _find(plan, queries).blocks(tile.block_m), tile, scale)[0]

    # -- context chunks

    def plan_chunk(self, queries: PagedQueries, first_keys: Sequence[int], key_lens: Sequence[int]) -> GroupPlan:
        queries.refuse_tree("expanded")
        return GroupPlan(queries, None, first_keys, key_lens)

    def expanded_chunk(
        self, q: Tensor, kv: Tensor, k_rope: Tensor, scale: float, plan: GroupPlan
    ) -> tuple[Tensor, Tensor]:
        tile = _expanded_tile(q, kv, k_rope)
        return expanded_attention(q, kv, k_rope, plan.blocks(tile.block_m), tile, scale)

    def merge_chunks(self, out: Tensor, lse: Tensor, other: Tensor, other_lse: Tensor) -> None:
        merge_chunk(out, lse, other, other_lse)


class TritonGQA(_Backend):
    """`GQABackend`."""

    def __init__(self, deterministic: bool = False, num_programs: int | None = None) -> None:
        super().__init__(deterministic, num_programs)
        self._paged_as: dict[tuple[int | None, bool], tuple[int, int, int, torch.dtype]] = {}
        """Arguments of `_cut` by `_kind`. Layers of a kind are alike."""

    @property
    def capabilities(self) -> AttentionCapabilities:
        return AttentionCapabilities(
            self.plan_in_place, windows=True, chunked=True, sinks=self.paged, capped=self.paged
        )

    def plan(self, batch: AttentionBatch, buffers: ScheduleBuffers | None = None) -> StepPlan:
        """See the protocol; `buffers` as in `TritonMLA.plan`."""
        groups = []
        if batch.decode is not None:
            groups.append(GroupPlan(batch.decode, buffers))
        if batch.prefill is not None:
            groups.append(GroupPlan(batch.prefill))
        for group in groups:
            if (form := self._paged_as.get(_kind(group.queries))) is not None:
                self._schedule(group, *form)
        return StepPlan(*groups)

    def plan_in_place(self, batch: AttentionBatch) -> PlanInPlace | None:
        """See `TritonMLA.plan_in_place`. Before the first selection its plan has the form of other layers: plans
        are made again between the first run of a step and its capture."""
        if batch.decode is None or self._deterministic:
            return None
        window, selected = kind = _kind(batch.decode)
        form = self._paged_as.get(kind) or (self._paged_as.get((window, False)) if selected else None)
        if form is None:
            return None
        _, split = self._cut(batch.decode, *form)
        return PlanInPlace(batch.decode, form[0], split)

    def _cut(
        self, queries: PagedQueries, per_group: int, num_groups: int, width: int, dtype: torch.dtype
    ) -> tuple[PagedTile, Split]:
        tile = paged_tile(self._rows(queries, per_group), width, dtype)
        return tile, self._split(tile, queries.slot_table.device, tile.programs, num_groups)

    def _schedule(
        self, group: GroupPlan, per_group: int, num_groups: int, width: int, dtype: torch.dtype
    ) -> tuple[PagedTile, Schedule]:
        tile, split = self._cut(group.queries, per_group, num_groups, width, dtype)
        return tile, group.schedule(per_group, split)

    def paged(
        self, q: Tensor, k_cache: Tensor, v_cache: Tensor, queries: PagedQueries, scale: float, plan: object,
        sinks: Tensor | None = None, cap: float = 0.0,
    ) -> Tensor:  # fmt: skip
        num_groups = k_cache.shape[1]
        form = self._paged_as[_kind(queries)] = (q.shape[1] // num_groups, num_groups, q.shape[2], q.dtype)
        tile, segments = self._schedule(_find(plan, queries), *form)
        return paged_attention(q, k_cache, v_cache, queries, segments, tile, scale, sinks, cap)


def _kind(queries: PagedQueries) -> tuple[int | None, bool]:
    """The window of the layers, and whether they attend to selections, in which a request has one KV head."""
    return queries.window, queries.selected


def _expanded_tile(q: Tensor, kv: Tensor, rope: Tensor) -> ExpandedTile:
    """The tile for queries [T, H, N+P], expanded keys [S, H, N+V] and rotary channels [S, P]."""
    nope = q.shape[2] - rope.shape[1]
    return expanded_tile(q.dtype, nope, kv.shape[2] - nope)


def _record_form(width: int) -> tuple[int, int, int]:
    """(form, C, P) of FP8 records of `width` bytes with 64 rotary channels.

    Raises:
        ValueError: if no record has that size.
    """
    for latent in (128, 256, 512, 1024):
        for form in (FP8_TOKEN, FP8_GROUPS):
            if record_bytes(form, latent, 64) == width:
                return form, latent, 64
    raise ValueError(f"no FP8 record has {width} bytes")
