"""Routed experts whose input the router's weight multiplies, and not their result (Llama 4): expert(w x).

Legend: T tokens, D hidden.
"""

from __future__ import annotations

import torch
from torch import Tensor

from moe_engine.kernels.quantization.protocol import UNQUANTIZED, Activation, as_format, unquantized
from moe_engine.parallel.dispatch.protocol import Phase
from moe_engine.parallel.experts import RoutedExperts


class ScaledInputs:
    """`RoutedExperts` with one expert for each token of x [T, D], around the experts `routed`."""

    input_format = UNQUANTIZED

    def __init__(self, routed: RoutedExperts) -> None:
        self.routed = routed

    def run(
        self, x: Activation, topk_weights: Tensor, topk_ids: Tensor, add: Tensor | None = None, phase: Phase = "prefill"
    ) -> Tensor:
        whole = unquantized(x)
        scaled = as_format(whole * topk_weights.to(whole.dtype), self.routed.input_format)
        return self.routed.run(scaled, torch.ones_like(topk_weights), topk_ids, add, phase)
