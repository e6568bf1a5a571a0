"""Requests of a simulation: arrival times, shared prefixes, lengths of answers."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Protocol

from moe_engine.frontend.known_prefixes import PromptBlocks
from moe_engine.scheduler.session_hold import TAIL

FIRST_TOKEN = 1 << 20
"""Tokens of answers and of text that occurs once are numbered from here on, so that only copied text matches the prefix
cache. Smaller tokens are those of a dataset."""

DRAWN = 32
"""Tokens at the begin of a random prompt that are drawn: no two prompts are equal in so many."""
ANSWER_BYTES = 600
"""Memory of the record of a request that has ended."""
OWN_TOKEN_BYTES = 40
"""Memory of a token that no other prompt shares."""
_COMMON: list[int] = []
"""By position: tokens of all answers and random prompts. They share the objects: a list of other numbers takes five
times the memory, and one of random numbers several times as long, because each is in another part of it."""
_FIRST_COMMON = 1 << 50


def _common(begin: int, end: int) -> list[int]:
    if end > len(_COMMON):
        _COMMON.extend(range(_FIRST_COMMON + len(_COMMON), _FIRST_COMMON + 2 * end))
    return _COMMON[begin:end]


def random_prompt(head: list[int], length: int) -> list[int]:
    """A prompt of `length` random tokens, of which the first `DRAWN` are given. The others, which are behind a prefix
    that is not cached, match nothing, whatever they are."""
    return head + _common(len(head), length)


def answer_tokens(number: int, begin: int, end: int) -> list[int]:
    """Tokens [begin, end) of an answer. The first one, `number`, and then every `TAIL`th one occur in no other answer:
    the first token that differs distinguishes prefixes, the last `TAIL` tokens distinguish sessions. The others
    depend on their position alone."""
    tokens = _common(begin, end)
    own = begin + -begin % TAIL
    if own < end:
        tokens[own - begin :: TAIL] = range(number + own, number + end, TAIL)
    return tokens


class Numbers:
    """Allocates runs of unique token ids."""

    def __init__(self, first: int = FIRST_TOKEN) -> None:
        self._next = first

    def take(self, count: int) -> int:
        """The first of `count` new ids."""
        first = self._next
        self._next += count
        return first


@dataclass(slots=True)
class Arrival:
    """A request. `seconds`: its arrival on the simulated clock; `output_len`: tokens of its answer.

    `max_tokens` is what the client allows (at least `output_len`; the scheduler sees this limit only). `answer_ids` is
    the number of its first answer token (`answer_tokens`), drawn by the simulation. `conversation` identifies the turns
    of a dialogue, or of a sub-agent within it. `pause`: seconds after the previous answer; None: at `seconds`.
    """

    seconds: float
    prompt_ids: list[int]
    output_len: int
    max_tokens: int = 0
    conversation: int = -1
    turn: int = 0
    answer_ids: int = 0
    subagent: bool = False
    pause: float | None = None
    blocks: PromptBlocks | None = None
    """Of the prompt, for the router, which finds its tokens in the processor's cache right after they are drawn."""
    is_unique: bool = False
    """No two prompts of the load begin with a common block: a router that follows prefixes finds none."""

    def __post_init__(self) -> None:
        self.max_tokens = max(self.max_tokens, self.output_len)


class Workload(Protocol):
    """Arrivals in order of time; arrivals that depend on answers are added while the simulation runs."""

    total: int
    """Requests in all."""

    def first(self) -> Iterator[Arrival]:
        """Arrivals that do not depend on answers, in order of time."""

    def after(self, arrival: Arrival, finished: float) -> Arrival | None:
        """The request that follows the answer to another one, e.g. the next turn, or None."""


class Fixed:
    """Requests with known times, in order; drawn one by one, because the prompts of a day need much memory.

    Args:
        behind: of the method of this name; None: `arrivals`, whatever its argument.
    """

    def __init__(
        self, arrivals: Iterable[Arrival], total: int, behind: Callable[[int], Iterator[Arrival]] | None = None
    ) -> None:
        self._arrivals, self.total, self._behind = arrivals, total, behind

    def behind(self, count: int) -> Iterator[Arrival]:
        """The requests, of which the first `count` may lack their prompts. In the place of `first`."""
        return iter(self._arrivals) if self._behind is None else self._behind(count)

    def first(self) -> Iterator[Arrival]:
        return iter(self._arrivals)

    def after(self, arrival: Arrival, finished: float) -> Arrival | None:
        return None


class Limited:
    """At most `concurrency` requests concurrently, as `--max-concurrency` of a load generator: a further request is
    sent when an answer has ended, and not before its own time."""

    def __init__(self, inner: Workload, concurrency: int) -> None:
        self._inner, self.total = inner, inner.total
        self._concurrency = concurrency
        self._rest = inner.first()
        self._next: Arrival | None = None

    def first(self) -> Iterator[Arrival]:
        yield from itertools.islice(self._rest, self._concurrency)

    def after(self, arrival: Arrival, finished: float) -> Arrival | None:
        follower = self._inner.after(arrival, finished) or next(self._rest, None)
        if follower is not None:
            follower.seconds = max(follower.seconds, finished)
        return follower
