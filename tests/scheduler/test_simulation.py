"""Whole traces under random configurations: tokens, KV contents, budgets, progress, and no leaks at the end."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from moe_engine.scheduler import POLICIES, SchedulerConfig
from moe_engine.types import Request
from moe_engine.types.prefill_delay import DelayerSettings
from tests.examples import examples
from tests.scheduler.simulator import Simulation, random_request
from tests.scheduler.traces import play_arrivals

PRESSED = SchedulerConfig(
    num_slots=320, context_len=200, max_rows=10, chunked_prefill_size=32, init_new_token_ratio=0.1,
    new_token_ratio_decay_steps=10, retract_decode_steps=4,
)  # fmt: skip
"""Long requests do not fit together, and are admitted nevertheless: they are retracted."""
EVICTION = {"lru": "{}", "lfu": "{}", "slru": "{}", "priority": "{}", "tlru": '{"threshold": 20}'}


@st.composite
def configs(draw: st.DrawFn) -> SchedulerConfig:
    page = draw(st.sampled_from([1, 4, 16]))
    pages = draw(st.integers(max(2, 48 // page), max(3, 400 // page)))
    policy = draw(st.sampled_from(POLICIES))
    chunk = draw(st.sampled_from([-1, 16, 24, 64]))
    return SchedulerConfig(
        num_slots=page * pages,
        context_len=draw(st.sampled_from([64, 200])),
        page_size=page,
        max_rows=draw(st.integers(1, 12)),
        policy=policy,
        chunked_prefill_size=chunk,
        max_prefill_tokens=draw(st.sampled_from([16, 64, 1000])),
        enable_mixed_chunk=draw(st.booleans()),
        schedule_conservativeness=draw(st.sampled_from([0.0, 0.1, 1.0, 2.0])),
        new_token_ratio_decay_steps=draw(st.sampled_from([10, 600])),
        radix_eviction_policy=(eviction := draw(st.sampled_from(list(EVICTION)))),
        radix_eviction_policy_config=EVICTION[eviction],
        disable_radix_cache=draw(st.sampled_from([False, False, False, True])),
        uses_priority=policy == "priority" or (policy in ("fcfs", "lof") and draw(st.booleans())),
        schedule_low_priority_values_first=draw(st.booleans()),
        max_queued_requests=draw(st.sampled_from([None, None, 3])),
        prefill_max_requests=draw(st.sampled_from([None, None, 1, 2])),
        request_waiting_timeout=draw(st.sampled_from([None, None, 0.05, 1.0])),
        request_running_timeout=draw(st.sampled_from([None, None, 0.1, 2.0])),
        max_consecutive_prefills=draw(st.sampled_from([1, 4, 32])),
        max_delayed_tokens=draw(st.sampled_from([None, 1, 60])),
        least_chunk=16,
        prefill_decode_interval=draw(st.sampled_from([0, 0, 1, 5])),
        prefill_decode_interval_min_bs=draw(st.sampled_from([0, 3])),
        delayer=draw(st.sampled_from([None, None, DelayerSettings(), DelayerSettings(3, 0.2, 0.5, 5.0)])),
        max_overtakes=draw(st.sampled_from([0, 4, 512])),
        random_seed=draw(st.integers(0, 5)),
        retract_decode_steps=draw(st.sampled_from([1, 5, 20])),
        vocab_size=50,
    )


def play(
    sim: Simulation, rng: random.Random, num_requests: int, arrival: float, abort: float, long: bool = False
) -> None:
    """Runs a random trace, with random aborts at any time."""

    def make(i: int) -> Request:
        request = random_request(rng, f"{i}.", sim.config, max_prompt=40 if long else 100, max_new=60)
        if long:
            request.max_new_tokens = rng.randint(60, 120)
            request.sampling = replace(request.sampling, min_new_tokens=request.max_new_tokens // 2)
        return request

    play_arrivals(sim, rng, make, num_requests, arrival, abort)


@settings(max_examples=examples(30), suppress_health_check=list(HealthCheck))
@given(
    config=configs(),
    overlap=st.booleans(),
    seed=st.integers(0, 10**6),
    arrival=st.sampled_from([0.1, 0.5, 0.9]),
    abort=st.sampled_from([0.0, 0.05, 0.3]),
    long=st.booleans(),
)
def test_any_configuration_computes_the_same(
    config: SchedulerConfig, overlap: bool, seed: int, arrival: float, abort: float, long: bool
) -> None:
    sim = Simulation(config, overlap=overlap)
    play(sim, random.Random(seed), 40, arrival, abort, long)


@pytest.mark.each_value
@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("page", [1, 16])
@pytest.mark.parametrize("mixed", [False, True])
def test_long_run_under_memory_pressure(overlap: bool, page: int, mixed: bool) -> None:
    config = replace(PRESSED, page_size=page, policy="lpm", enable_mixed_chunk=mixed)
    sim = Simulation(config, overlap=overlap, check_every=5)
    play(sim, random.Random(page), 200, 0.5, 0.01, long=True)
    stats = sim.scheduler.stats()
    assert stats.num_retractions_total > 10
    assert stats.cached_tokens_total > 200
    if overlap:
        assert stats.num_drains_total > 0


@pytest.mark.parametrize("mixed", [False, True])
def test_long_run_with_preemption(mixed: bool) -> None:
    config = SchedulerConfig(
        num_slots=400,
        context_len=200,
        max_rows=4,
        policy="priority",
        uses_priority=True,
        chunked_prefill_size=48,
        enable_mixed_chunk=mixed,
    )
    sim = Simulation(config, check_every=5)
    play(sim, random.Random(1), 200, 0.3, 0.01)
    assert sim.scheduler.stats().num_preemptions_total > 5
