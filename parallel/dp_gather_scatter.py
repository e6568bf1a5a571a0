"""Tokens on their way between the parts of a layer.

A layer's attention works on all tokens of its attention group, which every rank of the group sees. Its feed-forward
part says which tokens it wants (`TokenLayout`). What lies between, and where the residual stream is kept, is one of two
`TokenMoves`:

    moves     after attention         to the feed-forward part   from it              to the next attention
    Whole     sum over attn_tp        -                          sum over the world   -
    Shares    sum, each its share     ALL: gather the shares     ALL: sum, shares     gather the group's shares
              of the group's tokens   SHARE: -                   SHARE: -

`Whole` is plain tensor parallelism. `Shares` also serves DP attention and tokens that travel to their experts; norms
and residual additions are then done once in a group. A group without tokens takes part in what concerns all ranks.

Legend: T tokens of the group, S of them this rank's share, N tokens of all groups, D hidden.
"""

from __future__ import annotations

from enum import Enum
from typing import Protocol

from torch import Tensor

from moe_engine.parallel.context import ParallelContext
from moe_engine.parallel.step_sizes import StepSizes
from moe_engine.parallel.uneven import gather_rows, scatter_sums, sum_over


class TokenLayout(Enum):
    """Which tokens a feed-forward part takes, and what it returns.

    ALL: those of all attention groups, the same on every rank; returns summands over the world.
    SHARE: each rank its own; returns the whole result.
    """

    ALL = "all"
    SHARE = "share"


class TokenMoves(Protocol):
    """Collective: all ranks call alike, those of an idle group too."""

    moves_in: bool
    """Whether `enter` sends tokens anywhere; else it returns what it is given."""
    moves_out: bool
    """The same of `to_attention`."""

    def after_attention(self, partial: Tensor, step: StepSizes) -> Tensor:
        """Summands over the attention group [T, D] -> the rows that the residual is kept for."""

    def residual_rows(self, residual: Tensor, step: StepSizes) -> Tensor:
        """A view of the rows [S, D] of `residual` [T, D] that this rank keeps; the others are stale."""

    def enter(self, x: Tensor, step: StepSizes) -> Tensor:
        """[S, D] -> the tokens that the feed-forward part takes."""

    def leave(self, x: Tensor, step: StepSizes) -> Tensor:
        """What the feed-forward part returned -> [S, D]."""

    def to_attention(self, x: Tensor, step: StepSizes) -> Tensor:
        """[S, D] -> all tokens of the group [T, D]."""


class Whole:
    """One attention group, whose ranks all keep all tokens."""

    moves_in = moves_out = False

    def __init__(self, parallel: ParallelContext) -> None:
        self._group = parallel.world

    def after_attention(self, partial: Tensor, step: StepSizes) -> Tensor:
        return sum_over(self._group, partial)

    def residual_rows(self, residual: Tensor, step: StepSizes) -> Tensor:
        return residual

    def enter(self, x: Tensor, step: StepSizes) -> Tensor:
        return x

    def leave(self, x: Tensor, step: StepSizes) -> Tensor:
        return sum_over(self._group, x)

    def to_attention(self, x: Tensor, step: StepSizes) -> Tensor:
        return x


class Shares:
    """Every rank keeps its share of its group's tokens."""

    def __init__(self, parallel: ParallelContext, layout: TokenLayout) -> None:
        self._world, self._group = parallel.world, parallel.attn_tp
        self._gathers = self.moves_in = layout is TokenLayout.ALL
        self.moves_out = parallel.attn_tp.size > 1

    def after_attention(self, partial: Tensor, step: StepSizes) -> Tensor:
        return scatter_sums(self._group, partial, step.group_shares)

    def residual_rows(self, residual: Tensor, step: StepSizes) -> Tensor:
        return residual[step.own_tokens]

    def enter(self, x: Tensor, step: StepSizes) -> Tensor:
        return gather_rows(self._world, x, step.shares) if self._gathers else x

    def leave(self, x: Tensor, step: StepSizes) -> Tensor:
        return scatter_sums(self._world, x, step.shares) if self._gathers else x

    def to_attention(self, x: Tensor, step: StepSizes) -> Tensor:
        return gather_rows(self._group, x, step.group_shares)
