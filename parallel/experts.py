"""The routed experts of a layer as the model sees them: tokens and choices in, weighted sums out.

Where the experts live, how tokens travel there and which kernel multiplies them is decided when this object is made.
Legend: T tokens, D hidden, K experts per token, E experts.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor

from moe_engine.kernels.experts.protocol import ExpertsKernel, ExpertWeights, FusedExperts, FusedMoE, MoELayer
from moe_engine.kernels.linear.protocol import PreparedLinear
from moe_engine.kernels.ops.protocol import RouterSpec
from moe_engine.parallel.context import SINGLE, ParallelContext
from moe_engine.parallel.dispatch.layouts import GroupedLayout
from moe_engine.parallel.dispatch.local import LocalDispatcher
from moe_engine.parallel.dispatch.protocol import Phase, Tokens

if TYPE_CHECKING:
    from moe_engine.parallel.dispatch.build import PhasedDispatcher


class RoutedExperts(Protocol):
    def run(
        self, x: Tensor, topk_weights: Tensor, topk_ids: Tensor, add: Tensor | None = None, phase: Phase = "prefill"
    ) -> Tensor:
        """x [T, D], topk_weights float32 [T, K], topk_ids int32 [T, K] -> add + sum_k w_k expert_k(x), [T, D].

        The sum is over what this rank holds of the experts, or over all of them where tokens travel; `phase` is then
        the mode of the dispatcher, the same on every rank.
        """

    def whole_layer(
        self,
        gate: Tensor,
        bias: Tensor | None,
        router: RouterSpec,
        shared: tuple[PreparedLinear, PreparedLinear] | None,
    ) -> partial[Tensor] | None:
        """x [T, D] -> routed plus shared experts [T, D] in one call, by what the kernel made of the weights
        (its first argument); None where that takes several.

        gate [E, D] and bias [E] float32; `shared` holds the shared expert's gate and up, and its down.
        """


class _InSeveralCalls:
    """What is not fused with the router and the shared expert."""

    def whole_layer(
        self,
        gate: Tensor,
        bias: Tensor | None,
        router: RouterSpec,
        shared: tuple[PreparedLinear, PreparedLinear] | None,
    ) -> None:
        return None


class DispatchedExperts(_InSeveralCalls):
    """All experts on this rank: dispatch -> grouped matrix products -> combine."""

    def __init__(self, dispatcher: LocalDispatcher, kernel: ExpertsKernel, weights: ExpertWeights) -> None:
        self._dispatcher = dispatcher
        self._kernel = kernel
        self._weights = weights

    def run(
        self, x: Tensor, topk_weights: Tensor, topk_ids: Tensor, add: Tensor | None = None, phase: Phase = "prefill"
    ) -> Tensor:
        batch, handle = self._dispatcher.dispatch(x, topk_ids)
        out = self._dispatcher.combine(self._kernel.run(batch, self._weights), topk_weights, handle)
        return out if add is None else out.add_(add)


class TravellingExperts(_InSeveralCalls):
    """Experts on many ranks, to which tokens travel: any dispatcher with any kernel that takes its layout."""

    def __init__(self, dispatcher: PhasedDispatcher, kernel: ExpertsKernel, weights: ExpertWeights) -> None:
        self._dispatcher = dispatcher
        self._kernel = kernel
        self._weights = weights

    def run(
        self, x: Tensor, topk_weights: Tensor, topk_ids: Tensor, add: Tensor | None = None, phase: Phase = "prefill"
    ) -> Tensor:
        batch, handle = self._dispatcher.dispatch(x, topk_ids, topk_weights, phase)
        out = self._dispatcher.combine(self._kernel.run(batch, self._weights), topk_weights, handle)
        return out if add is None else out.add_(add)


class HeldExperts(_InSeveralCalls):
    """Some of the experts, for tokens that every rank sees: choices of experts that others hold count nothing."""

    def __init__(self, kernel: ExpertsKernel, weights: ExpertWeights, first: int) -> None:
        self._kernel = kernel
        self._weights = weights
        self._first = first

    def run(
        self, x: Tensor, topk_weights: Tensor, topk_ids: Tensor, add: Tensor | None = None, phase: Phase = "prefill"
    ) -> Tensor:
        local = topk_ids - self._first
        ids = torch.where((local >= 0) & (local < self._weights.num_experts), local, -1)
        layout = GroupedLayout(self._weights.num_experts, x.dtype, x.device)  # with buffers that end with the call
        batch, positions = layout.expand(Tokens(x, None, ids, topk_weights), slot=0)
        out = layout.reduce(self._kernel.run(batch, self._weights), positions, topk_weights)
        return out if add is None else out.add_(add)


class FusedLocalExperts:
    """Tokens that need not travel, and a kernel that permutes, multiplies and combines in one call.

    Args:
        first: the number of this rank's first expert; choices of experts that it does not hold count nothing.
    """

    def __init__(self, kernel: FusedExperts, weights: ExpertWeights, first: int = 0) -> None:
        self._kernel = kernel
        self._weights = weights
        self._first = first

    def run(
        self, x: Tensor, topk_weights: Tensor, topk_ids: Tensor, add: Tensor | None = None, phase: Phase = "prefill"
    ) -> Tensor:
        ids = topk_ids - self._first if self._first else topk_ids
        return self._kernel.run_routed(x, topk_weights, ids, self._weights, add)

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
    """The form for this rank: tokens travel where a dispatcher is, else fused where the kernel offers it."""
    if parallel.dispatcher is not None:
        return TravellingExperts(parallel.dispatcher, kernel, weights)
    first = parallel.ep_rank * weights.num_experts
    if isinstance(kernel, FusedExperts):
        return FusedLocalExperts(kernel, weights, first)
    if parallel.ep_size > 1:
        return HeldExperts(kernel, weights, first)
    return DispatchedExperts(LocalDispatcher(weights.num_experts), kernel, weights)
