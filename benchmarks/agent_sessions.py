"""Replays agent sessions against a server: `serving`'s dataset ``agentic``.

No command. The sessions are a workload of the simulator (generated, or from a trace): chains of requests whose text is
numbers. `Replay` sends each request after the previous answer and its pause, with the server's own answers in the text,
and keeps at most `concurrency` sessions open.
"""

from __future__ import annotations

import argparse
import asyncio
import random
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass

import numpy as np

from moe_engine.tuning.answer import Answer
from moe_engine.tuning.datasets import BenchRequest, Vocabulary
from moe_engine.tuning.simulator.agents import agents_of
from moe_engine.tuning.simulator.arrivals import arrival_times
from moe_engine.tuning.simulator.report import progress
from moe_engine.tuning.simulator.sessions import Recorded, link_sessions
from moe_engine.tuning.simulator.traces import read_trace
from moe_engine.tuning.simulator.workload import Arrival, Workload

Ask = Callable[[BenchRequest], Awaitable[Answer]]


@dataclass(frozen=True)
class Turn:
    """A request of a session and its answer. `kind`: first, returning or subagent (the first turn of one)."""

    session: int
    kind: str
    answer: Answer


def workload_of(args: argparse.Namespace) -> Workload:
    """The sessions of the options. Raises ConfigError for an unreadable trace or impossible options."""
    if args.dataset_path:
        arrivals = read_trace(args.dataset_path, args.num_prompts)
        link_sessions(arrivals)
        return Recorded(arrivals)
    return agents_of(args, arrival_times("poisson", args.request_rate, random.Random(args.seed)))


class TokenText:
    """Tokens of the numbers of a workload: the same token for the same number, another text for another `salt`."""

    def __init__(self, vocabulary: Vocabulary, salt: str) -> None:
        self._plain = np.array(vocabulary.plain_ids, dtype=np.int64)
        self._salt = np.uint64(random.Random(salt).getrandbits(64))

    def tokens(self, numbers: list[int]) -> list[int]:
        """splitmix64's finalizer over number and salt, modulo the vocabulary."""
        mixed = np.array(numbers, dtype=np.uint64) ^ self._salt
        mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        mixed ^= mixed >> np.uint64(31)
        chosen: list[int] = self._plain[(mixed % np.uint64(len(self._plain))).astype(np.int64)].tolist()
        return chosen


class Replay:
    """One run of a workload. `answer_ids`: the tokens of an answer, for backends that report text only."""

    def __init__(
        self,
        workload: Workload,
        ask: Ask,
        text: TokenText,
        answer_ids: Callable[[str], list[int]],
        concurrency: int | None,
    ) -> None:
        self._workload, self._ask, self._text = workload, ask, text
        self._answer_ids, self._concurrency = answer_ids, concurrency
        self.turns: list[Turn] = []
        self.abandoned = 0
        """Sessions that ended with a failed request; their later turns are not sent."""

    async def run(self, *, show_progress: bool = False) -> float:
        """Sends all requests; returns the seconds from the first request to the last answer."""
        clock = asyncio.get_running_loop()
        began = clock.time()
        starts = self._workload.first()
        workers = min(self._concurrency or self._workload.total, self._workload.total)
        with progress(self._workload.total, show_progress) as advance:
            async with asyncio.TaskGroup() as group:
                for _ in range(workers):
                    group.create_task(self._sessions(starts, began, advance))
        return clock.time() - began

    async def _sessions(self, starts: Iterator[Arrival], began: float, advance: Callable[[int], None]) -> None:
        """Runs one session after another, each at its start time or once the previous one has ended."""
        clock = asyncio.get_running_loop()
        for start in starts:
            answers: list[tuple[int, int, list[int]]] = []
            arrival: Arrival | None = start
            while arrival is not None:
                await asyncio.sleep(max(0.0, began + arrival.seconds - clock.time()))
                arrival.seconds = clock.time() - began
                answer = await self._ask(self._request(arrival, answers))
                self.turns.append(Turn(arrival.conversation, _kind(arrival), answer))
                advance(1)
                if not answer.success:
                    self.abandoned += 1
                    break
                ids = answer.output_ids or self._answer_ids(answer.text)
                answers.append((len(arrival.prompt_ids), arrival.answer_ids, ids[: arrival.output_len]))
                arrival = self._workload.after(arrival, clock.time() - began)

    def _request(self, arrival: Arrival, answers: list[tuple[int, int, list[int]]]) -> BenchRequest:
        """The prompt with the server's answers inserted."""
        numbers = arrival.prompt_ids
        tokens = self._text.tokens(numbers)
        for place, first, ids in answers:
            if place < len(numbers) and numbers[place] == first:
                tokens[place : place + len(ids)] = ids
        return BenchRequest(tokens, len(tokens), arrival.output_len)


def _kind(arrival: Arrival) -> str:
    if arrival.turn:
        return "returning"
    return "subagent" if arrival.subagent else "first"
