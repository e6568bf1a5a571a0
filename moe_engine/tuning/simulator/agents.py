"""Multi-turn agents: sessions that begin at random times, wait for tools between turns, and send all text before."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass

from moe_engine.tuning.simulator.workload import Arrival, Numbers


@dataclass(frozen=True)
class AgentShape:
    """Lengths in tokens; `pause`: mean seconds between an answer and the next turn (exponential).

    Sessions of a group share the system prompt. A turn's new input and its answer are uniform in half to one and a half
    of their lengths.
    """

    turns: int = 8
    system_len: int = 2048
    input_len: int = 512
    output_len: int = 256
    pause: float = 5.0
    groups: int = 4


class Agents:
    """Implements `Workload`."""

    def __init__(self, shape: AgentShape, times: Iterator[float], sessions: int, seed: int) -> None:
        self._shape, self._times, self._sessions = shape, times, sessions
        self._rng = random.Random(seed)
        self._numbers = Numbers()
        self._systems = [self._new_text(shape.system_len) for _ in range(shape.groups)]
        self._texts: dict[int, list[int]] = {}
        self.total = sessions * shape.turns

    def first(self) -> Iterator[Arrival]:
        for session, seconds in zip(range(self._sessions), self._times):
            system = self._systems[session % len(self._systems)]
            yield self._turn(session, 0, seconds, [*system, *self._new_text(self._around(self._shape.input_len))])

    def after(self, arrival: Arrival, finished: float) -> Arrival | None:
        if arrival.turn + 1 == self._shape.turns:
            return None
        answer = range(arrival.answer_ids, arrival.answer_ids + arrival.output_len)
        prompt = [*arrival.prompt_ids, *answer, *self._new_text(self._around(self._shape.input_len))]
        pause = self._rng.expovariate(1 / self._shape.pause) if self._shape.pause else 0.0
        return self._turn(arrival.conversation, arrival.turn + 1, finished + pause, prompt)

    def _turn(self, session: int, turn: int, seconds: float, prompt: list[int]) -> Arrival:
        output_len = self._around(self._shape.output_len)
        first = self._numbers.take(output_len + 1)
        return Arrival(seconds, prompt, output_len, conversation=session, turn=turn, answer_ids=first)

    def _around(self, length: int) -> int:
        return self._rng.randint(max(1, length // 2), max(1, length + length // 2))

    def _new_text(self, count: int) -> list[int]:
        first = self._numbers.take(count)
        return list(range(first, first + count))
