"""Seconds of a step that neither bytes nor operations explain."""

from __future__ import annotations

from moe_engine.tuning.costs.efficiency import Efficiency
from moe_engine.tuning.costs.form import Precision
from moe_engine.tuning.costs.model_facts import ModelFacts
from moe_engine.tuning.costs.step_cost import StepShape

GROUPED_INPUTS, LATENT_INPUTS, MLP_INPUTS = 2, 3, 2
"""Different inputs of a layer's products: GQA and states, MLA, and a feed-forward or the routed experts."""


def quantizing_kernels(model: ModelFacts, precision: Precision) -> int:
    """Kernels that quantize the inputs of FP8 products, one for each input; those of this engine are fused."""
    found = 0
    if precision.other == "fp8":
        latent = sum(each.layers for each in model.attention if each.prefill_flops != each.decode_flops)
        states = sum(each.layers for each in model.attention) - latent
        found += LATENT_INPUTS * latent + GROUPED_INPUTS * states
        found += MLP_INPUTS * (model.dense_layers + model.moe_layers * bool(model.shared))
    return found + MLP_INPUTS * model.moe_layers * (precision.experts == "fp8")


class Launches:
    """Launches, gaps, small kernels."""

    def __init__(self, model: ModelFacts, precision: Precision, share: Efficiency) -> None:
        kernels = model.kernels(precision.held is not None and precision.held.shared_slots)
        if precision.held is None:
            kernels += quantizing_kernels(model, precision)
        self.decode_s = kernels * share.kernel_us * 1e-6
        self.prefill_s = kernels * share.prefill_kernel_us * 1e-6

    def seconds(self, shape: StepShape) -> float:
        return self.decode_s + (self.prefill_s if shape.prefill_tokens else 0.0)


class Host:
    """The device waits for the host: schedule, inputs, tokens out."""

    def __init__(self, share: Efficiency) -> None:
        self.step_s, self.row_s = share.step_us * 1e-6, share.row_us * 1e-6

    def seconds(self, shape: StepShape) -> float:
        return self.step_s + shape.decode_rows * self.row_s
