"""The scheduler's part of speculation: the number of drafts of each decode, and acceptance statistics.

Acceptance and rollback only change counts. A request keeps the slots of its rejected drafts for its next tokens.
"""

from __future__ import annotations

from moe_engine.scheduler.draft_depth import DraftOutcome, make_policy
from moe_engine.scheduler.events import SpecStats
from moe_engine.scheduler.kv_cache.kv_cache_manager import KVCacheManager
from moe_engine.scheduler.plan_draft import PlanDraft, StepRecord
from moe_engine.scheduler.request_table import RequestTable
from moe_engine.scheduler.step_cost_model import StepCost
from moe_engine.types import Request, SpeculationConfig, StepResult


class Speculator:
    """Plans the drafts of one scheduler and counts accepted drafts."""

    def __init__(self, config: SpeculationConfig) -> None:
        self._config = config
        self._needs_follow = config.follows
        self._policy = make_policy(config)
        self._verified = 0
        self._proposed = [0] * config.num_steps
        self._accepted = [0] * config.num_steps
        self._depth = 0
        self.decode_steps = 0
        """Steps with drafts, summed over requests; `accepted_tokens` of these steps. For the log's `accept len`."""
        self.accepted_tokens = 0

    def follows(self, requests: list[Request], *, plain: bool) -> bool:
        """Whether the drafter runs a draft extend in a step with these requests; without a draft extend they get no
        drafts later.

        Args:
            plain: the decodes among them were planned without speculation.
        """
        if not self._needs_follow:
            return False
        follow = not plain and self._policy.enabled and any(r.followed for r in requests)
        if not follow:
            for request in requests:
                request.followed = False
        return follow

    def decode_into(
        self, draft: PlanDraft, requests: list[Request], table: RequestTable, kv_cache: KVCacheManager
    ) -> bool | None:
        """Adds decodes, with drafts if there is room. None if there is no room even without drafts; else as
        `PlanDraft.add_decodes`."""
        draftable = [r.followed or not self._needs_follow for r in requests]
        depth = self._policy.choose(len(requests), sum(draftable))
        if not any(draftable):
            depth = 0
        for tried in (depth, 0) if depth else (0,):
            depths = [tried if able and _wants_drafts(r) else 0 for r, able in zip(requests, draftable)]
            widths = [self._config.num_slots(d) for d in depths]
            if kv_cache.make_room(kv_cache.reserve_need(requests, widths)):
                self._depth = max(depths)
                # drafting is disabled, or no request can get drafts: a plain step with known lengths
                wanted = self._policy.enabled and (any(draftable) or _prompts_may_join(table))
                if not (wanted or any(r.num_maybe for r in requests)):
                    return draft.add_decodes(requests, kv_cache)
                return self._add(draft, requests, depths, widths, kv_cache)
        return None

    def _add(
        self, draft: PlanDraft, requests: list[Request], depths: list[int], widths: list[int], kv_cache: KVCacheManager
    ) -> bool:
        reserved = kv_cache.reserve(requests, widths)
        return draft.add_speculative(requests, depths, [self._config.num_nodes(d) for d in depths], reserved)

    def observe(self, record: StepRecord, result: StepResult, draft_outcomes: list[DraftOutcome]) -> None:
        """Takes in the result of a step with decodes.

        Args:
            draft_outcomes: of its requests with drafts, as in `DepthPolicy.observe`.
        """
        for judged, good, used in draft_outcomes:
            if used < 0:
                continue  # in vain
            self._verified += 1
            self.decode_steps += 1
            self.accepted_tokens += good + 1
            for i in range(judged):
                self._proposed[i] += 1
            for i in range(good):
                self._accepted[i] += 1
        self._policy.observe(draft_outcomes, _cost(record, result))

    def take_accept_length(self) -> float | None:
        """Mean tokens per request and step with drafts since the last call; None if there were no drafts."""
        steps, tokens = self.decode_steps, self.accepted_tokens
        self.decode_steps = self.accepted_tokens = 0
        return tokens / steps if steps else None

    def stats(self) -> SpecStats:
        return SpecStats(self._depth, self._verified, list(self._proposed), list(self._accepted))


def _cost(record: StepRecord, result: StepResult) -> StepCost | None:
    """Cost of a decode-only step; None for other steps, and if the worker does not report it."""
    if record.prefilled or not record.sampled or not result.seconds:
        return None
    drafting = sum(1 for depth in record.depths if depth)
    depth = max(record.depths, default=0)
    seconds = (result.seconds, result.draft_seconds, result.follow_seconds, result.model_seconds)
    return StepCost(len(record.sampled), drafting, depth, *seconds, plain=not record.depths)


def _prompts_may_join(table: RequestTable) -> bool:
    """Whether the step may have prompts in addition to the decodes, which need a draft extend."""
    return table.config.enable_mixed_chunk and (len(table.queue) > 0 or table.chunked is not None)


def _wants_drafts(request: Request) -> bool:
    """Whether the request can use more than one further token."""
    return request.max_new_tokens - len(request.output_ids) - request.num_in_flight > 1
