"""Whole draft-chain steps (draft, verify, accept, update the draft cache) in one call, as C structs.

Legend: R rows, N verified tokens of a row, L layers, M MTP layers.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from torch import Tensor

from moe_engine.kernels.cpu.library import Library
from moe_engine.kernels.decoder.chain import FusedDrafts, draws_struct
from moe_engine.kernels.decoder.drafting import RowTables, StepDraws, VerifiedChains
from moe_engine.kernels.decoder.layers import L, P
from moe_engine.kernels.decoder.stack import FusedStack


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
class FusedDraftStep:
    """Steps of one MTP layer after a decoder, in one call."""

    kind: int
    struct: _Step
    library: Library
    keep: tuple[Any, ...]
    buffers: _Buffers | None = None

    def run(self, rows: np.ndarray, depth: int, draws: StepDraws | None) -> VerifiedChains:
        """Drafts `depth` tokens for each of rows [R] int64, verifies them, enters accepted tokens into the tables and
        updates the MTP layer's cache, bit-identical to the separate calls. The result is valid until the next call.

        Args:
            rows: `slots` must be set for N tokens from the last one on. The array must not be modified between calls.
            draws: None: greedy.

        Raises:
            ValueError: a row's table is too short; no state was changed.
        """
        buffers = self.buffers
        if buffers is None or buffers.rows is not rows or buffers.depth != depth:
            buffers = self.buffers = _Buffers.of(rows, depth)
        draft_draws = draws_struct(None if draws is None else draws.of_rows)
        token_draws = draws_struct(None if draws is None else draws.of_tokens)
        too_short = self.library.moe_draft_step(
            self.kind, ctypes.addressof(self.struct), buffers.rows_address, len(rows), depth,
            ctypes.addressof(draft_draws), ctypes.addressof(token_draws),
            None if draws is None else draws.uniform.ctypes.data, ctypes.addressof(buffers.struct),
        )  # fmt: skip
        if too_short >= 0:
            raise ValueError(f"row {too_short} grows by {depth + 1} tokens beyond its table")
        return buffers.results


def fuse_draft_step(
    drafts: FusedDrafts, stack: FusedStack, tables: RowTables, caches: Sequence[Tensor]
) -> FusedDraftStep | None:
    """None if there are several MTP layers, or the parts do not fit together.

    Args:
        tables: read and advanced by every step.
        caches: of the L layers and the MTP layer.
    """
    num_layers = len(stack.layers)
    if len(drafts.levels) != 1 or drafts.kind != stack.kind or any(not t.is_contiguous() for t in tables):
        return None
    stack.take(caches)
    drafts.take(caches[num_layers:], tables.states.dtype)
    struct = _Step(
        ctypes.addressof(drafts.levels[0]), stack.address, ctypes.addressof(drafts.head),
        tables.slots.data_ptr(), tables.tokens.data_ptr(), tables.slots.shape[1],
        *(t.data_ptr() for t in (tables.lengths, tables.last_tokens, tables.states)),
    )  # fmt: skip
    return FusedDraftStep(drafts.kind, struct, drafts.library, (drafts, stack, tables, tuple(caches)))
