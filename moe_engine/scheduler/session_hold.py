"""Holds the KV of sessions whose next turn is expected, so that throughput does not fall when sessions exceed the pool.

With many sessions in rotation, each turn would evict the KV that the next turn needs. Instead a set of sessions that
fits keeps its KV, and requests that could only run by evicting it wait. The rule is derived, not fitted; its core is in
`return_times`, and all quantities are measured:

- Sessions whose next turn waits, or whose pause is worth their space, are held as far as they fit: first those whose KV
saves most for the space of all their expected turns. Sessions near their end therefore come before young ones, which
are cheap to recompute and would grow in their place.
- A request that evicts no held KV runs. It also leaves space for the growth of the admitted sessions and its own within
the horizon, by expectation (`session_growth`), and at least for their net growth in a steady state: without it, a held
session would be recomputed before its space had paid off.
- The request that has waited longest may evict held KV if evictions for this reason have cost at most `ROTATION` of the
  time (`session_rotation`). Its wait is therefore at most the time to recompute the KV evicted for the requests before
  it and for the expected growth of their sessions, divided by `ROTATION`; while nothing runs, not divided. A limit in
  seconds (`--session-hold SECONDS`) lets it run earlier, at any cost.

A session is recognized by its prefix: a request returns if its prompt continues the tokens of an ended one. If requests
do not return, no KV is held. With a host tier evicted KV is loaded back, so sessions are held on device and host
together, and no request waits until the host is full too.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass

from moe_engine.scheduler.config import SchedulerConfig
from moe_engine.scheduler.kv_cache.kv_cache_manager import token_run
from moe_engine.scheduler.kv_cache.radix_cache import Node, RadixCache
from moe_engine.scheduler.return_times import ReturnTimes, StepTimes
from moe_engine.scheduler.session_growth import MAX_TURNS, Projection, ReturnShares, rounded
from moe_engine.scheduler.session_rotation import Rotation
from moe_engine.scheduler.step_sums import MEMORY, Steps
from moe_engine.scheduler.waiting_queue import Waiting
from moe_engine.types import Request

MAX_SESSIONS = 512
HEAD, TAIL = 32, 16
"""Tokens by which an ended request is recognized: the first tokens, and the last cached tokens."""
LEAST_CACHED = 0.5
"""Cached share of a session's KV below which the session counts as evicted."""
PLANNING = 0.05
"""Share of the time that `plan` may take."""


@dataclass(slots=True, eq=False)
class _Session:
    """An ended request. `entry` is its next turn."""

    node: Node
    end: int
    ended: float
    head: Hashable
    tail: tuple[int, ...]
    entry: Waiting | None = None
    returns: float = 1.0
    """Probability that another turn follows."""
    is_lost: bool = False
    """Whether it has been silent for so long that it counts as ended."""


class _Mean:
    """Mean of values: all weigh the same at first, later older ones less."""

    def __init__(self) -> None:
        self.value = 0.0
        self._num = 0

    def add(self, value: float) -> None:
        self._num += 1
        self.value += (value - self.value) * max(MEMORY, 1 / self._num)


class SessionHold:
    """
    Args:
        limit: longest wait of a request in seconds; None: as long as rotation takes; 0: no KV is held.
        host_tokens: size of the host tier; 0 without one.
        max_running: requests that may run concurrently.
    """

    def __init__(
        self,
        limit: float | None,
        tree: RadixCache,
        clock: Callable[[], float],
        num_slots: int = 0,
        host_tokens: int = 0,
        max_running: int = 1,
    ) -> None:
        self._limit, self._tree, self._clock = limit, tree, clock
        self._below = max(host_tokens - num_slots, 0)
        """Tokens that stay loadable when the pool is full: a host tier may have a copy of everything on the device."""
        self._pool = num_slots + self._below
        self.is_off = limit == 0
        self._sessions: dict[int, _Session] = {}
        """Sessions in the order of their ends."""
        self._by_head: dict[Hashable, dict[int, _Session]] = {}
        self._num = 0
        """Ended requests so far: the number of the last session."""
        self._running: dict[str, Request] = {}
        self._by_length = ReturnShares()
        self._projection = Projection(0.0, self._by_length.shares(), 0)
        self.times, self.returns = StepTimes(max_running), ReturnTimes()
        self._output, self._prompt, self._first, self._gap = _Mean(), _Mean(), _Mean(), _Mean()
        """Per turn: output tokens, new prompt tokens of returning and of first turns; seconds between two ends."""
        self._last_end = 0.0
        self.holds_back = False
        """Whether the last admission passed over requests because of held sessions."""
        self._held = self._displaced = 0
        self._before: dict[Waiting, int] = {}
        """By waiting request whose KV is held: tokens held with higher precedence."""
        self._reserve = 0.0
        self._rotation = Rotation()
        self._next_plan = 0.0

    @classmethod
    def of(cls, config: SchedulerConfig, tree: RadixCache, clock: Callable[[], float]) -> SessionHold:
        """The policy of a scheduler; off if KV is not cached, or if evicted KV goes to a storage or another server."""
        off = config.disable_radix_cache or config.storage is not None or config.kv_connector != "host"
        limit = 0.0 if off else config.session_hold
        return cls(limit, tree, clock, config.num_slots, config.host_tier_tokens, config.max_rows)

    # -- observations

    def stepped(
        self, launched: float, now: float, spans: Mapping[int, tuple[int, int]], num_decodes: int, waits: bool
    ) -> None:
        """Records a step that computed these `spans` of prompts; `waits`: requests waited during it."""
        if self.is_off or not (spans or num_decodes):
            return
        num_prompt = sum([end - start for start, end in spans.values()]) if spans else 0
        self.times.add(launched, now, num_prompt, num_decodes, waits)

    def decoded(self, num_decodes: int, steps: Steps, contended: Steps) -> None:
        """As `stepped` for several steps of the same requests up to now; `contended`: the last of them, during which
        requests waited."""
        if not self.is_off:
            self.times.add_decodes(num_decodes, steps, contended, self._clock())

    def ended(self, request: Request, node: Node) -> None:
        """Records that a request has ended; its KV is cached up to `node`."""
        self._running.pop(request.rid, None)
        if self.is_off or node.parent is None or node.end < HEAD:
            return
        now = self._clock()
        self._num += 1
        self._output.add(len(request.output_ids))
        if self._num > 1:
            self._gap.add(max(now - self._last_end, 1e-6))
        self._last_end = now
        head = request.namespace, tuple(token_run(request, 0, HEAD))
        tail = tuple(token_run(request, node.end - TAIL, node.end))
        session = _Session(node, node.end, now, head, tail)
        self._sessions[self._num] = session
        self._by_head.setdefault(head, {})[self._num] = session
        if len(self._sessions) > MAX_SESSIONS:
            self._drop(next(iter(self._sessions)))

    def aborted(self, request: Request) -> None:
        """Records that a request was aborted."""
        self._running.pop(request.rid, None)

    def arrived(self, entry: Waiting) -> None:
        """Records a waiting request, which may be the next turn of a session."""
        if self.is_off:
            return
        found, tokens, length = None, entry.tokens, 0
        for number, session in self._by_head.get((entry.request.namespace, tuple(tokens[:HEAD])), {}).items():
            end = session.end
            fits = session.entry is None and length < end <= len(tokens)
            if fits and tuple(tokens[end - TAIL : end]) == session.tail:
                found, length = number, end
        if found is None:
            self._first.add(len(tokens))
            return
        session = self._sessions[found]
        session.entry = entry
        if session.is_lost:
            session.is_lost = False
            self.returns.found()
            self._by_length.found(self._turns(session.end))
        self._by_length.observe(self._turns(session.end), True)
        self.returns.returned(self._clock() - session.ended)
        self._prompt.add(len(tokens) - session.end)

    def discard(self) -> None:
        """Drops all sessions: the policy is not used any more (`RadixCache.discard`)."""
        self._sessions.clear()
        self._by_head.clear()

    # -- what is held

    @property
    def growth(self) -> float:
        """Tokens that a turn adds to its session."""
        return self._prompt.value + self._output.value

    def _turns(self, length: float) -> int:
        """A session's length in turns of mean growth."""
        return min(int(length / self.growth), MAX_TURNS - 1) if self.growth else 0

    @property
    def horizon(self) -> float:
        """Seconds for which space is worth as much as recomputing its content (`return_times`)."""
        return self._pool * self.times.per_token * self.times.price

    def plan(self, available: int, num_running: int) -> None:
        """Decides which sessions are held, for the next calls of `must_wait`.

        Args:
            available: tokens of the pool that no running request has.
        """
        now = self._clock()
        if not self._sessions or not self.returns.pauses:  # no request has ever returned
            self._held, self._displaced, self._before, self._reserve = 0, 0, {}, 0.0
            return
        if now < self._next_plan:
            return
        room = available + self._below
        self._choose(now, room - num_running * self._output.value)
        self._next_plan = now + (self._clock() - now) / PLANNING

    def _rank(self, now: float, horizon: float) -> list[_Session]:
        """Sessions that are worth their space, by `_worth`, then by time. The evicted part of a session takes space and
        saves nothing."""
        patience, shares = self.returns.patience, self._by_length.shares()
        demands = self._by_length.demands(self.growth)
        doubts = [0.0] * MAX_TURNS
        ranked: list[tuple[float, float, int]] = []
        for number, session in list(self._sessions.items()):
            entry, silence = session.entry, now - session.ended
            if session.is_lost:
                continue
            if entry is None and patience and silence > patience:
                session.is_lost = True
                self.returns.lost()
                self._by_length.observe(self._turns(session.end), False)
                continue
            if entry is not None and not entry.is_queued:
                self._drop(number)
                continue
            if entry is None:
                turns = self._turns(session.end)
                session.returns = self.returns.follows(silence, shares[turns])
                doubts[turns] += 1 - session.returns
            if (cached := _cached(session.node).end / session.end) >= LEAST_CACHED:
                value = horizon if entry is not None else self.returns.value(silence, shares[self._turns(session.end)])
                if value > 0:
                    since = session.ended if entry is None else entry.request.queued_at
                    ranked.append((-cached * self._worth(session, *demands), since, number))
        self._by_length.doubted, self.returns.num_doubted = doubts, sum(doubts)
        ranked.sort()
        return [self._sessions[number] for _, _, number in ranked]

    def _worth(self, session: _Session, turns: list[float], tokens: list[float]) -> float:
        """Tokens that holding a session is expected to save, over the space that it takes: until it returns, and in its
        later turns."""
        length, returns = session.end, session.returns if session.entry is None else 1.0
        turn = self._turns(length)
        return returns / (1 + returns * (turns[turn] + tokens[turn] / length))

    def _choose(self, now: float, room: float) -> None:
        horizon = self.horizon
        self.returns.update(horizon)
        self._held, self._displaced, self._before = 0, 0, {}
        holds, displaced, seen = list[_Session](), list[tuple[_Session, int]](), set[Node]()
        for session in self._rank(now, horizon):
            size, path = self._cached_path(session, seen)
            if self._held + size <= room:
                if session.entry is not None:
                    self._before[session.entry] = self._held
                seen.update(path)
                holds.append(session)
                self._held += size
            elif session.entry is not None:
                displaced.append((session, size))
        self._project(holds, horizon)
        self._reserve = 0.0
        if holds or self.returns.value(0.0, rounded(self.returns.share)) > 0:  # running sessions will be held
            self._reserve = self._growth_reserve(horizon)
        before = int(self._held + max(self._reserve, self._projection.peak))
        for session, size in displaced:  # they come before requests without cached KV
            assert session.entry is not None
            self._before[session.entry] = before
            before += size
            self._displaced += size
            self._tree.touch(_cached(session.node))
        for session in reversed(holds):  # sessions that are not held are evicted first, then the least valuable
            self._tree.touch(_cached(session.node))

    def _project(self, holds: list[_Session], horizon: float) -> None:
        """Expects the growth of the admitted sessions, as many turns ahead as pass within the horizon."""
        shares, members = self._by_length.shares(), list[tuple[int, float, float, float]]()
        for request in self._running.values():
            if request.row >= 0:  # not retracted
                has = request.num_computed
                end = max(len(request.prompt_ids) + self._output.value, has)
                turns = self._turns(end)
                members.append((turns, has, end, shares[turns]))
        for session in holds:
            members.append((self._turns(session.end), session.end, session.end, session.returns))
        cycle = self._gap.value * max(len(members), 1)
        self._projection = Projection(self.growth, shares, int(horizon / cycle) + 1 if cycle else 1)
        self._projection.add_all(members)
        size = self._first.value + self._output.value
        begins = len(members) / self._projection.num_turns(self._turns(size))  # as many as end, in a steady state
        self._projection.add_arrivals(begins, self._turns(size), size)

    def _growth_reserve(self, horizon: float) -> float:
        """Space that a further session leaves free. Held sessions grow by G tokens a second, and one ends every T
        seconds, which frees its space. With the reserve R a held session is evicted before that with the probability
        exp(-R / (G T)); recomputing it then takes the time of L tokens. Waiting for the end instead leaves L tokens of
        the pool unused for T seconds at most. Both are equal at R = G T log(1 + horizon / T), without ends at G
        horizon.
        """
        if not self._gap.value:
            return 0.0
        rate, ends = self.growth / self._gap.value, (1 - self.returns.share) / self._gap.value
        return rate * math.log1p(horizon * ends) / ends if ends > 1e-9 else rate * horizon

    def must_wait(self, entry: Waiting, total: int, room: float, idle: bool = False) -> bool:
        """Whether a request that takes `total` of `room` tokens waits because sessions would lose their KV. `idle`: no
        request runs."""
        if not (self._held or self._reserve) or entry.request.retractions:
            return False
        if not (self._held or self._displaced or self._running):
            return False
        size = len(entry.tokens) + self._output.value
        before: float | None = self._before.get(entry)
        if before is None:
            ahead = max(self._reserve, self._projection.peak_with(self._turns(size), size))
            before = self._held + self._displaced + ahead
        missing = total + before - (room + self._below)
        if missing < 0:
            return False
        now = self._clock()
        if self._is_over(entry):
            return False
        if not self._rotation.pass_over(entry, now):
            return True
        recomputed = total + self._projection.growth_of(self._turns(size), size)
        return not self._rotation.affords(entry, recomputed * self.times.per_token, now, idle)

    def admitted(self, entry: Waiting) -> None:
        """Records that a request runs."""
        if self.is_off:
            return
        if entry.request.rid not in self._running:
            self._running[entry.request.rid] = entry.request
            if entry not in self._before and (self._held or self._reserve):
                size = len(entry.tokens) + self._output.value
                self._projection.add(self._turns(size), size)
        self._rotation.admitted(entry)

    def may_evict(self, entry: Waiting) -> bool:
        """Whether a request is worth examining although many were passed over."""
        return entry in self._before or entry is self._rotation.first() or self._is_over(entry)

    def _is_over(self, entry: Waiting) -> bool:
        return self._limit is not None and self._clock() - entry.request.queued_at >= self._limit

    def _cached_path(self, session: _Session, seen: set[Node]) -> tuple[int, list[Node]]:
        """Evictable nodes of a session that are not in `seen`; their tokens, and its tokens that are not cached any
        more."""
        node = walk = _cached(session.node)
        size, path = session.end - node.end, list[Node]()
        while walk.parent is not None and walk not in seen and not walk.lock:
            path.append(walk)
            size += len(walk.tokens)
            walk = walk.parent
        return size, path

    def _drop(self, number: int) -> None:
        session = self._sessions.pop(number)
        of_head = self._by_head[session.head]
        del of_head[number]
        if not of_head:
            del self._by_head[session.head]


def _cached(node: Node) -> Node:
    """The node, or the part in front of it that is still cached."""
    while node.parent is not None and not node.alive and getattr(node, "places", None) is None:
        node = node.parent
    return node
