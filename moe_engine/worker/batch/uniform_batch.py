"""Uniform batches, with the same number of tokens per row: the verify batch of a speculative step, and draft steps.

Equal to those of `BatchBuilder.assemble`, at a fraction of the host work: values that do not change while the same rows
have the same number of tokens are cached.

Legend: R rows, K tokens of each, T = R * K.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from torch import Tensor

from moe_engine.kernels.decoder.drafting import ChainSteps
from moe_engine.kernels.queries import AttentionBatch
from moe_engine.worker.batch.paged_rows import PagedRows
from moe_engine.worker.batch.step_batch import StepBatch
from moe_engine.worker.device_stream import DeviceStream
from moe_engine.worker.sampling.sampler import SampledRows


@dataclass(frozen=True)
class _Shape:
    """Values shared by batches of the same rows and count."""

    within: np.ndarray  # [K] int64: 0..K-1
    base: np.ndarray  # [R, 1] int64: start of the row in the flat slot table
    rows_int32: Tensor  # [R] int32
    query_lens: list[int]
    query_starts: Tensor  # [R+1] int32
    sampled_rows: np.ndarray  # [T] int64
    sampled_device: Tensor  # [T] int64
    offsets: np.ndarray  # [R] int64


class UniformBatches:
    """Builds uniform batches. The cache is keyed by the identity of the `rows` object."""

    def __init__(self, paged: PagedRows, stream: DeviceStream) -> None:
        self._paged, self._rows = paged, paged.rows
        self._stream = stream
        self._known_for: np.ndarray | None = None
        self._known: dict[int, _Shape] = {}

    def batch(self, rows: np.ndarray, rows_device: Tensor, starts: np.ndarray, count: int, ids: Tensor) -> StepBatch:
        """Tokens [starts[i], starts[i] + count) of each row, all sampled, with slots from the table; ids [R, K]."""
        shape = self._shape(rows, rows_device, count)
        num, total = len(rows), len(rows) * count
        staging = self._stream.staging(2 * total + (num + 1) // 2)
        host = staging.numpy()
        positions = host[:total].reshape(num, count)
        np.add(starts[:, None], shape.within, out=positions)
        np.add(positions, shape.base, out=host[total : 2 * total].reshape(num, count))
        lengths = starts + count
        self._rows.check_lengths(rows, lengths)
        lengths32 = host[2 * total :].view(np.int32)[:num]
        lengths32[:] = lengths
        ends = host[:total] + 1
        pool_starts = self._paged.pool_starts(shape.sampled_rows, host[:total], self._stream.upload)
        if self._rows.images is not None:
            self._rows.images.shift(shape.sampled_rows, host[:total])
        parts = [host[:total], host[total : 2 * total], lengths32]
        positions_device, flat, context_lens = self._stream.upload_parts(staging, parts)
        queries = self._paged.queries(
            shape.query_lens, lengths.tolist(), shape.rows_int32, shape.query_starts, context_lens
        )
        return StepBatch(
            input_ids=ids.reshape(-1),
            positions=positions_device,
            slots=self._rows.slots_at(flat),
            logits_rows=flat[:0],
            all_sampled=True,
            attention=AttentionBatch(queries, None),
            sampled=SampledRows(shape.sampled_rows, ends, shape.sampled_device),
            offsets=shape.offsets,
            flat=flat,
            windows=self._paged.window_slots(flat),
            adapters=self._paged.adapters(shape.sampled_rows),
            pool_starts=pool_starts,
        )

    def chain(self, rows: np.ndarray, rows_device: Tensor, positions: np.ndarray, levels: Sequence[int]) -> ChainSteps:
        """Steps of one token per row, at positions [steps, R], without ids: the host work of all steps together."""
        shape = self._shape(rows, rows_device, 1)
        steps, num = positions.shape
        total = steps * num
        staging = self._stream.staging(2 * total + (total + 1) // 2)
        host = staging.numpy()
        places, flat = host[:total].reshape(steps, num), host[total : 2 * total].reshape(steps, num)
        ends = host[2 * total :].view(np.int32)[:total].reshape(steps, num)
        places[:] = positions
        np.add(positions, shape.base[:, 0], out=flat)
        np.add(positions, 1, out=ends, casting="same_kind")
        self._rows.check_lengths(rows, ends[-1])
        if self._rows.images is not None:
            self._rows.images.shift(rows, places)
        positions_device, flat_device, context_lens = self._stream.upload_parts(staging, [places, flat, ends])
        queries = self._paged.queries(
            shape.query_lens, ends[0].tolist(), shape.rows_int32, shape.query_starts, context_lens[0]
        )
        slots = self._rows.slots_at(flat_device)
        return ChainSteps(levels, positions_device, slots, context_lens, queries, flat_device)

    def _shape(self, rows: np.ndarray, rows_device: Tensor, count: int) -> _Shape:
        if self._known_for is not rows:
            self._known_for, self._known = rows, {}
        known = self._known.get(count)
        if known is None:
            known = self._known[count] = self._make(rows, rows_device, count)
        return known

    def _make(self, rows: np.ndarray, rows_device: Tensor, count: int) -> _Shape:
        offsets = np.arange(0, len(rows) * count, count)
        starts = np.append(offsets, len(rows) * count).astype(np.int32)
        many = count > 1
        return _Shape(
            within=np.arange(count),
            base=(rows * self._rows.width)[:, None],
            rows_int32=rows_device.int(),
            query_lens=[count] * len(rows),
            query_starts=self._stream.from_array(starts),
            sampled_rows=rows.repeat(count) if many else rows,
            sampled_device=rows_device.repeat_interleave(count) if many else rows_device,
            offsets=offsets,
        )
