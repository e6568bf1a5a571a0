"""What a step costs that several schedulers take together (attention DP)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from moe_engine.tuning.costs.step_cost import StepCost, StepCostModel, StepShape


def joint_cost(costs: StepCostModel, shapes: Sequence[StepShape], skew: float = 0.0) -> StepCost:
    """Cost of a step with these shapes of its groups. Groups with prompts and groups without compute at the same time:
    the slower ones determine the step.

    Args:
        skew: as `StepShape.expert_skew`.
    """
    kinds = [
        [shape for shape in shapes if bool(shape.prefill_tokens) is with_prompts] for with_prompts in (True, False)
    ]
    num_tokens = sum([shape.global_tokens for shape in shapes])
    chosen = [busiest(kind, skew) for kind in kinds if kind]
    if len(chosen) == 1:
        return costs.step(chosen[0])
    found = [costs.step(replace(shape, global_tokens=num_tokens)) for shape in chosen]
    return max(found, key=lambda cost: cost.seconds)


def busiest(shapes: Sequence[StepShape], skew: float = 0.0) -> StepShape:
    """The maximum of the counts over the groups, with the tokens of all."""
    if len(shapes) == 1:
        return replace(shapes[0], expert_skew=skew) if skew else shapes[0]
    return StepShape(
        max(shape.decode_rows for shape in shapes),
        max(shape.decode_context for shape in shapes),
        max(shape.drafts for shape in shapes),
        max(shape.prefill_tokens for shape in shapes),
        max(shape.prefill_pairs for shape in shapes),
        sum(shape.global_tokens for shape in shapes),
        skew,
        max(shape.prefill_cached for shape in shapes),
        max(shape.prefill_fresh for shape in shapes),
    )
