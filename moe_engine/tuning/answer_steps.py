"""Answers of a measurement: their chunks, and the steps in which several of them decode."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from moe_engine.tuning.answer import Answer

SKIPPED = 6
"""First chunks of a stream that are not measured, because other prompts are computed meanwhile."""


@dataclass(frozen=True)
class Decode:
    """Seconds of a step, and context tokens of each request in it."""

    seconds: float
    context: float


@dataclass(frozen=True)
class Stream:
    """An answer: seconds from its request to each chunk, and the time of its beginning. `received`: time at which the
    server had read the request, on the same clock. `reply`: seconds from the first token at the frontend until it
    arrived."""

    chunks: list[float]
    started: float
    received: float
    reply: float = 0.0

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
