"""A fake worker that checks plans: it keeps, per KV slot, a hash of the computed token prefix, and verifies at
execution time that every context slot has the hash that the plan relies on."""

from __future__ import annotations

import random
from collections import deque
from dataclasses import dataclass, field
from typing import Protocol

from moe_engine.scheduler import NEEDS_RESULT, RequestEvent, Scheduler, SchedulerConfig
from moe_engine.types import Request, SamplingParams, StepPlan, StepResult

VOCAB = 50
EOS = 1


def step_hash(previous: int, token: int) -> int:
    return hash((previous, token))


def prefix_hashes(tokens: list[int]) -> list[int]:
    out, value = [], 0
    for token in tokens:
        value = step_hash(value, token)
        out.append(value)
    return out


def next_token(value: int) -> int:
    """The fake model: the next token is a function of the whole prefix; sometimes EOS."""
    return value % 997 % VOCAB


def expected_outputs(request: Request) -> tuple[list[int], str]:
    """The expected tokens and finish reason of a request."""
    outputs: list[int] = []
    value = prefix_hashes(request.prompt_ids)[-1]
    while len(outputs) < request.max_new_tokens:
        token = next_token(value)
        outputs.append(token)
        value = step_hash(value, token)
        ends = not request.sampling.ignore_eos and token in request.eos_token_ids | set(request.sampling.stop_token_ids)
        if ends and len(outputs) > request.sampling.min_new_tokens:
            return outputs, "stop"
    return outputs, "length"


class SimulatedWorker(Protocol):
    """Executes plans strictly in order and late: a plan runs only when its result is requested."""

    queue: deque[StepPlan]

    def submit(self, plan: StepPlan) -> None:
        """Checks a plan at planning."""

    def execute(self) -> StepResult:
        """Runs the oldest submitted plan."""


@dataclass
class Row:
    tokens: list[int]
    slots: list[int]


class FakeWorker:
    """The worker of a scheduler without speculation; implements `SimulatedWorker`."""

    def __init__(self, config: SchedulerConfig) -> None:
        self.config = config
        self.rows: dict[int, Row] = {}
        self.device_token: dict[int, int] = {}
        self.pool: dict[int, int] = {}
        self.queue: deque[StepPlan] = deque()
        self.mirror: dict[int, list[int]] = {}
        self.touched: deque[set[int]] = deque()
        self.last_number = 0

    def submit(self, plan: StepPlan) -> None:
        """Checks that no slot that a step in flight may use changes its owner."""
        assert plan.number == self.last_number + 1
        self.last_number = plan.number
        in_flight = set().union(*self.touched) if self.touched else set()
        assert in_flight.isdisjoint(plan.slots), "a slot was reassigned while a step in flight may use it"
        for new in plan.new_rows:
            assert new.row not in {row for p in self.queue for row in p.rows}, "a row was reassigned in flight"
            self.mirror[new.row] = list(new.slots)
        for write in plan.row_writes:
            self.mirror[write.row][write.start : write.start + len(write.slots)] = write.slots
        touched: set[int] = set()
        at = 0
        for row, count in zip(plan.rows, plan.counts):
            self.mirror[row] += plan.slots[at : at + count]
            at += count
            touched.update(self.mirror[row])
        self.touched.append(touched)
        self.queue.append(plan)

    def execute(self) -> StepResult:
        """Runs the oldest submitted plan."""
        plan = self.queue.popleft()
        self.touched.popleft()
        self._update_rows(plan)
        page = self.config.page_size
        assert len(set(plan.slots)) == len(plan.slots)
        assert all(page <= slot < self.config.num_slots + page for slot in plan.slots)
        assert len(set(plan.rows)) == len(plan.rows)
        writes: dict[int, int] = {}
        rows, tokens = [], []
        slot_at = input_at = 0
        for i, (row, start, count) in enumerate(zip(plan.rows, plan.starts, plan.counts)):
            state = self.rows[row]
            slots = plan.slots[slot_at : slot_at + count]
            slot_at += count
            if i < plan.num_decodes:
                assert len(state.tokens) == start, (len(state.tokens), start)
                state.tokens.append(self.device_token[row])
            else:
                ids = plan.input_ids[input_at : input_at + count]
                input_at += count
                assert ids == state.tokens[start : start + count]
            assert len(state.slots) == start
            for k in range(count):  # pages are filled in order
                if (start + k) % page:
                    previous = slots[k - 1] if k else state.slots[-1]
                    assert slots[k] == previous + 1
                else:
                    assert slots[k] % page == 0
            hashes = prefix_hashes(state.tokens[: start + count])
            context = [self.pool.get(slot) for slot in state.slots]
            assert context == hashes[:start], "a context slot has the wrong KV"
            writes.update(zip(slots, hashes[start:]))
            state.slots += slots
            if plan.samples[i]:
                token = next_token(hashes[-1])
                self.device_token[row] = token
                rows.append(row)
                tokens.append([token])
        assert input_at == len(plan.input_ids) and slot_at == len(plan.slots)
        self.pool.update(writes)  # last: no request may rely on writes of another request in the same step
        return StepResult(plan.number, rows, tokens)

    def _update_rows(self, plan: StepPlan) -> None:
        for row in plan.finished_rows:
            del self.rows[row]
        for new in plan.new_rows:
            assert new.row not in self.rows
            assert 0 <= new.row < self.config.max_rows
            self.rows[new.row] = Row(list(new.token_ids), list(new.slots))
        for write in plan.row_writes:
            slots = self.rows[write.row].slots
            assert write.start + len(write.slots) <= len(slots)
            slots[write.start : write.start + len(write.slots)] = write.slots


@dataclass
class Outcome:
    request: Request
    tokens: list[int] = field(default_factory=list)
    reason: str | None = None
    message: str = ""


class Simulation:
    """Drives a scheduler and a fake worker as an engine core does, checking invariants each turn."""

    may_be_empty = False
    """True if a plan may have neither requests nor copies, because there was no free slot for nodes to store."""

    def __init__(
        self,
        config: SchedulerConfig,
        *,
        overlap: bool | int = True,
        check_every: int = 1,
        worker: SimulatedWorker | None = None,
    ) -> None:
        self.config = config
        self.depth = int(overlap)  # steps that may be in flight while the next is planned
        self.check_every = check_every
        self.now = 0.0
        self.scheduler = Scheduler(config, clock=lambda: self.now)
        self.worker: SimulatedWorker = worker or FakeWorker(config)
        self.outcomes: dict[str, Outcome] = {}
        self.turns = 0
        self.plans: list[StepPlan] = []
        self.keep_plans = False

    def add(self, request: Request) -> None:
        self.outcomes[request.rid] = Outcome(request)
        self.take(self.scheduler.add(request))

    def abort(self, rid: str) -> None:
        self.take(self.scheduler.abort([rid]))

    def take(self, events: list[RequestEvent]) -> None:
        for event in events:
            outcome = self.outcomes[event.rid]
            assert outcome.reason is None, "an output after the end"
            outcome.tokens += event.token_ids
            if event.finish_reason is not None:
                outcome.reason = event.finish_reason.type
                outcome.message = event.finish_reason.message or ""

    def finish_one(self) -> None:
        self.take(self.scheduler.update(self.worker.execute()))

    def turn(self) -> bool:
        """One iteration of the core's loop. False if it was idle."""
        self.turns += 1
        self.now += 0.01
        if self.scheduler.table.timeouts is not None:
            for rids, reason in self.scheduler.overdue():
                self.take(self.scheduler.abort(rids, reason))
        plan = self.scheduler.schedule()
        if self.turns % self.check_every == 0:
            assert self.scheduler.check_integrity() == []
        if plan is NEEDS_RESULT:
            if self.worker.queue:
                self.finish_one()
                return True
            assert self.take_arrivals(), "a drain without steps in flight"
            return True
        if plan is None:
            if self.worker.queue:
                self.finish_one()
                return True
            if self.take_arrivals():
                return True
            assert self.scheduler.is_idle(), "no step although requests wait"
            return False
        assert isinstance(plan, StepPlan)
        self.check_budgets(plan)
        if self.keep_plans:
            self.plans.append(plan)
        self.worker.submit(plan)
        while len(self.worker.queue) > self.depth:
            self.finish_one()
        return True

    def take_arrivals(self) -> bool:
        """Waits, as an idle core, until the worker reports loads of KV, or held sessions allow further requests. False
        if there are none."""
        self.now += 0.5
        return self.scheduler.is_held_back

    def check_budgets(self, plan: StepPlan) -> None:
        config = self.config
        prefills, decodes = plan.counts[plan.num_decodes :], plan.counts[: plan.num_decodes]
        assert plan.rows or plan.kv_ops is not None or self.may_be_empty
        assert len(plan.rows) <= config.max_rows
        assert plan.speculation is not None or all(count == 1 for count in decodes)
        if not config.enable_mixed_chunk:
            assert not (prefills and plan.num_decodes)
        if prefills and config.chunked_prefill_size > 0:
            assert plan.num_tokens <= config.chunked_prefill_size
        if len(prefills) > 1:
            assert plan.num_tokens <= config.max_prefill_tokens
        if config.prefill_max_requests is not None:
            assert len(prefills) <= config.prefill_max_requests

    def run_to_end(self, max_turns: int = 100_000) -> None:
        for _ in range(max_turns):
            if not self.turn():
                return
        raise AssertionError(f"not finished after {max_turns} turns: starvation")

    def check_end(self) -> None:
        """Checks that all requests ended as expected, without leaks in the pool."""
        for outcome in self.outcomes.values():
            tokens, reason = expected_outputs(outcome.request)
            if outcome.reason == "abort":
                assert outcome.tokens == tokens[: len(outcome.tokens)]
            else:
                assert (outcome.tokens, outcome.reason) == (tokens, reason), outcome.request.rid
        scheduler = self.scheduler
        assert scheduler.is_idle() and scheduler.check_integrity() == []
        kv_cache = scheduler.kv_cache
        assert kv_cache.slots.num_free + kv_cache.tree.num_evictable == self.config.num_slots
        assert kv_cache.rows.num_free == self.config.max_rows
        table = scheduler.table
        left = table.sessions._running, table.prompt_logprobs, getattr(kv_cache, "_pending", {})
        assert not any(left) and (table.lora is None or not table.lora._users), "state of requests that have ended"
        assert scheduler.flush_cache()
        assert kv_cache.slots.num_free == self.config.num_slots and kv_cache.tree.num_evictable == 0


def make_request(
    rid: str,
    prompt: list[int],
    max_new: int = 8,
    *,
    eos: bool = True,
    priority: int | None = None,
    extra_key: str | None = None,
    min_new: int = 0,
    stop: tuple[int, ...] = (),
    ignore_eos: bool = False,
) -> Request:
    sampling = SamplingParams(
        max_new_tokens=max_new, min_new_tokens=min_new, stop_token_ids=stop, ignore_eos=ignore_eos
    )
    return Request(
        rid=rid,
        prompt_ids=prompt,
        sampling=sampling,
        max_new_tokens=max_new,
        eos_token_ids=frozenset([EOS] if eos else []),
        priority=priority,
        extra_key=extra_key,
    )


def random_prompt(rng: random.Random, length: int, families: int = 3) -> list[int]:
    """Prompts of a family share a prefix of random length."""
    family = rng.randrange(families)
    shared = rng.randrange(length + 1)
    base = random.Random(family)
    head = [base.randrange(VOCAB) for _ in range(shared)]
    return head + [rng.randrange(VOCAB) for _ in range(length - shared)]


def random_request(rng: random.Random, rid: str, config: SchedulerConfig, max_prompt: int, max_new: int) -> Request:
    longest = min(config.context_len, config.num_slots)
    prompt = rng.randint(1, max(1, min(max_prompt, longest - 1)))
    new = rng.choice([0, 1, 2, rng.randint(0, max_new), rng.randint(0, max_new)])
    new = min(new, longest - prompt)
    return make_request(
        rid,
        random_prompt(rng, prompt),
        new,
        priority=rng.choice([None, 0, 5, 20, 40]),
        extra_key=rng.choice([None, None, None, "a"]),
        min_new=rng.choice([0, 0, rng.randint(0, new)]),
        stop=rng.choice([(), (2,), (3, 4)]),
        ignore_eos=rng.random() < 0.3,
    )
