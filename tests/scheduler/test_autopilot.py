"""The autopilot's rules, its trials, and its bounds: on artificial windows, and with the production scheduler in
simulation."""

from __future__ import annotations

import itertools
import logging
import random
from dataclasses import dataclass
from itertools import pairwise
from statistics import fmean, stdev
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moe_engine.scheduler import SchedulerConfig
from moe_engine.scheduler.autopilot import Autopilot
from moe_engine.scheduler.autopilot.autopilot import (
    CHANGES_AN_HOUR,
    EARLY_SECONDS,
    HOUR,
    LEAST_SECONDS,
    MOST_SECONDS,
    gain_of,
)
from moe_engine.scheduler.autopilot.proposals import RULES
from moe_engine.scheduler.autopilot.window import LatencyLimits, Window
from moe_engine.scheduler.events import RequestEvent, RequestTiming
from moe_engine.scheduler.request_table import RequestTable
from moe_engine.scheduler.stats import Totals
from moe_engine.types import FinishReason, Request, SamplingParams
from tests.examples import examples

CONFIG = SchedulerConfig(num_slots=4096, context_len=512, max_rows=64, chunked_prefill_size=1024, autopilot=True)
LIMITS = LatencyLimits(ttft=1.0, itl=0.1)


def table(**changes: Any) -> RequestTable:
    found = RequestTable(CONFIG)
    found.settings.set(changes)
    return found


def window(own: RequestTable, **counts: Any) -> Window:
    """A window of 100 seconds with 1000 answer tokens and 100 requests, unless given."""
    made = Window(own, Totals(), LIMITS, 0.0, 0)
    for name, value in {"seconds": 100.0, "tokens": 1000, "ended": 100, **counts}.items():
        setattr(made.counts, name, value)
    return made


def first_proposal(own: RequestTable, limits: LatencyLimits = LIMITS, **counts: Any) -> tuple[str, Any] | None:
    made = window(own, **counts)
    for rule in RULES:
        if (found := rule(made, own.settings, limits)) is not None:
            assert found.old == own.settings.values()[found.setting] and found.reason
            own.settings.set({found.setting: found.new}, check_only=True)
            return found.setting, found.new
    return None


FREE = LatencyLimits()
WAITING = {"backlog_seconds": 100.0, "queue_seconds": 100.0}


@pytest.mark.parametrize(
    ("values", "limits", "counts", "expected"),
    [
        ({"max_running_requests": 4}, FREE, WAITING | {"row_blocked_seconds": 60.0}, ("max_running_requests", 64)),
        ({"max_running_requests": 4}, LIMITS, WAITING | {"row_blocked_seconds": 60.0}, ("max_running_requests", 8)),
        ({"max_running_requests": 4}, FREE, WAITING | {"row_blocked_seconds": 40.0}, None),
        ({"max_running_requests": 4}, FREE, WAITING | {"row_blocked_seconds": 60.0, "usage_seconds": 95.0}, None),
        ({}, LIMITS, {"slow_tokens": 100, "running_seconds": 1600.0}, ("max_running_requests", 12)),
        ({}, LIMITS, {"slow_tokens": 40, "running_seconds": 1600.0}, None),
        ({}, LIMITS, {"slow_tokens": 100, "slow_behind_prompts": 100}, ("max_consecutive_prefills", 1)),
        (
            {"max_consecutive_prefills": 1},
            LIMITS,
            {"slow_tokens": 100, "slow_behind_prompts": 100},
            ("chunked_prefill_size", 512),
        ),
        ({"max_running_requests": 4}, LIMITS, WAITING | {"row_blocked_seconds": 60.0, "slow_tokens": 20}, None),
        (
            {"max_running_requests": 4},
            LIMITS,
            WAITING | {"row_blocked_seconds": 60.0, "slow_tokens": 20, "late_waiting": 150},
            ("max_running_requests", 64),
        ),
        ({}, FREE, WAITING | {"memory_blocked_seconds": 60.0}, ("schedule_conservativeness", 0.25)),
        (
            {},
            FREE,
            WAITING | {"memory_blocked_seconds": 60.0, "usage_seconds": 70.0},
            ("schedule_conservativeness", 0.412),  # (1 / 0.85 - 1) x 0.7 / 0.3
        ),
        (
            {"schedule_conservativeness": 4.0},
            FREE,
            WAITING | {"memory_blocked_seconds": 60.0, "usage_seconds": 70.0},
            ("schedule_conservativeness", 1.0),
        ),
        ({}, FREE, WAITING | {"memory_blocked_seconds": 60.0, "retractions": 3}, None),
        ({}, FREE, WAITING | {"memory_blocked_seconds": 60.0, "usage_seconds": 95.0}, None),
        ({"schedule_conservativeness": 0.1}, FREE, {"retractions": 30}, ("schedule_conservativeness", 0.16)),
        ({}, FREE, {"retractions": 30}, None),
        (
            {},
            FREE,
            WAITING | {"queue_seconds": 900.0, "prompt_tokens": 100, "cached_tokens": 30},
            ("schedule_policy", "lpm"),
        ),
        ({}, FREE, WAITING | {"queue_seconds": 900.0, "prompt_tokens": 100, "cached_tokens": 1}, None),
        (
            {"schedule_policy": "lpm"},
            FREE,
            WAITING | {"queue_seconds": 900.0, "prompt_tokens": 100},
            ("schedule_policy", "fcfs"),
        ),
        ({"chunked_prefill_size": 64}, FREE, {"prompt_step_seconds": 60.0}, ("chunked_prefill_size", 1024)),
        ({"chunked_prefill_size": 64}, FREE, {"prompt_step_seconds": 40.0}, None),
        ({"chunked_prefill_size": 64}, LIMITS, WAITING | {"prompt_step_seconds": 60.0}, ("chunked_prefill_size", 256)),
        ({"chunked_prefill_size": 64}, LIMITS, {"prompt_step_seconds": 60.0}, None),
        (
            {"chunked_prefill_size": 64},
            LIMITS,
            {"prompt_step_seconds": 60.0, "late_first_tokens": 60},
            ("chunked_prefill_size", 1024),
        ),
        ({"max_consecutive_prefills": 2}, LIMITS, {"late_first_tokens": 10}, ("max_consecutive_prefills", 8)),
        ({"max_consecutive_prefills": 2}, LIMITS, {"late_first_tokens": 4}, None),
    ],
)
def test_rules(values: dict[str, Any], limits: LatencyLimits, counts: dict[str, Any], expected: Any) -> None:
    assert first_proposal(table(**values), limits, **counts) == expected


@dataclass
class Plant:
    """A fake engine: a function of the settings determines the throughput and the state of its steps."""

    own: RequestTable
    totals: Totals
    pilot: Autopilot
    now: float = 0.0
    steps: int = 0

    @classmethod
    def create(cls, **values: Any) -> Plant:
        own, totals = RequestTable(CONFIG), Totals()
        own.settings.set(values)
        plant = cls(own, totals, Autopilot(own, totals, 0.0))
        for i in range(90):  # 60 of them run, by the queue
            own.add(Request(str(i), [1, 2], SamplingParams(max_new_tokens=8), 8), 0.0)
        return plant

    def step(self, tokens: int, seconds: float, ended: int = 1, blocked: bool = False, prompts: bool = False) -> None:
        self.now += seconds
        self.steps += 1
        self.totals.generated_tokens += tokens
        timing = RequestTiming(self.now - 1, self.now - 0.9, self.now - 0.5, self.now)
        events = [RequestEvent("x", [], FinishReason("length", length=1), 0, 0, timing=timing)] * ended
        self.pilot.after_step(events, self.now, self.steps, blocked, prompts)


def test_a_change_that_helps_stays_and_one_that_hurts_is_undone() -> None:
    for gain, stays in ((1.3, True), (1.0, True), (0.8, False)):
        plant = Plant.create()
        while plant.pilot.counts.tried == 0:
            plant.step(100, 0.05, blocked=True)
        assert plant.own.settings.schedule_conservativeness == 0.25
        while plant.pilot.counts.kept + plant.pilot.counts.undone == 0:
            plant.step(int(100 * gain), 0.05)
        assert plant.own.settings.schedule_conservativeness == (0.25 if stays else 1.0)
        assert (plant.pilot.counts.kept, plant.pilot.counts.undone) == (int(stays), int(not stays))


def test_an_undone_change_waits_twice_as_long_each_time() -> None:
    plant, moments = Plant.create(), []
    while len(moments) < 5:
        before = plant.pilot.counts.tried
        lowered = plant.own.settings.schedule_conservativeness < 1
        plant.step(60 if lowered else 100, 0.05, blocked=True)
        if plant.pilot.counts.tried > before:
            moments.append(plant.now)
    pauses = [b - a for a, b in pairwise(moments)]
    for shorter, longer in pairwise(pauses):
        assert 1.7 < longer / shorter < 2.3


def test_settings_that_somebody_else_changes_stand() -> None:
    plant = Plant.create()
    while plant.pilot.counts.tried == 0:
        plant.step(100, 0.05, blocked=True)
    plant.own.settings.set({"schedule_conservativeness": 0.7})
    for _ in range(200):
        plant.step(10, 0.05)
    assert plant.own.settings.schedule_conservativeness == 0.7 and plant.pilot.counts.undone == 0


@settings(max_examples=examples(10))
@given(seed=st.integers(0, 10**9))
def test_random_loads_never_leave_the_bounds_nor_change_more_often_than_allowed(seed: int) -> None:
    """Load, effects and blockages are new random values every few seconds: noise that matches no rule for long."""
    rng = random.Random(seed)
    plant = Plant.create(max_running_requests=rng.randint(1, 64), schedule_conservativeness=rng.uniform(0.05, 4))
    bounds, moments = plant.own.settings.bounds(), []
    while plant.now < 3 * HOUR:
        tokens, seconds, blocked = rng.randint(1, 1000), rng.uniform(0.5, 3.0), rng.random() < 0.5
        plant.totals.retractions += rng.choice([0, 0, 10])
        for _ in range(rng.randint(1, 60)):
            before = plant.pilot.counts.tried
            plant.step(tokens, seconds, ended=rng.randint(0, 9), blocked=blocked)
            if plant.pilot.counts.tried > before:
                moments.append(plant.now)
    for name, value in plant.own.settings.values().items():
        low, high = bounds[name][0], bounds[name][1]
        if isinstance(value, (int, float)):
            assert low <= value and (high is None or value <= high)
    for i, moment in enumerate(moments):
        assert sum(moment <= other < moment + HOUR for other in moments[i:]) <= CHANGES_AN_HOUR


def test_a_steady_load_for_a_week_settles() -> None:
    """The throughput is best at a conservativeness of 0.2, and noise of 3 % hides small steps."""
    rng = random.Random(random.getrandbits(32))
    plant = Plant.create()
    day, by_day = 24 * HOUR, []
    for number in range(7):
        before = plant.pilot.counts.tried
        while plant.now < (number + 1) * day:
            value = plant.own.settings.schedule_conservativeness
            rate = 1000 * (1 - 0.1 * abs(value - 0.2)) * rng.gauss(1, 0.03)
            plant.step(int(20 * rate), 20.0, ended=20, blocked=value > 0.1)
        by_day.append(plant.pilot.counts.tried - before)
    assert sum(by_day[1:]) <= 6 * 24 and by_day[-1] <= 24  # at most one trial an hour after settling
    assert 0.05 <= plant.own.settings.schedule_conservativeness <= 0.5


def test_gains() -> None:
    own = table()
    slow, fast = window(own, **WAITING), window(own, **WAITING, tokens=1200)
    assert gain_of(slow, fast, FREE)[0] == pytest.approx(0.2)
    before, after = window(own, request_seconds=100.0), window(own, request_seconds=50.0)
    assert gain_of(before, after, FREE)[0] == pytest.approx(1.0)
    assert gain_of(before, window(own, slow_tokens=100), LIMITS)[0] == pytest.approx(-0.1)
    assert gain_of(before, window(own, late_first_tokens=10), LIMITS)[0] == pytest.approx(-0.1)
    late = window(own, **WAITING, tokens=1200, late_first_tokens=90)
    assert gain_of(slow, late, LIMITS)[0] == pytest.approx(0.2)  # first tokens after a queue depend on its length
    quiet, busy = window(own, request_seconds=100.0), window(own, **WAITING, tokens=3000, request_seconds=3000.0)
    assert gain_of(quiet, busy, FREE)[0] > 1


def test_noise_is_the_standard_error_of_the_throughput() -> None:
    """Of 600 windows with independent steps, compared with the deviation of their throughputs."""
    rng, errors, rates = random.Random(random.getrandbits(32)), [], []
    for _ in range(600):
        own, totals = RequestTable(CONFIG), Totals()
        own.add(Request("a", [1, 2], SamplingParams(max_new_tokens=8), 8), 0.0)
        made = Window(own, totals, FREE, 0.0, 0)
        for step in range(40):
            totals.generated_tokens += rng.choice([10, 30])
            made.step([], 0.5 * (step + 1), step + 1, False, False)
        errors.append(made.throughput_noise)
        rates.append(made.throughput)
    assert fmean(errors) == pytest.approx(stdev(rates) / fmean(rates), rel=0.2)


def test_a_loss_within_the_noise_is_not_undone(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "moe_engine")
    plant = Plant.create()
    while plant.pilot.counts.tried == 0:
        plant.step(100, 0.05, blocked=True)
    bursts = itertools.cycle([0] * 40 + [180] * 40)  # a tenth less, in bursts of two seconds
    while plant.pilot.counts.kept + plant.pilot.counts.undone == 0:
        plant.step(next(bursts), 0.05)
    assert plant.pilot.counts.kept == 1
    assert "token/s, a loss within the noise." in caplog.messages[-1]


def test_changes_that_give_more_room_go_together_and_early() -> None:
    plant = Plant.create(max_running_requests=4, chunked_prefill_size=64)
    for i in range(4):
        plant.own.live[str(i)].row = i
        plant.own.queue.remove(plant.own.queue.entries[0])
    while plant.pilot.counts.tried == 0:
        plant.step(100, 0.5, ended=0, prompts=True)
    assert plant.pilot.counts.by_setting == {"max_running_requests": 1, "chunked_prefill_size": 1}
    assert plant.own.settings.max_running_requests == 64 and plant.own.settings.chunk_tokens == 1024
    assert plant.now <= EARLY_SECONDS + LEAST_SECONDS


def test_requests_whose_first_token_is_late_already_count() -> None:
    own = table()
    for i, queued in enumerate((0.0, 0.0, 9.5)):
        own.add(Request(str(i), [1, 2], SamplingParams(max_new_tokens=8), 8), queued)
    made = Window(own, Totals(), LIMITS, 0.0, 0)
    made.step([], 10.0, 0, False, False)
    made.count_waiting()
    assert made.counts.late_waiting == 2 and made.late_share == 1


def test_windows_count_busy_time_and_gaps() -> None:
    own, totals = RequestTable(CONFIG), Totals()
    made = Window(own, totals, LIMITS, 0.0, 0)
    made.step([], 100.0, 0, False, False)  # idle
    assert made.seconds == 0
    own.add(Request("a", [1, 2], SamplingParams(max_new_tokens=8), 8), 100.0)
    made.step([], 101.0, 0, False, False)
    made.step([], 101.5, 0, False, True)  # a prompt step
    totals.generated_tokens += 1
    made.step([], 101.75, 1, False, False)  # 0.25 s after it, without earlier decodes
    totals.generated_tokens += 10
    made.step([], 102.0, 11, False, False)  # ten decode steps of 25 ms
    assert made.seconds == pytest.approx(1.0) and made.counts.prompt_step_seconds == pytest.approx(0.5)
    assert made.counts.slow_tokens == made.counts.slow_behind_prompts == 1
    assert made.seconds < MOST_SECONDS and made.counts.tokens == 11
