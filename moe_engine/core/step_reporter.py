"""Batch log lines and throughput, in SGLang's format."""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable
from typing import Any

from moe_engine.scheduler import log_lines
from moe_engine.scheduler.events import PlanFacts
from moe_engine.scheduler.scheduler import Scheduler
from moe_engine.scheduler.speculation import Speculator
from moe_engine.types import StepResult

logger = logging.getLogger("moe_engine")

MAX_STEPS = 20_000
Recorded = tuple[int, int, int, int, float, float]


class StepReporter:
    """Counts tokens and steps; logs a line per prefill batch and one per `decode_log_interval` decode steps.

    Args:
        record_steps: keeps the newest `MAX_STEPS` steps for `state`: requests that decoded, prompt tokens, prompts,
            their cached tokens, Unix time of the result, and seconds since the step before it, or since it was planned
            if the engine was idle.
        clock: seconds, of which only differences count.
    """

    def __init__(
        self, decode_log_interval: int = 40, record_steps: bool = False, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._clock = clock
        self._times: deque[Recorded] | None = deque(maxlen=MAX_STEPS) if record_steps else None
        self._planned: deque[float] = deque()
        self._last_end = 0.0
        self._interval = decode_log_interval
        self._facts: deque[PlanFacts | None] = deque()
        self._decodes = 0
        self._tokens = 0
        self._since = clock()
        self.gen_throughput = 0.0
        self._total_tokens = 0
        self._total_steps = 0
        self._cuda_graph = False

    def planned(self, scheduler: Scheduler) -> None:
        """A step was planned; logs it if it contains prefills."""
        self._facts.append(scheduler.last_facts)
        facts = scheduler.last_facts
        if self._times is not None:
            self._planned.append(self._clock())
        if facts is not None and facts.new_token:
            logger.info("%s", log_lines.prefill_line(facts))

    def finished(self, result: StepResult, speculator: Speculator | None = None) -> None:
        """A step finished, in planning order; logs a decode line every `decode_log_interval` decode steps."""
        facts = self._facts.popleft()
        produced = sum(map(len, result.tokens)) + (0 if facts is None else facts.num_jumped)
        self._tokens += produced
        self._total_tokens += produced
        self._total_steps += 1
        if self._times is not None:
            self._record(self._times, facts)
        if facts is None or not facts.num_decodes:
            return
        self._decodes += 1
        self._cuda_graph = result.cuda_graph
        if self._decodes % self._interval == 0:
            self._measure()
            accept_len = speculator.take_accept_length() if speculator is not None else None
            line = log_lines.decode_line(
                facts, self.gen_throughput, cuda_graph=result.cuda_graph, accept_len=accept_len
            )
            logger.info("%s", line)

    def restart(self) -> None:
        """Drops the steps planned so far: they will have no result."""
        self._facts.clear()
        self._planned.clear()

    def idle(self) -> None:
        """The core is idle: restarts the throughput interval, so that idle time does not count."""
        if self._tokens:
            self._measure()
        self._since, self._tokens = self._clock(), 0

    def _record(self, times: deque[Recorded], facts: PlanFacts | None) -> None:
        now = self._clock()
        began, self._last_end = max(self._planned.popleft(), self._last_end), now
        if facts is not None:
            counts = facts.num_decodes, facts.new_token, facts.new_seq, facts.cached_token
            times.append((*counts, time.time(), now - began))

    def state(self) -> dict[str, Any]:
        return {
            **({} if self._times is None else {"step_times": list(self._times)}),
            "last_gen_throughput": self.gen_throughput,
            "total_generated_tokens": self._total_tokens,
            "total_steps": self._total_steps,
            "is_cuda_graph": int(self._cuda_graph),
        }

    def _measure(self) -> None:
        now = self._clock()
        self.gen_throughput = self._tokens / max(now - self._since, 1e-9)
        self._since, self._tokens = now, 0
