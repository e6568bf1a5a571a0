"""Waiting queue: requests before admission, in an order without starvation.

Order: by priority (if enabled), then a front region, then by policy. The front region holds, by arrival, retracted
requests (they were admitted once already) and aged requests. A request is aged when the number of admissions since its
arrival exceeds the queue length at its arrival plus `max_overtakes`; under fcfs it would be running by then. Under lpm,
lof, dfs-weight and random every request is therefore admitted after a bounded number of admissions. There is no aging
between priorities: priority is strict by design.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import deque
from heapq import heapify, heappop, heappush
from operator import attrgetter
from typing import Any

from moe_engine.scheduler.config import SchedulerConfig
from moe_engine.scheduler.kv_cache.prefix_keys import bigrams
from moe_engine.scheduler.kv_cache.radix_cache import Match, RadixCache
from moe_engine.types import Request

FRONT, NORMAL = 0, 1
MAX_STALE = 64
"""Max removed entries in the heap of ages, beyond the number of waiting entries."""
_KEY = attrgetter("key")


class Waiting:
    """A queue entry. Caches its prefix match, which is refreshed only when the tree has changed.

    `prefix_keys` are the tokens' keys in the radix cache: the tokens themselves, or pairs of neighbors.
    """

    __slots__ = (
        "_match", "_version", "deadline", "is_queued", "key", "limit", "prefetch", "prefix_keys", "request", "tokens",
    )  # fmt: skip

    def __init__(self, request: Request, tokens: list[int], limit: int, prefix_keys: list[int]) -> None:
        self.request = request
        self.tokens = tokens
        self.prefix_keys = prefix_keys
        self.limit = limit
        """Max tokens from the radix cache."""
        self.key: tuple[float, int, int, int] = (0, 0, 0, 0)
        self.deadline = 0
        self.is_queued = True
        self.prefetch: Any = None
        """Its `storage_tier.Prefetch`; None: not begun."""
        self._match = Match(None, 0)
        self._version = -1

    def matched(self, tree: RadixCache) -> Match:
        """The currently cached prefix; the walk starts from the last matched node."""
        if self._version != tree.version:
            self._match = tree.peek(self.prefix_keys, self.limit, self.request.namespace, self._match.node)
            self._version = tree.version
        return self._match


def prefix_limit(request: Request) -> int:
    """Max tokens of a request from the radix cache: all but the last one, whose logits are needed for sampling.

    With prompt log-probabilities from position s on, the logits at s - 1 are needed too.
    """
    if request.computes_all:
        return 0
    limit = request.num_tokens - 1
    if request.logprobs is not None and request.logprobs.start is not None and not request.output_ids:
        limit = min(limit, max(request.logprobs.start - 1, 0))
    return limit


class WaitingQueue:
    """Entries sorted by (priority, region, policy key, arrival)."""

    def __init__(self, config: SchedulerConfig) -> None:
        self._config = config
        self.entries: list[Waiting] = []
        """In static order; read only."""
        self._by_arrival: deque[Waiting] = deque()
        self._last_deadline = 0
        self._admissions = 0
        self.num_retracted = 0
        """Entries of retracted requests."""
        self._oldest: list[tuple[float, int, Waiting]] = []
        """Heap of (queued_at, number of the push, entry); its first entry waits, others may have been removed."""
        self._num_pushed = 0

    def __len__(self) -> int:
        return len(self.entries)

    def push(self, request: Request, *, front: bool = False) -> Waiting:
        """Adds a request; `front` for a retracted one."""
        tokens = request.prompt_ids + request.output_ids if request.output_ids else request.prompt_ids
        keys = bigrams(tokens) if self._config.bigram_prefixes else tokens
        entry = Waiting(request, tokens, prefix_limit(request), keys)
        self._place(entry, FRONT if front else NORMAL)
        self.num_retracted += request.retractions > 0
        self._note_age(entry)
        if not front:
            due = self._admissions + len(self.entries) + self._config.max_overtakes
            self._last_deadline = entry.deadline = max(due, self._last_deadline)
            self._by_arrival.append(entry)
        return entry

    def remove(self, entry: Waiting) -> None:
        """Removes an entry."""
        self._unplace(entry)
        self.num_retracted -= entry.request.retractions > 0
        entry.deadline, entry.is_queued = -1, False
        self._drop_stale()

    def admit(self, entries: list[Waiting]) -> None:
        """Removes entries that start to run."""
        for entry in entries:
            self.remove(entry)
        self._admissions += len(entries)

    def oldest_arrival(self) -> float | None:
        """`queued_at` of the oldest waiting request; None if none waits."""
        return self._oldest[0][0] if self._oldest else None

    def _drop_stale(self) -> None:
        """Drops removed entries, and with them their prompts, from the head of the heap of ages."""
        oldest = self._oldest
        while oldest and not oldest[0][2].is_queued:
            heappop(oldest)

    def promote_aged(self) -> None:
        """Moves aged entries to the front region. Deadlines grow with arrival, so only the oldest is checked."""
        waiting = self._by_arrival
        while waiting and waiting[0].deadline < self._admissions:
            entry = waiting.popleft()
            if entry.deadline >= 0:
                self._unplace(entry)
                self._place(entry, FRONT)

    def regions(self) -> tuple[list[Waiting], list[Waiting]]:
        """The front region and the rest; meaningful only without priorities."""
        cut = bisect_left(self.entries, NORMAL, key=lambda e: e.key[1])
        return self.entries[:cut], self.entries[cut:]

    def _note_age(self, entry: Waiting) -> None:
        if len(self._oldest) > 2 * len(self.entries) + MAX_STALE:  # rare: most policies admit the oldest first
            self._oldest = [item for item in self._oldest if item[2].is_queued]
            heapify(self._oldest)
        self._num_pushed += 1
        heappush(self._oldest, (entry.request.queued_at, self._num_pushed, entry))

    def _place(self, entry: Waiting, region: int) -> None:
        request, config = entry.request, self._config
        priority = config.priority_key(request.priority) if config.uses_priority else 0.0
        by_policy = -request.max_new_tokens if config.effective_policy == "lof" and region == NORMAL else 0
        entry.key = (priority, region, by_policy, request.seq)
        insort(self.entries, entry, key=_KEY)

    def _unplace(self, entry: Waiting) -> None:
        index = bisect_left(self.entries, entry.key, key=_KEY)
        assert self.entries[index] is entry
        del self.entries[index]
