"""The routed experts of a layer, as called by the model: tokens and choices in, weighted sums out.

Placement, dispatch and the expert kernel are fixed at construction.
Legend: T tokens, D hidden, K experts per token, E experts.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import Tensor

from moe_engine.kernels.experts.batch import ExpertBatch, ExpertWeights
from moe_engine.kernels.experts.protocol import ExpertsKernel, RunRouted
from moe_engine.kernels.quantization.protocol import UNQUANTIZED, Activation, ActivationFormat, as_format, unquantized
from moe_engine.parallel.context import SINGLE, ParallelContext
from moe_engine.parallel.dispatch.layouts import GroupedLayout
from moe_engine.parallel.dispatch.local import LocalDispatcher
from moe_engine.parallel.dispatch.protocol import Phase, Tokens
from moe_engine.parallel.overlap import CommStream, Pending


class RoutedExperts(Protocol):
    @property
    def input_format(self) -> ActivationFormat:
        """Activation format of `run`; it accepts a `QuantizedActivation` if the format has rows."""

    def run(
        self, x: Activation, topk_weights: Tensor, topk_ids: Tensor, add: Tensor | None = None, phase: Phase = "prefill"
    ) -> Tensor:
        """x [T, D], topk_weights float32 [T, K], topk_ids int32 [T, K] -> add + sum_k w_k expert_k(x), [T, D].

        Ids are slots, numbered over all ranks; a slot holds a copy of an expert (see `ExpertTables`). The sum is over
        over this rank's experts, or over all experts with all-to-all; `phase` is then the mode of the dispatcher, the
        same on every rank.
        """


class Dispatches(Protocol):
    """Common interface of `PhasedDispatcher` and the single-rank dispatcher."""

    @property
    def takes_rows(self) -> bool: ...

    def dispatch(
        self,
        x: Activation,
        topk_ids: Tensor,
        topk_weights: Tensor,
        phase: Phase,
        format: ActivationFormat = UNQUANTIZED,
    ) -> tuple[ExpertBatch, Any]: ...

    def combine(self, rows: Tensor, topk_weights: Tensor, handle: Any) -> Tensor: ...


class DispatchedExperts:
    """Dispatch -> grouped matrix products -> combine: any dispatcher with any kernel that supports its layout.

    With FP8 dispatch and a kernel that reads FP8 rows, tokens are quantized once, by the preceding norm or by dispatch,
    and stay quantized.
    """

    def __init__(self, dispatcher: Dispatches, kernel: ExpertsKernel, weights: ExpertWeights) -> None:
        self._dispatcher = dispatcher
        self._kernel = kernel
        self._weights = weights
        self._arriving = kernel.input_format(weights)
        self.input_format = self._arriving if self._arriving.rows and dispatcher.takes_rows else UNQUANTIZED
        self.on_arrival: Callable[[Tensor], None] | None = None
        """Callback with the number of tokens received by each of this rank's slots, int32 [P/G]."""

    def run(
        self, x: Activation, topk_weights: Tensor, topk_ids: Tensor, add: Tensor | None = None, phase: Phase = "prefill"
    ) -> Tensor:
        batch, handle = self._dispatch(x, topk_ids, topk_weights, phase)
        if self.on_arrival is not None:
            self.on_arrival(_rows_of_slots(batch))
        out = self._dispatcher.combine(self._kernel.run(batch, self._weights), topk_weights, handle)
        return out if add is None else out.add_(add)

    def _dispatch(self, x: Activation, topk_ids: Tensor, topk_weights: Tensor, phase: Phase) -> tuple[ExpertBatch, Any]:
        x = as_format(x, self.input_format)
        return self._dispatcher.dispatch(x, topk_ids, topk_weights, phase, self._arriving)

    # -- the same in stages, with communication in a comm stream

    def send(
        self, stream: CommStream, x: Activation, topk_weights: Tensor, topk_ids: Tensor, phase: Phase
    ) -> Pending[Any]:
        """Starts the dispatch."""
        return stream.run(self._dispatch, x, topk_ids, topk_weights, phase)

    def compute(self, stream: CommStream, sent: Pending[Any], topk_weights: Tensor) -> Pending[Tensor]:
        """Waits for the received tokens, runs the experts, and starts the combine."""
        batch, handle = sent.wait()
        if self.on_arrival is not None:
            self.on_arrival(_rows_of_slots(batch))
        return stream.run(self._dispatcher.combine, self._kernel.run(batch, self._weights), topk_weights, handle)


def _rows_of_slots(batch: ExpertBatch) -> Tensor:
    if batch.counts is not None:
        return batch.counts
    assert batch.offsets is not None
    return batch.offsets.diff()


class HeldExperts:
    """Some of the slots, for tokens replicated on every rank: choices of other ranks' slots are ignored."""

    input_format = UNQUANTIZED

    def __init__(self, kernel: ExpertsKernel, weights: ExpertWeights, first: int) -> None:
        self._kernel = kernel
        self._weights = weights
        self._first = first

    def run(
        self, x: Activation, topk_weights: Tensor, topk_ids: Tensor, add: Tensor | None = None, phase: Phase = "prefill"
    ) -> Tensor:
        x, local = unquantized(x), topk_ids - self._first
        ids = torch.where((local >= 0) & (local < self._weights.num_experts), local, -1)
        layout = GroupedLayout(self._weights.num_experts, x.dtype, x.device)  # with temporary buffers
        batch, positions = layout.expand(Tokens(x, None, ids, topk_weights), slot=0)
        out = layout.reduce(self._kernel.run(batch, self._weights), positions, topk_weights)
        return out if add is None else out.add_(add)


class FusedLocalExperts:
    """Local tokens, with a kernel that permutes, computes and combines in one call.

    Args:
        first: index of this rank's first slot; choices of other ranks' slots are ignored.
    """

    def __init__(
        self, run_routed: RunRouted, input_format: ActivationFormat, weights: ExpertWeights, first: int = 0
    ) -> None:
        self._run = run_routed
        self.input_format = input_format
        self._weights = weights
        self._first = first

    def run(
        self, x: Activation, topk_weights: Tensor, topk_ids: Tensor, add: Tensor | None = None, phase: Phase = "prefill"
    ) -> Tensor:
        ids = topk_ids - self._first if self._first else topk_ids
        return self._run(x, topk_weights, ids, self._weights, add)


def make_routed_experts(
    kernel: ExpertsKernel, weights: ExpertWeights, parallel: ParallelContext = SINGLE
) -> RoutedExperts:
    """The implementation for this rank: all-to-all if there is a dispatcher, else fused if the kernel supports it."""
    if parallel.dispatcher is not None:
        return DispatchedExperts(parallel.dispatcher, kernel, weights)
    first = parallel.ep_rank * weights.num_experts
    run_routed = kernel.capabilities.run_routed
    if run_routed is not None:
        return FusedLocalExperts(run_routed, kernel.input_format(weights), weights, first)
    if parallel.ep_size > 1:
        return HeldExperts(kernel, weights, first)
    return DispatchedExperts(LocalDispatcher(weights.num_experts), kernel, weights)
