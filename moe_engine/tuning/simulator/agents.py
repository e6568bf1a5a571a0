"""Multi-turn agents: sessions that begin at random times, wait for tools between turns, and send all earlier text.

A session is a chain of requests: each is sent after the answer to the one before. A sub-agent is a tool of its parent:
its turns follow an answer of the parent, whose next turn waits for its last answer. Drawn lengths and pauses depend on
seed and session only, not on the order in which answers end. Used by `moe-engine simulate` and `bench serving`.
"""

from __future__ import annotations

import argparse
import math
import random
from collections.abc import Generator, Iterator
from dataclasses import dataclass, fields

from moe_engine.errors import ConfigError
from moe_engine.tuning.datasets import check_fits
from moe_engine.tuning.simulator.workload import ANSWER_BYTES, OWN_TOKEN_BYTES, Arrival, Numbers, answer_tokens

PAUSES = ("exponential", "lognormal", "constant")
SESSION_NUMBERS = 1 << 28
"""Token numbers of a session, and of all system prompts."""
MOST_SESSIONS = 1 << 21

Chain = Generator[Arrival, float, float]
"""Yields a request, receives the time of its answer; returns the time of the last answer."""


@dataclass(frozen=True)
class AgentShape:
    """Lengths in tokens; `pause`: mean seconds between an answer and the next turn.

    Sessions of a group share the system prompt. A turn's new input and its answer are uniform in half to one and a half
    of their lengths. A session has `subagents`, each with `subagent_turns` turns. The share `fork_share` of them begins
    with the text of its parent, the others with a system prompt.
    """

    turns: int = 8
    system_len: int = 2048
    input_len: int = 512
    output_len: int = 256
    pause: float = 5.0
    groups: int = 4
    pause_distribution: str = "exponential"
    subagents: int = 0
    subagent_turns: int = 3
    fork_share: float = 0.5

    def check(self) -> None:
        """Raises ConfigError: names the option with an impossible value."""
        for name, least in (
            ("turns", 1), ("system_len", 0), ("input_len", 1), ("output_len", 1), ("groups", 1), ("subagents", 0),
            ("subagent_turns", 1),
        ):  # fmt: skip
            if not least <= (value := getattr(self, name)) <= MOST_SESSIONS:
                option = f"--agent-{name.replace('_', '-')}"
                raise ConfigError(f"{option} is {value}; it must be from {least} to {MOST_SESSIONS}")
        if not 0 <= self.pause < math.inf:
            raise ConfigError(f"--agent-pause is {self.pause}; it must be a number of seconds of at least 0")
        if not 0 <= self.fork_share <= 1:
            raise ConfigError(f"--agent-fork-share is {self.fork_share}; it must be between 0 and 1")
        if self.pause_distribution not in PAUSES:
            raise ConfigError(f"--agent-pause-distribution must be one of {', '.join(PAUSES)}")

    @property
    def requests(self) -> int:
        """Number of requests of a session, including those of its sub-agents."""
        return self.turns + self.subagents * self.subagent_turns


def add_agent_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of generated sessions: one for each field of `AgentShape`, and their number."""
    group = parser.add_argument_group("agentic dataset: sessions of several turns, with pauses for tools")
    group.add_argument(
        "--agent-sessions", type=int, metavar="N", help="sessions (default: --num-prompts / requests of a session)"
    )
    for option, text in (
        ("--agent-turns", "turns of a session"),
        ("--agent-system-len", "tokens of a system prompt"),
        ("--agent-input-len", "new tokens of a turn"),
        ("--agent-output-len", "tokens of an answer"),
        ("--agent-groups", "different system prompts"),
        ("--agent-subagents", "sub-agents of a session; the next turn waits for their last answer"),
        ("--agent-subagent-turns", "turns of a sub-agent"),
    ):
        default = getattr(AgentShape, option.removeprefix("--agent-").replace("-", "_"))
        group.add_argument(option, type=int, default=default, help=f"{text} (default: {default})")
    group.add_argument(
        "--agent-fork-share", type=float, default=AgentShape.fork_share, metavar="SHARE",
        help=f"share of sub-agents that begin with the parent's text (default: {AgentShape.fork_share})",
    )  # fmt: skip
    group.add_argument("--agent-pause", type=float, default=AgentShape.pause, help="mean seconds between turns")
    group.add_argument("--agent-pause-distribution", choices=PAUSES, default=PAUSES[0])


def agents_of(options: argparse.Namespace, times: Iterator[float]) -> Agents:
    """The sessions of the options, which begin at `times`. Raises ConfigError for impossible options."""
    shape = AgentShape(**{field.name: getattr(options, f"agent_{field.name}") for field in fields(AgentShape)})
    shape.check()
    sessions, flag, requests = options.agent_sessions, "--agent-sessions", "--agent-sessions x requests of a session"
    if sessions is None:
        sessions = max(options.num_prompts // shape.requests, 1)
        flag, requests = "--num-prompts / requests of a session", "--num-prompts"
    if not 1 <= sessions <= MOST_SESSIONS:
        raise ConfigError(f"{flag} is {sessions}; it must be from 1 to {MOST_SESSIONS}")
    check_fits(requests, sessions * shape.requests, ANSWER_BYTES)
    groups = min(shape.groups, sessions)
    check_fits("--agent-groups", groups, OWN_TOKEN_BYTES * shape.system_len, "system prompts")
    return Agents(shape, times, sessions, options.seed)


class Agents:
    """Implements `Workload`."""

    def __init__(self, shape: AgentShape, times: Iterator[float], sessions: int, seed: int) -> None:
        self._shape, self._times, self._sessions, self._seed = shape, times, sessions, seed
        numbers = Numbers()
        self._systems = [_new_text(numbers, shape.system_len) for _ in range(min(shape.groups, sessions))]
        self._chains: dict[int, Chain] = {}
        self.total = sessions * shape.requests

    def first(self) -> Iterator[Arrival]:
        for session, seconds in zip(range(self._sessions), self._times):
            chain = self._chains[session] = _Session(
                self._shape, session, self._systems[session % len(self._systems)], self._seed
            ).turns(seconds)
            yield next(chain)

    def after(self, arrival: Arrival, finished: float) -> Arrival | None:
        try:
            return self._chains[arrival.conversation].send(finished)
        except StopIteration:
            del self._chains[arrival.conversation]
            return None


class _Session:
    """Draws the requests of one session."""

    def __init__(self, shape: AgentShape, number: int, system: list[int], seed: int) -> None:
        self._shape, self._number, self._system = shape, number, system
        self._rng = random.Random(f"{seed} {number}")
        self._numbers = Numbers((number + 1) * SESSION_NUMBERS)

    def turns(self, seconds: float) -> Chain:
        shape, rng = self._shape, self._rng
        calls = [rng.randrange(max(shape.turns - 1, 1)) for _ in range(shape.subagents)]
        prompt, finished = [*self._system, *self._input()], seconds
        for turn in range(shape.turns):
            arrival = self._request(seconds, prompt, turn)
            finished = yield arrival
            prompt = _with_answer(arrival)
            seconds = finished
            for _ in range(calls.count(turn)):
                seconds = yield from self._subagent(seconds, prompt)
            if turn not in calls:
                seconds += self._pause()
            prompt = [*prompt, *self._input()]
        return finished

    def _subagent(self, seconds: float, parent: list[int]) -> Chain:
        start = parent if self._rng.random() < self._shape.fork_share else self._system
        prompt, finished = [*start, *self._input()], seconds
        for turn in range(self._shape.subagent_turns):
            arrival = self._request(seconds, prompt, turn, subagent=True)
            finished = yield arrival
            prompt = [*_with_answer(arrival), *self._input()]
            seconds = finished + self._pause()
        return finished

    def _request(self, seconds: float, prompt: list[int], turn: int, *, subagent: bool = False) -> Arrival:
        output_len = self._around(self._shape.output_len)
        first = self._numbers.take(output_len + 1)
        return Arrival(
            seconds, prompt, output_len, conversation=self._number, turn=turn, answer_ids=first, subagent=subagent
        )

    def _pause(self) -> float:
        mean = self._shape.pause
        if not mean or self._shape.pause_distribution == "constant":
            return mean
        if self._shape.pause_distribution == "lognormal":
            return self._rng.lognormvariate(math.log(mean) - 0.5, 1.0)
        return self._rng.expovariate(1 / mean)

    def _input(self) -> list[int]:
        return _new_text(self._numbers, self._around(self._shape.input_len))

    def _around(self, length: int) -> int:
        return self._rng.randint(max(1, length // 2), max(1, length + length // 2))


def _with_answer(arrival: Arrival) -> list[int]:
    return arrival.prompt_ids + answer_tokens(arrival.answer_ids, 0, arrival.output_len)


def _new_text(numbers: Numbers, count: int) -> list[int]:
    first = numbers.take(count)
    return list(range(first, first + count))
