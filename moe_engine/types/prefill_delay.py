"""Settings of the prefill delayer, and the facts that schedulers exchange for it (``--enable-prefill-delayer``)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

PASSES_BUCKETS = (5.0, 20.0, 50.0, 100.0, 200.0)
SECONDS_BUCKETS = (1.0, 2.0, 5.0, 10.0, 20.0, 50.0, 100.0, 200.0, 500.0)
DEFAULT_DELAY_MS = 5000.0


@dataclass(frozen=True, slots=True)
class DelayerSettings:
    """The flags ``--prefill-delayer-*``, and ``--prefill-max-requests``.

    Attributes:
        max_delay_passes: steps for which prompts wait, less one.
        token_usage_low_watermark: prompts do not wait while a group with prompts uses a smaller share of its KV pool.
        queue_min_ratio: prompts also wait until the queue has this share of the running requests; None: no such rule.
        max_delay_ms: longest wait by this rule.
        passes_buckets, seconds_buckets: upper bounds of the histograms.
    """

    max_delay_passes: int = 30
    token_usage_low_watermark: float | None = None
    queue_min_ratio: float | None = None
    max_delay_ms: float = DEFAULT_DELAY_MS
    prefill_max_requests: int | None = None
    passes_buckets: tuple[float, ...] = PASSES_BUCKETS
    seconds_buckets: tuple[float, ...] = SECONDS_BUCKETS


class DelayFacts(NamedTuple):
    """One attention group before a step; exchanged by the schedulers of a DP group.

    `waiting`: requests with prompt tokens to compute, 0 without a free row; `running`: decoding requests; `usual`: the
    largest of the last prefill batches; `low_usage`: token usage below the watermark; `overdue`: the wait has lasted
    `max_delay_ms`; `in_prompt`: a prompt is computed in part.
    """

    waiting: int = 0
    running: int = 0
    usual: int = 0
    low_usage: bool = False
    overdue: bool = False
    in_prompt: bool = False
