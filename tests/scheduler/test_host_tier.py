"""The host-RAM tier under random traces: KV contents, tokens, waits for KV, and no leaks, with copies in flight."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from moe_engine.errors import ConfigError
from moe_engine.scheduler import SchedulerConfig
from moe_engine.scheduler.kv_cache.radix_cache import RadixCache
from moe_engine.types import Request, SpeculationConfig, Status, StepPlan
from tests.examples import examples
from tests.scheduler.simulator import Simulation, make_request, random_request
from tests.scheduler.test_simulation import configs
from tests.scheduler.test_speculation import speculations
from tests.scheduler.tier_simulator import TierSimulation
from tests.scheduler.traces import play_arrivals, play_failures

pytestmark = pytest.mark.drawn(6)

BASE = SchedulerConfig(num_slots=200, context_len=200, max_rows=4, chunked_prefill_size=64, host_tier_tokens=400)


def play(sim: TierSimulation, rng: random.Random, num_requests: int, arrival: float, abort: float) -> None:
    """A trace of sessions: requests repeat or continue earlier prompts."""
    prompts: list[list[int]] = []

    def make(i: int) -> Request:
        request = random_request(rng, f"{i}.", sim.config, max_prompt=100, max_new=40)
        if prompts and rng.random() < 0.6:
            again = rng.choice(prompts)
            request.prompt_ids = (again + request.prompt_ids)[: rng.randint(len(again), len(again) + 20)]
            longest = min(sim.config.context_len, sim.config.num_slots)
            request.prompt_ids = request.prompt_ids[: longest - request.max_new_tokens]
        prompts.append(request.prompt_ids)
        return request

    play_arrivals(sim, rng, make, num_requests, arrival, abort)


@settings(max_examples=examples(25), suppress_health_check=list(HealthCheck))
@given(
    config=configs(),
    places=st.integers(0, 40),
    overlap=st.booleans(),
    seed=st.integers(0, 10**6),
    arrival=st.sampled_from([0.1, 0.5, 0.9]),
    abort=st.sampled_from([0.0, 0.05, 0.3]),
    late=st.sampled_from([0.0, 0.5, 0.95]),
)
def test_any_trace_leaks_nothing_and_computes_the_same(
    config: SchedulerConfig, places: int, overlap: bool, seed: int, arrival: float, abort: float, late: float
) -> None:
    tokens = config.page_size * max(1, 20 * places // config.page_size)
    config = replace(config, host_tier_tokens=tokens, disable_radix_cache=False)
    rng = random.Random(seed)
    play(TierSimulation(config, rng, overlap=overlap, late=late), rng, 40, arrival, abort)


@settings(max_examples=examples(20), suppress_health_check=list(HealthCheck))
@given(
    config=configs(),
    speculation=speculations(),
    overlap=st.booleans(),
    seed=st.integers(0, 10**6),
    luck=st.sampled_from([0.0, 0.7, 1.0]),
    abort=st.sampled_from([0.0, 0.2]),
    late=st.sampled_from([0.0, 0.9]),
)
def test_drafts_are_loaded_too(
    config: SchedulerConfig,
    speculation: SpeculationConfig,
    overlap: bool,
    seed: int,
    luck: float,
    abort: float,
    late: float,
) -> None:
    tokens = 2 * config.num_slots
    config = replace(config, host_tier_tokens=tokens, disable_radix_cache=False, speculation=speculation)
    rng = random.Random(seed)
    play(TierSimulation(config, rng, overlap=overlap, late=late, luck=luck), rng, 30, 0.5, abort)


def test_returning_sessions_are_loaded_under_memory_pressure() -> None:
    rng = random.Random(3)
    sim = TierSimulation(replace(BASE, init_new_token_ratio=0.1, retract_decode_steps=4), rng, overlap=True, late=0.5)
    play(sim, rng, 200, 0.5, 0.02)
    stats = sim.scheduler.stats()
    assert stats.host_hit_tokens_total > 1000
    assert stats.num_retractions_total > 0


def one_session_evicted(late: float = 0.95) -> TierSimulation:
    """The prompt 0..99 was served and evicted."""
    sim = TierSimulation(BASE, random.Random(0), overlap=True, late=late)
    sim.add(make_request("a", [i % 50 for i in range(100)], 2, ignore_eos=True))
    sim.run_to_end()
    sim.add(make_request("b", [49 - i % 50 for i in range(190)], 2, ignore_eos=True))
    sim.run_to_end()
    return sim


def again(rid: str = "c"):
    return make_request(rid, [i % 50 for i in range(100)] + [7], 4, ignore_eos=True)


def test_a_returning_request_waits_for_its_kv_and_hits_the_tier() -> None:
    sim = one_session_evicted()
    request = again()
    sim.add(request)
    plan = sim.scheduler.schedule()
    assert isinstance(plan, StepPlan) and not plan.rows and plan.kv_ops is not None
    assert request.status is Status.WAITING_FOR_KV and sum(len(load.slots) for load in plan.kv_ops.loads) >= 90
    assert sim.scheduler.check_integrity() == []
    sim.worker.submit(plan)
    sim.run_to_end()
    assert request.cached_tokens == 100
    sim.check_end()


def test_requests_with_one_prefix_wait_for_one_load() -> None:
    sim = one_session_evicted()
    sim.add(again("c"))
    sim.add(again("d"))
    sim.keep_plans = True
    sim.run_to_end()
    assert sum(len(plan.kv_ops.loads) for plan in sim.plans if plan.kv_ops is not None) == 1
    sim.check_end()


def test_others_run_while_a_request_waits_for_kv() -> None:
    sim = one_session_evicted(late=1.0)
    sim.add(again())
    sim.add(make_request("d", [3, 4, 5], 4, ignore_eos=True))
    for _ in range(20):
        if sim.outcomes["d"].reason:
            break
        sim.turn()
    assert sim.outcomes["d"].reason == "length" and not sim.outcomes["c"].tokens
    sim.run_to_end()
    sim.check_end()


def test_an_aborted_request_leaves_its_load_to_the_tree() -> None:
    sim = one_session_evicted(late=1.0)
    sim.add(again())
    sim.turn()
    sim.abort("c")
    assert sim.outcomes["c"].reason == "abort"
    assert not sim.scheduler.is_idle() and not sim.scheduler.flush_cache()
    sim.run_to_end()
    assert sim.scheduler.kv_cache.tree.num_protected == 0
    sim.check_end()


def test_without_a_connector_plans_carry_no_copies() -> None:
    sim = Simulation(replace(BASE, host_tier_tokens=0))
    sim.keep_plans = True
    for i in range(8):
        sim.add(random_request(random.Random(i), str(i), sim.config, 90, 20))
    sim.run_to_end()
    assert sim.plans and all(plan.kv_ops is None for plan in sim.plans)
    assert type(sim.scheduler.kv_cache.tree) is RadixCache and sim.scheduler.num_loading == 0


def test_the_tier_needs_the_radix_cache() -> None:
    with pytest.raises(ConfigError, match="--disable-radix-cache"):
        replace(BASE, disable_radix_cache=True)


@settings(max_examples=examples(15), suppress_health_check=list(HealthCheck))
@given(seed=st.integers(0, 10**6), overlap=st.booleans(), late=st.sampled_from([0.0, 0.5, 0.95]))
def test_failed_steps_forget_what_they_stored(seed: int, overlap: bool, late: float) -> None:
    rng = random.Random(seed)
    sim = TierSimulation(BASE, rng, overlap=overlap, late=late)
    play_failures(sim, rng, 40)
