"""The routed experts of a layer, as called by the model: tokens and choices in, weighted sums out.

Placement, dispatch and the expert kernel are fixed at construction.
Legend: T tokens, D hidden, K experts per token, E experts.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol

from torch import Tensor

from moe_engine.kernels.experts.protocol import (
    ExpertBatch,
    ExpertsKernel,
    ExpertWeights,
    FusedExperts,
    FusedMoE,
    MoELayer,
    ReadsRows,
)
from moe_engine.kernels.linear.protocol import PreparedLinear
from moe_engine.kernels.ops.protocol import RouterSpec
from moe_engine.kernels.quantization.protocol import UNQUANTIZED, Activation, ActivationFormat, as_format
from moe_engine.parallel.context import SINGLE, ParallelContext
from moe_engine.parallel.dispatch.protocol import Phase
from moe_engine.parallel.overlap import CommStream, Pending

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
        over this rank's experts, or over all experts with all-to-all; `phase` is then the mode of the dispatcher, the
        same on every rank.
        """

    def whole_layer(
        self,
        gate: Tensor,
        bias: Tensor | None,
        router: RouterSpec,
        shared: tuple[PreparedLinear, PreparedLinear] | None,
    ) -> partial[Tensor] | None:
        """x [T, D] -> routed plus shared experts [T, D] in one call, with the kernel's fused weights as first argument,
        see `FusedMoE.run_layer`; None if one call is not supported.

        gate [E, D] and bias [E] float32; `shared` holds the shared expert's gate and up, and its down. Slots must be
        the experts themselves.
        """


class DispatchedExperts:
    """Dispatch -> grouped matrix products -> combine: any dispatcher with any kernel that supports its layout. Not
    fused with router and shared expert.

    With FP8 dispatch and a kernel that reads FP8 rows, tokens are quantized once, by the preceding norm or by dispatch,
    and stay quantized.
    """

    def __init__(self, dispatcher: PhasedDispatcher, kernel: ExpertsKernel, weights: ExpertWeights) -> None:
        self._dispatcher = dispatcher
        self._kernel = kernel
        self._weights = weights
        self._arriving = kernel.input_format(weights) if isinstance(kernel, ReadsRows) else UNQUANTIZED
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

    def whole_layer(
        self,
        gate: Tensor,
        bias: Tensor | None,
        router: RouterSpec,
        shared: tuple[PreparedLinear, PreparedLinear] | None,
    ) -> None:
        return None


def _rows_of_slots(batch: ExpertBatch) -> Tensor:
    if batch.counts is not None:
        return batch.counts
    assert batch.offsets is not None
    return batch.offsets.diff()


class FusedLocalExperts:
    """Local tokens, with a kernel that permutes, computes and combines in one call.

    Args:
        first: index of this rank's first slot; choices of other ranks' slots are ignored.
    """

    def __init__(self, kernel: FusedExperts, weights: ExpertWeights, first: int = 0) -> None:
        self._kernel = kernel
        self._weights = weights
        self._first = first
        self.input_format = kernel.input_format(weights) if isinstance(kernel, ReadsRows) else UNQUANTIZED
        self._run: Callable[..., Tensor] = kernel.run_routed

    def run(
        self, x: Activation, topk_weights: Tensor, topk_ids: Tensor, add: Tensor | None = None, phase: Phase = "prefill"
    ) -> Tensor:
        ids = topk_ids - self._first if self._first else topk_ids
        return self._run(x, topk_weights, ids, self._weights, add)

    def whole_layer(
        self,
        gate: Tensor,
        bias: Tensor | None,
        router: RouterSpec,
        shared: tuple[PreparedLinear, PreparedLinear] | None,
    ) -> partial[Tensor] | None:
        if not isinstance(self._kernel, FusedMoE) or self._weights.num_experts < router.num_experts:
            return None
        layer = self._kernel.fuse(MoELayer(gate, bias, router, self._weights, shared))
        return None if layer is None else partial(self._kernel.run_layer, layer)


def make_routed_experts(
    kernel: ExpertsKernel, weights: ExpertWeights, parallel: ParallelContext = SINGLE
) -> RoutedExperts:
    """The implementation for this rank: all-to-all if there is a dispatcher, else local tokens."""
    if parallel.dispatcher is not None:
        return DispatchedExperts(parallel.dispatcher, kernel, weights)
    if not isinstance(kernel, FusedExperts):
        raise TypeError(f"the {kernel.name} experts cannot permute local tokens (run_routed)")
    return FusedLocalExperts(kernel, weights, parallel.ep_rank * weights.num_experts)
