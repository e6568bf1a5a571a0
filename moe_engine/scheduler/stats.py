"""Counters and snapshots for metrics, logs and load balancing."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from moe_engine.scheduler.admission import PrefillBatch
from moe_engine.scheduler.events import PlanFacts, SchedulerStats, SpecStats
from moe_engine.scheduler.plan_draft import PlanDraft
from moe_engine.scheduler.request_table import RequestTable
from moe_engine.types import Request, StepPlan


@dataclass(slots=True)
class Totals:
    """Counts since the start, except `hit_rate`, that of the last prefill batch."""

    retractions: int = 0
    preemptions: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    generated_tokens: int = 0
    drains: int = 0
    waiting_timeouts: int = 0
    running_timeouts: int = 0
    hit_rate: float = 0.0

    def count_timeouts(self, waited: bool, count: int) -> None:
        if waited:
            self.waiting_timeouts += count
        else:
            self.running_timeouts += count


def snapshot(
    table: RequestTable,
    totals: Totals,
    ratio: float,
    now: float,
    speculation: SpecStats | None = None,
    prefill_delayer: dict[str, Any] | None = None,
) -> SchedulerStats:
    """Statistics of this scheduler, in constant time: the shared status is updated many times a second."""
    kv_cache, queue = table.kv_cache, table.queue
    connector = kv_cache.connector
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
        waiting_timeouts_total=totals.waiting_timeouts,
        running_timeouts_total=totals.running_timeouts,
        host_hit_tokens_total=connector.num_loaded_tokens if connector is not None else 0,
        storage_hit_tokens_total=getattr(connector, "num_loaded_from_storage", 0),
        storage_backed_up_tokens_total=kv_cache.storage.num_backed_up_tokens if kv_cache.storage is not None else 0,
        storage_paused=int(kv_cache.storage is not None and kv_cache.storage.pause.is_on),
        host_used_tokens=connector.num_stored if connector is not None else 0,
        host_total_tokens=connector.num_places if connector is not None else 0,
        num_incoming_transfers=len(getattr(connector, "incoming", ())),
        num_outgoing_transfers=len(getattr(connector, "outgoing", ())),
        transferred_tokens_total=getattr(connector, "num_transferred_tokens", 0),
        failed_transfers_total=getattr(connector, "num_failed_transfers", 0),
        speculation=speculation,
        prefill_delayer=prefill_delayer,
    )


def plan_facts(
    plan: StepPlan, draft: PlanDraft, batch: PrefillBatch, num_before: int, table: RequestTable
) -> PlanFacts:
    """Facts of a plan; `num_before`: requests that ran before its prefills joined."""
    kv_cache = table.kv_cache
    used = kv_cache.num_used
    return PlanFacts(
        number=plan.number,
        new_seq=len(batch.jobs),
        new_token=batch.num_tokens,
        cached_token=batch.cached_tokens,
        num_decodes=draft.num_decodes,
        num_running=num_before,
        num_queued=len(table.queue),
        num_used=used,
        token_usage=used / kv_cache.slots.num_slots,
        prompt_logprobs=any(_asks_prompt_logprobs(job.entry.request) for job in batch.jobs),
        host_hit=sum(entry.request.tiers[0] for entry in batch.admitted if entry.request.tiers),
        storage_hit=sum(entry.request.tiers[1] for entry in batch.admitted if entry.request.tiers),
        has_tiers=kv_cache.connector is not None,
        num_jumped=sum(map(len, draft.jumped.values())),
    )


def _asks_prompt_logprobs(request: Request) -> bool:
    return request.logprobs is not None and request.logprobs.start is not None
