"""The routed experts of a layer, as called by the model: tokens and choices in, weighted sums out.

Placement, dispatch and the expert kernel are fixed at construction.
Legend: T tokens, D hidden, K experts per token, E experts.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor

from moe_engine.kernels.experts.batch import ExpertBatch, ExpertWeights
from moe_engine.kernels.experts.protocol import ExpertsKernel
from moe_engine.kernels.permutation.protocol import ExpertRows
from moe_engine.kernels.quantization.groups import RowGroups
from moe_engine.kernels.quantization.protocol import UNQUANTIZED, Activation, ActivationFormat, as_format
from moe_engine.parallel.context import SINGLE, ParallelContext
from moe_engine.parallel.dispatch.protocol import NormedSum, Phase
from moe_engine.parallel.overlap import CommStream, Done, Pending, Started

if TYPE_CHECKING:
    from moe_engine.parallel.dispatch.build import PhasedDispatcher


class RoutedExperts(Protocol):
    @property
    def input_format(self) -> ActivationFormat:
        """Activation format of `run`; it accepts a `QuantizedActivation` if the format has rows."""

    def run(
        self, x: Activation, topk_weights: Tensor, topk_ids: Tensor, add: Tensor | None = None, phase: Phase = "prefill"
    ) -> Tensor:
        """x [T, D], topk_weights float32 [T, K], topk_ids int32 [T, K] -> add + sum_k w_k expert_k(x), [T, D].

        Ids are slots, numbered over all ranks; a slot holds a copy of an expert (see `ExpertTables`). The sum is over
        this rank's experts, or over all experts with all-to-all; `phase` is then the mode of the dispatcher, the
        same on every rank.
        """


class DispatchedExperts:
    """Dispatch -> grouped matrix products -> combine: any dispatcher with any kernel that supports its layout.

    With FP8 dispatch and a kernel that reads FP8 rows, tokens are quantized once, by the preceding norm or by dispatch,
    and stay quantized.
    """

    def __init__(self, dispatcher: PhasedDispatcher, kernel: ExpertsKernel, weights: ExpertWeights) -> None:
        self._dispatcher = dispatcher
        self._kernel = kernel
        self._weights = weights
        read, able = kernel.input_format(weights), kernel.capabilities
        self._arriving, self._row_alignment = replace(read, column_scales=able.column_scales), able.row_alignment
        self._sends_rows = {phase: read.rows and takes for phase, takes in dispatcher.takes_rows().items()}
        rows = any(self._sends_rows.values())  # a producer has no phase: it leaves what any of them sends
        plain = not all(self._sends_rows.values())
        self.input_format = replace(read, unquantized=read.unquantized or plain) if rows else UNQUANTIZED
        self.on_arrival: Callable[[Tensor], None] | None = None
        """Callback with the number of tokens received by each of this rank's slots, int32 [P/G]."""

    def reads_int64(self, phase: Phase) -> bool:
        """True if dispatch copies ids that are not int64."""
        return self._dispatcher.reads_int64(phase)

    def run(
        self, x: Activation, topk_weights: Tensor, topk_ids: Tensor, add: Tensor | None = None, phase: Phase = "prefill"
    ) -> Tensor:
        batch, handle = self._dispatcher.dispatch(*self._sent(x, topk_ids, topk_weights, phase))
        out = self._dispatcher.combine(self._multiplied(batch), topk_weights, handle)
        return out if add is None else out.add_(add)

    def _sent(self, x: Activation, topk_ids: Tensor, topk_weights: Tensor, phase: Phase) -> tuple[Any, ...]:
        """Arguments of a dispatch."""
        x = as_format(x, self.input_format if self._sends_rows[phase] else UNQUANTIZED)
        return x, topk_ids, topk_weights, phase, self._arriving_format(topk_ids, phase)

    def _arriving_format(self, topk_ids: Tensor, phase: Phase) -> ActivationFormat:
        """The format of arriving rows. In a decode every rank has about as many tokens as this one."""
        if self._row_alignment is None:
            return self._arriving
        mean_rows = -(-topk_ids.numel() // self._weights.num_experts) if phase == "decode" else 0
        return replace(self._arriving, row_alignment=max(self._row_alignment(self._weights, mean_rows), 1))

    def norms_sums(self, phase: Phase) -> bool:
        """True if `compute_norm` is supported."""
        return self._dispatcher.norms_sums(phase)

    # -- the same in stages, with communication in a comm stream

    def dispatched(self, x: Activation, topk_weights: Tensor, topk_ids: Tensor, phase: Phase) -> Pending[Any]:
        """The whole dispatch, in the owner's stream."""
        return Done(self._dispatcher.dispatch(*self._sent(x, topk_ids, topk_weights, phase)))

    def send(
        self, stream: CommStream, x: Activation, topk_weights: Tensor, topk_ids: Tensor, phase: Phase
    ) -> Pending[Any]:
        """Starts the dispatch."""
        return Started(stream.run(self._start_dispatch, x, topk_ids, topk_weights, phase))

    def _start_dispatch(self, *sent: Any) -> Callable[[], tuple[ExpertBatch, Any]]:
        return self._dispatcher.start_dispatch(*self._sent(*sent))

    def compute(self, stream: CommStream, sent: Pending[Any], topk_weights: Tensor) -> Pending[Tensor]:
        """Waits for the received tokens, runs the experts, and starts the combine."""
        batch, handle = sent.wait()
        return Started(stream.run(self._dispatcher.start_combine, self._multiplied(batch), topk_weights, handle))

    def compute_norm(self, stream: CommStream, sent: Pending[Any], topk_weights: Tensor) -> NormedSum:
        """`compute` for a sum that a norm follows, if the dispatcher `norms_sums`."""
        batch, handle = sent.wait()
        call = self._dispatcher.start_combine_norm
        made: NormedSum = stream.run(call, self._multiplied(batch), topk_weights, handle).wait()
        return made

    def _multiplied(self, batch: ExpertBatch) -> Tensor:
        """The experts' results of a batch, whose rows are counted if there is a recorder."""
        if self.on_arrival is not None and batch.fused is not None:
            counts = torch.zeros(self._weights.num_experts, dtype=torch.int32, device=batch.x.device)
            batch = replace(batch, counts=counts)
        rows = self._kernel.run(batch, self._weights)
        if self.on_arrival is not None:
            self.on_arrival(_rows_of_slots(batch))
        return rows


def _rows_of_slots(batch: ExpertBatch) -> Tensor:
    if batch.counts is not None:
        return batch.counts
    if batch.ends is not None:
        return RowGroups(batch.ends, batch.alignment).counts
    assert batch.offsets is not None
    return batch.offsets.diff()


class LocalExperts:
    """Local tokens: the kernel permutes, computes and combines in one call.

    Args:
        first: index of this rank's first slot; choices of other ranks' slots are ignored.
    """

    def __init__(self, kernel: ExpertsKernel, weights: ExpertWeights, first: int = 0) -> None:
        self._run = kernel.run_routed
        self._rows = kernel.capabilities.routed_rows
        self.input_format = kernel.input_format(weights)
        self._weights = weights
        self._first = first

    def run(
        self, x: Activation, topk_weights: Tensor, topk_ids: Tensor, add: Tensor | None = None, phase: Phase = "prefill"
    ) -> Tensor:
        return self._run(x, topk_weights, self._own(topk_ids), self._weights, add)

    @property
    def leaves_rows(self) -> bool:
        """True if `rows` is supported."""
        return self._rows is not None

    def rows(self, x: Activation, topk_weights: Tensor, topk_ids: Tensor, add: Tensor | None = None) -> ExpertRows:
        """`run` before the sum."""
        assert self._rows is not None
        return self._rows(x, topk_weights, self._own(topk_ids), self._weights, add)

    def _own(self, topk_ids: Tensor) -> Tensor:
        return topk_ids - self._first if self._first else topk_ids


def make_routed_experts(
    kernel: ExpertsKernel, weights: ExpertWeights, parallel: ParallelContext = SINGLE
) -> RoutedExperts:
    """The implementation for this rank: all-to-all if there is a dispatcher, else local tokens."""
    if parallel.dispatcher is not None:
        return DispatchedExperts(parallel.dispatcher, kernel, weights)
    return LocalExperts(kernel, weights, parallel.ep_rank * weights.num_experts)
