"""Snapshots of states: traces against a worker that checks each state's text, and the positions of snapshots."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from moe_engine.scheduler import SchedulerConfig
from moe_engine.scheduler.kv_cache.state_kv_cache import StateKVCacheManager
from tests.examples import examples
from tests.scheduler import test_failures as failures
from tests.scheduler.simulator import Simulation, make_request
from tests.scheduler.state_worker import FailingStateWorker, StateWorker
from tests.scheduler.test_simulation import configs, play


def with_snapshots(config: SchedulerConfig, number: int, interval: int = 8) -> SchedulerConfig:
    return replace(config, disable_radix_cache=False, num_snapshots=number, mamba_track_interval=interval)


@settings(max_examples=examples(20), suppress_health_check=list(HealthCheck))
@given(
    config=configs(),
    number=st.sampled_from([1, 2, 5, 40]),
    interval=st.sampled_from([1, 7, 20]),
    overlap=st.booleans(),
    seed=st.integers(0, 10**6),
    arrival=st.sampled_from([0.1, 0.9]),
    abort=st.sampled_from([0.0, 0.1]),
    long=st.booleans(),
)
def test_every_state_has_seen_its_text(
    config: SchedulerConfig,
    number: int,
    interval: int,
    overlap: bool,
    seed: int,
    arrival: float,
    abort: float,
    long: bool,
) -> None:
    """Hits, evictions, retractions, chunks and aborts; the integrity check counts the owners of snapshots each turn."""
    config = with_snapshots(config, number, interval)
    sim = Simulation(config, overlap=overlap, worker=StateWorker(config))
    play(sim, random.Random(seed), 25, arrival, abort, long)
    assert not sim.scheduler.kv_cache.check_snapshots()


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("seed", range(4))
def test_failed_steps(overlap: bool, seed: int) -> None:
    """Snapshots of a failed step, or of a step after it, are never read."""
    rng = random.Random(seed)
    config = SchedulerConfig(num_slots=300, context_len=120, max_rows=5, chunked_prefill_size=24)
    config = with_snapshots(config, rng.choice([3, 30]), 4)
    failures.play_poisoned(config, FailingStateWorker, rng, seed, overlap)


def run(sim: Simulation, rid: str, prompt: list[int], max_new: int = 4) -> int:
    """Number of cached tokens of a request that runs alone."""
    request = make_request(rid, prompt, max_new, ignore_eos=True)
    sim.add(request)
    sim.run_to_end()
    return request.cached_tokens


def test_a_save_leaves_the_snapshot_that_a_new_row_of_its_plan_reads() -> None:
    """With `--enable-mixed-chunk`: one plan has a decode with a state to store, and a request that continues from a
    snapshot."""
    config = SchedulerConfig(num_slots=100, context_len=60, page_size=4, max_rows=4, enable_mixed_chunk=True)
    config = with_snapshots(config, 1, 8)
    prefix, hits = [7] * 9, []
    for turns in range(12):
        sim = Simulation(config, overlap=False, worker=StateWorker(config))
        run(sim, "first", prefix)
        sim.add(make_request("decoding", [3, 4, 5], 20, ignore_eos=True))  # no whole page: no snapshot of its prompt
        for _ in range(turns):
            sim.turn()
        again = make_request("again", [*prefix, 8], 2, ignore_eos=True)
        sim.add(again)
        sim.run_to_end()
        hits.append(again.cached_tokens)
    assert hits[0] == 8 and 0 in hits  # the decode's snapshot replaced it


@pytest.mark.parametrize("page", [1, 4])
def test_where_prefixes_are_found(page: int) -> None:
    config = SchedulerConfig(num_slots=400, context_len=200, page_size=page, max_rows=4, chunked_prefill_size=32)
    config = with_snapshots(config, 20, 16)
    sim = Simulation(config, worker=StateWorker(config))
    head = [random.randrange(50) for _ in range(50)]
    tails = [[i, *(random.randrange(50) for _ in range(20))] for i in range(4)]
    last = 70 - 70 % page
    assert run(sim, "first", head + tails[0]) == 0
    assert run(sim, "again", head + tails[0]) == last, "the end of the prompt"
    assert run(sim, "chunk", head + tails[1]) == 32, "the end of a chunk; the state at the divergence is not kept"
    assert run(sim, "parts", head + tails[2]) == 50 - 50 % page, "where the previous prompt diverged from the others"
    long = head + tails[3]
    request = make_request("talk", long, 40, ignore_eos=True)
    sim.add(request)
    sim.run_to_end()
    text = long + request.output_ids
    assert run(sim, "turn", [*text, 1, 2, 3]) == 96, "a multiple of the interval in the answer"
    sim.check_end()


def test_the_snapshot_used_least_recently_is_given_up() -> None:
    config = with_snapshots(SchedulerConfig(num_slots=400, context_len=200, max_rows=4), 2, 1000)
    sim = Simulation(config, worker=StateWorker(config))
    prompts = [[i, *(random.randrange(50) for _ in range(20))] for i in range(3)]
    for i, prompt in enumerate(prompts[:2]):
        run(sim, f"new{i}", prompt)
    assert run(sim, "hit", prompts[0]) == 20
    assert run(sim, "new", prompts[2]) == 0
    assert run(sim, "lost", prompts[1]) == 0 and run(sim, "kept", prompts[2]) == 20
    kv_cache = sim.scheduler.kv_cache
    assert isinstance(kv_cache, StateKVCacheManager) and len(kv_cache.tree.holders) == 2
