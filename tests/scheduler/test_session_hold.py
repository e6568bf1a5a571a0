"""Sessions that exceed the pool: throughput does not fall with offered load, and waits are bounded."""

from __future__ import annotations

import random
from dataclasses import dataclass, field, replace

import pytest

from moe_engine.scheduler import Scheduler, SchedulerConfig
from moe_engine.scheduler.scheduler import NEEDS_RESULT
from moe_engine.scheduler.waiting_queue import Waiting
from moe_engine.types import Request, StepPlan
from tests.scheduler.simulator import FakeWorker, make_request

POOL, PROMPT, LONGEST, TURN, OUTPUT = 4000, 350, 550, 10, 10
STEP, TOKEN = 0.02, 0.0005
"""Seconds of a step, and of each of its prompt tokens more."""


@dataclass
class Session:
    number: int
    text: list[int]
    due: float = 0.0
    turns: int = 0
    waits: list[float] = field(default_factory=list)
    request: Request | None = None


class Load:
    """Sessions in closed loop over a scheduler, in virtual time: each sends its next turn after a short pause."""

    def __init__(self, num_sessions: int, pause: float, turns: bool = True, **config: float) -> None:
        base = SchedulerConfig(num_slots=POOL, context_len=2000, max_rows=8, chunked_prefill_size=512)
        self.config = replace(base, **config)  # type: ignore[arg-type]
        self.now = 0.0
        self.scheduler = Scheduler(self.config, clock=lambda: self.now)
        self.worker = FakeWorker(self.config)
        self.rng = random.Random(5)
        self.pause, self.turns = pause, turns
        self.sessions = [Session(i, self.text(PROMPT)) for i in range(num_sessions)]
        self.num_tokens = 0

    def text(self, count: int) -> list[int]:
        return [self.rng.randrange(2, 50) for _ in range(count)]

    def arrivals(self) -> None:
        for session in self.sessions:
            if session.request is None and session.due <= self.now:
                if len(session.text) > LONGEST or not self.turns:
                    session.text = self.text(PROMPT)  # a new conversation takes the place of the old one
                rid = f"{session.number}.{session.turns}"
                session.request = make_request(rid, list(session.text), OUTPUT, eos=False, ignore_eos=True)
                self.scheduler.add(session.request)

    def step(self) -> None:
        self.arrivals()
        plan = self.scheduler.schedule()
        if plan is None or plan is NEEDS_RESULT:
            self.now += 0.001
            return
        assert isinstance(plan, StepPlan)
        self.worker.submit(plan)
        self.now += STEP + TOKEN * (plan.num_tokens - plan.num_decodes)
        ended = {event.rid for event in self.scheduler.update(self.worker.execute()) if event.finish_reason}
        for session in self.sessions:
            request = session.request
            if request is not None and request.rid in ended:
                assert request.first_scheduled is not None
                session.waits.append(request.first_scheduled - request.queued_at)
                session.text = [*request.prompt_ids, *request.output_ids, *self.text(TURN)]
                session.due, session.request = self.now + self.pause * self.rng.uniform(0.5, 1.5), None
                session.turns += 1
                self.num_tokens += OUTPUT

    def run(self, seconds: float, warm: float = 20.0) -> float:
        """Output tokens per second, behind the first seconds."""
        while self.now < warm:
            self.step()
        begin, self.num_tokens = self.now, 0
        while self.now < begin + seconds:
            self.step()
        assert self.scheduler.check_integrity() == []
        return self.num_tokens / (self.now - begin)


@pytest.mark.parametrize("pause", [0.05, pytest.param(0.5, marks=pytest.mark.exhaustive)])
def test_throughput_does_not_fall_with_offered_load(pause: float) -> None:
    """At 1, 2 and 4 times the pool; at 4 times without the policy."""
    held = [Load(num, pause).run(40) for num in (9, 18, 36)]
    assert min(held) >= 0.93 * max(held), held
    plain = Load(36, pause, session_hold=0.0).run(20)
    assert plain < 0.6 * held[2], (plain, held)


def test_requests_wait_no_longer_than_the_bound_and_the_queue() -> None:
    load = Load(36, 0.05, session_hold=5.0)
    load.run(60)
    assert all(session.turns >= 4 for session in load.sessions)
    assert max(max(session.waits) for session in load.sessions) < 5.0 + 15.0


def test_requests_that_do_not_return_hold_nothing() -> None:
    """The same steps with and without the policy."""
    counts = []
    for hold in (0.0, 30.0):
        load = Load(24, 0.05, turns=False, session_hold=hold)
        load.run(20)
        counts.append((load.num_tokens, round(load.now, 6)))
    assert counts[0] == counts[1]


def test_a_session_is_recognized_by_its_prefix() -> None:
    load = Load(1, 0.05)
    sessions = load.scheduler.table.sessions
    while load.sessions[0].turns < 4:
        load.step()
    assert sessions._returning > 0.4 and 0.0 < sessions._pause < 0.1
    sessions.plan(load.scheduler.kv_cache.available)
    stranger = Waiting(make_request("s", load.text(100), 4), load.text(100), 99, load.text(100))
    stranger.request.queued_at = load.now
    assert sessions.held_for(stranger) >= PROMPT  # what the one session has cached
    load.now += 31.0
    assert sessions.held_for(stranger) == 0  # the bound
