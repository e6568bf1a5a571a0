"""Where the tokens of a step are: the runs of a plan, in the order in which the step has them.

Legend: R runs, T tokens.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np


class StepLayout(NamedTuple):
    """All int64."""

    order: np.ndarray  # [R]: the runs in the order of the step
    ends: np.ndarray  # [R], in this order: end of a run among the step's tokens
    offsets: np.ndarray  # [R], in the plan's order: first token of a run among the step's tokens
    owner: np.ndarray  # [T]: run of each token of the step
    within: np.ndarray  # [T]: its number in the run
    plan_token: np.ndarray  # [T]: its number among the plan's tokens
    step_token: np.ndarray  # [T]: the inverse, the number in the step of each token of the plan

    @classmethod
    def of(cls, order: np.ndarray, counts: np.ndarray) -> StepLayout:
        """`counts` [R]: tokens of each run of the plan."""
        ends = np.cumsum(counts[order])
        offsets = np.empty_like(ends)
        offsets[order] = ends - counts[order]
        owner = np.repeat(order, counts[order])
        in_step = np.arange(len(owner))
        within = in_step - offsets[owner]
        plan_token = (np.cumsum(counts) - counts)[owner] + within
        step_token = np.empty_like(plan_token)
        step_token[plan_token] = in_step
        return cls(order, ends, offsets, owner, within, plan_token, step_token)
