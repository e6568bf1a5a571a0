"""The routed experts of a layer as the model sees them: tokens and choices in, weighted sums out.

Where the experts live, how tokens travel there and which kernel multiplies them is decided when this object is made.
Legend: T tokens, D hidden, K experts per token.
"""

from __future__ import annotations

from functools import partial
from typing import Protocol

from torch import Tensor

from moe_engine.kernels.experts.protocol import ExpertsKernel, ExpertWeights, FusedExperts, FusedMoE, MoELayer
from moe_engine.kernels.linear.protocol import PreparedLinear
from moe_engine.kernels.ops.protocol import RouterSpec
from moe_engine.parallel.dispatch.local import LocalDispatcher


class RoutedExperts(Protocol):
    def run(self, x: Tensor, topk_weights: Tensor, topk_ids: Tensor, add: Tensor | None = None) -> Tensor:
        """x [T, D], topk_weights float32 [T, K], topk_ids int32 [T, K] -> add + sum_k w_k expert_k(x), [T, D]."""

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


class DispatchedExperts:
    """dispatch -> grouped matrix products -> combine: any dispatcher with any kernel that takes its layout."""

    def __init__(self, dispatcher: LocalDispatcher, kernel: ExpertsKernel, weights: ExpertWeights) -> None:
        self._dispatcher = dispatcher
        self._kernel = kernel
        self._weights = weights

    def run(self, x: Tensor, topk_weights: Tensor, topk_ids: Tensor, add: Tensor | None = None) -> Tensor:
        batch, handle = self._dispatcher.dispatch(x, topk_ids)
        out = self._dispatcher.combine(self._kernel.run(batch, self._weights), topk_weights, handle)
        return out if add is None else out.add_(add)

    def whole_layer(
        self,
        gate: Tensor,
        bias: Tensor | None,
        router: RouterSpec,
        shared: tuple[PreparedLinear, PreparedLinear] | None,
    ) -> None:
        return None


class FusedLocalExperts:
    """All experts on this rank and a kernel that permutes, multiplies and combines in one call."""

    def __init__(self, kernel: FusedExperts, weights: ExpertWeights) -> None:
        self._kernel = kernel
        self._weights = weights

    def run(self, x: Tensor, topk_weights: Tensor, topk_ids: Tensor, add: Tensor | None = None) -> Tensor:
        return self._kernel.run_routed(x, topk_weights, topk_ids, self._weights, add)

    def whole_layer(
        self,
        gate: Tensor,
        bias: Tensor | None,
        router: RouterSpec,
        shared: tuple[PreparedLinear, PreparedLinear] | None,
    ) -> partial[Tensor] | None:
        if not isinstance(self._kernel, FusedMoE):
            return None
        layer = self._kernel.fuse(MoELayer(gate, bias, router, self._weights, shared))
        return None if layer is None else partial(self._kernel.run_layer, layer)


def make_routed_experts(kernel: ExpertsKernel, weights: ExpertWeights) -> RoutedExperts:
    """The form for one rank: fused where the kernel offers it, dispatched otherwise."""
    if isinstance(kernel, FusedExperts):
        return FusedLocalExperts(kernel, weights)
    return DispatchedExperts(LocalDispatcher(weights.num_experts), kernel, weights)
