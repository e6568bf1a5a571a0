"""Request table: all live requests of a scheduler, and how a request is added, ended or retracted."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable

from moe_engine.errors import InputError
from moe_engine.scheduler.config import SchedulerConfig
from moe_engine.scheduler.events import RequestEvent, finish_event
from moe_engine.scheduler.finish import check_fits, end_ids
from moe_engine.scheduler.jump_forward import JumpForward
from moe_engine.scheduler.kv_cache.kv_cache_manager import KVCacheManager
from moe_engine.scheduler.kv_cache.radix_cache import Node
from moe_engine.scheduler.kv_cache.state_kv_cache import StateKVCacheManager
from moe_engine.scheduler.kv_cache.windowed_kv_cache import WindowedKVCacheManager
from moe_engine.scheduler.lora_slots import LoraSlots
from moe_engine.scheduler.request_timeouts import RequestTimeouts
from moe_engine.scheduler.run_settings import RunSettings
from moe_engine.scheduler.session_hold import SessionHold
from moe_engine.scheduler.waiting_queue import Waiting, WaitingQueue
from moe_engine.types import NO_LORA_SLOT, FinishReason, PackedLogprobs, Request, RowWrite, Status

QUEUE_FULL = "The request queue is full."


def _kv_cache_of(config: SchedulerConfig) -> KVCacheManager:
    if config.num_snapshots:
        return StateKVCacheManager(config)
    return WindowedKVCacheManager(config) if config.window else KVCacheManager(config)


class RequestTable:
    """Live requests: waiting requests are in `queue`, running requests hold a row (`row >= 0`).

    Of the running requests, `decodes` compute one more token in the next step; `chunked` has a partly computed prompt;
    the rest only wait for the result of a step in flight. `row_writes` and `finished_rows` are sent with the next plan.
    """

    def __init__(self, config: SchedulerConfig, clock: Callable[[], float] = time.monotonic) -> None:
        self.config = config
        self.settings = RunSettings(config)
        self.kv_cache = _kv_cache_of(config)
        self.queue = WaitingQueue(config)
        self.sessions = SessionHold.of(config, self.kv_cache.tree, clock)
        self.lora = LoraSlots(config.lora_slots) if config.lora_slots else None
        """Slots of LoRA adapters, if LoRA is enabled."""
        self.jumps = JumpForward(config)
        self.timeouts: RequestTimeouts | None = None
        """Time limits of requests; None without any."""
        self._clock = clock
        self._set_timeouts()
        self.settings.on_change.append(self._set_timeouts)
        self.live: dict[str, Request] = {}
        self.decodes: list[Request] = []
        self.chunked: Waiting | None = None
        self.row_writes: list[RowWrite] = []
        self.finished_rows: list[int] = []
        self.aborting: list[Request] = []
        self.prompt_logprobs: dict[str, list[PackedLogprobs]] = {}
        """Log-probabilities of prompts in prefill, chunk by chunk."""
        self.num_released = 0
        """Rows released so far; a change means that admission may succeed again."""
        self._seq = 0

    def _set_timeouts(self) -> None:
        self.timeouts = RequestTimeouts.of(self.settings, self._clock)

    @property
    def num_running(self) -> int:
        """Requests that hold a row."""
        return len(self.live) - len(self.queue.entries)

    def in_rows(self) -> list[Request]:
        """Requests that can be retracted (complete only when no step is in flight)."""
        return self.decodes if self.chunked is None else [*self.decodes, self.chunked.request]

    def take_prompt_logprobs(self, rid: str) -> PackedLogprobs | None:
        """Removes and returns the log-probabilities of a prompt so far."""
        parts = self.prompt_logprobs.pop(rid, None)
        return PackedLogprobs.join(parts) if parts else None

    def take_lora_loads(self) -> list[tuple[int, int]]:
        """LoRA adapters that take a slot before the next step: (slot, adapter)."""
        return [] if self.lora is None else self.lora.take_loads()

    # -- add

    def add(self, request: Request, now: float) -> list[RequestEvent]:
        """See `Scheduler.add`. A request that already ran on another rank is not refused for a full queue."""
        if request.rid in self.live:
            raise InputError(f"rid {request.rid!r} is already in use by a running request", field="rid")
        check_fits(request, self.config)
        events: list[RequestEvent] = []
        limit = self.settings.max_queued_requests
        if limit is not None and len(self.queue) >= limit and not request.retractions:
            events = self._displace(request, now)
        self._seq += 1
        request.seq = self._seq
        request.queued_at = now
        request.end_ids = end_ids(request)
        request.ends_by_text = bool(request.sampling.stop or request.sampling.stop_regex)
        self.live[request.rid] = request
        entry = self.queue.push(request, front=request.retractions > 0)
        if self.kv_cache.storage is not None:
            self.kv_cache.storage.begin(entry)
        self.sessions.arrived(entry)
        if request.bootstrap is not None and not request.retractions:
            self.kv_cache.enter_transfer(request)
        return events

    def _displace(self, request: Request, now: float) -> list[RequestEvent]:
        """Makes room in a full queue: aborts its least urgent, newest request if that is less urgent than this one."""
        key = self.config.priority_key
        if not self.config.uses_priority:
            raise InputError(QUEUE_FULL, status=503)
        worst = max(self.queue.entries, key=lambda e: (key(e.request.priority), e.request.seq))
        if key(worst.request.priority) <= key(request.priority):
            raise InputError(QUEUE_FULL, status=503)
        self.queue.remove(worst)
        return [self._end_waiting(worst.request, FinishReason("abort", message=QUEUE_FULL, status_code=503), now)]

    # -- end

    def end_all(self, requests: Iterable[Request], reason: FinishReason, now: float) -> list[RequestEvent]:
        """Ends waiting requests immediately, and marks running ones for `end_aborting`."""
        events = []
        entries: dict[str, Waiting] = {}
        for request in requests:
            if request.row < 0:
                entries = entries or {entry.request.rid: entry for entry in self.queue.entries}
                self.queue.remove(entries[request.rid])
                events.append(self._end_waiting(request, reason, now))
            elif request.to_abort is None:
                request.to_abort = reason
                self.aborting.append(request)
        return events

    def end_aborting(self, now: float) -> list[RequestEvent]:
        """Ends the requests marked by `end_all`."""
        events = []
        for request in self.aborting:
            if request.finish_reason is None and request.to_abort is not None:
                prompt_logprobs = self.take_prompt_logprobs(request.rid)
                self.end_running(request, request.to_abort)
                events.append(finish_event(request, request.to_abort, now, [], None, prompt_logprobs))
        if self.aborting:
            self.aborting = []
            self.drop_rowless()
        return events

    def _end_waiting(self, request: Request, reason: FinishReason, now: float) -> RequestEvent:
        del self.live[request.rid]
        self.sessions.aborted(request)  # it may have run before a retraction
        request.status = Status.FINISHED
        request.finish_reason = reason
        return finish_event(request, reason, now, [])

    def end_running(self, request: Request, reason: FinishReason) -> None:
        """Frees everything that the request holds. The caller must call `drop_rowless`."""
        del self.live[request.rid]
        request.status = Status.FINISHED
        request.finish_reason = reason
        node = self._release_row(request)
        if reason.type == "abort":
            self.sessions.aborted(request)
        else:
            self.sessions.ended(request, node)

    def retract(self, victims: list[Request]) -> None:
        """Moves running requests back to the front region of the queue; their KV stays cached until it is evicted.

        No step may be in flight.
        """
        for request in victims:
            self._release_row(request)
            request.status = Status.WAITING
            request.num_computed = 0
            request.retractions += 1
            self.queue.push(request, front=True)
        self.drop_rowless()

    def end_failed(self, request: Request, reason: FinishReason, now: float) -> list[RequestEvent]:
        """Ends the request that caused a failed step, unless it has already ended. It may be running or waiting."""
        if request.status is Status.FINISHED:
            return []
        if request.row < 0:
            return self.end_all([request], reason, now)
        request.num_computed = min(request.num_computed, request.num_in_tree)  # caches no further KV of it
        prompt_logprobs = self.take_prompt_logprobs(request.rid)
        self.end_running(request, reason)
        self.drop_rowless()
        return [finish_event(request, reason, now, [], None, prompt_logprobs)]

    def start_over(self) -> None:
        """Moves all running requests back to the queue, by arrival, with nothing computed: the KV cache is lost."""
        running = sorted((r for r in self.live.values() if r.row >= 0), key=lambda r: r.seq)
        self.finished_rows += [request.row for request in running]
        self.num_released += len(running)
        for request in running:
            request.row, request.slots, request.num_computed = -1, [], 0
            request.tree_node, request.num_in_tree, request.window_start = None, 0, 0
            request.num_in_flight = request.num_maybe = 0
            request.lora_slot = NO_LORA_SLOT
            request.status = Status.WAITING
            request.retractions += 1
            self.queue.push(request, front=True)
        self.decodes, self.chunked, self.row_writes = [], None, []
        self.prompt_logprobs.clear()
        if self.lora is not None:
            self.lora.start_over()
        self.kv_cache.reset()

    def drop_rowless(self) -> None:
        """Removes requests without a row from `decodes`."""
        self.decodes = [r for r in self.decodes if r.row >= 0]

    def _release_row(self, request: Request) -> Node:
        row = request.row
        if self.lora is not None:
            self.lora.release(request)
        node = self.kv_cache.release(request)
        self.finished_rows.append(row)
        self.num_released += 1
        self.prompt_logprobs.pop(request.rid, None)
        if self.row_writes:
            self.row_writes = [w for w in self.row_writes if w.row != row]
        if self.chunked is not None and self.chunked.request is request:
            self.chunked = None
        return node
