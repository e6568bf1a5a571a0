"""Storage below the host tier under random traces, faults and restarts: correct tokens, no leaks, no endless waits."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from moe_engine.scheduler import SchedulerConfig
from moe_engine.scheduler.tiers.page_keys import page_keys, root_key
from moe_engine.types import KVBackup, KVFetch, KVOps, KVReport, Request, SpeculationConfig, StepPlan
from moe_engine.types.step_settings import StorageSettings
from tests.examples import examples
from tests.scheduler.simulator import make_request
from tests.scheduler.storage_simulator import Faults, StorageSimulation
from tests.scheduler.test_host_tier import play
from tests.scheduler.test_simulation import configs
from tests.scheduler.test_speculation import speculations
from tests.scheduler.traces import play_failures

STORAGE = StorageSettings("fake", threshold=8)
BASE = SchedulerConfig(
    num_slots=200, context_len=200, max_rows=4, chunked_prefill_size=64, host_tier_tokens=400, page_size=4,
    hicache_write_policy="write_through", storage=STORAGE,
)  # fmt: skip
POLICIES = ("write_back", "write_through", "write_through_selective")
PREFETCH = ("best_effort", "wait_complete", "timeout")


@st.composite
def faults(draw: st.DrawFn) -> Faults:
    share = st.sampled_from([0.0, 0.0, 0.1, 0.5, 1.0])
    return Faults(draw(share), draw(share), draw(st.sampled_from([0.0, 0.5, 0.9])), draw(st.sampled_from([0.0, 0.2])))


@settings(max_examples=examples(30), suppress_health_check=list(HealthCheck))
@given(
    config=configs(),
    places=st.integers(1, 40),
    write=st.sampled_from(POLICIES),
    prefetch=st.sampled_from(PREFETCH),
    faults=faults(),
    overlap=st.booleans(),
    seed=st.integers(0, 10**6),
    abort=st.sampled_from([0.0, 0.05, 0.3]),
    late=st.sampled_from([0.0, 0.5, 0.95]),
)
def test_any_trace_and_any_fault(
    config: SchedulerConfig, places: int, write: str, prefetch: str, faults: Faults, overlap: bool, seed: int,
    abort: float, late: float,
) -> None:  # fmt: skip
    """Two engines, one after the other, over one storage."""
    config = replace(
        config, host_tier_tokens=config.page_size * max(1, 20 * places // config.page_size), disable_radix_cache=False,
        hicache_write_policy=write, storage=replace(STORAGE, policy=prefetch),
    )  # fmt: skip
    rng, pages = random.Random(seed), dict[bytes, list[Any]]()
    for _ in range(2):
        play(StorageSimulation(config, rng, faults, pages, overlap=overlap, late=late), rng, 25, 0.5, abort)


@settings(max_examples=examples(10), suppress_health_check=list(HealthCheck))
@given(
    config=configs(),
    speculation=speculations(),
    write=st.sampled_from(POLICIES),
    faults=faults(),
    seed=st.integers(0, 10**6),
    late=st.sampled_from([0.0, 0.9]),
)
def test_drafts_are_stored_too(
    config: SchedulerConfig, speculation: SpeculationConfig, write: str, faults: Faults, seed: int, late: float
) -> None:
    tokens = 2 * config.num_slots
    config = replace(
        config, host_tier_tokens=tokens, disable_radix_cache=False, speculation=speculation, storage=STORAGE,
        hicache_write_policy=write,
    )  # fmt: skip
    rng, pages = random.Random(seed), dict[bytes, list[Any]]()
    for _ in range(2):
        play(StorageSimulation(config, rng, faults, pages, overlap=True, late=late, luck=0.7), rng, 20, 0.5, 0.05)


@settings(max_examples=examples(10), suppress_health_check=list(HealthCheck))
@given(seed=st.integers(0, 10**6), write=st.sampled_from(POLICIES), faults=faults(), late=st.sampled_from([0.0, 0.9]))
def test_failed_steps_store_nothing_wrong(seed: int, write: str, faults: Faults, late: float) -> None:
    rng, pages = random.Random(seed), dict[bytes, list[Any]]()
    sim = StorageSimulation(replace(BASE, hicache_write_policy=write), rng, faults, pages, overlap=True, late=late)
    play_failures(sim, rng, 30)
    check_contents(sim)


def test_stops_of_a_failed_step_are_ascending() -> None:
    """The failed step had a fetch, and earlier backups."""
    sim = StorageSimulation(BASE, random.Random(0), Faults(), {}, overlap=False, late=0.0)
    storage_tier = sim.storage_tier
    storage_tier.steps_failed([KVOps(fetches=[KVFetch(3, [], [])], backups=[KVBackup(1, [], []), KVBackup(2, [], [])])])
    ops = storage_tier.take_ops(None)
    assert ops is not None and ops.stops == [1, 2, 3]


def check_contents(sim: StorageSimulation) -> None:
    assert all(None not in value for values in sim.storage.pages.values() for value in values)


PROMPT = [i % 50 for i in range(100)]


def served_before(write: str = "write_through", **config: Any) -> dict[bytes, list[Any]]:
    """The storage of an ended engine that had served `PROMPT`."""
    pages: dict[bytes, list[Any]] = {}
    base = replace(BASE, hicache_write_policy=write, **config)
    sim = StorageSimulation(base, random.Random(0), Faults(), pages, overlap=True, late=0.5)
    sim.add(make_request("a", list(PROMPT), 2, ignore_eos=True))
    sim.settle()
    return pages


def test_a_restarted_engine_finds_its_storage() -> None:
    pages = served_before()
    assert len(pages) == 25  # whole pages of the prompt
    sim = StorageSimulation(BASE, random.Random(1), Faults(), pages, overlap=True, late=0.5)
    request = make_request("b", [*PROMPT, 7], 4, ignore_eos=True)
    sim.add(request)
    sim.run_to_end()
    assert request.cached_tokens == request.loaded_storage == 100 and request.loaded_host == 0
    again = make_request("c", [*PROMPT, 8], 4, ignore_eos=True)
    sim.add(again)
    sim.run_to_end()
    assert again.cached_tokens == 100 and again.loaded_storage == 0  # on the device
    sim.check_end()


def test_write_policies_store_what_they_name() -> None:
    assert not served_before("write_back") and not served_before("write_through_selective")
    pages: dict[bytes, list[Any]] = {}
    config = replace(BASE, hicache_write_policy="write_through_selective")
    sim = StorageSimulation(config, random.Random(0), Faults(), pages, overlap=True, late=0.5)
    for i in range(2):
        sim.add(make_request(str(i), [*PROMPT, i], 2, ignore_eos=True))
        sim.settle()
        assert len(pages) == 25 * i


@pytest.mark.parametrize("policy", PREFETCH)
def test_a_storage_that_hangs_delays_a_request_by_its_bound(policy: str) -> None:
    config = replace(BASE, storage=replace(STORAGE, policy=policy, timeout_base=2.0))
    sim = StorageSimulation(config, random.Random(1), Faults(hangs=1.0), served_before(), overlap=True, late=0.5)
    request = make_request("b", [*PROMPT, 7], 4, ignore_eos=True)
    sim.add(request)
    sim.run_to_end()
    waited = request.first_scheduled
    bounds = {"best_effort": (0, 0.1), "timeout": (2, 4), "wait_complete": (5, 7)}[policy]  # paused
    assert waited is not None and bounds[0] <= waited <= bounds[1]
    assert request.cached_tokens == 0
    sim.check_end()


@pytest.mark.parametrize("policy", ["timeout", "wait_complete"])
def test_a_storage_that_hangs_is_paused_and_tried_again(policy: str, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "moe_engine")
    config = replace(BASE, storage=replace(STORAGE, policy=policy, timeout_base=2.0))
    faults = Faults(dead=True)
    sim = StorageSimulation(config, random.Random(1), faults, served_before(), overlap=True, late=0.5)
    pause = sim.storage_tier.pause

    def served(name: str) -> Request:
        request = make_request(name, [*PROMPT, 7], 4, ignore_eos=True)
        sim.add(request)
        sim.run_to_end()
        assert sim.outcomes[name].reason == "length"
        sim.scheduler.flush_cache()
        return request

    def wait(seconds: float) -> None:
        end = sim.now + seconds
        while sim.now < end:
            sim.now += 0.5
            sim.turn()

    waits = []
    for i in range(20):
        arrived = sim.now
        request = served(f"hanging {i}")
        assert request.first_scheduled is not None and request.cached_tokens == 0
        waits.append(request.first_scheduled - arrived)
        wait(1.0)
    assert pause.is_on and max(waits[8:]) < 0.5
    assert sim.scheduler.stats().storage_paused == 1
    assert caplog.text.count("KV storage: no read has answered") == 1
    num_open = sim.storage_tier.num_open
    wait(40.0)
    assert pause.is_on and sim.storage_tier.num_open == num_open + 1, "one try, which hangs"
    faults.dead = False
    wait(700.0)
    assert not pause.is_on and "it answers again" in caplog.text
    assert served("after").loaded_storage == 100
    sim.check_end()


def test_a_stopped_try_is_no_answer() -> None:
    """The step that should have begun the try failed."""
    sim = StorageSimulation(BASE, random.Random(1), Faults(dead=True), served_before(), overlap=False, late=0.0)
    tier = sim.storage_tier
    sim.add(make_request("b", [*PROMPT, 7], 4, ignore_eos=True))
    sim.run_to_end()
    while not tier.pause.is_on:
        sim.now += 1.0
        tier.next_step(running=False)
    tier.take_ops(None)
    sim.now += 60.0
    tier.next_step(running=False)
    ops = tier.take_ops(None)
    assert ops is not None and [len(fetch.pages) for fetch in ops.fetches] == [0]
    tier.steps_failed([ops])
    tier.reported([KVReport(ops.fetches[0].id, 0, True)])
    assert tier.pause.is_on


def test_others_run_while_a_request_waits_for_the_storage() -> None:
    config = replace(BASE, storage=replace(STORAGE, policy="wait_complete"))
    sim = StorageSimulation(config, random.Random(1), Faults(hangs=1.0), served_before(), overlap=True, late=0.5)
    sim.add(make_request("b", [*PROMPT, 7], 4, ignore_eos=True))
    sim.add(make_request("d", [3, 4, 5], 4, ignore_eos=True))
    while not sim.outcomes["d"].reason:
        sim.turn()
    assert sim.outcomes["d"].reason == "length" and not sim.outcomes["b"].tokens
    sim.check_end()


def test_keys_name_everything_in_front_of_a_page() -> None:
    root = root_key("", "", None, 4, False)
    keys = page_keys(root, PROMPT, 4)
    assert len(keys) == len(set(keys)) == 25 and page_keys(keys[9], PROMPT[40:], 4) == keys[10:]
    other = [*PROMPT[:3], 99, *PROMPT[4:]]
    assert not set(keys) & set(page_keys(root, other, 4))
    for facts in [("v2", "", None, 4, False), ("", "adapter", None, 4, False), ("", "", "salt", 4, False)]:
        assert not set(keys) & set(page_keys(root_key(*facts), PROMPT, 4))


def test_new_weights_and_other_adapters_share_nothing() -> None:
    pages = served_before()
    sim = StorageSimulation(BASE, random.Random(1), Faults(), pages, overlap=True, late=0.5)
    sim.storage_tier.renew("other weights")
    for i, more in enumerate([{}, {"extra_key": "a"}]):
        request = make_request(str(i), [*PROMPT, 7], 4, ignore_eos=True, **more)
        sim.add(request)
        sim.run_to_end()
        assert request.cached_tokens == 0
    sim.check_end()


def test_long_prompts_are_hashed_over_several_steps_while_others_run() -> None:
    sim = StorageSimulation(BASE, random.Random(1), Faults(), served_before(), overlap=True, late=0.0)
    sim.storage_tier.max_hash_tokens = 24
    request = make_request("b", [*PROMPT, 7], 4, ignore_eos=True)
    sim.add(make_request("a", [3, 4, 5], 60, ignore_eos=True))
    sim.turn()
    sim.add(request)
    assert sim.storage_tier.poll() == 1 and not sim.storage.open
    turns = 0
    while not sim.storage.open:
        sim.turn()
        turns += 1
    assert 2 <= turns <= 8
    sim.run_to_end()
    assert request.loaded_storage == 100
    sim.check_end()


def test_keys_of_cached_nodes_are_computed_once() -> None:
    sim = StorageSimulation(BASE, random.Random(1), Faults(), {}, overlap=True, late=0.0)
    sim.scheduler.kv_cache.tree.write_through = None
    sim.add(make_request("a", list(PROMPT), 8, ignore_eos=True))
    sim.run_to_end()
    longer = [*PROMPT, *range(60, 90)]
    sim.add(make_request("b", longer, 8, ignore_eos=True))
    keys = page_keys(root_key("", "", None, 4, False), longer, 4)
    entry = next(iter(sim.scheduler.table.queue.entries))
    assert entry.prefetch.keys == keys[25:32]
    assert entry.matched(sim.storage_tier._tree).node.digest == keys[24]
    sim.run_to_end()
    sim.check_end()


def test_without_storage_plans_are_as_before() -> None:
    sim = StorageSimulation(BASE, random.Random(1), Faults(), {}, overlap=True, late=0.5)
    sim.add(make_request("a", [1, 2, 3], 4, ignore_eos=True))
    plan = sim.scheduler.schedule()
    assert isinstance(plan, StepPlan) and plan.kv_ops is None  # too short for a lookup
    sim.worker.submit(plan)
    sim.check_end()
