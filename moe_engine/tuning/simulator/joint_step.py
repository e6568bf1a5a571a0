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
        rows, tokens: decoding requests and prompt tokens of all. most_rows: decoding requests of the group with most.
        prefilled: whether a plan has prompts. loaded: most tokens that one loads from the host-RAM tier.
        drained: first group whose result was applied before its plan; NEVER: none.
    """

    shapes: list[StepShape]
    groups: set[int]
    rows: int = 0
    tokens: int = 0
    most_rows: int = 0
    prefilled: bool = False
    loaded: int = 0
    drained: int = NEVER

    def add(self, group: int, plan: StepPlan) -> None:
        shape = shape_of(plan)
        self.shapes.append(shape)
        self.groups.add(group)
        self.rows += shape.decode_rows
        self.tokens += shape.prefill_tokens
        self.most_rows = max(self.most_rows, shape.decode_rows)
        self.prefilled |= plan.num_decodes < len(plan.rows)
        if plan.kv_ops is not None:
            self.loaded = max(self.loaded, loaded_tokens(plan.kv_ops))


def joint_cost(costs: StepCostModel, shapes: Sequence[StepShape], skew: float = 0.0) -> StepCost:
    """Cost of a step with these shapes of its groups. Groups with prompts and groups without compute at the same time:
    the slower ones determine the step.

    Args:
        skew: as `StepShape.expert_skew`.
    """
    num_tokens, prompts, decodes = 0, list[StepShape](), list[StepShape]()
    for shape in shapes:
        num_tokens += shape.global_tokens
        (prompts if shape.prefill_tokens else decodes).append(shape)
    if not prompts or not decodes:
        return costs.step(busiest(prompts or decodes, num_tokens, skew))
    found = costs.step(busiest(prompts, num_tokens, skew)), costs.step(busiest(decodes, num_tokens, skew))
    return found[1] if found[1].seconds > found[0].seconds else found[0]


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
