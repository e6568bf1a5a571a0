"""Contract between the sources of step costs and their users."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol


# Not frozen: a simulation makes several objects for every step, and constructors of frozen classes take three times as
# long.
@dataclass(slots=True)
class StepShape:
    """One step of one rank, the busiest of its group.

    Attributes:
        decode_rows: requests that decode.
        decode_context: sum of their context tokens.
        drafts: draft tokens that each decode verifies in the step; 0: none.
        prefill_tokens: prompt tokens computed in the step.
        prefill_pairs: sum over prompt tokens of the tokens that each attends to.
        global_tokens: tokens of all ranks of the expert-parallel group in the step, at least the rank's own.
        expert_skew: load of the busiest rank's experts over the mean, at least 1; 0: the model's expectation.
        prefill_cached: context tokens before the prompt tokens of the step, which it does not compute.
        prefill_fresh: prompt tokens of prompts with less such context than new tokens.
    """

    decode_rows: int
    decode_context: int
    drafts: int
    prefill_tokens: int
    prefill_pairs: int
    global_tokens: int
    expert_skew: float = 0.0
    prefill_cached: int = 0
    prefill_fresh: int = 0


@dataclass(slots=True)
class StepCost:
    """Seconds of a step, and of each resource in it: hbm, flops, all_to_all, all_reduce, launches, host; with weights
    in host memory also bus, the wait for their copies."""

    seconds: float
    by_resource: dict[str, float] = field(default_factory=dict)


class StepCostModel(Protocol):
    """Predicts the cost of a step. Quick: a simulation calls it for every step."""

    def step(self, shape: StepShape) -> StepCost: ...
