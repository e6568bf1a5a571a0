"""One scheduler of a simulation, and the answers of the model that it drives.

The scheduler is the production one, with its radix cache, admission, retraction and draft depth; only the results of
its steps are made up here: every request gets the tokens of its answer, and drafts are accepted by chance.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import replace

from moe_engine.errors import InputError
from moe_engine.scheduler.config import SchedulerConfig
from moe_engine.scheduler.decode_run import decode_run_limit, run_decodes
from moe_engine.scheduler.events import RequestEvent
from moe_engine.scheduler.scheduler import NEEDS_RESULT, NeedsResult, Scheduler
from moe_engine.tuning.costs.step_cost import StepCost, StepShape
from moe_engine.tuning.simulator.recorder import Running
from moe_engine.types import Request, SamplingParams, StepPlan, StepResult

EOS = 0
SAMPLING = SamplingParams(max_new_tokens=None)
NO_STEPS = StepShape(0, 0, 0, 0, 0, 0)


class Group:
    """A scheduler with its requests.

    Attributes:
        run_limit: decode steps that may pass before the scheduler is asked again; 0: ask it for the next step.
        run_steps: steps that have passed so, of which the scheduler does not know yet.
        run_holds: whether the run must end when prompts may be computed.
        load_tokens: prompt and answer tokens of its requests, without those of a run.
    """

    def __init__(
        self, config: SchedulerConfig, clock: Callable[[], float], acceptance: Sequence[float], seed: int
    ) -> None:
        self.scheduler = Scheduler(replace(config, vocab_size=None), clock)  # answers are of made-up tokens
        self.running: dict[str, Running] = {}
        self.run_limit = self.run_steps = 0
        self.run_holds = False
        self.load_tokens = 0
        self._run_shape = NO_STEPS
        self._acceptance = list(acceptance)
        self._rng = random.Random(seed)
        self._plans: list[tuple[StepPlan, list[Request]]] = []

    # -- requests

    def add(self, running: Running, rid: str, output_ids: Sequence[int] = ()) -> str | None:
        """Queues a request; `output_ids`: answered before, on a lost rank. Returns why it is refused, or None."""
        self.end_run()
        arrival = running.arrival
        request = Request(
            rid,
            arrival.prompt_ids,
            SAMPLING,
            arrival.max_tokens,
            frozenset((EOS,)),
            seed=arrival.answer_ids,
            output_ids=list(output_ids),
            retractions=1 if output_ids else 0,
        )
        try:
            self.scheduler.add(request)
        except InputError as error:
            return str(error)
        self.running[rid] = running
        self.load_tokens += len(arrival.prompt_ids) + len(output_ids)
        return None

    def remove(self, rid: str) -> None:
        """A request has ended."""
        arrival = self.running.pop(rid).arrival
        self.load_tokens -= len(arrival.prompt_ids) + arrival.output_len

    @property
    def load(self) -> tuple[int, int]:
        """Requests, and their tokens so far."""
        return len(self.running), self.load_tokens + self._run_shape.decode_rows * self.run_steps

    @property
    def generated(self) -> int:
        """Answer tokens so far."""
        return self.scheduler.totals.generated_tokens + self._run_shape.decode_rows * self.run_steps

    # -- steps

    def plan(self, hold_prefill: bool) -> StepPlan | NeedsResult | None:
        """The scheduler's next step."""
        plan = self.scheduler.schedule(hold_prefill)
        return plan if plan is NEEDS_RESULT else self._launched(plan)

    def _launched(self, plan: StepPlan | None) -> StepPlan | None:
        if plan is not None:
            self._plans.append((plan, self.scheduler.last_sampled))
        return plan

    def finish(self, cost: StepCost) -> list[RequestEvent]:
        """Applies the result of the oldest step."""
        plan, sampled = self._plans.pop(0)
        speculation = plan.speculation
        if speculation is None:
            tokens = [self._next_tokens(request, 1) for request in sampled]
        else:
            accepted = [self._accepted(count - 1) for count in plan.counts[: plan.num_decodes]]
            accepted += [0] * (len(sampled) - len(accepted))
            tokens = [self._next_tokens(request, 1 + more) for request, more in zip(sampled, accepted)]
        rows = [row for row, samples in zip(plan.rows, plan.samples) if samples]
        drafting = cost.by_resource.get("drafts", 0.0)
        return self.scheduler.update(
            StepResult(plan.number, rows, tokens, seconds=cost.seconds, draft_seconds=drafting)
        )

    def _next_tokens(self, request: Request, count: int) -> list[int]:
        """The next tokens of its answer; the last one is the end token, unless the answer ends by its length."""
        done = len(request.output_ids)
        first = request.seed + done
        running = self.running.get(request.rid)
        if running is None or done + count < running.arrival.output_len:
            return [first] if count == 1 else list(range(first, first + count))
        left = max(running.arrival.output_len - done, 1)
        tokens = list(range(first, first + left))
        if done + left < request.max_new_tokens:
            tokens[-1] = EOS
        return tokens

    def _accepted(self, drafts: int) -> int:
        for i in range(drafts):
            rate = self._acceptance[min(i, len(self._acceptance) - 1)] if self._acceptance else 0.0
            if self._rng.random() >= rate:
                return i
        return drafts

    # -- runs of decode steps

    def begin_run(self, hold_prefill: bool = False) -> bool:
        """Whether decode steps can pass without the scheduler; its step in flight is the first of them.

        Args:
            hold_prefill: prompts wait for the turn of their group; the run must end with it.
        """
        self.run_limit = decode_run_limit(self.scheduler, self._remaining, hold_prefill)
        self.run_holds = hold_prefill and self.scheduler.num_waiting > 0
        if self.run_limit < 1:
            self.run_limit = 0
            return False
        self._run_shape = self.decode_shape()
        return True

    def end_run(self) -> None:
        """Applies the steps that passed to the scheduler."""
        if self.run_steps:
            run_decodes(self.scheduler, self.run_steps, lambda request: request.seed + len(request.output_ids))
            self.load_tokens += self._run_shape.decode_rows * self.run_steps
            plan, sampled = self._plans[0]
            self._plans[0] = (_renumbered(plan, self.run_steps), sampled)
        self.run_limit = self.run_steps = 0

    def _remaining(self, request: Request) -> int:
        return self.running[request.rid].arrival.output_len - len(request.output_ids)

    @property
    def run_rows(self) -> int:
        """Requests that decode in a run."""
        return self._run_shape.decode_rows

    def run_shape(self) -> StepShape:
        """Of the next step of a run."""
        shape = self._run_shape
        context = shape.decode_context + shape.decode_rows * self.run_steps
        return StepShape(shape.decode_rows, context, 0, 0, 0, shape.decode_rows)

    def decode_shape(self) -> StepShape:
        """Of a step in which all running requests decode, behind the step in flight."""
        decodes = self.scheduler.table.decodes
        context = sum(request.num_computed + 1 for request in decodes)
        return StepShape(len(decodes), context, 0, 0, 0, len(decodes))


def shape_of(plan: StepPlan) -> StepShape:
    """Counts of one scheduler's step."""
    num = plan.num_decodes
    counts, starts = plan.counts, plan.starts
    decode_tokens = sum(counts[:num])
    prefill = list(zip(starts[num:], counts[num:]))
    drafts = max(counts[:num], default=1) - 1 if plan.speculation is not None else 0
    return StepShape(
        decode_rows=num,
        decode_context=sum(starts[:num]) + decode_tokens,
        drafts=drafts,
        prefill_tokens=sum(count for _, count in prefill),
        prefill_pairs=sum(count * start + count * (count + 1) // 2 for start, count in prefill),
        global_tokens=plan.num_tokens,
        prefill_cached=sum(start for start, _ in prefill),
    )


def _renumbered(plan: StepPlan, steps: int) -> StepPlan:
    return StepPlan(
        plan.number + steps, plan.rows, plan.starts, plan.counts, plan.samples, num_decodes=plan.num_decodes
    )
