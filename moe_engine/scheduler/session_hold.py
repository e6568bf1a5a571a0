"""Holds the KV of sessions whose next turn is expected, so that throughput does not fall when sessions exceed the pool.

Turns of many sessions in rotation would each evict what the next one needs. Instead the sessions whose KV is cached
keep it, and requests that could only run by evicting it wait, at most `--session-hold` seconds after they arrived; then
they are admitted as without this policy.

A session is recognized by its prefix: a request returns if its prompt continues the tokens of an ended one. Held is the
KV of returned requests that wait, and of ended requests for about the pause after which requests have returned lately.
Where requests do not return, nothing is held.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from moe_engine.scheduler.radix_cache import Node, RadixCache
from moe_engine.scheduler.waiting_queue import Waiting

MAX_SESSIONS = 512
HEAD, TAIL = 32, 16
"""Tokens by which an ended request is recognized: the first ones, and the last ones of what is cached."""
SHARE = 0.3
"""Ended requests are held if at least this share of them returns."""
DEVIATIONS = 4.0
"""They are held for the mean pause and so many mean deviations of it."""
MOST = 0.75
"""At most this share of the pool beside running requests is held; the rest is for their growth."""
WEIGHT = 0.2
"""Of a new observation in the means."""


@dataclass(slots=True, eq=False)
class _Session:
    """An ended request. `entry` is its next turn."""

    node: Node
    end: int
    ended: float
    head: tuple[int, ...]
    tail: tuple[int, ...]
    entry: Waiting | None = None


class SessionHold:
    """
    Args:
        bound: longest wait of a request, in seconds; 0: nothing is held.
    """

    def __init__(self, bound: float, tree: RadixCache, clock: Callable[[], float]) -> None:
        self._bound, self._tree, self._clock = bound, tree, clock
        self._sessions: dict[int, _Session] = {}
        """In the order of their ends."""
        self._by_head: dict[tuple[int, ...], dict[int, _Session]] = {}
        self._num = 0
        self.holds_back = False
        """Whether the last admission passed over requests because of held sessions."""
        self._held = 0
        self._before: dict[Waiting, int] = {}
        """Of waiting requests whose KV is held: tokens that are held for sessions that ended earlier."""
        self._returning = 0.0
        """Mean share of ended requests that return; `_pause`: mean time until they do, and its mean deviation."""
        self._pause = self._deviation = 0.0

    def ended(self, tokens: Sequence[int], node: Node) -> None:
        """A request has ended; its KV is cached up to `node`."""
        if not self._bound or node.parent is None or node.end < HEAD:
            return
        self._num += 1
        head, tail = tuple(tokens[:HEAD]), tuple(tokens[node.end - TAIL : node.end])
        session = self._sessions[self._num] = _Session(node, node.end, self._clock(), head, tail)
        self._by_head.setdefault(head, {})[self._num] = session
        if len(self._sessions) > MAX_SESSIONS:
            self._drop(next(iter(self._sessions)))

    def arrived(self, entry: Waiting) -> None:
        """A request waits: perhaps the next turn of a session."""
        found, tokens, length = None, entry.tokens, 0
        for number, session in self._by_head.get(tuple(tokens[:HEAD]), {}).items():
            end = session.end
            fits = session.entry is None and length < end <= len(tokens)
            if fits and tuple(tokens[end - TAIL : end]) == session.tail:
                found, length = number, end
        if found is None:
            return
        session = self._sessions[found]
        session.entry = entry
        pause = self._clock() - session.ended
        if not self._returning:
            self._pause, self._deviation = pause, pause / 2
        self._deviation += (abs(pause - self._pause) - self._deviation) * WEIGHT
        self._pause += (pause - self._pause) * WEIGHT
        self._returning += (1.0 - self._returning) * WEIGHT

    def plan(self, available: int) -> None:
        """Decides what is held, for the next calls of `held_for`.

        Args:
            available: tokens of the pool that no running request has.
        """
        self._held, self._before = 0, {}
        if not self._sessions:
            return
        now, limit, seen = self._clock(), int(MOST * available), set[Node]()
        window = min(self._bound, self._pause + DEVIATIONS * self._deviation) if self._returning >= SHARE else 0.0
        holds: list[_Session] = []
        for number, session in list(self._sessions.items()):
            if not self._is_current(session, now):
                self._drop(number)
                continue
            if session.entry is None and now - session.ended >= window:
                continue
            if self._held >= limit or not session.node.alive or session.node.end != session.end:
                continue
            if session.entry is not None:
                self._before[session.entry] = self._held
            holds.append(session)
            walk: Node | None = session.node
            while walk is not None and walk not in seen and not walk.lock:
                seen.add(walk)
                self._held += len(walk.tokens)
                walk = walk.parent
        for session in reversed(holds):  # what is not held is evicted first, then the sessions that ended last
            self._tree.refresh(session.node)

    def held_for(self, entry: Waiting) -> int:
        """Evictable tokens that a request must leave in the cache: those of all held sessions, or of those before its
        own; 0 once it has waited for the bound."""
        if not self._held or self._clock() - entry.request.queued_at >= self._bound:
            return 0
        return self._before.get(entry, self._held)

    def is_returning(self, entry: Waiting) -> bool:
        """Whether a request is the next turn of a session whose KV is held."""
        return entry in self._before

    def share_for(self, entry: Waiting) -> float:
        """Of the room, what a request and the KV that is held may take together: a session that could not be held
        afterwards would only evict and be evicted."""
        return 1.0 if entry in self._before else MOST

    def _is_current(self, session: _Session, now: float) -> bool:
        if session.entry is not None:
            return session.entry.is_queued
        if now - session.ended <= self._bound:
            return True
        self._returning -= self._returning * WEIGHT
        return False

    def _drop(self, number: int) -> None:
        session = self._sessions.pop(number)
        of_head = self._by_head[session.head]
        del of_head[number]
        if not of_head:
            del self._by_head[session.head]
