"""The table of changes that the autopilot may propose: condition, setting, new value, reason.

The conditions are those of the tuning guides, over a window. An earlier row has precedence.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from moe_engine.scheduler.autopilot.window import LatencyLimits, Window
from moe_engine.scheduler.run_settings import RunSettings

MOST = 0.5
"""Share of the time from which on a condition holds."""
HIGH_USAGE = 0.9
MISSED = 0.05
"""Share of tokens or requests above which a limit counts as missed; below a fifth of it there is slack."""
OVERLOADED = 0.5
"""Share of late first tokens from which the queue, not the steps, decides the latency."""
FEW_RETRACTIONS, MANY_RETRACTIONS = 0.02, 0.2
"""Retractions for each request that ended."""
FULL_POOL = 0.85
"""Target token usage of less conservative admission."""
LEAST_CONSERVATIVENESS = 0.05
LEAST_CHUNK = 64
LONG_QUEUE = 4.0
SOME_HITS, MANY_HITS = 0.02, 0.9
"""Cache hit rates between which the order of the queue can raise them."""


@dataclass(frozen=True)
class Proposal:
    """Attributes:
    must_gain: the change is undone unless the figures improve; else it is undone if they worsen.
    relieves: the change relaxes a limit, within those of the launch. Such changes are made together, as soon as
    requests wait.
    """

    setting: str
    old: Any
    new: Any
    reason: str
    must_gain: bool = False
    relieves: bool = False


Rule = Callable[[Window, RunSettings, LatencyLimits], Proposal | None]


def proposal_of(
    setting: str, value: Any, settings: RunSettings, reason: str, *, must_gain: bool = False, relieves: bool = False
) -> Proposal | None:
    """None if the setting has that value."""
    old = settings.values()[setting]
    return None if value == old else Proposal(setting, old, value, reason, must_gain, relieves)


def has_time_left(window: Window, limits: LatencyLimits) -> bool:
    """Whether longer steps are allowed: few tokens are late; or many first tokens are late, which more throughput
    reduces."""
    if limits.itl is None or window.slow_share < MISSED / 5 or window.late_share > OVERLOADED:
        return True
    return window.slow_share < MISSED < window.late_share


def more_rows(window: Window, settings: RunSettings, limits: LatencyLimits) -> Proposal | None:
    """Requests wait for a row although the KV pool has room."""
    blocked = window.share(window.counts.row_blocked_seconds)
    if blocked < MOST or window.usage > HIGH_USAGE or not has_time_left(window, limits):
        return None
    limit = settings.config.max_rows
    at_once = limits.itl is None or window.late_share > OVERLOADED
    rows = limit if at_once else min(2 * settings.max_running_requests, limit)
    reason = f"requests waited for a row {blocked:.0%} of the time at token usage {window.usage:.2f}"
    return proposal_of("max_running_requests", rows, settings, reason, relieves=True)


def fewer_rows(window: Window, settings: RunSettings, limits: LatencyLimits) -> Proposal | None:
    """Decode steps take longer than the limit."""
    slow = window.counts.slow_tokens - window.counts.slow_behind_prompts
    share = slow / max(window.counts.tokens - window.counts.prompt_tokens, 1)
    mean = window.counts.running_seconds / max(window.seconds, 1e-9)
    if limits.itl is None or share < MISSED or mean < 2:
        return None
    rows = max(int(min(mean, settings.max_running_requests) * 0.75), 1)
    reason = f"{share:.0%} of the tokens came later than {limits.itl * 1e3:g} ms at {mean:.0f} running requests"
    return proposal_of("max_running_requests", rows, settings, reason)


def smaller_chunks(window: Window, settings: RunSettings, limits: LatencyLimits) -> Proposal | None:
    """Running requests wait for prompt steps longer than the limit: one prompt step between decodes, then smaller."""
    share = window.counts.slow_behind_prompts / max(window.counts.tokens - window.counts.prompt_tokens, 1)
    if limits.itl is None or share < MISSED:
        return None
    reason = f"{share:.0%} of the tokens came later than {limits.itl * 1e3:g} ms behind prompts"
    if settings.max_consecutive_prefills > 1:
        return proposal_of("max_consecutive_prefills", 1, settings, reason)
    size = settings.chunk_tokens or settings.max_prefill_tokens
    least = max(settings.config.page_size, LEAST_CHUNK)
    if size <= least:
        return None
    return proposal_of("chunked_prefill_size", _whole_pages(max(size // 2, least), settings), settings, reason)


def larger_chunks(window: Window, settings: RunSettings, limits: LatencyLimits) -> Proposal | None:
    """Prompt steps take most of the time: fewer and larger steps. With an ITL limit only if prompts wait."""
    prompts = window.share(window.counts.prompt_step_seconds)
    needed = limits.itl is None or window.is_backlogged or window.late_share > MISSED
    if prompts < MOST or not needed or not has_time_left(window, limits):
        return None
    reason = f"{prompts:.0%} of the time went to prompt steps"
    size, limit = settings.chunk_tokens, settings.config.chunk_tokens
    if size is None or limit is None or size >= limit:
        return None
    at_once = limits.itl is None or window.late_share > OVERLOADED
    new = limit if at_once else _whole_pages(min(4 * size, limit), settings)
    return proposal_of("chunked_prefill_size", new, settings, reason, relieves=True)


def more_prefills(window: Window, settings: RunSettings, limits: LatencyLimits) -> Proposal | None:
    """First tokens are late, and running requests have time left."""
    if limits.ttft is None or window.late_share < MISSED or window.slow_share > MISSED / 5:
        return None
    reason = f"{window.late_share:.0%} of the first tokens came later than {limits.ttft:g} s"
    count = min(4 * settings.max_consecutive_prefills, settings.config.max_consecutive_prefills)
    return proposal_of("max_consecutive_prefills", count, settings, reason, must_gain=True, relieves=True)


def less_conservative(window: Window, settings: RunSettings, limits: LatencyLimits) -> Proposal | None:
    """Requests wait for memory that is reserved for answers which end earlier.

    The pool is full of tokens (`usage`) and of reservations, which are proportional to the conservativeness. With the
    new value the additional requests fill the pool to `FULL_POOL`.
    """
    blocked = window.share(window.counts.memory_blocked_seconds)
    if blocked < MOST or window.usage > FULL_POOL or window.retraction_rate > FEW_RETRACTIONS:
        return None
    old = min(
        settings.schedule_conservativeness, 1 / settings.config.init_new_token_ratio
    )  # a larger value reserves no more
    factor = (1 / FULL_POOL - 1) * window.usage / (1 - window.usage)
    at_launch = settings.config.schedule_conservativeness
    value = max(old * min(max(factor, 0.25), 0.8), at_launch if at_launch < old else LEAST_CONSERVATIVENESS)
    if value >= settings.schedule_conservativeness:
        return None
    reason = f"requests waited for memory {blocked:.0%} of the time at token usage {window.usage:.2f}"
    return proposal_of("schedule_conservativeness", round(value, 3), settings, reason, relieves=value >= at_launch)


def more_conservative(window: Window, settings: RunSettings, limits: LatencyLimits) -> Proposal | None:
    """Requests are recomputed because too many were admitted."""
    most = max(settings.config.schedule_conservativeness, 1.0)
    if window.retraction_rate < MANY_RETRACTIONS or settings.schedule_conservativeness >= most:
        return None
    value = min(max(settings.schedule_conservativeness, LEAST_CONSERVATIVENESS) * 1.6, most)
    reason = f"{window.retraction_rate:.2f} retractions a request"
    return proposal_of("schedule_conservativeness", round(value, 3), settings, reason, must_gain=True)


def order_by_prefix(window: Window, settings: RunSettings, limits: LatencyLimits) -> Proposal | None:
    """Many requests wait: those whose prefix is cached may go first."""
    queue = window.share(window.counts.queue_seconds)
    if settings.schedule_policy != "fcfs" or "lpm" not in settings.policies or queue < LONG_QUEUE:
        return None
    if not SOME_HITS < window.hit_rate < MANY_HITS:
        return None
    reason = f"{queue:.0f} requests waited at a cache hit rate of {window.hit_rate:.2f}"
    return proposal_of("schedule_policy", "lpm", settings, reason, must_gain=True)


def order_by_arrival(window: Window, settings: RunSettings, limits: LatencyLimits) -> Proposal | None:
    """The order by prefix finds no prefixes."""
    queue = window.share(window.counts.queue_seconds)
    if settings.schedule_policy != "lpm" or "fcfs" not in settings.policies or queue < LONG_QUEUE:
        return None
    if window.hit_rate > SOME_HITS / 2:
        return None
    return proposal_of("schedule_policy", "fcfs", settings, f"a cache hit rate of {window.hit_rate:.2f}")


RULES: tuple[Rule, ...] = (
    smaller_chunks,
    fewer_rows,
    more_rows,
    more_conservative,
    less_conservative,
    order_by_prefix,
    order_by_arrival,
    larger_chunks,
    more_prefills,
)


def _whole_pages(tokens: int, settings: RunSettings) -> int:
    page = settings.config.page_size
    return max(tokens // page * page, page)
