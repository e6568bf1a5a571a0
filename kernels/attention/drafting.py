"""Chains of drafts in one call: what an attention backend can offer beside its two forms.

Legend: R rows, D hidden, V vocabulary, M MTP layers, S steps of a chain.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

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
