"""Decodes of a plan: running requests, their slots for the next tokens, and retraction when memory is short."""

from __future__ import annotations

import logging
from collections.abc import Callable

from moe_engine.errors import MoeEngineError
from moe_engine.scheduler import log_lines
from moe_engine.scheduler.admission_backoff import AdmissionBackoff
from moe_engine.scheduler.plan_draft import PlanDraft
from moe_engine.scheduler.request_table import RequestTable
from moe_engine.scheduler.retraction import choose_victims
from moe_engine.scheduler.speculation import Speculator
from moe_engine.scheduler.stats import Totals
from moe_engine.scheduler.suspects import Suspects
from moe_engine.scheduler.token_ratio import NewTokenRatio
from moe_engine.types import Request

logger = logging.getLogger("moe_engine")


class DecodeScheduling:
    """Adds decodes to plans."""

    def __init__(
        self,
        table: RequestTable,
        suspects: Suspects,
        ratio: NewTokenRatio,
        backoff: AdmissionBackoff,
        totals: Totals,
        speculator: Speculator | None,
        check_integrity: Callable[[], list[str]],
    ) -> None:
        self._table = table
        self._kv_cache = table.kv_cache
        self._suspects = suspects
        self._ratio = ratio
        self._backoff = backoff
        self._totals = totals
        self._speculator = speculator
        self._check_integrity = check_integrity

    def candidates(self, alone: Request | None = None) -> list[Request]:
        """Requests that decode in a step of this suspect; None: in a step without suspects."""
        decodes = self._table.decodes
        if alone is not None:
            return [alone] if alone in decodes else []
        return [r for r in decodes if r not in self._suspects] if self._suspects else decodes

    def add(self, draft: PlanDraft, is_in_flight: bool, alone: Request | None = None) -> bool:
        """Adds decodes of all running requests, or of one suspect. False if that must wait for the step in flight, or
        for a load of KV."""
        table, connector = self._table, self._kv_cache.connector
        some_end = self._add(draft, self.candidates(alone))
        if some_end is not None:
            self._ratio.decay()
        elif is_in_flight or (connector is not None and connector.num_loading):
            return False
        else:
            self._retract()
            some_end = self._add(draft, self.candidates(alone))
        if some_end:
            table.decodes = [r for r in table.decodes if len(r.output_ids) + r.num_in_flight < r.max_new_tokens]
        return True

    def _add(self, draft: PlanDraft, requests: list[Request]) -> bool | None:
        """None if there is no room; else whether some of the requests need no further step."""
        if not requests:
            return False
        table, kv_cache = self._table, self._kv_cache
        if self._speculator is not None:
            return self._speculator.decode_into(draft, requests, table, kv_cache)
        if table.jumps:
            return table.jumps.decode_into(draft, requests, kv_cache)
        if not kv_cache.make_room(kv_cache.decode_need(requests)):
            return None
        return draft.add_decodes(requests, kv_cache)

    def _retract(self) -> None:
        """Retracts requests to make room for the decodes. No step is in flight."""
        table, kv_cache, old = self._table, self._kv_cache, self._ratio.value
        victims = choose_victims(table.in_rows(), table.config, kv_cache)
        if victims:
            table.retract(victims)
            self._totals.retractions += len(victims)
            self._ratio.after_retraction(table.decodes)
            self._backoff.after_retraction(table.config.retract_decode_steps, table.num_released)
            logger.info(log_lines.retract_line(len(victims), old, self._ratio.value))
        need = kv_cache.decode_need(table.decodes)
        if kv_cache.make_room(need):
            return
        found = self._check_integrity()
        if not kv_cache.make_room(need):
            raise MoeEngineError(
                f"the KV pool of {kv_cache.slots.num_slots} tokens has no room for {need} more although only "
                f"{len(table.decodes)} requests run; findings: {found or 'none'}"
            )
