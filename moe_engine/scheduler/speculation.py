"""The scheduler's part of speculation: how many drafts each decode brings, and what came of them.

Accepting and rolling back only move counts. A request keeps the slots that its rejected drafts had and uses them for
its next tokens.
"""

from __future__ import annotations

from moe_engine.scheduler.draft_depth import make_policy
from moe_engine.scheduler.events import SpecStats
from moe_engine.scheduler.kv_cache_manager import KVCacheManager
from moe_engine.scheduler.plan_draft import PlanDraft, StepRecord
from moe_engine.scheduler.request_table import RequestTable
from moe_engine.scheduler.step_cost_model import StepCost
from moe_engine.types import Request, SpeculationConfig, StepResult


class Speculator:
    """Plans the drafts of one rank and counts their fate."""

    def __init__(self, config: SpeculationConfig) -> None:
        self._config = config
        self._needs_follow = config.method == "nextn"
        self._policy = make_policy(config)
        self._verified = 0
        self._proposed = [0] * config.num_steps
        self._accepted = [0] * config.num_steps
        self._depth = 0
        self.decode_steps = 0
        """Requests times steps with drafts; `accepted_tokens` those steps brought. For the log line's `accept len`."""
        self.accepted_tokens = 0

    def follows(self, requests: list[Request], *, ordinary: bool) -> bool:
        """Whether the drafter takes in what a step with these requests computes; those it skips get no drafts later.

        Args:
            ordinary: the decodes among them were planned as a step without speculation.
        """
        if not self._needs_follow:
            return False
        follow = not ordinary and self._policy.following and any(r.followed for r in requests)
        if not follow:
            for request in requests:
                request.followed = False
        return follow

    def decode_into(
        self, draft: PlanDraft, requests: list[Request], book: RequestTable, memory: KVCacheManager
    ) -> bool | None:
        """Adds decodes, with the drafts for which there is room. None if there is no room even without; else as
        `PlanDraft.add_decodes`."""
        draftable = [r.followed or not self._needs_follow for r in requests]
        depth = self._policy.choose(len(requests), sum(draftable))
        if not any(draftable):
            depth = 0
        for tried in (depth, 0) if depth else (0,):
            depths = [tried if able and _wants_drafts(r) else 0 for r, able in zip(requests, draftable)]
            widths = [self._config.num_slots(d) for d in depths]
            if memory.make_room(memory.reserve_need(requests, widths)):
                self._depth = max(depths)
                # drafting sleeps, or nobody here has drafts to come: an ordinary step, where nothing is uncertain
                wanted = self._policy.following and (any(draftable) or _prompts_may_join(book))
                if not (wanted or any(r.num_maybe for r in requests)):
                    return draft.add_decodes(requests, memory)
                return self._add(draft, requests, depths, widths, memory)
        return None

    def _add(
        self, draft: PlanDraft, requests: list[Request], depths: list[int], widths: list[int], memory: KVCacheManager
    ) -> bool:
        reserved = memory.reserve(requests, widths)
        return draft.add_speculative(requests, depths, [self._config.num_nodes(d) for d in depths], reserved)

    def observe(self, record: StepRecord, result: StepResult, draft_outcomes: list[tuple[int, int]]) -> None:
        """A step with decodes is over.

        Args:
            draft_outcomes: of its requests with drafts, as `DepthPolicy.observe` takes them.
        """
        for judged, good in draft_outcomes:
            self._verified += 1
            self.decode_steps += 1
            self.accepted_tokens += good + 1
            for i in range(judged):
                self._proposed[i] += 1
            for i in range(good):
                self._accepted[i] += 1
        self._policy.observe(draft_outcomes, _cost(record, result))

    def take_accept_length(self) -> float | None:
        """Mean tokens by request and step with drafts since the last call; None if there were no drafts."""
        steps, tokens = self.decode_steps, self.accepted_tokens
        self.decode_steps = self.accepted_tokens = 0
        return tokens / steps if steps else None

    def stats(self) -> SpecStats:
        following = self._policy.following
        return SpecStats(self._depth, following, self._verified, list(self._proposed), list(self._accepted))


def _cost(record: StepRecord, result: StepResult) -> StepCost | None:
    """What a step of decodes alone cost; None of others, and where the worker does not say."""
    if record.prefilled or not result.seconds:
        return None
    drafting = sum(1 for depth in record.depths if depth)
    depth = max(record.depths, default=0)
    seconds = (result.seconds, result.draft_seconds, result.follow_seconds, result.model_seconds)
    return StepCost(len(record.sampled), drafting, depth, *seconds, plain=not record.depths)


def _prompts_may_join(book: RequestTable) -> bool:
    """Whether the step may hold prompts, which the drafter should follow, beside the decodes."""
    return book.config.enable_mixed_chunk and (len(book.queue) > 0 or book.chunked is not None)


def _wants_drafts(request: Request) -> bool:
    """Whether more than one further token could be used."""
    return request.max_new_tokens - len(request.output_ids) - request.num_in_flight > 1
