"""Drives a worker without scheduler, server or client: one batch of equal prompts, then one token per request and step.

No command; used by `benchmarks.one_batch`. Requests keep their rows and own consecutive KV slots.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

from moe_engine.planning.resolved_config import ResolvedConfig
from moe_engine.types import NewRow, SamplingParams, StepPlan

if TYPE_CHECKING:
    from moe_engine.worker.worker import Worker

GREEDY = SamplingParams(temperature=0.0, ignore_eos=True)


def create_worker(config: ResolvedConfig) -> Worker:
    """A warmed-up worker in this process."""
    from moe_engine.executor.make_worker import worker_options
    from moe_engine.worker.worker import Worker

    return Worker.create(worker_options(config))


def check_batch(config: ResolvedConfig, num_requests: int, max_len: int) -> None:
    """Raises ValueError: requests of so many tokens do not fit into the worker's rows, context or KV pool."""
    if max_len > config.context_len:
        raise ValueError(f"{max_len} tokens exceed the context of {config.context_len} (--context-length)")
    if num_requests > config.max_running_requests:
        raise ValueError(f"{num_requests} requests, but --max-running-requests is {config.max_running_requests}")
    num_slots = -(-max_len // config.page_size) * config.page_size * num_requests
    if num_slots > config.max_total_num_tokens:
        raise ValueError(
            f"{num_requests} requests of {max_len} tokens need {num_slots} KV slots; there are "
            f"{config.max_total_num_tokens} (--max-total-tokens)"
        )


class BatchDriver:
    """One batch, starting with its prompts. `tokens[i]`: tokens sampled so far for request i. A step has at most the
    prompt tokens of the scheduler's steps, for which memory is planned and kernels are compiled; only a longer prompt
    is divided.

    Args:
        max_len: max tokens of a request; its KV slots are reserved up front.

    Raises:
        ValueError: the batch does not fit into the worker's rows, context or KV pool.
    """

    def __init__(self, worker: Worker, config: ResolvedConfig, prompts: Sequence[Sequence[int]], max_len: int) -> None:
        check_batch(config, len(prompts), max_len)
        span = -(-max_len // config.page_size) * config.page_size
        self._worker = worker
        self._prompts = [list(prompt) for prompt in prompts]
        self._step_tokens = min(config.max_prefill_tokens, config.limits.prompt_tokens)
        self._first_slot = [config.page_size + row * span for row in range(len(prompts))]  # page 0 is the pool's dummy
        self._computed = [0] * len(prompts)
        self._number = 0
        self.tokens: list[list[int]] = [[] for _ in prompts]

    def prefill(self, until: int | None = None) -> float:
        """Computes every prompt up to token `until` (None: to its end, sampling a token). Returns seconds."""
        ends = [len(prompt) if until is None else min(until, len(prompt)) for prompt in self._prompts]
        began = time.perf_counter()
        step: dict[int, int] = {}
        room = self._step_tokens
        for row, end in enumerate(ends):
            start = self._computed[row]
            while start < end:
                if end - start > room and step:
                    self._prefill_step(step)
                    step, room = {}, self._step_tokens
                step[row] = min(end, start + room)
                room -= step[row] - start
                start = step[row]
        if step:
            self._prefill_step(step)
        return time.perf_counter() - began

    def decode(self) -> float:
        """One token for every request. Returns seconds."""
        rows = list(range(len(self._prompts)))
        plan = StepPlan(
            number=self._next_number(),
            rows=rows,
            starts=list(self._computed),
            counts=[1] * len(rows),
            samples=[True] * len(rows),
            slots=[first + done for first, done in zip(self._first_slot, self._computed)],
            num_decodes=len(rows),
        )
        began = time.perf_counter()
        result = self._worker.execute(plan).result()
        seconds = time.perf_counter() - began
        self._take(result.rows, result.tokens)
        self._computed = [done + 1 for done in self._computed]
        return seconds

    def close(self) -> None:
        """Releases the worker's rows."""
        plan = StepPlan(number=self._next_number(), finished_rows=list(range(len(self._prompts))))
        self._worker.execute(plan).result()

    def _prefill_step(self, ends: dict[int, int]) -> None:
        """Computes rows up to their ends."""
        group = list(ends)
        starts = [self._computed[row] for row in group]
        plan = StepPlan(
            number=self._next_number(),
            rows=group,
            starts=starts,
            counts=[ends[row] - self._computed[row] for row in group],
            samples=[ends[row] == len(self._prompts[row]) for row in group],
            slots=[self._first_slot[row] + i for row in group for i in range(self._computed[row], ends[row])],
            input_ids=[token for row in group for token in self._prompts[row][self._computed[row] : ends[row]]],
            new_rows=[self._new_row(row) for row in group if self._computed[row] == 0],
        )
        result = self._worker.execute(plan).result()
        for row in group:
            self._computed[row] = ends[row]
        self._take(result.rows, result.tokens)

    def _new_row(self, row: int) -> NewRow:
        prompt = self._prompts[row]
        return NewRow(row, f"bench-{row}", prompt, len(prompt), [], GREEDY, 0, frozenset())

    def _take(self, rows: Sequence[int], tokens: Sequence[Sequence[int]]) -> None:
        for row, new in zip(rows, tokens):
            self.tokens[row].extend(new)

    def _next_number(self) -> int:
        self._number += 1
        return self._number
