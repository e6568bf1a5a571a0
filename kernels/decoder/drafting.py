"""Draft chains, or the step around them, in one call: optional functions of an attention backend.

Legend: R rows, D hidden, V vocabulary, M MTP layers, S steps of a chain, N = S + 1 verified tokens, L layers,
W entries of a row in tables of all rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol, runtime_checkable

import numpy as np
from torch import Tensor

from moe_engine.kernels.attention.protocol import PagedQueries
from moe_engine.kernels.linear.protocol import PreparedLinear
from moe_engine.kernels.sampling.protocol import SamplingParameters


@dataclass(frozen=True)
class DraftLevel:
    """An MTP layer: z = project([embedding_norm(embedding) | hidden_norm(hidden)]), then a decoder layer on z."""

    embedding_norm: Tensor  # [D] float32, as are the other norms
    hidden_norm: Tensor
    project: PreparedLinear  # [D, 2D]
    input_norm: Tensor
    attention: Any  # from `FusedMLA.fuse`
    post_norm: Tensor
    experts: Any  # from `FusedMoE.fuse`
    final_norm: Tensor
    eps: float


@dataclass(frozen=True)
class ChainSteps:
    """Positions of each step of a chain. All rows attend to everything before their position."""

    levels: Sequence[int]  # [S]: which MTP layer runs
    positions: Tensor  # [S, R] int64
    slots: Tensor  # [S, R] int64
    context_lens: Tensor  # [S, R] int32, on the device
    queries: PagedQueries  # from any step: rows, slot table


@runtime_checkable
class FusedDrafting(Protocol):
    """A backend that drafts a whole chain in one call."""

    def fuse_drafts(self, levels: Sequence[DraftLevel], embedding: Tensor, head: PreparedLinear) -> Any | None:
        """The handle for `run_drafts`; None if these weights are not supported. embedding [V, D], head [V, D]."""

    def run_drafts(
        self,
        drafts: Any,
        states: Tensor,
        rows: Tensor,
        roots: Tensor,
        steps: ChainSteps,
        caches: Sequence[Tensor],
        parameters: SamplingParameters | None,
        uniform: Tensor | None,
    ) -> Tensor:
        """roots [R] int64 -> tokens [R, 1+S] int64: each root, then its drafts, identical to the separate calls.

        Args:
            states: [max_rows, D], states[rows[r]] precedes root r; rows [R] int64.
            caches: of the M layers, [num_slots, C+P].
            parameters: sampling parameters of the rows; None: greedy.
            uniform: [S, R] float32, random number of each draw, with `parameters`.
        """

    def remember_drafts(
        self, drafts: Any, level: int, ids: Tensor, hidden: Tensor, positions: Tensor, slots: Tensor, cache: Tensor
    ) -> None:
        """Writes a layer's cache rows for hidden [T, D] followed by tokens ids [T], as in the separate calls; positions
        and slots are [T] int64. For few tokens: all are processed at once."""


class RowTables(NamedTuple):
    """Per-row state of a worker with speculation, in host memory."""

    slots: Tensor  # [max_rows, W] int32: slot of each position
    tokens: Tensor  # [max_rows, W] int32: up to the last token, at position lengths[row]
    lengths: Tensor  # [max_rows] int64
    last_tokens: Tensor  # [max_rows] int64
    states: Tensor  # [max_rows, D]: target hidden state at the position before the last token


@dataclass(frozen=True)
class StepDraws:
    """Sampling of R rows in a step. A draft and its verification use the same random number."""

    of_rows: SamplingParameters  # of R draws
    of_tokens: SamplingParameters  # of R * N draws, grouped by row
    uniform: np.ndarray  # [N, R] float32


class VerifiedChains(NamedTuple):
    """Verification results for the chains of R rows."""

    starts: np.ndarray  # [R] int64: position of a row's last token before the step
    tokens: np.ndarray  # [R, N] int64: following tokens, the last one repeated; negative for invalid logits
    counts: np.ndarray  # [R] int64: number of new tokens
    seconds: np.ndarray  # [3] float64: of drafting, of the model, of the draft cache update


@runtime_checkable
class FusedDraftStep(FusedDrafting, Protocol):
    """A backend that drafts, verifies, accepts and updates the draft cache in one call. `M` is 1."""

    max_fused_tokens: int
    """Max tokens per step for which the fused call is faster."""

    def fuse_step(self, fused: Any, stack: Any, tables: RowTables, caches: Sequence[Tensor]) -> Any | None:
        """The handle for `run_step`; None if these are not supported.

        Args:
            fused: from `fuse_drafts`.
            stack: from `FusedStack.fuse_stack`.
            tables: read and advanced by every step.
            caches: of the L layers and the MTP layer.
        """

    def run_step(self, step: Any, rows: np.ndarray, depth: int, draws: StepDraws | None) -> VerifiedChains:
        """Drafts `depth` tokens for each of rows [R] int64, verifies them, enters accepted tokens into the tables and
        updates the MTP layer's cache, bit-identical to the separate calls. The result is valid until the next call.

        Args:
            rows: `slots` must be set for N tokens from the last one on. The array must not be modified between calls.
            draws: None: greedy.

        Raises:
            ValueError: a row's table is too short; no state was changed.
        """
