"""A decoder layer on one of many ranks: the same parts, and tokens on the move between them.

Legend: T tokens of the attention group, S of them kept by this rank, D hidden.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from torch import Tensor

from moe_engine.kernels.quantization.protocol import Activation
from moe_engine.models.batch import ForwardBatch
from moe_engine.models.layers.norm import RMSNorm
from moe_engine.models.layers.overlap_stages import Staged, Stages, finish
from moe_engine.parallel.context import ParallelContext
from moe_engine.parallel.dp_gather_scatter import Shares, TokenLayout, TokenMoves, Whole
from moe_engine.parallel.step_sizes import StepSizes


class ShardedLayer:
    """As `DecoderLayer`, with the same arguments.

    `shares_out`: the layer leaves each rank with its share of the residual stream only. `passes_on`: what its last norm
    gives stays where it is until the next layer reads it.

    Of `residual` [T, D] each rank keeps the rows that `moves` says. A group without tokens leaves its attention out,
    and takes part in the rest.
    """

    def __init__(
        self, attention: Any, post_norm: RMSNorm, feed_forward: Any, next_norm: RMSNorm, moves: TokenMoves
    ) -> None:
        self.attention = attention
        self.post_norm = post_norm
        self.feed_forward = feed_forward
        self.next_norm = next_norm
        self.shares_out = isinstance(moves, Shares)
        self.passes_on = not moves.moves_out
        if not moves.moves_in:
            post_norm.feed(feed_forward.input_format)
        self._moves = moves

    def forward(self, hidden: Activation, residual: Tensor, batch: ForwardBatch, *more: Any) -> Tensor:
        return finish(self.stages(hidden, residual, batch, *more, staged=False))

    def stages(
        self, hidden: Activation, residual: Tensor, batch: ForwardBatch, *more: Any, staged: bool = True
    ) -> Stages:
        """`forward`, stopping where tokens are on their way to and from experts."""
        step, moves = batch.sizes, self._moves
        assert step is not None
        mixed = residual[:0]
        if len(hidden):
            mixed = moves.after_attention(self.attention.forward(hidden, batch, *more), step)
        rows = moves.residual_rows(residual, step)  # [S, D]
        hidden = moves.enter(self.post_norm.add(mixed, rows), step)
        if staged and isinstance(self.feed_forward, Staged):
            mixed = yield from self.feed_forward.stages(hidden, step.phase)
        else:
            mixed = self.feed_forward.forward(hidden, step.phase)
        mixed = moves.leave(mixed, step)
        return moves.to_attention(self.next_norm.add(mixed, rows), step)


def choose_moves(parallel: ParallelContext, layout: TokenLayout, shared_out: bool) -> TokenMoves:
    """How a layer moves tokens.

    Args:
        layout: what its feed-forward part takes.
        shared_out: a layer before this one has left each rank with its share of the residual stream only.
    """
    if parallel.attn_dp_size == 1 and layout is TokenLayout.ALL and not shared_out:
        return Whole(parallel)
    return Shares(parallel, layout)


def with_sizes(batch: ForwardBatch, parallel: ParallelContext) -> ForwardBatch:
    """The batch with its `sizes`: those that were exchanged, or its own, where the model has one attention group.

    Raises:
        ValueError: sizes are missing, or are not those of the batch.
    """
    if batch.sizes is None:
        if parallel.attn_dp_size > 1:
            raise ValueError("with DP attention a batch needs `sizes`: see StepSizes.exchange")
        prefills = batch.attention.prefill is not None and batch.attention.prefill.num_tokens > 0
        sizes = StepSizes.known(parallel, [batch.num_tokens], [len(batch.logits_rows)], prefills)
        return replace(batch, sizes=sizes)
    if batch.sizes.tokens[parallel.attn_dp_rank] != batch.num_tokens:
        raise ValueError(f"the batch has {batch.num_tokens} tokens, its sizes say {batch.sizes.tokens}")
    return batch
