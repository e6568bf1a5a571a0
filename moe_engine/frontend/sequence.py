"""A sequence of a running request: passes its deltas to its output and its reader."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

from moe_engine.core.messages import RequestDelta
from moe_engine.frontend.client_api import DirectReader
from moe_engine.frontend.generation import Generation, Piece

SHARED_PROMPT_TOKENS = 32
"""With n > 1, prompts of at least this length are computed once: other copies wait for the first one's first token."""


class Observer:
    """Receives the events of each sequence (metrics, request log)."""

    def received(self, generation: Generation) -> None:
        pass

    def tokens(self, generation: Generation, count: int, seconds: float, *, first: bool) -> None:
        """`seconds`: since the last token, or since the request was received."""

    def finished(self, generation: Generation) -> None:
        pass


Observers = tuple[Observer, ...]


class PieceSink(Protocol):
    """A reader that takes pieces as they arrive, in the engine's reader task: no task wakes for a token.

    Pieces that end a sequence, and those that arrive while the sink is not ready, are yielded as without a sink.
    """

    def ready(self) -> bool:
        """Whether `put` may be called now."""

    def put(self, piece: Piece) -> None: ...

    def text_writer(self, generation: Generation) -> Callable[[str], None] | None:
        """A function that takes the text of a plain piece instead of `put`, which costs less; None: not possible.
        Asked once, when a plain piece arrives while the sink is ready."""


class _Collected:
    """The sink of outputs that are read at their end."""

    def ready(self) -> bool:
        return True

    def put(self, piece: Piece) -> None:
        pass

    def text_writer(self, generation: Generation) -> None:
        return None


COLLECTED = _Collected()


@dataclass(eq=False, slots=True)
class Sequence:
    """A sequence of a started request.

    `go` is set when it may be sent to the engine, or when it was aborted before. Copies of a long prompt are the
    `followers` of the first copy, which computes the prompt for all.
    """

    generation: Generation
    go: asyncio.Event = field(default_factory=asyncio.Event)
    followers: list[Sequence] = field(default_factory=list)
    is_sent: bool = False
    aborted: str | None = None
    """Reason of an abort."""
    failed: Exception | None = None
    """Raised in its sink."""

    def let_followers_go(self) -> None:
        for follower in self.followers:
            follower.go.set()
        self.followers = []


def sequences_of(generations: list[Generation]) -> list[Sequence]:
    """The sequences of a request; all but followers may go."""
    leaders: dict[int, Sequence] = {}
    sequences = []
    for g in generations:
        sequence = Sequence(g)
        leader = leaders.setdefault(g.prompt_index, sequence)
        if leader is not sequence and len(g.prompt_ids) >= SHARED_PROMPT_TOKENS:
            leader.followers.append(sequence)
        else:
            sequence.go.set()
        sequences.append(sequence)
    return sequences


def feed(sequence: Sequence, delta: RequestDelta, observers: Observers) -> None:
    """Adds a delta to the output."""
    generation = sequence.generation
    before, last = len(generation.output_ids), generation.last_token_at
    generation.feed(delta)
    _fed(sequence, observers, before, last)


def _fed(sequence: Sequence, observers: Observers, before: int, last: float | None) -> None:
    """Called after a delta. `before`, `last`: number of tokens, and time of the last token, before it."""
    generation = sequence.generation
    if sequence.followers and (generation.output_ids or generation.finish):
        sequence.let_followers_go()
    if observers and (count := len(generation.output_ids) - before) > 0:
        assert generation.last_token_at is not None
        seconds = generation.last_token_at - (generation.received_at if last is None else last)
        for observer in observers:
            observer.tokens(generation, count, seconds, first=last is None)


def direct_reader(sequence: Sequence, observers: Observers, sink: PieceSink | None) -> DirectReader | None:
    """Feeds plain deltas and passes their pieces to the sink. A stop string or an error wakes the task, which ends the
    sequence."""
    if sink is None:
        return None
    generation, ready, put = sequence.generation, sink.ready, sink.put
    put_text: Callable[[str], None] | None = None
    is_asked, is_watched = not generation.streams_plainly, bool(observers or sequence.followers)

    def take(delta: RequestDelta) -> bool:
        nonlocal put_text, is_asked
        if not ready():
            return False
        try:
            if not is_asked:
                put_text, is_asked = sink.text_writer(generation), True
            before, last = len(generation.output_ids), generation.last_token_at
            if put_text is not None and (text := generation.take_text(delta)) is not None:
                if is_watched:
                    _fed(sequence, observers, before, last)
                put_text(text)
                return True
            piece = generation.take_plain(delta)
            if is_watched:
                _fed(sequence, observers, before, last)
            if generation.finish is not None:
                return False  # the task ends the sequence
            if piece is not None:
                put(piece)
        except Exception as exc:
            sequence.failed = exc
            return False
        return True

    return take
