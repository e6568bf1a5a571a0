"""Measurements of a scheduler over a window of time, on which the autopilot's decisions are based."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from moe_engine.scheduler.events import RequestEvent
from moe_engine.scheduler.request_table import RequestTable
from moe_engine.scheduler.stats import Totals

BACKLOGGED = 0.6
"""Share of the time with waiting requests from which the engine, not its load, limits the throughput."""
BLOCK_SECONDS = 1.0
"""The noise of a ratio is estimated from blocks of at least this time,"""
MOST_BATCHES = 8
"""which are grouped into this many batches: within a batch, blocks are correlated."""


@dataclass(frozen=True, slots=True)
class LatencyLimits:
    """Limits of the time to first token and of the time between tokens, in seconds; None: none."""

    ttft: float | None = None
    itl: float | None = None


@dataclass(slots=True)
class Counts:
    """Sums over time; `*_seconds` of requests or shares are integrals over time."""

    seconds: float = 0.0
    backlog_seconds: float = 0.0
    row_blocked_seconds: float = 0.0
    memory_blocked_seconds: float = 0.0
    prompt_step_seconds: float = 0.0
    request_seconds: float = 0.0
    running_seconds: float = 0.0
    queue_seconds: float = 0.0
    usage_seconds: float = 0.0
    ended: int = 0
    late_first_tokens: int = 0
    late_waiting: int = 0
    tokens: int = 0
    slow_tokens: int = 0
    slow_behind_prompts: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    retractions: int = 0


class Window:
    """Counts while there are requests; idle time does not count.

    Args:
        now: its begin, on the scheduler's clock.
    """

    def __init__(
        self, table: RequestTable, totals: Totals, limits: LatencyLimits, now: float, decode_steps: int
    ) -> None:
        self.counts = Counts()
        self._table, self._totals, self._limits = table, totals, limits
        self._last = self._last_decode = now
        self._generated, self._prompts = totals.generated_tokens, totals.prompt_tokens
        self._cached, self._retractions = totals.cached_tokens, totals.retractions
        self._decode_steps = decode_steps
        self._behind_prompts = False
        self._was_busy = bool(table.live)
        self._block_began = (0.0, 0, 0.0)
        self._blocks: list[tuple[float, int, float]] = []
        """Seconds, tokens and `request_seconds` of each."""

    def step(
        self, events: Sequence[RequestEvent], now: float, decode_steps: int, memory_blocked: bool, with_prompts: bool
    ) -> None:
        """The result of a step, or of several decode steps, was applied.

        Args:
            decode_steps: decode steps planned since the start.
            memory_blocked: waiting requests have no room in the KV pool.
            with_prompts: the step computed prompts.
        """
        counts, table, totals = self.counts, self._table, self._totals
        passed, self._last = now - self._last, now
        generated, self._generated = totals.generated_tokens - self._generated, totals.generated_tokens
        if not self._was_busy:  # it was idle
            self._last_decode, self._decode_steps = now, decode_steps
        else:
            self._add_time(passed, memory_blocked, with_prompts)
            self._behind_prompts |= with_prompts
            if decode_steps > self._decode_steps and generated:
                self._add_gaps(generated, (now - self._last_decode) / (decode_steps - self._decode_steps))
                self._last_decode, self._decode_steps = now, decode_steps
                self._behind_prompts = False
        counts.tokens += generated + totals.prompt_tokens - self._prompts
        self._end_block()
        counts.prompt_tokens += totals.prompt_tokens - self._prompts
        counts.cached_tokens += totals.cached_tokens - self._cached
        counts.retractions += totals.retractions - self._retractions
        self._prompts, self._cached = totals.prompt_tokens, totals.cached_tokens
        self._retractions = totals.retractions
        for event in events:
            if event.finish_reason is not None:
                self._add_end(event)
        self._was_busy = bool(table.live)

    def _add_time(self, passed: float, memory_blocked: bool, with_prompts: bool) -> None:
        counts, table = self.counts, self._table
        waiting, running = len(table.queue), table.num_running
        counts.seconds += passed
        counts.request_seconds += passed * (waiting + running)
        counts.running_seconds += passed * running
        counts.queue_seconds += passed * waiting
        counts.usage_seconds += passed * table.kv_cache.num_used / table.kv_cache.slots.num_slots
        if with_prompts:
            counts.prompt_step_seconds += passed
        if waiting:
            counts.backlog_seconds += passed
            if running >= table.settings.max_running_requests:
                counts.row_blocked_seconds += passed
            elif memory_blocked:
                counts.memory_blocked_seconds += passed

    def _end_block(self) -> None:
        counts, began = self.counts, self._block_began
        if counts.seconds - began[0] >= BLOCK_SECONDS:
            now = self._block_began = (counts.seconds, counts.tokens, counts.request_seconds)
            self._blocks.append((now[0] - began[0], now[1] - began[1], now[2] - began[2]))

    def _add_gaps(self, tokens: int, gap: float) -> None:
        if self._limits.itl is not None and gap > self._limits.itl:
            self.counts.slow_tokens += tokens
            if self._behind_prompts:
                self.counts.slow_behind_prompts += tokens

    def _add_end(self, event: RequestEvent) -> None:
        timing, limit = event.timing, self._limits.ttft
        self.counts.ended += 1
        if limit is not None and timing is not None and timing.first_token_at is not None:
            self.counts.late_first_tokens += timing.first_token_at - timing.queued_at > limit

    def count_waiting(self) -> None:
        """Counts waiting requests whose first token is already late."""
        limit = self._limits.ttft
        if limit is not None:
            due = self._last - limit
            waiting = (r for r in self._table.live.values() if r.first_token_at is None)
            self.counts.late_waiting = sum(request.queued_at < due for request in waiting)

    # -- figures

    @property
    def seconds(self) -> float:
        """Time with requests."""
        return self.counts.seconds

    def share(self, seconds: float) -> float:
        """`seconds` as a share of the window's time."""
        return seconds / max(self.counts.seconds, 1e-9)

    @property
    def is_backlogged(self) -> bool:
        return self.share(self.counts.backlog_seconds) > BACKLOGGED

    @property
    def usage(self) -> float:
        """Mean token usage."""
        return self.share(self.counts.usage_seconds)

    @property
    def service_seconds(self) -> float:
        """Mean time of a request without its wait, by Little's law; at most the time of the window."""
        return min(self.counts.running_seconds / max(self.counts.ended, 1), self.counts.seconds)

    @property
    def throughput(self) -> float:
        """Prompt and answer tokens a second."""
        return self.counts.tokens / max(self.counts.seconds, 1e-9)

    @property
    def throughput_noise(self) -> float:
        """Relative standard error of `throughput`."""
        return _noise_of_ratio([(block[1], block[0]) for block in self._blocks])

    @property
    def latency_noise(self) -> float:
        """Relative standard error of `latency_per_token`."""
        return _noise_of_ratio([(block[2], block[1]) for block in self._blocks])

    @property
    def latency_per_token(self) -> float:
        """Seconds that requests spend for each of their tokens, the wait included, by Little's law."""
        return self.counts.request_seconds / max(self.counts.tokens, 1)

    @property
    def slow_share(self) -> float:
        """Share of the tokens that came later than the limit."""
        return self.counts.slow_tokens / max(self.counts.tokens - self.counts.prompt_tokens, 1)

    @property
    def late_share(self) -> float:
        """Share of the requests whose first token came later than the limit, or has not come within it."""
        late = self.counts.late_first_tokens + self.counts.late_waiting
        return late / max(self.counts.ended + self.counts.late_waiting, 1)

    @property
    def hit_rate(self) -> float:
        """Cached share of the admitted prompt tokens."""
        return self.counts.cached_tokens / max(self.counts.prompt_tokens, 1)

    @property
    def retraction_rate(self) -> float:
        """Retractions for each request that ended."""
        return self.counts.retractions / max(self.counts.ended, 1)


def _noise_of_ratio(blocks: Sequence[tuple[float, float]]) -> float:
    """Relative standard error of sum(x) / sum(y) by batch means; 0 where it is not known."""
    count = min(len(blocks), MOST_BATCHES)
    all_x, all_y = (sum(column) for column in zip(*blocks)) if blocks else (0, 0)
    if count < 2 or not all_x or not all_y:
        return 0.0
    batches = [blocks[i * len(blocks) // count : (i + 1) * len(blocks) // count] for i in range(count)]
    residuals = [sum(x - all_x / all_y * y for x, y in batch) for batch in batches]
    return math.sqrt(sum(r * r for r in residuals) * count / (count - 1)) / all_x
