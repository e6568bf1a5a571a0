"""Counters and snapshots for metrics, logs and load balancing."""

from __future__ import annotations

from dataclasses import dataclass

from moe_engine.scheduler.events import SchedulerStats, SpecStats
from moe_engine.scheduler.request_table import RequestTable


@dataclass(slots=True)
class Totals:
    """Counts since the start, except `hit_rate`, which is of the last prefill batch."""

    retractions: int = 0
    preemptions: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    generated_tokens: int = 0
    drains: int = 0
    hit_rate: float = 0.0


def snapshot(
    table: RequestTable, totals: Totals, ratio: float, now: float, speculation: SpecStats | None = None
) -> SchedulerStats:
    """Statistics of this scheduler, in constant time: the status board is updated many times a second."""
    kv_cache, queue = table.kv_cache, table.queue
    used = kv_cache.num_used
    oldest = queue.oldest_arrival()
    return SchedulerStats(
        num_running=table.num_running,
        num_waiting=len(queue),
        num_slots=kv_cache.slots.num_slots,
        num_used=used,
        token_usage=used / kv_cache.slots.num_slots,
        num_free=kv_cache.slots.num_free,
        num_evictable=kv_cache.tree.num_evictable,
        num_protected=kv_cache.tree.num_protected,
        new_token_ratio=ratio,
        cache_hit_rate=totals.hit_rate,
        num_retracted=queue.num_retracted,
        num_retractions_total=totals.retractions,
        num_preemptions_total=totals.preemptions,
        prompt_tokens_total=totals.prompt_tokens,
        cached_tokens_total=totals.cached_tokens,
        generation_tokens_total=totals.generated_tokens,
        oldest_wait_seconds=now - oldest if oldest is not None else 0.0,
        num_drains_total=totals.drains,
        speculation=speculation,
    )
