"""Events and statistics that the scheduler reports: of requests, of steps and of itself."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

from moe_engine.types import FinishReason, PackedLogprobs, Request


class RequestTiming(NamedTuple):
    """Timestamps of a request by the scheduler's clock (seconds); None if the event never happened."""

    queued_at: float
    first_scheduled: float | None
    first_token_at: float | None
    finished_at: float


class SpecCounts(NamedTuple):
    """Speculation of a request: steps with drafts, draft tokens, and steps by number of accepted drafts."""

    verify_ct: int
    proposed: int
    histogram: list[int]


class RequestEvent(NamedTuple):
    """New output of one request. `token_ids` are new; the counts are totals. `finish_reason` marks the last event.

    `timing`, `speculation` and `tiers` come with the last event, and with every event of a request that the frontend
    may end (`Request.ends_by_text`): its last event is too late for the answer. `logprobs` are those of `token_ids`;
    `prompt_logprobs` come once, with the first event that has tokens or an end.
    """

    rid: str
    token_ids: list[int]
    finish_reason: FinishReason | None
    cached_tokens: int
    retractions: int
    logprobs: PackedLogprobs | None = None
    prompt_logprobs: PackedLogprobs | None = None
    timing: RequestTiming | None = None
    speculation: SpecCounts | None = None
    vector: bytes | None = None
    """Pooled model: the vector, with the last event. Otherwise, if requested: the rows of the positions since the last
    event."""
    tiers: tuple[int, int, str] | None = None
    """See `Request.tiers`."""


def finish_event(
    request: Request,
    reason: FinishReason,
    now: float,
    token_ids: list[int],
    logprobs: PackedLogprobs | None = None,
    prompt_logprobs: PackedLogprobs | None = None,
    vector: bytes | None = None,
) -> RequestEvent:
    """The last event of a request."""
    vector = _taken(request) if vector is None else vector
    counts = request.cached_tokens, request.retractions
    event = RequestEvent(request.rid, token_ids, reason, *counts, logprobs, prompt_logprobs, vector=vector)
    return with_totals(event, request, now)


def with_totals(event: RequestEvent, request: Request, now: float) -> RequestEvent:
    """The event with times, speculation and tiers of its request."""
    timing = RequestTiming(request.queued_at, request.first_scheduled, request.first_token_at, now)
    speculation = None
    if request.spec_verify_ct:
        speculation = SpecCounts(request.spec_verify_ct, request.spec_proposed, request.spec_accepted)
    return event._replace(timing=timing, speculation=speculation, tiers=request.tiers)


def _taken(request: Request) -> bytes | None:
    """Rows of its positions since the last event."""
    return b"".join(request.positions) if request.positions else None


@dataclass(frozen=True, slots=True)
class PlanFacts:
    """Values of one plan for log lines and metrics. Counts of requests and tokens.

    `num_decodes` above 0 marks a decode iteration, `new_token` above 0 a prefill batch; with mixed chunks both.
    """

    number: int
    new_seq: int
    new_token: int
    cached_token: int
    num_decodes: int
    num_running: int
    """Requests that ran before this plan's prefills joined, as SGLang's lines count them."""
    num_queued: int
    num_used: int
    token_usage: float
    prompt_logprobs: bool = False
    """Whether this plan may compute prompt tokens whose log-probabilities are requested."""
    host_hit: int = 0
    """Tokens among `cached_token` that were loaded from host memory; `storage_hit`: of these, read from storage
    before."""
    storage_hit: int = 0
    has_tiers: bool = False
    num_jumped: int = 0
    """Output tokens that the plan computes as forced ones (`jump_forward`), besides the sampled ones."""


@dataclass(frozen=True, slots=True)
class SpecStats:
    """Speculation since the start. Lists are by draft position, the first at index 0.

    `accept_length` also counts the target model's own token: tokens per request and step with drafts. `accept_rates[i]`
    is the share of these steps whose drafts up to position i were all accepted.
    """

    depth: int
    verify_total: int
    proposed: list[int]
    accepted: list[int]

    @property
    def accept_length(self) -> float:
        return 1.0 + sum(self.accepted) / self.verify_total if self.verify_total else 1.0

    @property
    def accept_rates(self) -> list[float]:
        return [a / p if p else 0.0 for a, p in zip(self.accepted, self.proposed)]


@dataclass(frozen=True, slots=True)
class SchedulerStats:
    """A snapshot for metrics. `num_used` excludes cached prefixes without a lock."""

    num_running: int
    num_waiting: int
    num_slots: int
    num_used: int
    token_usage: float
    num_free: int
    num_evictable: int
    num_protected: int
    new_token_ratio: float
    cache_hit_rate: float
    """cached / (cached + computed) tokens of the last prefill batch."""
    num_retracted: int
    """Requests in the queue after a retraction."""
    num_retractions_total: int
    num_preemptions_total: int
    """Running requests that left their rows to a more urgent one."""
    prompt_tokens_total: int
    cached_tokens_total: int
    generation_tokens_total: int
    oldest_wait_seconds: float
    num_drains_total: int
    waiting_timeouts_total: int = 0
    """Requests that ended at `--request-waiting-timeout`, and at `--request-running-timeout`."""
    running_timeouts_total: int = 0
    host_hit_tokens_total: int = 0
    """Tokens loaded from the host-RAM tier, tokens in use in the tier, and its size."""
    storage_hit_tokens_total: int = 0
    """Loaded tokens that were read from storage."""
    storage_backed_up_tokens_total: int = 0
    storage_paused: int = 0
    """1 while a storage that hangs is not read."""
    host_used_tokens: int = 0
    host_total_tokens: int = 0
    num_incoming_transfers: int = 0
    """Open transfers of KV from a prefill server, and to decode servers."""
    num_outgoing_transfers: int = 0
    transferred_tokens_total: int = 0
    """Tokens whose KV arrived from prefill servers."""
    failed_transfers_total: int = 0
    """Transfers without a result, except those of aborted requests; their prompts were computed here."""
    speculation: SpecStats | None = None
    prefill_delayer: dict[str, Any] | None = None
    """Decisions and waits (`PrefillDelayer.state`), with ``--enable-prefill-delayer``."""
