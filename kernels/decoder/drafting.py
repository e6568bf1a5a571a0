"""Chains of drafts in one call, or the step around them: what an attention backend can offer beside its two forms.

Legend: R rows, D hidden, V vocabulary, M MTP layers, S steps of a chain, N = S + 1 tokens that are verified, L layers,
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

    embedding_norm: Tensor  # [D] float32, and so the other norms
    hidden_norm: Tensor
    project: PreparedLinear  # [D, 2D]
    input_norm: Tensor
    attention: Any  # what `FusedMLA.fuse` gave
    post_norm: Tensor
    experts: Any  # what `FusedMoE.fuse` gave
    final_norm: Tensor
    eps: float


@dataclass(frozen=True)
class ChainSteps:
    """Where each step of a chain stands. All rows see what is before their position."""

    levels: Sequence[int]  # [S]: which MTP layer runs
    positions: Tensor  # [S, R] int64
    slots: Tensor  # [S, R] int64
    context_lens: Tensor  # [S, R] int32, on the device
    queries: PagedQueries  # of any step: rows, slot table


@runtime_checkable
class FusedDrafting(Protocol):
    """A backend that drafts a whole chain in one call."""

    def fuse_drafts(self, levels: Sequence[DraftLevel], embedding: Tensor, head: PreparedLinear) -> Any | None:
        """What `run_drafts` takes; None where these weights cannot be run so. embedding [V, D], head [V, D]."""

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
        """roots [R] int64 -> tokens [R, 1+S] int64: each root, then the drafts of the separate calls.

        Args:
            states: [max_rows, D], of which states[rows[r]] is the one behind root r; rows [R] int64.
            caches: of the M layers, [num_slots, C+P].
            parameters: of the rows' draws; None draws greedily.
            uniform: [S, R] float32, the number of each draw, with `parameters`.
        """

    def remember_drafts(
        self, drafts: Any, level: int, ids: Tensor, hidden: Tensor, positions: Tensor, slots: Tensor, cache: Tensor
    ) -> None:
        """Writes what a layer leaves in its cache for hidden [T, D] followed by tokens ids [T], as the separate calls
        do; positions and slots are [T] int64. For few tokens: all of them are worked on at once."""


class RowTables(NamedTuple):
    """What a worker that speculates keeps of each of its rows, in the host's memory."""

    slots: Tensor  # [max_rows, W] int32: of each position
    tokens: Tensor  # [max_rows, W] int32: up to the last token, which stands at position lengths[row]
    lengths: Tensor  # [max_rows] int64
    last_tokens: Tensor  # [max_rows] int64
    states: Tensor  # [max_rows, D]: of the model, at the position before the last token


@dataclass(frozen=True)
class StepDraws:
    """How R rows draw in a step. A draft is drawn with the number that its judge draws with."""

    of_rows: SamplingParameters  # of R draws
    of_tokens: SamplingParameters  # of R * N draws, those of a row together
    uniform: np.ndarray  # [N, R] float32


class VerifiedChains(NamedTuple):
    """What became of the chains of R rows."""

    starts: np.ndarray  # [R] int64: position of a row's last token before the step
    tokens: np.ndarray  # [R, N] int64: what follows it, the last one repeated; negative where logits were broken
    counts: np.ndarray  # [R] int64: how many new tokens there are
    seconds: np.ndarray  # [3] float64: of drafting, of the model, of remembering


@runtime_checkable
class FusedDraftStep(FusedDrafting, Protocol):
    """A backend that drafts, verifies, accepts and remembers in one call. `M` is 1."""

    max_fused_tokens: int
    """Tokens of a step up to which that gains anything."""

    def fuse_step(self, fused: Any, stack: Any, tables: RowTables, caches: Sequence[Tensor]) -> Any | None:
        """What `run_step` takes; None where these cannot be run so.

        Args:
            fused: what `fuse_drafts` gave.
            stack: what `FusedStack.fuse_stack` gave.
            tables: read and moved on by every step.
            caches: of the L layers and the MTP layer.
        """

    def run_step(self, step: Any, rows: np.ndarray, depth: int, draws: StepDraws | None) -> VerifiedChains:
        """Rows [R] int64 get `depth` drafts each, the model judges them, tokens that stand are entered into the tables,
        and the MTP layer remembers them: all with the bits of the separate calls. The result holds until the next call.

        Args:
            rows: `slots` are known for N tokens from the last one on. The same object has the same numbers.
            draws: None draws greedily.

        Raises:
            ValueError: a row's table is too short; nothing was done.
        """
