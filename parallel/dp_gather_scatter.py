"""DP attention communication: all_gather and reduce_scatter of tokens between attention and the feed-forward part.

A layer's attention processes all tokens of its attention group, on every rank of the group. Its feed-forward part
declares its input tokens (`TokenLayout`). The communication in between, and the rows of the residual stream that a rank
keeps, are one of three `DPCommunication` classes:

                    after attention        gather (before FFN)    reduce (after FFN)     to_attention
    AllReduce       all_reduce in attn_tp  -                      all_reduce in world    -
    FusedAllReduce  in the norm            -                      in the norm            -
    GatherScatter   reduce_scatter in      ALL: all_gather in     ALL: reduce_scatter    all_gather in attn_tp
                    attn_tp                world; SHARE: -        in world; SHARE: -

`AllReduce` is plain tensor parallelism; `FusedAllReduce` leaves its sums to the norms that follow. `GatherScatter` also
supports DP attention and MoE all-to-all; norms and residual additions then run once per group. An idle group takes part
in the collectives of all ranks.

Legend: T tokens of the group, S of them on this rank, N tokens of all groups, D hidden.
"""

from __future__ import annotations

from enum import Enum
from typing import TYPE_CHECKING, Protocol

from torch import Tensor

from moe_engine.parallel.context import ParallelContext
from moe_engine.parallel.step_sizes import StepSizes
from moe_engine.parallel.uneven import gather_rows, scatter_sums, sum_over

if TYPE_CHECKING:
    from moe_engine.parallel.all_reduce.custom import CustomAllReduce


class TokenLayout(Enum):
    """Input tokens and result of a feed-forward part.

    ALL: tokens of all attention groups, the same on every rank; returns partial sums over the world.
    SHARE: each rank its own tokens; returns the full result.
    """

    ALL = "all"
    SHARE = "share"


class DPCommunication(Protocol):
    """Collective: all ranks make the same calls, ranks of an idle group too."""

    gathers_for_ffn: bool
    """True if `gather` communicates; otherwise it returns its input."""
    gathers_for_attention: bool
    """True if `to_attention` communicates."""
    norms_sum: CustomAllReduce | None
    """`after_attention` and `reduce` return partial sums, which the norms after them sum with it."""

    def after_attention(self, partial: Tensor, step: StepSizes) -> Tensor:
        """Partial sums over the attention group [T, D] -> the rows of this rank's residual."""

    def residual_rows(self, residual: Tensor, step: StepSizes) -> Tensor:
        """A view of the rows [S, D] of `residual` [T, D] kept by this rank; the others are stale."""

    def gather(self, x: Tensor, step: StepSizes) -> Tensor:
        """[S, D] -> the input tokens of the feed-forward part."""

    def reduce(self, x: Tensor, step: StepSizes) -> Tensor:
        """Result of the feed-forward part -> [S, D]."""

    def to_attention(self, x: Tensor, step: StepSizes) -> Tensor:
        """[S, D] -> all tokens of the group [T, D]."""


class FusedAllReduce:
    """One attention group; every rank keeps all tokens, and the norms sum the partial results."""

    gathers_for_ffn = gathers_for_attention = False

    def __init__(self, norms_sum: CustomAllReduce | None) -> None:
        self.norms_sum = norms_sum

    def after_attention(self, partial: Tensor, step: StepSizes) -> Tensor:
        return partial

    def residual_rows(self, residual: Tensor, step: StepSizes) -> Tensor:
        return residual

    def gather(self, x: Tensor, step: StepSizes) -> Tensor:
        return x

    def reduce(self, x: Tensor, step: StepSizes) -> Tensor:
        return x

    def to_attention(self, x: Tensor, step: StepSizes) -> Tensor:
        return x


class AllReduce(FusedAllReduce):
    """`FusedAllReduce` without such norms: partial results are summed here."""

    def __init__(self, parallel: ParallelContext) -> None:
        super().__init__(None)
        self._group = parallel.world

    def after_attention(self, partial: Tensor, step: StepSizes) -> Tensor:
        return sum_over(self._group, partial)

    def reduce(self, x: Tensor, step: StepSizes) -> Tensor:
        return sum_over(self._group, x)


class GatherScatter:
    """Every rank keeps its share of its group's tokens."""

    norms_sum: CustomAllReduce | None = None

    def __init__(self, parallel: ParallelContext, layout: TokenLayout) -> None:
        self._world, self._group = parallel.world, parallel.attn_tp
        self.gathers_for_ffn = layout is TokenLayout.ALL
        self.gathers_for_attention = parallel.attn_tp.size > 1

    def after_attention(self, partial: Tensor, step: StepSizes) -> Tensor:
        return scatter_sums(self._group, partial, step.group_shares)

    def residual_rows(self, residual: Tensor, step: StepSizes) -> Tensor:
        return residual[step.own_tokens]

    def gather(self, x: Tensor, step: StepSizes) -> Tensor:
        return gather_rows(self._world, x, step.shares) if self.gathers_for_ffn else x

    def reduce(self, x: Tensor, step: StepSizes) -> Tensor:
        return scatter_sums(self._world, x, step.shares) if self.gathers_for_ffn else x

    def to_attention(self, x: Tensor, step: StepSizes) -> Tensor:
        return gather_rows(self._group, x, step.group_shares)
