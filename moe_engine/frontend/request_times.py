"""Times of a request's phases, measured by the frontend or reported by the scheduler."""

from __future__ import annotations

import time
from typing import Any, Protocol


class Timed(Protocol):
    """A `Generation`: times of the monotonic clock; None for events that have not happened."""

    received_at: float
    first_token_at: float | None
    last_token_at: float | None
    finished_at: float | None
    queue_time: float
    output_ids: list[int]
    finish: dict[str, Any] | None


def durations(generation: Timed) -> dict[str, float]:
    """Seconds, without the phases that it did not reach.

    Queue and prefill need the end of the request, with which the scheduler reports the time in the queue.
    `prefill_duration` ends with the first token's arrival at the frontend; `inter_token_latency` is the mean.
    """
    first, last, begin = generation.first_token_at, generation.last_token_at, generation.received_at
    found: dict[str, float] = {}
    if generation.finish is not None:
        found["queue_duration"] = generation.queue_time
        if first is not None:
            found["prefill_duration"] = max(0.0, first - begin - generation.queue_time)
    if first is not None and last is not None:
        found["decode_duration"] = last - first
        found["time_to_first_token"] = first - begin
        if (later := len(generation.output_ids) - 1) > 0:
            found["inter_token_latency"] = (last - first) / later
    if generation.finished_at is not None:
        found["e2e_latency"] = generation.finished_at - begin
    return found


def meta_times(generation: Timed) -> dict[str, float]:
    """Fields of `meta_info` of an ended request, with SGLang's names: seconds, tokens per second, and Unix times."""
    begin, first = generation.received_at, generation.first_token_at
    last, end = generation.last_token_at, generation.finished_at
    if end is None:
        return {}
    unix = time.time() - time.monotonic()
    found = {"e2e_latency": end - begin, "request_received_ts": unix + begin, "request_finished_ts": unix + end}
    if first is None or last is None:
        return found
    found["first_token_latency"] = first - begin
    found["prefill_finished_time"] = unix + first
    found["forward_entry_time"] = unix + min(first, begin + generation.queue_time)
    if last > first:
        found["decode_throughput"] = (len(generation.output_ids) - 1) / (last - first)
    return found
