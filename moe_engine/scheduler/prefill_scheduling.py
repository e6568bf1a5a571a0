"""Prefills of a plan: admission of waiting requests, preemption for more urgent ones, prompts into the radix cache."""

from __future__ import annotations

from collections.abc import Callable

from moe_engine.scheduler.admission import Admission, Blocked, PrefillBatch
from moe_engine.scheduler.admission_backoff import AdmissionBackoff
from moe_engine.scheduler.plan_draft import PlanDraft
from moe_engine.scheduler.request_table import RequestTable
from moe_engine.scheduler.retraction import choose_preempted, less_urgent
from moe_engine.scheduler.stats import Totals
from moe_engine.scheduler.suspects import Suspects
from moe_engine.scheduler.token_ratio import NewTokenRatio
from moe_engine.types import Request, Status


class PrefillScheduling:
    """Builds the prefill batches of plans."""

    def __init__(
        self,
        table: RequestTable,
        suspects: Suspects,
        ratio: NewTokenRatio,
        backoff: AdmissionBackoff,
        totals: Totals,
        clock: Callable[[], float],
    ) -> None:
        self._table, self._config = table, table.config
        self._kv_cache = table.kv_cache
        self._suspects = suspects
        self._ratio = ratio
        self._backoff = backoff
        self._totals = totals
        self._clock = clock
        self._admission = Admission(table.settings, table.kv_cache, table.queue, table.lora, table.sessions)
        self.prefill_only = False
        """With mixed chunks, which plan decodes first: the next plan is prefill-only, to preempt, or because
        decodes took most of the last chunk."""
        self.to_cache: list[Request] = []
        """Prefills of the last plan, which are not in the radix cache yet."""

    @property
    def is_out_of_memory(self) -> bool:
        """Whether the last batch with new requests ended because the KV pool had no room."""
        return self._admission.blocked is Blocked.TOKENS

    def drop(self) -> None:
        """Drops the prefills of steps in flight, which will not end."""
        self.to_cache.clear()
        self.prefill_only = False

    def cache_prefills(self) -> None:
        """Puts the prefills of the last plan into the radix cache: later steps run after it."""
        for request in self.to_cache:
            if request.row >= 0:
                write = self._kv_cache.cache_unfinished(request)
                if write is not None:
                    self._table.row_writes.append(write)
        self.to_cache.clear()

    def build(self, num_mixed: int, is_in_flight: bool) -> PrefillBatch | None:
        """The next prefill batch, perhaps empty. None: a preemption has to wait for the step in flight."""
        table, backoff = self._table, self._backoff
        may_admit = bool(table.queue.entries)
        if may_admit and table.num_running:
            may_admit = backoff.may_admit(table.num_released)
        may_join = self._suspects.is_free if self._suspects else None
        if may_join is not None:
            if table.chunked is not None and not may_join(table.chunked.request):
                return PrefillBatch()  # at most one chunked prompt at a time
            may_admit &= not self._suspects.blocks_admission(table)
        if table.chunked is None and not may_admit:
            return PrefillBatch()
        batch = self.admit(num_mixed, may_admit, may_join)
        self.prefill_only = self._has_left_waiting(num_mixed, batch)
        if batch.jobs:  # admitted requests reserve less from the next step on: retry then
            return batch
        if batch.blocked is Blocked.ROWS or batch.blocked is Blocked.TOKENS:
            backoff.out_of_memory()
        victims = self._preempted_for(batch) if self._config.preempts else []
        if not victims:
            return batch
        if num_mixed or is_in_flight:  # decodes are planned already, or in flight: preempt in the next call
            self.prefill_only = True
            backoff.retry_now()
            return batch if num_mixed else None
        table.retract(victims)
        self._totals.preemptions += len(victims)
        return self.admit(num_mixed, may_admit, may_join)

    def _has_left_waiting(self, num_mixed: int, batch: PrefillBatch) -> bool:
        """Whether decodes took most of the chunk, and prompts wait: they get more tokens from every second step."""
        table, chunk = self._table, self._table.settings.chunk_tokens
        if not num_mixed or chunk is None or 2 * self._config.floor_page(max(chunk - num_mixed, 0)) >= chunk:
            return False
        taken = bool(batch.jobs) and batch.jobs[-1].is_last
        return bool(table.queue.entries) or not (taken or table.chunked is None)

    def _preempted_for(self, batch: PrefillBatch) -> list[Request]:
        """Running requests to preempt so that the first blocked request can run."""
        table, config = self._table, self._config
        if (entry := batch.without_adapter) is not None and table.lora is not None:
            victims = table.lora.users_of_one(less_urgent(table.in_rows(), entry.request, config))
            if victims:
                return victims
        entry = batch.blocked_entry
        if entry is None or (batch.blocked is not Blocked.ROWS and batch.blocked is not Blocked.TOKENS):
            return []
        need = config.ceil_page(len(entry.tokens)) + config.page_size
        return choose_preempted(table.in_rows(), entry.request, config, self._kv_cache, need)

    def admit(self, num_mixed: int, may_admit: bool, may_join: Callable[[Request], bool] | None = None) -> PrefillBatch:
        """A batch of the chunked request and, if `may_admit`, of waiting requests that `may_join`."""
        table, ratio = self._table, self._ratio.value
        running = table.num_running
        return self._admission.build(ratio, table.decodes, running, table.chunked, num_mixed, may_admit, may_join)

    def add(self, draft: PlanDraft, batch: PrefillBatch) -> None:
        """Adds the prefills of a non-empty batch."""
        now = self._clock()
        table = self._table
        table.chunked = None
        for job in batch.jobs:
            request = job.entry.request
            if job.is_new:
                request.status = Status.RUNNING
                request.followed = True
                if request.first_scheduled is None:
                    request.first_scheduled, request.paused_seconds = now, 0.0
                    self._kv_cache.note_hit(request, job.start)
                    self._totals.cached_tokens += job.start
                    self._totals.prompt_tokens += len(request.prompt_ids)
            if not job.is_last:
                table.chunked = job.entry
            if draft.add_prefill(job):
                table.decodes.append(request)
            self.to_cache.append(request)
        self._totals.hit_rate = batch.cached_tokens / (batch.cached_tokens + batch.num_tokens)
