"""Builds the batch of a step from a plan: one host buffer is filled, copied once, and split into views.

Tokens are in two groups, `attention.decode` before `attention.prefill`; within each, requests keep the plan's order,
except prompts with a shared prefix, which are adjacent at the end. Outputs (logits rows, sampled rows) are in the
plan's order, so nothing is reordered afterwards.

A pure decode of the same rows as the step before takes a fast path that reuses everything except positions and slots.

Legend: R requests, T tokens, S sampled rows, D decodes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

from moe_engine.kernels.delta.protocol import StateRuns
from moe_engine.kernels.queries import AttentionBatch, PagedQueries, SharedRun
from moe_engine.kernels.speculation.decode_inputs import DecodeBuffers, DecodeKernels, TorchDecodes
from moe_engine.models.batch import PoolStarts, WindowSlots
from moe_engine.types import StepPlan
from moe_engine.worker.batch.mla_form import MLAFormPolicy
from moe_engine.worker.batch.paged_rows import PagedRows
from moe_engine.worker.batch.request_rows import RequestRows
from moe_engine.worker.batch.shared_prefix import find_sharers
from moe_engine.worker.batch.step_batch import RaggedTokens, StepBatch
from moe_engine.worker.batch.step_layout import StepLayout
from moe_engine.worker.batch.uniform_batch import UniformBatches
from moe_engine.worker.batch.window_table import WindowTable
from moe_engine.worker.device_stream import DeviceStream
from moe_engine.worker.sampling.sampler import SampledRows


class StaticBuffers(Protocol):
    """Implemented by `static_inputs.StaticInputs`."""

    def enter(self, count: int) -> DecodeBuffers | None: ...


@dataclass(frozen=True)
class _SameRows:
    """Values shared by consecutive decodes of the same rows."""

    plan_rows: list[int]
    rows: np.ndarray  # [D] int64
    table_base: np.ndarray  # [D] int64: start of the row in the flat slot table
    rows_device: Tensor  # [D] int64
    rows_int32: Tensor  # [D] int32
    query_starts: Tensor  # [D+1] int32
    query_lens: list[int]
    token_indices: Tensor  # [D] int64: 0..D-1
    offsets: np.ndarray  # [D] int64


class _OnDevice(NamedTuple):
    """Tensors of a batch of any runs, in the order of the step."""

    input_ids: Tensor  # [T] int64
    positions: Tensor  # [T] int64
    flat: Tensor  # [T] int64: places in the flat slot table
    logits_rows: Tensor  # [S] int64
    sampled_rows: Tensor  # [S] int64
    rows: Tensor  # [R] int32
    lengths: Tensor  # [R] int32
    query_starts: Tensor  # [R + 2] int32: of the decode group, then of the others


class BatchBuilder:
    """Builds batches over one set of rows. Reads `RequestRows.last_token`, writes the step's slots into
    `RequestRows.slot_table`.

    Args:
        window: sliding window of the model's first cache group.
        windows: the table of windowed layers, if their KV is bounded.
        kernels: enters captured decodes.
    """

    def __init__(
        self,
        rows: RequestRows,
        page_size: int,
        form: MLAFormPolicy,
        stream: DeviceStream,
        window: int | None = None,
        windows: WindowTable | None = None,
        kernels: DecodeKernels | None = None,
    ) -> None:
        self.kernels = kernels or TorchDecodes()
        self._rows = rows
        self._paged = PagedRows(rows, page_size, window, windows)
        self._form = form
        self._stream = stream
        self._same: _SameRows | None = None
        self.uniform = UniformBatches(self._paged, stream)

    def build(self, plan: StepPlan, static: StaticBuffers | None = None) -> StepBatch:
        """The plan's `new_rows` and `row_writes` must have been applied before. static: gives memory for the tensors of
        a decode."""
        if not plan.is_pure_decode:  # a malformed plan is checked there
            self._same = None
            return self._general(plan)
        if self._same is None or self._same.plan_rows != plan.rows:
            self._same = self._enter_decode(plan.rows)
        return self._decode(plan, self._same, None if static is None else static.enter(len(plan.rows)))

    # -- decodes of the same rows

    def _enter_decode(self, plan_rows: list[int]) -> _SameRows:
        count = len(plan_rows)
        rows = np.array(plan_rows, dtype=np.int64)
        offsets = np.arange(count, dtype=np.int64)
        staging = self._stream.staging(2 * count + (2 * count + 2) // 2)
        host, host32 = staging.numpy(), staging[2 * count :].view(torch.int32).numpy()
        host[:count], host[count : 2 * count] = rows, offsets
        host32[:count] = rows
        host32[count : 2 * count + 1] = np.arange(count + 1)
        device = self._stream.upload(staging)
        ints = device[2 * count :].view(torch.int32)
        return _SameRows(
            plan_rows=list(plan_rows),
            rows=rows,
            table_base=rows * self._rows.width,
            rows_device=device[:count],
            rows_int32=ints[:count],
            query_starts=ints[count : 2 * count + 1],
            query_lens=[1] * count,
            token_indices=device[count : 2 * count],
            offsets=offsets,
        )

    def _decode(self, plan: StepPlan, same: _SameRows, static: DecodeBuffers | None) -> StepBatch:
        count = len(plan.rows)
        staging = self._stream.staging(4 * count)
        host = staging.numpy()
        host32 = host[3 * count :].view(np.int32)
        starts = host[:count]
        starts[:] = plan.starts
        host[count : 2 * count] = plan.slots
        np.add(same.table_base, starts, out=host[2 * count : 3 * count])
        lengths = starts + 1
        host32[:count] = lengths
        host32[count:] = host[count : 2 * count]
        self._rows.check_lengths(plan.rows, lengths)
        pool_starts = self.pool_starts(same.rows, starts)
        if self._rows.images is not None:
            self._rows.images.shift(same.rows, starts)
        packed = self._stream.upload(staging)
        positions, slots, flat, ints = packed.split(count)
        if static is None:
            context_lens, slots32 = ints.view(torch.int32).split(count)
            self._rows.write_slots(flat, slots32)
            ids = self._rows.last_token.index_select(0, same.rows_device)
            own = DecodeBuffers(ids, positions, slots, same.rows_int32, context_lens)
        else:
            self.kernels.enter(packed, same.rows_device, self._rows.last_token, self._rows.slot_table, static)
            own = static
        queries = self._paged.queries(same.query_lens, lengths.tolist(), own.rows, same.query_starts, own.lens)
        return StepBatch(
            input_ids=own.ids,
            positions=own.positions,
            slots=own.slots,
            logits_rows=same.token_indices,
            all_sampled=True,
            attention=AttentionBatch(queries, None),
            sampled=SampledRows(same.rows, lengths, same.rows_device),
            offsets=same.offsets,
            flat=flat,
            windows=self._paged.window_slots(flat),
            adapters=self._paged.adapters(same.rows),
            pool_starts=pool_starts,
        )

    # -- any plan

    def _general(self, plan: StepPlan) -> StepBatch:
        self._check(plan)
        rows, starts, counts = (np.array(v, dtype=np.int64) for v in (plan.rows, plan.starts, plan.counts))
        ends = np.cumsum(counts)
        decode_rows = self._stream.from_array(rows[: plan.num_decodes])
        return self.assemble(
            RaggedTokens(
                rows=rows,
                starts=starts,
                counts=counts,
                num_decodes=plan.num_decodes,
                device_ids=self._rows.last_token.index_select(0, decode_rows),
                host_ids=self.host_ids(plan),
                slots=np.array(plan.slots, dtype=np.int64),
                sampled=ends[np.array(plan.samples, dtype=bool)] - 1,
                stores=self.cuts(plan),
            )
        )

    def host_ids(self, plan: StepPlan) -> np.ndarray:
        """The ids of a plan's prompt tokens."""
        ids = np.array(plan.input_ids, dtype=np.int64)
        return ids if self._rows.images is None else self._rows.images.plain(ids)

    def cuts(self, plan: StepPlan) -> dict[int, list[tuple[int, int]]] | None:
        """`RaggedTokens.stores` of the snapshots inside a plan's runs; `StatePool.save_ends` stores snapshots of the
        states after the plan."""
        if plan.state_ops is None or not plan.state_ops.cuts or self._rows.states is None:
            return None
        first = self._rows.states.first_snapshot
        spans = {row: span for row, *span in zip(plan.rows, plan.starts, plan.counts)}
        found: dict[int, list[tuple[int, int]]] = {}
        for row, length, snapshot in plan.state_ops.cuts:
            start, count = spans[row]
            if length < start + count:
                found.setdefault(row, []).append((length - start, first + snapshot))
        return found

    def window_slots(self, flat: Tensor) -> WindowSlots | None:
        """See `PagedRows.window_slots`."""
        return self._paged.window_slots(flat)

    def pool_starts(self, rows: np.ndarray, places: np.ndarray) -> PoolStarts | None:
        """See `PagedRows.pool_starts`."""
        return self._paged.pool_starts(rows, places, self._stream.upload)

    def assemble(self, runs: RaggedTokens) -> StepBatch:
        """A batch of any runs of tokens; writes the given slots into the slot table, and looks up the other slots."""
        rows, starts, counts = runs.rows, runs.starts, runs.counts
        order, num_absorbed, shared = self._order(runs)
        layout, lengths = StepLayout.of(order, counts), starts + counts
        owner = layout.owner
        self._rows.check_lengths(rows, lengths)
        at = starts[owner] + layout.within  # [T]: column in the row's slot table
        positions = at if runs.positions is None else runs.positions[layout.plan_token]
        turned, images = positions, None
        pool_starts = self.pool_starts(rows[owner], at)
        if self._rows.images is not None:
            turned, images = self._rows.images.place(rows[owner], at, positions)
        flat, sampled = rows[owner] * self._rows.width + at, layout.step_token[runs.sampled]
        device = self._to_device(runs, layout, num_absorbed, turned, flat, sampled)
        query_lens, context_lens = counts[order].tolist(), lengths[order].tolist()

        def group(begin: int, end: int, shift: int) -> PagedQueries | None:
            if begin == end:
                return None
            visible = None
            if runs.visible is not None and shift == 0:
                visible = self._upload_masks(runs.visible, int(layout.ends[end - 1]))
            return self._paged.queries(
                query_lens[begin:end],
                context_lens[begin:end],
                device.rows[begin:end],
                device.query_starts[begin + shift : end + shift + 1],
                device.lengths[begin:end],
                visible,
                shared if shift else (),
            )

        return StepBatch(
            input_ids=device.input_ids,
            positions=device.positions,
            slots=self._rows.slots_at(device.flat),
            logits_rows=device.logits_rows,
            all_sampled=len(owner) == len(sampled) and bool((sampled == np.arange(len(owner))).all()),
            attention=AttentionBatch(group(0, num_absorbed, 0), group(num_absorbed, len(rows), 1)),
            sampled=SampledRows(rows[owner[sampled]], positions[sampled] + 1, device.sampled_rows),
            offsets=layout.offsets,
            flat=device.flat,
            windows=self._paged.window_slots(device.flat),
            adapters=self._paged.adapters(rows[owner]),
            stored_states=None if not runs.stores else self._stored_states(rows[order], query_lens, runs.stores),
            images=images,
            pool_starts=pool_starts,
        )

    def _to_device(
        self,
        runs: RaggedTokens,
        layout: StepLayout,
        num_absorbed: int,
        positions: np.ndarray,
        flat: np.ndarray,
        sampled: np.ndarray,
    ) -> _OnDevice:
        """Uploads a batch in one copy, with its input ids, and writes the given slots into the slot table."""
        order, ends, step_token = layout.order, layout.ends, layout.step_token
        num_tokens, num_device = len(step_token), len(runs.device_ids)
        input_ids = np.zeros(num_tokens, dtype=np.int64)
        input_ids[step_token[num_device:]] = runs.host_ids
        given = step_token[num_tokens - len(runs.slots) :]  # tokens whose slots the plan gives: its last ones
        split = int(ends[num_absorbed - 1]) if num_absorbed else 0
        query_starts = np.concatenate(([0], ends[:num_absorbed], [0], ends[num_absorbed:] - split))
        pieces, pieces32 = self._upload(
            [input_ids, positions, flat, flat[given], sampled, runs.rows[layout.owner[sampled]]],
            [runs.slots, runs.rows[order], (runs.starts + runs.counts)[order], query_starts],
        )
        ids_device, positions_device, flat_device, given_device, logits_rows, sampled_rows = pieces
        in_order = num_device <= int(runs.counts[: runs.num_decodes].sum())  # decodes are never reordered
        if num_device and in_order:
            ids_device[:num_device] = runs.device_ids
        elif num_device:
            places = self._stream.from_array(step_token[:num_device])
            ids_device.index_copy_(0, places, runs.device_ids)
        given_slots, *of_queries = pieces32
        self._rows.write_slots(given_device, given_slots)
        return _OnDevice(ids_device, positions_device, flat_device, logits_rows, sampled_rows, *of_queries)

    def _stored_states(
        self, rows: np.ndarray, counts: list[int], stores: Mapping[int, Sequence[tuple[int, int]]]
    ) -> StateRuns:
        """Runs in the order of the step's tokens."""
        starts = np.cumsum([0, *counts])
        at, stored = np.full(starts[-1], -1, dtype=np.int64), []
        for row, begin, count in zip(rows.tolist(), starts.tolist(), counts):
            own = dict(stores.get(row, ()))
            at[begin + count - 1] = row
            for tokens, target in own.items():
                at[begin + tokens - 1] = target
            stored.append(sorted({*own, count}))
        upload = self._stream.upload  # not `_upload`, whose buffer holds the batch
        starts32, reads, targets = (torch.from_numpy(array) for array in (starts.astype(np.int32), rows, at))
        return StateRuns(counts, upload(starts32), upload(reads), stored, upload(targets))

    def _upload_masks(self, visible: np.ndarray, num_tokens: int) -> Tensor:
        """Attention masks of the decode group: those of the draft trees."""
        if len(visible) < num_tokens:
            raise ValueError("a step with draft trees cannot have prompt chunks in its decode group")
        return self._stream.from_array(visible)

    def _order(self, runs: RaggedTokens) -> tuple[np.ndarray, int, list[SharedRun]]:
        """The runs in the order of the step's tokens, the number of runs in the decode group, and shared prefixes of
        the others.

        With draft trees the decode group has no prompt chunks: a chunk would need a mask.
        """
        decodes, num_requests = runs.num_decodes, len(runs.rows)
        chunks = range(decodes, num_requests)
        if runs.visible is not None:
            return np.arange(num_requests), decodes, []
        starts, counts = runs.starts.tolist(), runs.counts.tolist()
        table = self._rows.slots_on_host if self._form.shares else None
        sharers = [] if table is None or len(chunks) < 2 else find_sharers(table, runs.rows, runs.starts, chunks)
        spared = {run: group.spared for group in sharers for run in group.members}
        absorbed = [self._form.absorbed(starts[i], counts[i], spared.get(i, 0.0)) for i in chunks]
        few = [i for i, is_absorbed in zip(chunks, absorbed) if is_absorbed]
        many = [i for i, is_absorbed in zip(chunks, absorbed) if not is_absorbed and i not in spared]
        shared: list[SharedRun] = []
        for group in sharers:
            expanded = [i for i in group.members if not absorbed[i - decodes]]
            if len(expanded) > 1:
                shared.append(SharedRun(len(many), len(many) + len(expanded), group.length))
            many += expanded
        return np.array([*range(decodes), *few, *many], dtype=np.int64), decodes + len(few), shared

    def _upload(self, fields: list[np.ndarray], ints: list[np.ndarray]) -> tuple[list[Tensor], list[Tensor]]:
        """Copies int64 fields and fields that become int32 to the device in one copy; returns the device tensors."""
        sizes, sizes32 = [len(f) for f in fields], [len(f) for f in ints]
        total, total32 = sum(sizes), sum(sizes32)
        staging = self._stream.staging(total + (total32 + 1) // 2)
        host = staging.numpy()
        np.concatenate(fields, out=host[:total])
        np.concatenate(ints, out=host[total:].view(np.int32)[:total32], casting="same_kind")
        device = self._stream.upload(staging)
        device32 = device[total:].view(torch.int32)[:total32]
        return list(device[:total].split(sizes)), list(device32.split(sizes32))

    # -- checks

    def _check(self, plan: StepPlan) -> None:
        """Checks the plan's consistency: an inconsistent plan could write into another request's KV."""
        decodes, counts = plan.num_decodes, plan.counts
        lists = {len(plan.rows), len(plan.starts), len(plan.counts), len(plan.samples)}
        if len(lists) > 1 or sum(counts) != len(plan.slots):
            raise ValueError(f"plan {plan.number}: lists of lengths {sorted(lists)}, {len(plan.slots)} slots")
        if min(counts) <= 0 or any(count != 1 for count in counts[:decodes]):
            raise ValueError(f"plan {plan.number}: a count is not positive, or a decode's is not 1")
        if len(plan.input_ids) != len(plan.slots) - decodes:
            raise ValueError(f"plan {plan.number}: {len(plan.input_ids)} input ids, {len(plan.slots)} slots")
