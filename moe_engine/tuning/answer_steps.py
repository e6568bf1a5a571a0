"""Answers of a measurement: their chunks, and the steps in which several of them decode."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from moe_engine.tuning.answer import Answer
from moe_engine.tuning.stats import mean

LEAST_ANSWERS = 8
"""Concurrent answers from which the time between the tokens of a step is measured."""
SKIPPED = 6
"""First chunks of a stream that are not measured, because other prompts are computed meanwhile."""


@dataclass(frozen=True)
class Decode:
    """Seconds of a step, and context tokens of each request in it. `token_seconds`: between two of its tokens."""

    seconds: float
    context: float
    token_seconds: float = 0.0


@dataclass(frozen=True)
class Stream:
    """An answer: seconds from its request to each chunk, and the time of its beginning. `received`: time at which the
    server had read the request, on the same clock."""

    chunks: list[float]
    started: float
    received: float

    @property
    def entry(self) -> float:
        """Seconds until the server had read the request."""
        return self.received - self.started


def chunks_of(answer: Answer, counts: Sequence[int]) -> list[float]:
    """Seconds from the request to each chunk, of `counts` tokens."""
    chunks, gap = [answer.ttft], 0
    for count in counts[1:]:
        chunks.append(chunks[-1] + sum(answer.itl[gap : gap + count]))
        gap += count
    return chunks


def between_tokens(answers: Sequence[Stream]) -> float:
    """Mean seconds between two chunks of one step, while all answers ran. The longest gaps, one a step, are those
    between steps. 0: too few answers."""
    if len(answers) < LEAST_ANSWERS:
        return 0.0
    begin = max(answer.chunks[0] + answer.started for answer in answers)
    end = min(answer.chunks[-1] + answer.started for answer in answers)
    moments = sorted(answer.started + at for answer in answers for at in answer.chunks)
    gaps = sorted(later - before for before, later in pairwise(moments) if begin <= before and later <= end)
    of_steps = gaps[: len(gaps) - -(-len(gaps) // len(answers))]
    return mean(of_steps) if of_steps else 0.0


def common_steps(answers: Sequence[Stream]) -> list[tuple[float, float]]:
    """For each answer, while all of them ran: mean seconds between its chunks, and the part of it that had arrived in
    the middle of that time."""
    begin = max(answer.chunks[0] + answer.started for answer in answers)
    end = min(answer.chunks[-1] + answer.started for answer in answers)
    found = []
    for answer in answers:
        inside = [i for i, at in enumerate(answer.chunks) if i >= SKIPPED and begin <= at + answer.started <= end]
        if len(inside) > SKIPPED:
            first, last = inside[0], inside[-1]
            gap = (answer.chunks[last] - answer.chunks[first]) / (last - first)
            found.append((gap, (first + last) / 2 / len(answer.chunks)))
    return found
