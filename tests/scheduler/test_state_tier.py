"""Host tier and storage of a model with states: traces, faults and restarts, with workers that check every state."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from moe_engine.errors import ConfigError
from moe_engine.scheduler import SchedulerConfig
from moe_engine.types import Request
from tests.examples import examples
from tests.scheduler.drafting_worker import RUBBISH
from tests.scheduler.simulator import make_request
from tests.scheduler.storage_simulator import Faults, StorageSimulation
from tests.scheduler.test_host_tier import play
from tests.scheduler.test_simulation import configs
from tests.scheduler.test_storage_tier import POLICIES, PREFETCH, STORAGE, faults
from tests.scheduler.tier_simulator import TierSimulation
from tests.scheduler.traces import play_failures

BASE = SchedulerConfig(
    num_slots=200, context_len=200, max_rows=4, chunked_prefill_size=64, host_tier_tokens=400, page_size=4,
    num_snapshots=4, host_snapshots=8, mamba_track_interval=8,
)  # fmt: skip
PROMPT = [i % 50 for i in range(100)]


@settings(max_examples=examples(25), suppress_health_check=list(HealthCheck))
@given(
    config=configs(),
    snapshots=st.sampled_from([1, 2, 5, 40]),
    entries=st.sampled_from([1, 3, 40]),
    interval=st.sampled_from([1, 7, 20]),
    write=st.sampled_from(POLICIES),
    overlap=st.booleans(),
    seed=st.integers(0, 10**6),
    abort=st.sampled_from([0.0, 0.1]),
    late=st.sampled_from([0.0, 0.5, 0.95]),
)
def test_every_state_has_seen_its_text(
    config: SchedulerConfig, snapshots: int, entries: int, interval: int, write: str, overlap: bool, seed: int,
    abort: float, late: float,
) -> None:  # fmt: skip
    config = replace(
        config, host_tier_tokens=2 * config.num_slots, disable_radix_cache=False, num_snapshots=snapshots,
        host_snapshots=entries, mamba_track_interval=interval, hicache_write_policy=write,
    )  # fmt: skip
    rng = random.Random(seed)
    play(TierSimulation(config, rng, overlap=overlap, late=late), rng, 30, 0.5, abort)


@settings(max_examples=examples(15), suppress_health_check=list(HealthCheck))
@given(
    config=configs(),
    snapshots=st.sampled_from([2, 40]),
    entries=st.sampled_from([1, 3, 40]),
    write=st.sampled_from(POLICIES),
    prefetch=st.sampled_from(PREFETCH),
    faults=faults(),
    seed=st.integers(0, 10**6),
    late=st.sampled_from([0.0, 0.9]),
)
def test_restarts_and_faults_of_the_storage(
    config: SchedulerConfig, snapshots: int, entries: int, write: str, prefetch: str, faults: Faults, seed: int,
    late: float,
) -> None:  # fmt: skip
    config = replace(
        config, host_tier_tokens=2 * config.num_slots, disable_radix_cache=False, num_snapshots=snapshots,
        host_snapshots=entries, mamba_track_interval=8, hicache_write_policy=write,
        storage=replace(STORAGE, policy=prefetch),
    )  # fmt: skip
    rng, pages = random.Random(seed), dict[bytes, list[Any]]()
    for _ in range(2):
        play(StorageSimulation(config, rng, faults, pages, overlap=True, late=late), rng, 25, 0.5, 0.05)


@settings(max_examples=examples(12), suppress_health_check=list(HealthCheck))
@given(
    seed=st.integers(0, 10**6), write=st.sampled_from(POLICIES), overlap=st.booleans(), stored=st.booleans(),
    late=st.sampled_from([0.0, 0.5, 0.95]),
)  # fmt: skip
def test_states_of_failed_steps_are_never_used(seed: int, write: str, overlap: bool, stored: bool, late: float) -> None:
    rng = random.Random(seed)
    config = replace(BASE, hicache_write_policy=write, storage=STORAGE if stored else None)
    if not stored:
        play_failures(TierSimulation(config, rng, overlap=overlap, late=late), rng, 40)
        return
    pages: dict[bytes, list[Any]] = {}
    sim = StorageSimulation(config, rng, Faults(), pages, overlap=overlap, late=late)
    play_failures(sim, rng, 40)
    for key, values in pages.items():
        bad = {None, RUBBISH}
        assert bad.isdisjoint(values if key.endswith(b"state") else (each for value in values for each in value))


def served(sim: TierSimulation, rid: str, prompt: list[int], max_new: int = 2) -> Request:
    request = make_request(rid, prompt, max_new, ignore_eos=True)
    sim.add(request)
    sim.run_to_end()
    return request


@pytest.mark.parametrize("write", POLICIES)
def test_an_evicted_prefix_comes_back_with_its_state(write: str) -> None:
    sim = TierSimulation(replace(BASE, hicache_write_policy=write), random.Random(0), overlap=True, late=0.5)
    served(sim, "first", PROMPT)
    served(sim, "other", [49 - i % 50 for i in range(190)])
    again = served(sim, "again", [*PROMPT, 7])
    assert again.cached_tokens == 96 and again.loaded_host >= 60  # a part was still on the device
    sim.check_end()


def test_only_the_state_is_loaded_if_the_kv_is_on_the_device() -> None:
    config = replace(BASE, num_snapshots=1, num_slots=400)
    sim = TierSimulation(config, random.Random(0), overlap=True, late=0.5)
    served(sim, "first", PROMPT)
    served(sim, "other", [49 - i for i in range(40)])  # takes the only snapshot
    again = served(sim, "again", [*PROMPT, 7])
    assert again.cached_tokens == 96 and again.loaded_host == 0
    sim.check_end()


def test_a_restarted_engine_finds_states_in_its_storage() -> None:
    pages: dict[bytes, list[Any]] = {}
    config = replace(BASE, hicache_write_policy="write_through", storage=STORAGE)
    sim = StorageSimulation(config, random.Random(0), Faults(), pages, overlap=True, late=0.5)
    served(sim, "first", PROMPT)
    sim.settle()
    states = [key for key in pages if key.endswith(b"state")]
    assert len(pages) - len(states) == 25 and len(states) == 2  # the end of a chunk and of the prompt
    for lost in (states[:0], states[1:], states):
        kept = {key: value for key, value in pages.items() if key not in lost}
        sim = StorageSimulation(config, random.Random(1), Faults(), kept, overlap=True, late=0.5)
        again = served(sim, "again", [*PROMPT, 7])
        assert again.cached_tokens == again.loaded_storage == {0: 96, 1: 64, 2: 0}[len(lost)]
        sim.check_end()


@pytest.mark.parametrize("mixed", [False, True])
def test_no_step_is_run_for_a_state_without_room(mixed: bool) -> None:
    """A load reads the only entry while a state is due."""
    config = SchedulerConfig(
        num_slots=48, context_len=200, max_rows=1, page_size=16, max_prefill_tokens=16, chunked_prefill_size=-1,
        policy="lpm", max_overtakes=0, enable_mixed_chunk=mixed, vocab_size=50, host_tier_tokens=96, num_snapshots=2,
        host_snapshots=1, mamba_track_interval=1, hicache_write_policy="write_through_selective",
    )  # fmt: skip
    rng = random.Random(18074)
    play(TierSimulation(config, rng, overlap=True, late=0.5), rng, 30, 0.5, 0.0)


def test_a_tier_without_states_of_its_own_is_refused() -> None:
    for changes in ({"host_snapshots": 0}, {"kv_connector": "a:B"}):
        with pytest.raises(ConfigError, match="snapshots of states"):
            replace(BASE, **changes)
