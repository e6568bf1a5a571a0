"""Applies the result of a step to its requests and returns the events."""

from __future__ import annotations

from moe_engine.errors import MoeEngineError
from moe_engine.scheduler.draft_depth import IN_VAIN, DraftOutcome
from moe_engine.scheduler.events import RequestEvent, finish_event, with_totals
from moe_engine.scheduler.finish import take_tokens
from moe_engine.scheduler.jump_forward import with_jumps
from moe_engine.scheduler.plan_draft import StepRecord
from moe_engine.scheduler.position_rows import keep_rows, take_rows
from moe_engine.scheduler.request_table import RequestTable
from moe_engine.types import FinishReason, PackedLogprobs, Request, StepResult

_ANY_ID = 1 << 62


def read_result(
    table: RequestTable, record: StepRecord, result: StepResult, now: float, outcomes: list[DraftOutcome]
) -> list[RequestEvent]:
    """Appends tokens, ends finished requests, and returns an event for each request with new output.

    Tokens of requests that ended while the step was in flight are dropped. With speculation a step may return several
    tokens for a request; its plan must have reserved slots for them. `outcomes` gets that of each request with
    drafts.

    Raises:
        MoeEngineError: the result does not belong to the plan.
    """
    if result.rows != record.sampled_rows or len(result.tokens) != len(record.sampled):
        raise MoeEngineError(
            f"the result of step {result.number} has rows {result.rows[:8]}, but its plan has {record.sampled_rows[:8]}"
        )
    _keep_states(table, record, result)
    table.sessions.stepped(record.launched, now, record.prompt_spans, record.num_decodes, bool(table.queue.entries))
    vocab = table.config.vocab_size
    top = _ANY_ID if vocab is None else vocab
    logprobs = result.logprobs
    events: list[RequestEvent] = []
    push = events.append
    released = table.num_released
    waiting_logprobs = table.prompt_logprobs
    depths = record.depths
    for i, (request, tokens) in enumerate(zip(record.sampled, with_jumps(record, result.tokens))):
        depth = depths[i] if i < len(depths) else 0
        if request.row < 0:
            if depth:
                outcomes.append(IN_VAIN)
            continue
        request.num_in_flight -= 1
        request.num_maybe -= depth
        if request.to_abort is not None:
            continue
        if request.first_token_at is None:
            request.first_token_at = now
        outputs = request.output_ids
        if (  # the common case: one token, and the request continues
            len(tokens) == 1
            and tokens[0] not in request.end_ids
            and 0 <= tokens[0] < top
            and len(outputs) + 1 < request.max_new_tokens
        ):
            outputs.append(tokens[0])
            kept, reason = tokens, None
        else:
            kept, reason = _take_several(request, tokens, vocab, result.errors or {})
        if depth:
            outcomes.append(_count_accepted(request, depth, len(tokens), len(kept), ended=reason is not None))
        mine = _kept_logprobs(logprobs[i], len(kept)) if logprobs else None
        prompt = table.take_prompt_logprobs(request.rid) if waiting_logprobs else None
        if reason is not None:
            table.end_running(request, reason)
            push(finish_event(request, reason, now, kept, mine, prompt))
            continue
        event = RequestEvent(request.rid, kept, None, request.cached_tokens, request.retractions, mine, prompt)
        if request.ends_by_text:
            event = with_totals(event, request, now)
        push(event._replace(vector=take_rows(request)) if request.positions else event)
    if record.ended:
        events += _end_prompts(table, record.ended, result.vectors, now)
    if table.num_released != released:
        table.drop_rowless()
    return events


def _end_prompts(
    table: RequestTable, requests: list[Request], vectors: dict[int, bytes] | None, now: float
) -> list[RequestEvent]:
    running = [request for request in requests if request.row >= 0 and request.to_abort is None]
    return [_end_prompt(table, request, vectors, now) for request in running]


def _end_prompt(table: RequestTable, request: Request, vectors: dict[int, bytes] | None, now: float) -> RequestEvent:
    """The end of a request with max_new_tokens 0, whose prompt is computed; `vectors`: of the result."""
    prompt, row = table.take_prompt_logprobs(request.rid), request.row
    reason = FinishReason("length", length=len(request.output_ids))
    table.end_running(request, reason)
    vector = vectors.get(row) if vectors is not None else None
    return finish_event(request, reason, now, [], None, prompt, vector)


def _kept_logprobs(logprobs: PackedLogprobs | None, count: int) -> PackedLogprobs | None:
    """Log-probabilities of the first `count` tokens; None: not requested, or no token is left."""
    return logprobs.part(0, count) if logprobs is not None and count else None


def _take_several(
    request: Request, tokens: list[int], vocab: int | None, errors: dict[int, FinishReason]
) -> tuple[list[int], FinishReason | None]:
    """`errors`: why tokens of a row are invalid, as in the result."""
    if not tokens:
        raise MoeEngineError(f"the result has no token for request {request.rid!r}, which samples one")
    kept, reason = take_tokens(request, tokens, vocab)
    if errors and len(kept) < len(tokens) and tokens[len(kept)] < 0:
        reason = errors.get(request.row, reason)
    request.num_computed += max(len(kept) - 1, 0)
    if request.num_computed > len(request.slots):
        raise MoeEngineError(
            f"the result has {len(tokens)} tokens for request {request.rid!r}, more than its plan has slots for"
        )
    return kept, reason


def _count_accepted(request: Request, depth: int, brought: int, kept: int, *, ended: bool) -> DraftOutcome:
    """The outcome of a request's drafts; drafts behind the end of the request do not count."""
    judged = min(depth, kept) if ended else depth
    good = min(brought - 1, judged)
    if not request.spec_accepted:
        request.spec_accepted = [0]
    request.spec_verify_ct += 1
    request.spec_proposed += judged
    request.spec_accepted += [0] * (good + 1 - len(request.spec_accepted))
    request.spec_accepted[good] += 1
    return judged, good, min(good, max(kept - 1, 0))


def _keep_states(table: RequestTable, record: StepRecord, result: StepResult) -> None:
    if result.positions:
        keep_rows(record, result.positions)
    if result.prompt_logprobs:
        _keep_prompt_logprobs(table, record, result.prompt_logprobs)


def _keep_prompt_logprobs(table: RequestTable, record: StepRecord, by_row: dict[int, PackedLogprobs]) -> None:
    """Collects prompt log-probabilities chunk by chunk; they are reported once, with the first token."""
    for row, logprobs in by_row.items():
        request = record.prefilled.get(row)
        if request is not None and request.row >= 0:
            table.prompt_logprobs.setdefault(request.rid, []).append(logprobs)
