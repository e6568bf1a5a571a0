"""Messages to the frontend about the events of a step."""

from __future__ import annotations

from collections.abc import Callable

from moe_engine.core import messages
from moe_engine.scheduler.events import RequestEvent


class DeltaSender:
    """Sends the events of one attention group to the frontend.

    Args:
        send: of the transport.
        group: attention group of the core.
    """

    def __init__(self, send: Callable[[messages.Message], None], group: int) -> None:
        self._send = send
        self._group = group

    def publish(self, events: list[RequestEvent]) -> None:
        """Sends one message with all events, if there are any."""
        if events:
            self.send(deltas_of(events))

    def send(self, deltas: list[messages.RequestDelta]) -> None:
        self._send(messages.StepOutput(deltas=deltas, group=self._group))


def deltas_of(events: list[RequestEvent]) -> list[messages.RequestDelta]:
    """One delta per event. Most events only carry a token: a fast path, because a step has hundreds of them."""
    plain = messages.RequestDelta
    return [
        plain(rid, tokens, None, None, None, cached, retractions)
        if finish is None and logprobs is None and prompt_logprobs is None and timing is None and vector is None
        else _delta(event)
        for event in events
        for rid, tokens, finish, cached, retractions, logprobs, prompt_logprobs, timing, _, vector, _ in (event,)
    ]


def _delta(event: RequestEvent) -> messages.RequestDelta:
    return messages.RequestDelta(
        event.rid,
        event.token_ids,
        event.finish_reason.to_dict() if event.finish_reason else None,
        event.logprobs,
        event.prompt_logprobs,
        event.cached_tokens,
        event.retractions,
        _queue_time(event),
        event.speculation,
        event.vector,
        event.tiers,
    )


def _queue_time(event: RequestEvent) -> float:
    """Seconds from arrival in the queue to the first step, if the event has times."""
    timing = event.timing
    return timing.first_scheduled - timing.queued_at if timing and timing.first_scheduled is not None else 0.0
