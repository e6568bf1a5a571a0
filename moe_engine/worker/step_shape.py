"""The shape of a captured step, and the one that all attention groups replay."""

from __future__ import annotations

from dataclasses import dataclass

from moe_engine.types import StepFacts, StepPlan
from moe_engine.types.step_settings import GraphSettings


@dataclass(frozen=True)
class StepShape:
    """The shape of a graph: `size` requests with `count` tokens each."""

    size: int
    count: int

    @property
    def num_tokens(self) -> int:
        return self.size * self.count


def common_shape(plan: StepPlan, settings: GraphSettings) -> StepShape | None:
    """The shape that all attention groups replay in this step; None if one of them cannot."""
    facts = plan.dp_facts or (StepFacts.of(plan),)
    shapes = [_uniform_shape(group) for group in facts if group.num_tokens or group.prefills]
    counts = {shape.count for shape in shapes if shape is not None}
    if None in shapes or len(counts) != 1:
        return None
    size = settings.size_for(max(shape.size for shape in shapes if shape is not None))
    return StepShape(size or 0, counts.pop())


def _uniform_shape(facts: StepFacts) -> StepShape | None:
    """The shape of one attention group's batch; None unless it has decodes only, with the same number of tokens each.
    A chain of drafts has one token more than its depth."""
    count = facts.depth + 1 if facts.num_drafting else 1
    size, rest = divmod(facts.num_tokens, count)
    if facts.prefills or facts.prompt_logprobs or rest or facts.num_logits != facts.num_tokens:
        return None
    if facts.num_drafting not in (0, size):
        return None
    return StepShape(size, count)
