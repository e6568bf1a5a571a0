"""Admission: which waiting requests a prefill batch takes, and how many of their tokens, by SGLang's budgets.

| budget    | tokens it allows                                                                                   |
|-----------|----------------------------------------------------------------------------------------------------|
| rem_total | free, soon free and evictable, less the expected growth of running and admitted requests           |
| rem_input | `--max-prefill-tokens` a batch; the first request may exceed it                                    |
| rem_chunk | `--chunked-prefill-size` a batch, at most a step; the request that reaches it is chunked.          |
|           | fewer while many requests decode that are not in the same step (`max_delayed_tokens`)              |

Slots are allocated at admission, so free slots need no bookkeeping here. Admission stops at the first request that does
not fit. This head-of-line blocking is deliberate: small requests cannot starve a large one.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Callable
from dataclasses import dataclass, field

from moe_engine.scheduler.kv_cache.kv_cache_manager import KVCacheManager
from moe_engine.scheduler.kv_cache.kv_connector import KVConnector
from moe_engine.scheduler.lora_slots import LoraSlots
from moe_engine.scheduler.policies import Policy
from moe_engine.scheduler.run_settings import RunSettings
from moe_engine.scheduler.session_hold import SessionHold
from moe_engine.scheduler.waiting_queue import Waiting, WaitingQueue
from moe_engine.types import Request, Status

_UNLIMITED = 1 << 60
MAX_HELD = 8
"""Max requests examined in a step while held sessions block the KV pool; beyond it, only requests of returning sessions
are examined."""
SHARED_TOKENS = 32
"""Prompts that share this many uncached tokens are not prefilled in the same batch: the second waits a step."""


class Blocked(enum.Enum):
    """Why admission stopped."""

    NOTHING = "queue empty"
    ROWS = "no free row"
    TOKENS = "no room in the KV pool"
    HELD = "would evict the KV of sessions that return"
    BUDGET = "batch full"


@dataclass(slots=True)
class PrefillJob:
    """Computes tokens [start, start + len(slots)) of a request."""

    entry: Waiting
    start: int
    slots: list[int]
    is_new: bool
    is_last: bool
    """The job completes the known sequence."""


@dataclass(slots=True)
class PrefillBatch:
    jobs: list[PrefillJob] = field(default_factory=list)
    admitted: list[Waiting] = field(default_factory=list)
    cached_tokens: int = 0
    blocked: Blocked = Blocked.NOTHING
    blocked_entry: Waiting | None = None
    without_adapter: Waiting | None = None
    """The first request that found all slots of LoRA adapters in use."""

    @property
    def num_tokens(self) -> int:
        return sum([len(job.slots) for job in self.jobs])


def expected_growth(request: Request, clip: int) -> int:
    """Tokens a request may still generate beyond those in flight, clipped for estimates."""
    return min(request.max_new_tokens - len(request.output_ids) - request.num_in_flight, clip)


def growth_of(requests: list[Request], clip: int) -> int:
    """Sum of `expected_growth`, without a call for each."""
    total = 0
    for request in requests:
        growth = request.max_new_tokens - len(request.output_ids) - request.num_in_flight
        total += growth if growth < clip else clip
    return total


class PrefillBudget:
    """The three budgets of one batch."""

    def __init__(
        self, settings: RunSettings, kv_cache: KVCacheManager, ratio: float, running: list[Request], num_mixed: int
    ) -> None:
        self._config = config = settings.config
        self._kv_cache = kv_cache
        clip = config.clip_max_new_tokens
        # The ratio also applies to requests that end by length only (ignore_eos): other requests end and free slots for
        # them; if that fails, a retracted request resumes from the radix cache.
        self._reserved = ratio * growth_of(running, clip)
        self._windows = kv_cache.window_room
        self._windows_reserved = 0.0
        if self._windows is not None:
            self._windows_reserved = self._windows.expected(ratio, ((r, expected_growth(r, clip)) for r in running))
        self.rem_input = settings.max_prefill_tokens - num_mixed
        chunk = settings.chunk_beside(0 if num_mixed else len(running))
        self.rem_chunk = _UNLIMITED if chunk is None else chunk - num_mixed

    @property
    def rem_total(self) -> float:
        return self._kv_cache.available - self._reserved

    @property
    def rem_windows(self) -> float:
        """Free tokens of windowed layers; unlimited if their KV is not bounded."""
        return _UNLIMITED if self._windows is None else self._windows.available - self._windows_reserved

    @property
    def room(self) -> int:
        """Free tokens of all layers."""
        return max(0, int(min(self.rem_total, self.rem_windows)))

    def has_room(self, total: int) -> bool:
        """Whether a request fits that needs `total` tokens until its end."""
        if self._windows is not None and self._windows.of_new(total) >= self.rem_windows:
            return False
        return total < self.rem_total

    def spend(self, request: Request, count: int, growth: int) -> None:
        """Charges `count` tokens of the batch (with slots allocated) and the request's expected `growth`."""
        pages = self._config.ceil_page(count)
        self.rem_input -= pages
        self.rem_chunk -= pages
        self._reserved += growth
        if self._windows is not None:
            self._windows_reserved += self._windows.growth(request, growth)

    @property
    def exhausted(self) -> bool:
        return self.rem_input <= 0 or self.rem_chunk <= 0 or self.rem_total <= 0


class Admission:
    """Builds prefill batches."""

    def __init__(
        self,
        settings: RunSettings,
        kv_cache: KVCacheManager,
        queue: WaitingQueue,
        lora: LoraSlots | None,
        sessions: SessionHold | None,
    ) -> None:
        self._settings, self._config = settings, settings.config
        self._kv_cache = kv_cache
        self._queue = queue
        self._lora = lora
        self._sessions = sessions
        self._policy = Policy(settings)
        self.blocked = Blocked.NOTHING
        """Why the last batch with new requests ended."""

    def build(
        self,
        ratio: float,
        running: list[Request],
        num_running: int,
        chunked: Waiting | None,
        num_mixed: int,
        may_admit: bool,
        may_join: Callable[[Request], bool] | None = None,
    ) -> PrefillBatch:
        """Allocates slots and rows for the next batch and removes admitted requests from the queue.

        Args:
            running: requests that will decode, to estimate their growth; `num_running` counts all with a row.
            chunked: the request in chunked prefill, if any; it comes first.
            num_mixed: decodes in the same step, whose slots are allocated already.
            may_admit: False to continue `chunked` only.
            may_join: the requests that may be admitted; None: all.
        """
        batch = PrefillBatch()
        budget = PrefillBudget(self._settings, self._kv_cache, ratio, running, num_mixed)
        if chunked is not None and not self._continue(chunked, batch, budget, others=num_running > 1):
            return batch
        num_held = 0
        if may_admit and self._sessions is not None:
            self._sessions.plan(self._kv_cache.available, num_running)
        if may_admit and not (batch.jobs and budget.exhausted):
            num_held = self._admit_in_order(batch, budget, num_running, may_join)
            self._queue.admit(batch.admitted)
            if self._sessions is not None:
                for entry in batch.admitted:
                    self._sessions.admitted(entry)
            self.blocked = batch.blocked
        if self._sessions is not None:
            self._sessions.holds_back = num_held > 0
        return batch

    def _admit_in_order(
        self, batch: PrefillBatch, budget: PrefillBudget, num_running: int, may_join: Callable[[Request], bool] | None
    ) -> int:
        """Admits waiting requests in the policy's order until one is blocked; the number of those held back meanwhile,
        for a bounded time."""
        connector = self._kv_cache.connector
        num_held, barred, urgency = 0, False, math.inf
        for entry in self._policy.order(self._queue, self._kv_cache.tree):
            if may_join is not None and not may_join(entry.request):
                continue
            # a request with an adapter overtakes no more urgent one
            if self._lora is not None and not self._lora.may_join(entry.request, barred or entry.key[0] > urgency):
                barred |= self._lora.bars(entry.request)
                if batch.without_adapter is None:
                    batch.without_adapter, urgency = entry, entry.key[0]
                continue
            if num_held >= MAX_HELD and self._sessions is not None and not self._sessions.may_evict(entry):
                continue
            if self._is_computed_by(batch, entry):
                continue
            if connector is not None and self._waits_for_kv(connector, entry, batch, budget, num_running, may_join):
                continue
            batch.blocked = self._admit(entry, batch, budget, num_running)
            if batch.blocked is Blocked.HELD:
                num_held += 1
                continue
            if batch.blocked is not Blocked.NOTHING:
                batch.blocked_entry = entry
                break
            if budget.exhausted or not batch.jobs[-1].is_last:
                batch.blocked = Blocked.BUDGET
                break
        return num_held

    def _is_computed_by(self, batch: PrefillBatch, entry: Waiting) -> bool:
        """Whether a request of the batch computes more of this entry's prompt than is cached. One step later that part
        is cached too; the wait is bounded by the other request's prefill."""
        if self._config.disable_radix_cache or not batch.jobs:
            return False
        least = entry.matched(self._kv_cache.tree).length + SHARED_TOKENS
        if least > entry.limit:
            return False
        keys, namespace = entry.prefix_keys[:least], entry.request.namespace
        return any(
            job.start + len(job.slots) >= least
            and job.entry.request.namespace == namespace
            and job.entry.prefix_keys[:least] == keys
            for job in batch.jobs
        )

    def _waits_for_kv(
        self,
        connector: KVConnector,
        entry: Waiting,
        batch: PrefillBatch,
        budget: PrefillBudget,
        num_running: int,
        may_join: Callable[[Request], bool] | None,
    ) -> bool:
        """Whether the request waits for KV of its prefix; begins the load if the request fits. Nothing is loaded while
        requests of a failed step are being retried."""
        config, kv_cache, request = self._config, self._kv_cache, entry.request
        if request.status is Status.WAITING_FOR_KV:
            return True
        storage = kv_cache.storage
        if may_join is not None or kv_cache.rows.num_free == 0:
            return False
        if storage is None and not connector.get_num_new_matched_tokens(entry):
            return False
        left = config.ceil_page(len(entry.tokens) - entry.matched(kv_cache.tree).length)
        total = left + expected_growth(request, config.clip_max_new_tokens) + config.page_size
        alone = not num_running and not batch.jobs
        if (not alone and not budget.has_room(total)) or self._must_leave(entry, total, budget, alone):
            return False  # `_admit` refuses it for the same reason
        if storage is not None:
            if storage.must_wait(entry):
                return True
            if not connector.get_num_new_matched_tokens(entry):
                return False
        return connector.start_load(entry, kv_cache.step)

    def _continue(self, entry: Waiting, batch: PrefillBatch, budget: PrefillBudget, others: bool) -> bool:
        """Adds the next chunk of the chunked request. True if it is the last one and others may join."""
        request = entry.request
        left = len(entry.tokens) - request.num_computed
        count = min(left, budget.rem_chunk)
        if others:
            count = min(count, budget.room)
        if count < left:
            count = self._config.floor_page(count)
        start = request.num_computed
        count = self._with_whole_images(request, start, count, left, budget.room if others else _UNLIMITED)
        if count <= 0:
            return False
        slots = self._kv_cache.extend(request, count)
        if slots is None:
            return False
        is_last = count == left
        batch.jobs.append(PrefillJob(entry, start, slots, is_new=False, is_last=is_last))
        budget.spend(request, count, expected_growth(request, self._config.clip_max_new_tokens) if is_last else 0)
        return is_last

    def _with_whole_images(self, request: Request, start: int, count: int, left: int, room: float) -> int:
        """The tokens of a chunk from `start` on that does not end inside an image, if the model asks for that. An image
        that no chunk holds gets a longer one, of at most `room` tokens."""
        if not self._config.whole_images or count >= left:
            return count
        stop = start + max(count, 0)
        cut = next((image for image in request.images if image.start - (stop == start) < stop < image.stop), None)
        if cut is None:
            return count
        if cut.start > start:
            return cut.start - start
        return cut.stop - start if cut.stop - start <= room else 0

    def _must_leave(self, entry: Waiting, total: int, budget: PrefillBudget, alone: bool) -> bool:
        """Whether the request waits because returning sessions would lose their KV."""
        if self._sessions is None:
            return False
        return self._sessions.must_wait(entry, total, self._kv_cache.available if alone else budget.rem_total, alone)

    def _admit(self, entry: Waiting, batch: PrefillBatch, budget: PrefillBudget, num_running: int) -> Blocked:
        config, kv_cache, request = self._config, self._kv_cache, entry.request
        most, joining = self._settings.prefill_max_requests, len(batch.admitted)
        if most is not None and len(batch.jobs) >= most:
            return Blocked.BUDGET
        if kv_cache.rows.num_free == 0 or num_running + joining >= self._settings.max_running_requests:
            return Blocked.ROWS
        alone = num_running == 0 and not batch.jobs  # then only free tokens count, not the expected growth
        left = len(entry.tokens) - entry.matched(kv_cache.tree).length
        growth = expected_growth(request, config.clip_max_new_tokens)
        pages = config.ceil_page(left)
        total = pages + growth + config.page_size
        if not alone and not budget.has_room(total):
            return Blocked.TOKENS
        if self._must_leave(entry, total, budget, alone):
            return Blocked.HELD
        if batch.jobs and pages >= budget.rem_input:
            return Blocked.BUDGET
        count = left if pages <= budget.rem_chunk else config.floor_page(budget.rem_chunk)
        count = self._with_whole_images(request, len(entry.tokens) - left, count, left, 0 if batch.jobs else _UNLIMITED)
        if count <= 0:
            return Blocked.BUDGET
        node = kv_cache.tree.match(entry.prefix_keys, entry.limit, request.namespace, entry.matched(kv_cache.tree).node)
        kv_cache.attach(request, node)
        slots = None
        if alone or budget.has_room(total):  # checked again: locking the prefix reduced the evictable tokens
            slots = kv_cache.extend(request, count)
        if slots is None:
            kv_cache.detach(request)
            return Blocked.TOKENS
        row = kv_cache.rows.take(1)
        assert row is not None
        request.row = row[0]
        if self._lora is not None:
            self._lora.take(request)
        is_last = count == left
        batch.jobs.append(PrefillJob(entry, node.end, slots, is_new=True, is_last=is_last))
        batch.admitted.append(entry)
        batch.cached_tokens += node.end
        budget.spend(request, count, growth if is_last else 0)
        return Blocked.NOTHING
