"""Retraction: which running requests go back to the queue when the KV pool is full.

Windowed layers may have a pool of their own, and either pool may be full. Victims are the requests with the fewest
outputs, ties the longest prompt (least work lost, most room gained); with priorities the least urgent first. A victim's
computed KV is put into the radix cache, so it resumes from there unless that KV is evicted meanwhile; it waits in the
front region of the queue. Against thrashing, a retraction makes room for several decode steps, and admission pauses
until a request has ended or that many steps have passed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from moe_engine.scheduler.config import SchedulerConfig
from moe_engine.scheduler.kv_cache.kv_cache_manager import KVCacheManager
from moe_engine.scheduler.request_table import RequestTable
from moe_engine.scheduler.stats import Totals
from moe_engine.types import Request


def victim_order(requests: Sequence[Request], config: SchedulerConfig) -> list[Request]:
    """The requests in the order of retraction."""

    def key(request: Request) -> tuple[float, int, int]:
        urgency = -config.priority_key(request.priority) if config.uses_priority else 0.0
        return urgency, len(request.output_ids), -len(request.prompt_ids)

    return sorted(requests, key=key)


@dataclass
class _Pool:
    """Free tokens of a pool, tokens that each request needs from it, and tokens that a victim frees."""

    room: int
    needs: dict[str, int]
    gain: Callable[[Request], int]

    def __post_init__(self) -> None:
        self.need = sum(self.needs.values())

    def retract(self, victim: Request) -> None:
        self.need -= self.needs[victim.rid]
        self.room += self.gain(victim)


def choose_victims(requests: Sequence[Request], config: SchedulerConfig, kv_cache: KVCacheManager) -> list[Request]:
    """The requests to retract so that the others can decode for `retract_decode_steps`; never all of them.

    Counts only a victim's private slots as freed. No step may be in flight.
    """
    steps = {
        request.rid: max(1, min(config.retract_decode_steps, request.max_new_tokens - len(request.output_ids)))
        for request in requests
    }
    needs = {request.rid: kv_cache.decode_need([request], steps[request.rid]) for request in requests}
    pools = [
        _Pool(
            kv_cache.slots.num_free + kv_cache.tree.num_evictable,
            needs,
            lambda victim: config.ceil_page(len(victim.slots)) - victim.num_in_tree,
        )
    ]
    if (windows := kv_cache.window_room) is not None:
        grown = {request.rid: windows.growth(request, needs[request.rid]) for request in requests}  # in whole pages
        pools.append(_Pool(windows.available_now, grown, windows.gain))
    victims: list[Request] = []
    for victim in victim_order(requests, config)[:-1]:
        if all(pool.need <= pool.room for pool in pools):
            break
        victims.append(victim)
        for pool in pools:
            pool.retract(victim)
    return victims


def less_urgent(running: Sequence[Request], waiting: Request, config: SchedulerConfig) -> list[Request]:
    """Running requests that the waiting one may preempt: less urgent by more than the threshold, in the order of their
    preemption."""
    mine = config.priority_key(waiting.priority)
    worse = [r for r in running if config.priority_key(r.priority) - mine > config.priority_preemption_threshold]
    worse.sort(key=lambda r: (-config.priority_key(r.priority), -r.seq))
    return worse


def choose_preempted(
    running: Sequence[Request], waiting: Request, config: SchedulerConfig, kv_cache: KVCacheManager, need: int
) -> list[Request]:
    """Running requests to preempt for a much more urgent waiting one: the least urgent and newest first, until a row
    and `need` tokens would be free. Empty if requests less urgent by more than the threshold do not suffice."""
    room = kv_cache.available
    victims: list[Request] = []
    for victim in less_urgent(running, waiting, config):
        victims.append(victim)
        room += config.ceil_page(len(victim.slots)) - victim.num_in_tree
        if room >= need:
            return victims
    return []


def retract_all(table: RequestTable, totals: Totals) -> None:
    """Every running request returns to the queue, for a pause of generation. No step may be in flight."""
    victims = list(table.in_rows())
    table.retract(victims)
    totals.retractions += len(victims)
