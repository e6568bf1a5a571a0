"""Jump-forward: output tokens for which a grammar allows only one text are computed in one step, like a prompt chunk.

With the masks of a step the core reports the forced tokens of a request (`core.late_masks`): the step in flight samples
the first one. The next decode step of the request computes all of them and samples the token after them, so they take
no steps of their own. Outputs are the same. A report counts only at the position that it was made for: after a
retraction or a failed step it is ignored.
"""

from __future__ import annotations

from collections.abc import Mapping

from moe_engine.scheduler.config import SchedulerConfig
from moe_engine.scheduler.kv_cache.kv_cache_manager import KVCacheManager
from moe_engine.scheduler.plan_draft import PlanDraft, StepRecord
from moe_engine.types import Request

MIN_TOKENS = 4
"""Shortest run of forced tokens. It saves three steps of the request; a step with a run costs half a decode step more
than one without (measured on two CPU cores)."""
MIN_SHARE = 0.25
"""Min tokens that a step must save, by its number of requests: all of them wait for a step with runs."""


class JumpForward:
    """The forced tokens of one scheduler's requests. Without `SchedulerConfig.jump_forward` there are none."""

    def __init__(self, config: SchedulerConfig) -> None:
        self.enabled = config.jump_forward
        self._max_tokens = config.chunk_tokens or config.max_prefill_tokens
        self._reported: dict[Request, tuple[int, list[int]]] = {}
        self._planned: tuple[int, Mapping[Request, list[int]]] = (0, {})
        self.num_tokens = 0
        """Output tokens that took no step of their own."""

    def __bool__(self) -> bool:
        return bool(self._reported)

    def report(self, request: Request, position: int, tokens: list[int]) -> None:
        """Reports the only possible tokens of the request from `position` on. The step in flight samples the first
        one."""
        if len(tokens) >= MIN_TOKENS:
            self._reported[request] = position, tokens

    def planned(self, number: int) -> Mapping[Request, list[int]]:
        """Forced tokens in the result of step `number`, before the sampled one."""
        return self._planned[1] if self._planned[0] == number else {}

    def decode_into(self, draft: PlanDraft, requests: list[Request], kv_cache: KVCacheManager) -> bool | None:
        """As `PlanDraft.add_decodes`, with jumps. Takes the reports."""
        jumps = self._usable(requests)
        plain = [request for request in requests if request not in jumps]
        need = sum(kv_cache.decode_need([request], len(tokens)) for request, tokens in jumps.items())
        if not kv_cache.make_room(kv_cache.decode_need(plain) + need):
            jumps, plain = {}, requests
            if not kv_cache.make_room(kv_cache.decode_need(requests)):
                return None
        some_end = draft.add_decodes(plain, kv_cache) if plain else False
        for request, tokens in jumps.items():
            slots = kv_cache.extend(request, len(tokens))
            assert slots is not None
            some_end |= draft.add_jump(request, tokens, slots)
            self.num_tokens += len(tokens) - 1
        self._planned = kv_cache.step + 1, {request: tokens[1:] for request, tokens in jumps.items()}
        return some_end

    def _usable(self, requests: list[Request]) -> dict[Request, list[int]]:
        """Reports for the position that each request computes next, within the step's and the request's limits."""
        reported, self._reported = self._reported, {}
        found: dict[Request, list[int]] = {}
        room = self._max_tokens - len(requests)
        for request in requests:
            position, tokens = reported.get(request, (-1, []))
            wanted = request.max_new_tokens - len(request.output_ids) - request.num_in_flight
            count = min(len(tokens), wanted, room + 1)
            if position == request.num_computed and count >= MIN_TOKENS:
                found[request] = tokens[:count]
                room -= count - 1
        saved = self._max_tokens - len(requests) - room
        return found if saved >= MIN_SHARE * len(requests) else {}


def with_jumps(record: StepRecord, sampled: list[list[int]]) -> list[list[int]]:
    """The tokens of a step's requests: forced ones before the sampled ones."""
    if not record.jumped:
        return sampled
    found = list(sampled)
    for i, forced in record.jumped.items():
        request = record.sampled[i]
        if request.row >= 0:
            request.num_in_flight -= len(forced)
            request.num_computed -= len(forced)  # `read_result` adds those that it keeps
        found[i] = forced + sampled[i]
    return found
