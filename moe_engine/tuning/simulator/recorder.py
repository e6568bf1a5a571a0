"""Measurements of the clients of a simulation: times of requests and tokens, cached tokens, retractions."""

from __future__ import annotations

from dataclasses import dataclass, field

from moe_engine.tuning.answer import Answer
from moe_engine.tuning.gap_histogram import GapHistogram
from moe_engine.tuning.phases import DECODE, DELIVERY, END, PREFILL, QUEUE, READ
from moe_engine.tuning.simulator.workload import Arrival
from moe_engine.types import Request


@dataclass(slots=True)
class Running:
    """A request in the engine. `last`: arrival of its newest token; `first`: of its first token. `entered`: moment at
    which its scheduler receives it. `uncomputed`: prompt tokens without known KV, until the first token."""

    arrival: Arrival
    entered: float
    first: float = 0.0
    last: float = 0.0
    group: int = -1
    request: Request | None = None
    """As its scheduler has it."""
    uncomputed: int = 0
    answer: list[int] = field(default_factory=list)
    """Its tokens, and a further one."""


@dataclass
class Recorder:
    """Collects answers and gaps. Seconds are those of the simulated clock."""

    answer_seconds: float = 0.0
    """Added to every time to first token: HTTP, tokenization and detokenization, outside the engine's steps."""
    reply_seconds: float = 0.0
    """The part of `answer_seconds` from the token at the frontend until the client has it, in `phases`."""
    answers: list[Answer] = field(default_factory=list)
    gaps: GapHistogram = field(default_factory=GapHistogram)
    ended_at: float = 0.0
    retractions: int = 0
    refused: list[str] = field(default_factory=list)
    keeps_details: bool = False
    """Whether answers have their phases, and steps are kept."""
    steps: list[tuple[int, int, float]] = field(default_factory=list)
    """Requests that decoded, prompt tokens and seconds of each step, of all groups together."""

    def tokens(self, running: Running, count: int, now: float, delay: float = 0.0) -> None:
        """Records the arrival of `count` tokens of a request. `delay`: of a first token, by the frontend."""
        if running.first:
            self.gaps.add((now - running.last) / count, count)
        else:
            running.first = now + delay
            if count > 1:
                self.gaps.add(0.0, count - 1)
        running.last = now
        self.gaps.add_tokens(now, count)

    def end(self, running: Running, now: float, *, cached_tokens: int, retractions: int, delay: float = 0.0) -> None:
        """Records the end of an answer. `delay`: of its last token, by the frontend."""
        arrival = running.arrival
        count = arrival.output_len if running.request is None else len(running.request.output_ids)
        answer = Answer(len(arrival.prompt_ids), count, success=True, started=arrival.seconds)
        answer.ttft = running.first - arrival.seconds + self.answer_seconds
        answer.latency = now + delay - arrival.seconds + self.answer_seconds
        answer.cached_tokens, answer.retractions = cached_tokens, retractions
        answer.cut_tokens = arrival.output_len - count
        if self.keeps_details and running.request is not None:
            answer.phases = self._phases(running, answer)
        self.answers.append(answer)
        self.retractions += retractions
        self.ended_at = max(self.ended_at, now + delay + self.answer_seconds)

    def _phases(self, running: Running, answer: Answer) -> dict[str, float]:
        """As `tuning.phases` has them: the work of the frontend on a token counts before its delivery."""
        request, reply = running.request, self.reply_seconds
        assert request is not None
        if request.first_scheduled is None or not running.first:
            return {}
        read, queue = running.entered - answer.started, request.first_scheduled - request.queued_at
        found = {READ: read, QUEUE: queue, PREFILL: answer.ttft - read - queue - reply, DELIVERY: reply}
        if answer.output_len > 1:
            found[DECODE] = (answer.latency - answer.ttft) / (answer.output_len - 1)
        return found | {END: reply}

    def fail(self, running: Running, now: float, reason: str) -> None:
        """Records a request that ended without its answer."""
        arrival = running.arrival
        self.answers.append(Answer(len(arrival.prompt_ids), error=reason, started=arrival.seconds))
        self.refused.append(reason)
        self.ended_at = max(self.ended_at, now)
