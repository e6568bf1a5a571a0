"""Settings that change while a scheduler runs: every plan respects the values in force, and tokens do not change."""

from __future__ import annotations

import math
import random
from typing import Any

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from moe_engine.errors import InputError
from moe_engine.scheduler import Scheduler, SchedulerConfig
from moe_engine.scheduler.run_settings import SETTINGS, RunSettings
from moe_engine.server.native_types import StateShown
from moe_engine.types import StepPlan
from tests.examples import examples
from tests.scheduler.simulator import Simulation, random_request
from tests.scheduler.test_simulation import configs

WRONG: list[tuple[str, Any, str]] = [
    ("max_running_requests", 0, "at least 1 and at most 8, the limit of this launch, got 0"),
    ("max_running_requests", 9, "at most 8"),
    ("max_running_requests", 2.5, "an integer"),
    ("max_running_requests", None, "an integer"),
    ("max_running_requests", True, "an integer"),
    ("chunked_prefill_size", 3, "at least 4"),
    ("chunked_prefill_size", 65, "at most 64"),
    ("chunked_prefill_size", -1, "at least 4"),
    ("schedule_conservativeness", -0.1, "at least 0"),
    ("schedule_conservativeness", math.inf, "a number"),
    ("schedule_conservativeness", math.nan, "a number"),
    ("max_queued_requests", 0, "at least 1, or null"),
    ("max_consecutive_prefills", 33, "at most 32"),
    ("schedule_policy", "lof", "expected one of fcfs, lpm, got 'lof'"),
    ("schedule_policy", None, "expected one of fcfs, lpm"),
    ("page_size", 4, "cannot change at run time; these can: schedule_conservativeness, "),
    ("no_such_flag", 1, "cannot change at run time"),
]


@given(configs())
@settings(max_examples=examples(5))
def test_bounds_have_the_type_that_the_endpoint_describes(config: SchedulerConfig) -> None:
    own = RunSettings(config)
    shown = [{"values": own.values(), "bounds": own.bounds()}]
    assert msgspec.convert(shown, list[StateShown]) == shown


class Changing(Simulation):
    """Checks each plan against the settings at the time of planning."""

    def check_budgets(self, plan: StepPlan) -> None:
        super().check_budgets(plan)
        now = self.scheduler.table.settings
        prefills = plan.counts[plan.num_decodes :]
        if prefills and now.chunk_tokens is not None:
            assert plan.num_tokens <= now.chunk_tokens
        if len(prefills) > 1:
            assert plan.num_tokens <= now.max_prefill_tokens
        assert len(prefills) <= (now.prefill_max_requests or len(prefills))
        if plan.new_rows:
            assert self.scheduler.table.num_running <= now.max_running_requests

    def change(self, rng: random.Random) -> None:
        own = self.scheduler.table.settings
        changes: dict[str, Any] = {}
        for name, setting in SETTINGS.items():
            low, high = setting.bounds(self.config)
            if setting.kind is str:
                changes[name] = rng.choice(setting.choices(self.config))
            elif rng.random() < 0.5:
                value = (
                    rng.uniform(low, min(high, 60))
                    if setting.kind is float
                    else rng.randint(int(low), int(min(high, 60)))
                )
                changes[name] = rng.choice([value, setting.at_launch(self.config)])
        before = own.values()
        assert own.set(changes, check_only=True) == before
        assert own.set(changes) == before | changes


@settings(max_examples=examples(15), suppress_health_check=list(HealthCheck))
@given(config=configs(), overlap=st.booleans(), seed=st.integers(0, 10**6))
def test_plans_keep_to_the_values_in_force(config: SchedulerConfig, overlap: bool, seed: int) -> None:
    rng = random.Random(seed)
    sim = Changing(config, overlap=overlap)
    for number in range(40):
        request = random_request(rng, f"{number}.", config, max_prompt=100, max_new=40)
        try:
            sim.add(request)
        except InputError:
            del sim.outcomes[request.rid]
        for _ in range(rng.randint(0, 4)):
            sim.turn()
        if rng.random() < 0.3:
            sim.change(rng)
    sim.run_to_end(20_000)
    sim.check_end()


@pytest.mark.parametrize(("name", "value", "words"), WRONG)
def test_values_out_of_bounds_change_nothing(name: str, value: Any, words: str) -> None:
    config = SchedulerConfig(num_slots=256, context_len=128, page_size=4, max_rows=8, chunked_prefill_size=64)
    own = Scheduler(config).table.settings
    before = own.values()
    with pytest.raises(InputError) as refused:
        own.set({"schedule_conservativeness": 0.5, name: value})
    assert refused.value.message.startswith(f"server_args.{name}: ") and words in refused.value.message
    assert own.values() == before
    assert own.bounds()["max_running_requests"] == [1, 8] and own.bounds()["max_queued_requests"] == [1, None]


def test_conservativeness_starts_the_ratio_again() -> None:
    scheduler = Scheduler(SchedulerConfig(num_slots=64, context_len=64))
    assert scheduler.ratio.value == pytest.approx(0.7)
    scheduler.table.settings.set({"schedule_conservativeness": 0.5})
    assert scheduler.ratio.value == pytest.approx(0.35)
    scheduler.ratio.decay()
    value = scheduler.ratio.value
    scheduler.table.settings.set({"max_running_requests": 2})
    assert scheduler.ratio.value == value < 0.35
