"""The requests of one session: a tree of turns, each with the tokens that it adds to the one before."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

TURN_TOKENS = 128
"""Size of a turn without its tokens (objects, name), counted in tokens."""


class Running(Protocol):
    """A sequence that runs."""

    output_ids: list[int]


@dataclass(eq=False, slots=True)
class Turn:
    """A request of a session: the first `keep` tokens of its parent's prompt and output, its own tokens, its output."""

    rid: str
    parent: Turn | None
    keep: int
    own: array[int]
    output: array[int]
    running: Running | None = None
    rank: int | None = None
    """Data-parallel rank that has its KV."""
    children: list[Turn] = field(default_factory=list)

    def answer(self) -> Sequence[int]:
        """Output so far."""
        return self.output if self.running is None else self.running.output_ids

    def prefix(self, count: int) -> list[int]:
        """The first `count` tokens of prompt and output."""
        parts: list[array[int]] = []
        turn: Turn | None = self
        while turn is not None:
            if count > turn.keep:
                parts.append((turn.own + array("q", turn.answer()))[: count - turn.keep])
                count = turn.keep
            turn = turn.parent
        return [token for part in reversed(parts) for token in part]


@dataclass(eq=False, slots=True)
class Session:
    id: str
    streaming: bool
    timeout: float | None
    used_at: float
    turns: dict[str, Turn] = field(default_factory=dict)
    num_running: int = 0
    size: int = 0
    """Tokens kept, with a share for each turn."""

    def add(self, turn: Turn) -> None:
        """A request id that is used again names the later request; the earlier request is kept for the requests that
        continue it."""
        self.turns[turn.rid] = turn
        if turn.parent is not None:
            turn.parent.children.append(turn)
        self.size += TURN_TOKENS + len(turn.own) + len(turn.output)

    def forget(self, parent: Turn | None) -> list[str]:
        """Removes all turns that follow `parent`; None: all turns. Returns the ids of running requests among them."""
        waiting = list(self.turns.values()) if parent is None else list(parent.children)
        running = set[str]()
        while waiting:
            turn = waiting.pop()
            if turn.running is not None:
                running.add(turn.rid)
            if self.turns.get(turn.rid) is turn:
                del self.turns[turn.rid]
            waiting += turn.children
            self.size -= TURN_TOKENS + len(turn.own) + len(turn.output)
            turn.children = []
        if parent is None:
            self.size = 0
        else:
            parent.children = []
        return sorted(running)


@dataclass(slots=True)
class Joined:
    """How a new request of a session begins. `replace`: the turns that follow `parent` are removed when it starts."""

    session: Session
    parent: Turn | None
    keep: int
    replace: bool

    @property
    def rank(self) -> int | None:
        return None if self.parent is None else self.parent.rank
