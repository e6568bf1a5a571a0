"""Whole draft-chain steps (verify, draft) as C structs."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from torch import Tensor

from moe_engine.kernels.cpu.decoder import DecoderPointer
from moe_engine.kernels.cpu.drafts import DraftsPointer, draws_struct
from moe_engine.kernels.cpu.layers import L, P
from moe_engine.kernels.cpu.library import Library
from moe_engine.kernels.decoder.drafting import RowTables, StepDraws, VerifiedChains


class _Step(ctypes.Structure):
    _fields_ = [
        *((name, P) for name in ("level", "decoder", "head", "slots", "tokens")),
        ("width", L),
        *((name, P) for name in ("lengths", "last_tokens", "states")),
    ]


class _Results(ctypes.Structure):
    _fields_ = [(name, P) for name in ("starts", "tokens", "counts", "seconds")]


@dataclass(slots=True)
class _Buffers:
    """Result buffers for a set of rows, kept for later steps, which mostly have the same rows."""

    rows: np.ndarray
    depth: int
    results: VerifiedChains
    rows_address: int
    struct: _Results

    @staticmethod
    def of(rows: np.ndarray, depth: int) -> _Buffers:
        count = len(rows)
        starts, counts = np.empty((2, count), dtype=np.int64)
        results = VerifiedChains(starts, np.empty((count, depth + 1), dtype=np.int64), counts, np.empty(3))
        struct = _Results(*(array.ctypes.data for array in results))
        return _Buffers(rows, depth, results, rows.ctypes.data, struct)


@dataclass(slots=True)
class DraftStepPointer:
    """A C struct and the objects it points to."""

    kind: int
    struct: _Step
    keep: tuple[Any, ...]
    buffers: _Buffers | None = None


def fuse(
    drafts: DraftsPointer, decoder: DecoderPointer, tables: RowTables, caches: Sequence[Tensor]
) -> DraftStepPointer | None:
    """See `FusedDraftStep.fuse_step`."""
    num_layers = len(decoder.layers)
    if len(drafts.levels) != 1 or drafts.kind != decoder.kind or any(not t.is_contiguous() for t in tables):
        return None
    decoder.take(caches)
    drafts.take(caches[num_layers:], tables.states.dtype)
    struct = _Step(
        ctypes.addressof(drafts.levels[0]), decoder.address, ctypes.addressof(drafts.head),
        tables.slots.data_ptr(), tables.tokens.data_ptr(), tables.slots.shape[1],
        *(t.data_ptr() for t in (tables.lengths, tables.last_tokens, tables.states)),
    )  # fmt: skip
    return DraftStepPointer(drafts.kind, struct, (drafts, decoder, tables, tuple(caches)))


def run(
    library: Library, step: DraftStepPointer, rows: np.ndarray, depth: int, draws: StepDraws | None
) -> VerifiedChains:
    """See `FusedDraftStep.run_step`."""
    buffers = step.buffers
    if buffers is None or buffers.rows is not rows or buffers.depth != depth:
        buffers = step.buffers = _Buffers.of(rows, depth)
    draft_draws = draws_struct(None if draws is None else draws.of_rows)
    token_draws = draws_struct(None if draws is None else draws.of_tokens)
    too_short = library.moe_draft_step(
        step.kind, ctypes.addressof(step.struct), buffers.rows_address, len(rows), depth, ctypes.addressof(draft_draws),
        ctypes.addressof(token_draws), None if draws is None else draws.uniform.ctypes.data,
        ctypes.addressof(buffers.struct),
    )  # fmt: skip
    if too_short >= 0:
        raise ValueError(f"row {too_short} grows by {depth + 1} tokens beyond its table")
    return buffers.results
