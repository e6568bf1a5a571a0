"""A step that several schedulers take together (attention DP): their plans, and its cost."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from moe_engine.tuning.costs.step_cost import StepCost, StepCostModel, StepShape
from moe_engine.tuning.simulator.group import loaded_tokens, shape_of
from moe_engine.tuning.simulator.runs import NEVER
from moe_engine.types import StepPlan


@dataclass(slots=True)
class GroupPlans:
    """Plans of one step of the groups that are in no run.

    Attributes:
        shapes: of each plan. groups: that have a plan.
        prefilled: whether a plan has prompts. loaded: most tokens that one loads from the host-RAM tier.
        drained: first group whose result was applied before its plan; NEVER: none.
    """

    shapes: list[StepShape]
    groups: set[int]
    prefilled: bool = False
    loaded: int = 0
    drained: int = NEVER

    def add(self, group: int, plan: StepPlan) -> None:
        self.shapes.append(shape_of(plan))
        self.groups.add(group)
        self.prefilled |= plan.num_decodes < len(plan.rows)
        self.loaded = max(self.loaded, loaded_tokens(plan))


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
    found = [costs.step(busiest(kind, num_tokens, skew)) for kind in kinds if kind]
    return found[0] if len(found) == 1 else max(found, key=lambda cost: cost.seconds)


def busiest(shapes: Sequence[StepShape], num_tokens: int, skew: float = 0.0) -> StepShape:
    """The maximum of the counts over the groups; `num_tokens`: of all groups of the step."""
    if len(shapes) == 1:
        only = shapes[0]
        if only.global_tokens == num_tokens and only.expert_skew == skew:
            return only
        rows, context, drafts = only.decode_rows, only.decode_context, only.drafts
        return StepShape(
            rows, context, drafts, only.prefill_tokens, only.prefill_pairs, num_tokens, skew,
            only.prefill_cached, only.prefill_fresh,
        )  # fmt: skip
    return StepShape(
        max([shape.decode_rows for shape in shapes]),
        max([shape.decode_context for shape in shapes]),
        max([shape.drafts for shape in shapes]),
        max([shape.prefill_tokens for shape in shapes]),
        max([shape.prefill_pairs for shape in shapes]),
        num_tokens,
        skew,
        max([shape.prefill_cached for shape in shapes]),
        max([shape.prefill_fresh for shape in shapes]),
    )
