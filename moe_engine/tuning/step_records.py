"""Steps that a server has recorded (`--record-step-times`), for measurements.

A step's own seconds are steadier than what a client sees: an interruption of the machine lengthens one of hundreds of
steps, while it moves the beginning or the end of a client's whole measurement.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from moe_engine.errors import MoeEngineError
from moe_engine.tuning.stats import mean, median

INTERRUPTED = 3.0
"""A step that took so many times the median was interrupted by something else."""
KNOWN_TOKENS = 0.8
"""A prompt may begin as an earlier one does; its steps then have this share of its tokens, or more."""
Step = Sequence[float]
"""Requests that decode, prompt tokens, prompts, their cached tokens, Unix time of the end, seconds."""


def joint_steps(states: Sequence[Mapping[str, Any]]) -> list[list[Step]]:
    """For each step of schedulers that step together, the part of each, of the states in `/server_info`. Steps that
    only some of them have recorded so far are left out."""
    parts = []
    for state in states:
        steps = state["step_times"]
        parts.append(dict(enumerate(steps, state["total_steps"] - len(steps))))
    return [[part[number] for part in parts] for number in parts[0] if all(number in part for part in parts)]


def busiest(parts: Sequence[Step]) -> Step:
    """A joint step as one of a single scheduler: the most requests, and the prompts of the scheduler with most of
    their tokens, as `StepShape`; the mean of the seconds."""
    prompts = max(parts, key=lambda step: step[1])
    rows, end = max(step[0] for step in parts), max(step[-2] for step in parts)
    return (rows, *prompts[1:-2], end, mean([step[-1] for step in parts]))


class StepRecords:
    """Steps of all schedulers of a server, in order of time; `joint`: of all together (`busiest`), if they step
    together."""

    def __init__(self, steps: Iterable[Step], joint: Iterable[Step] = ()) -> None:
        self.steps = sorted(steps, key=lambda step: step[-2])
        self.joint = [step for step in joint if step[0] or step[1]]
        self._ends = [step[-2] for step in self.steps]

    @classmethod
    def of(cls, info: dict[str, Any]) -> StepRecords:
        """The records of a response of `/server_info`. Raises MoeEngineError: the server records none."""
        states = info.get("internal_states") or []
        if not states or any("step_times" not in state for state in states):
            raise MoeEngineError("the server does not record its steps; start it with --record-step-times")
        return cls((step for state in states for step in state["step_times"]), map(busiest, joint_steps(states)))

    def between(self, begin: float, end: float) -> list[Step]:
        """Steps of a scheduler that ended in a time span."""
        return self.steps[bisect_left(self._ends, begin) : bisect_right(self._ends, end)]

    def together(self, begin: float, end: float) -> list[Step]:
        """Steps of all schedulers together (`busiest`), if these step together, that ended in a time span."""
        return [step for step in self.joint if begin <= step[-2] <= end]

    def decode(self, rows: int, begin: float, end: float) -> float | None:
        """Mean seconds of the steps in a time span in which `rows` requests decoded; None: there were none."""
        return steady([step[-1] for step in self.between(begin, end) if step[0] == rows and not step[1]])

    def prompt(self, tokens: int, begin: float, end: float) -> float | None:
        """Seconds of the steps of a prompt in a time span; None: they cannot be distinguished from those of others."""
        steps = [step for step in self.between(begin, end) if step[1]]
        least = KNOWN_TOKENS * tokens
        if least <= sum(step[1] for step in steps) <= tokens:
            return sum(step[-1] for step in steps)
        own = [step for step in steps if step[2] == 1 and least <= step[1] <= tokens]
        return own[0][-1] if len(own) == 1 else None


def steady(values: Sequence[float]) -> float | None:
    """Mean without interruptions; None without values."""
    limit = INTERRUPTED * median(values)
    return mean([value for value in values if value <= limit]) if values else None
