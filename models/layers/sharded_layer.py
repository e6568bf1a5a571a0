"""A decoder layer on one of many ranks: the same modules, with communication in between.

Legend: T tokens of the attention group, S of them kept by this rank, D hidden.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from moe_engine.kernels.quantization.protocol import Activation
from moe_engine.models.batch import ForwardBatch, RoutedTokens
from moe_engine.models.layers.feed_forward.moe import Choice, MoE
from moe_engine.models.layers.norm import RMSNorm
from moe_engine.models.layers.overlap_stages import Stages, finish
from moe_engine.models.layers.residual.deepstack import DeepstackRows
from moe_engine.models.layers.residual.ngram_input import NgramInput
from moe_engine.parallel.context import ParallelContext
from moe_engine.parallel.dp_gather_scatter import AllReduce, DPCommunication, FusedAllReduce, GatherScatter, TokenLayout
from moe_engine.parallel.step_sizes import StepSizes
from moe_engine.parallel.uneven import gather_rows


class ShardedLayer:
    """`DecoderLayer` on many ranks, with the same arguments.

    `shares_out`: the layer leaves each rank with its rows of the residual stream only. `passes_on`: the result of its
    last norm is not communicated before the next layer reads it.

    Each rank keeps the rows of `residual` [T, D] given by its `DPCommunication`. An idle group skips its attention, and
    takes part in the rest.
    """

    def __init__(
        self, attention: Any, post_norm: RMSNorm, feed_forward: Any, next_norm: RMSNorm, comm: DPCommunication
    ) -> None:
        self.attention = attention
        self.post_norm = post_norm
        self.feed_forward = feed_forward
        self.next_norm = next_norm
        self.shares_out = isinstance(comm, GatherScatter)
        self.passes_on = not comm.gathers_for_attention
        if not comm.gathers_for_ffn and feed_forward is not None:
            post_norm.feed(feed_forward.input_format)
        if comm.norms_sum is not None:
            post_norm.sum_over(comm.norms_sum)
            next_norm.sum_over(comm.norms_sum)
        self._moe = feed_forward if isinstance(feed_forward, MoE) else None
        self._comm = comm
        self.deepstack: DeepstackRows | None = None
        self.ngrams: NgramInput | None = None
        self._pairs = self._moe is not None and next_norm.adds_pairs and not comm.gathers_for_ffn and self.shares_out
        """True if `next_norm` sums routed and shared experts, since the result is not communicated."""

        sums = comm.norms_sum is not None and next_norm.adds_rows
        self._leaves_rows = sums and self._moe is not None and self._moe.leaves_rows
        """True if `next_norm` sums the experts' rows."""

    def forward(self, hidden: Activation, residual: Tensor, batch: ForwardBatch, *more: Any) -> Tensor:
        return finish(self.stages(hidden, residual, batch, *more, staged=False))

    def stages(
        self, hidden: Activation, residual: Tensor, batch: ForwardBatch, *more: Any, staged: bool = True
    ) -> Stages:
        """`forward` as a generator that yields during dispatch and combine."""
        step, comm = batch.sizes, self._comm
        assert step is not None
        mixed = residual[:0, : self.post_norm.width]
        if self.ngrams is not None and len(hidden):
            hidden = self.ngrams.add(hidden, residual, batch)
        if len(hidden):
            mixed = comm.after_attention(self.attention.forward(hidden, batch, *more), step)
        rows = comm.residual_rows(residual, step)  # [S, D]
        chosen: Choice | None = None
        if self._moe is not None and not comm.gathers_for_ffn:
            hidden, chosen = self._moe.after_norm(self.post_norm, mixed, rows, step.phase, batch.routed)
        elif self.feed_forward is None:
            return comm.to_attention(self.post_norm.add(mixed, rows), step)
        else:
            hidden = comm.gather(self.post_norm.add(mixed, rows), step)
        if self.deepstack is not None:
            self.deepstack.add(residual, batch)  # of whose rows `rows` is a view
        if self._leaves_rows and self._moe is not None:
            return self.next_norm.add_rows(self._moe.expert_rows(hidden, batch.routed, chosen), rows)
        if self._pairs and self._moe is not None and not staged:
            return comm.to_attention(
                self._moe.before_norm(self.next_norm, hidden, rows, step.phase, batch.routed, chosen), step
            )
        if staged and self._moe is not None:
            mixed = yield from self._moe.stages(hidden, step.phase, batch.routed, chosen)
        elif self._moe is not None:
            mixed = self._moe.forward(hidden, step.phase, batch.routed, chosen)
        else:
            mixed = self.feed_forward.forward(hidden, step.phase, batch.routed)
        mixed = comm.reduce(mixed, step)
        return comm.to_attention(self.next_norm.add(mixed, rows), step)

    def whole_stream(self, residual: Tensor, batch: ForwardBatch) -> Tensor:
        """The residual stream [T, D] after this layer; collective in the attention group if its ranks share it."""
        step, comm = batch.sizes, self._comm
        assert step is not None
        return comm.to_attention(self.next_norm.stream(comm.residual_rows(residual, step)), step)


def choose_communication(parallel: ParallelContext, layout: TokenLayout, shared_out: bool) -> DPCommunication:
    """Selects a layer's communication.

    Args:
        layout: input tokens of its feed-forward part; ALL without one.
        shared_out: an earlier layer leaves each rank with its rows of the residual stream only.
    """
    if parallel.attn_dp_size == 1 and layout is TokenLayout.ALL and not shared_out:
        return AllReduce(parallel) if parallel.all_reduce is None else FusedAllReduce(parallel.all_reduce)
    return GatherScatter(parallel, layout)


def with_sizes(
    batch: ForwardBatch, parallel: ParallelContext, hashes: bool = False, images: bool = False
) -> ForwardBatch:
    """The batch with its `sizes`: the exchanged sizes, or its own if the model has one attention group; and with its
    `rank_tokens`. hashes: some layers choose experts by token id; images: routers tell image tokens from text;
    collective if these facts of other ranks' tokens are needed.

    Raises:
        ValueError: sizes are missing, or do not match the batch.
    """
    if batch.sizes is None:
        if parallel.attn_dp_size > 1:
            raise ValueError("with DP attention a batch needs `sizes`: see StepSizes.exchange")
        prefills = batch.attention.prefill is not None and batch.attention.prefill.num_tokens > 0
        sizes = StepSizes.known(parallel, [batch.num_tokens], [len(batch.logits_rows)], prefills)
        return replace(batch, sizes=sizes, rank_tokens=_routed(batch, sizes, parallel, hashes, images))
    if batch.sizes.tokens[parallel.attn_dp_rank] != batch.num_tokens:
        raise ValueError(f"the batch has {batch.num_tokens} tokens, its sizes have {batch.sizes.tokens}")
    return replace(batch, rank_tokens=_routed(batch, batch.sizes, parallel, hashes, images))


def _routed(
    batch: ForwardBatch, sizes: StepSizes, parallel: ParallelContext, hashes: bool, images: bool
) -> RoutedTokens:
    """This rank's share if tokens are dispatched. Without a dispatcher a rank routes the tokens of all groups: their
    ids and kinds are gathered if layers read them, and all are real."""
    ids, real, kinds = batch.input_ids, batch.real, batch.is_image if images else None
    if parallel.dispatcher is None and parallel.attn_dp_size == 1:
        return RoutedTokens(ids, real, kinds, sizes.own_of_all)
    own = sizes.own_tokens
    if parallel.dispatcher is not None:
        real, kinds = (None if part is None else part[own] for part in (real, kinds))
        return RoutedTokens(ids[own], real, kinds, sizes.own_of_all)
    ids = ids[own]
    if images and sizes.prefills:  # image tokens are in prompts only
        found = torch.zeros_like(ids) if kinds is None else kinds[own].to(ids.dtype)
        kinds = gather_rows(parallel.world, found.unsqueeze(1), sizes.shares).squeeze(1) > 0
    return RoutedTokens(
        gather_rows(parallel.world, ids.unsqueeze(1), sizes.shares).squeeze(1) if hashes else ids, None, kinds,
        sizes.own_of_all,
    )  # fmt: skip
