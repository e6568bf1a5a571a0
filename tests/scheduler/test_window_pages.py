"""Bounded KV of windowed layers: pages, matches, and traces against a worker that checks the windows' contents."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from moe_engine.errors import MoeEngineError
from moe_engine.scheduler import SchedulerConfig
from moe_engine.scheduler.kv_cache.window_pages import WindowPages
from moe_engine.scheduler.kv_cache.windowed_kv_cache import WindowedKVCacheManager
from tests.scheduler import test_failures as failures
from tests.scheduler.failing_windowed_worker import FailingWindowedWorker
from tests.scheduler.simulator import Simulation, make_request
from tests.scheduler.test_simulation import PRESSED, configs, play
from tests.scheduler.windowed_worker import WindowedWorker, bounded


def kv_cache_of(sim: Simulation) -> WindowedKVCacheManager:
    kv_cache = sim.scheduler.kv_cache
    assert isinstance(kv_cache, WindowedKVCacheManager)
    return kv_cache


@settings(max_examples=60, suppress_health_check=list(HealthCheck))
@given(
    config=configs(),
    window=st.sampled_from([1, 2, 7, 16, 40]),
    overlap=st.booleans(),
    seed=st.integers(0, 10**6),
    arrival=st.sampled_from([0.1, 0.9]),
    abort=st.sampled_from([0.0, 0.05]),
    long=st.booleans(),
    requests=st.sampled_from([1, 2, None]),
)
def test_every_window_is_there(
    config: SchedulerConfig,
    window: int,
    overlap: bool,
    seed: int,
    arrival: float,
    abort: float,
    long: bool,
    requests: int | None,
) -> None:
    config = bounded(config, window, requests)
    sim = Simulation(config, overlap=overlap, worker=WindowedWorker(config))
    play(sim, random.Random(seed), 25, arrival, abort, long)
    pages = kv_cache_of(sim).windows
    assert pages.pool.num_free == pages.pool.num_total and not pages.page_of


@pytest.mark.each_value
@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("page", [1, 4])
def test_small_pools_evict_windows_and_share_prefixes(overlap: bool, page: int) -> None:
    config = replace(PRESSED, num_slots=400, page_size=page, max_rows=4, policy="lpm", chunked_prefill_size=16)
    config = bounded(config, 8)
    assert config.num_window_slots < config.num_slots / 2
    sim = Simulation(config, overlap=overlap, check_every=5, worker=WindowedWorker(config))
    play(sim, random.Random(page), 120, 0.5, 0.01, long=True)
    stats = sim.scheduler.stats()
    assert kv_cache_of(sim).windows.num_evicted > 100
    assert stats.cached_tokens_total > 100


def test_retractions_keep_the_windows() -> None:
    config = bounded(PRESSED, 6)
    sim = Simulation(config, check_every=5, worker=WindowedWorker(config))
    play(sim, random.Random(0), 100, 0.5, 0.01, long=True)
    assert sim.scheduler.stats().num_retractions_total > 5


@pytest.mark.each_value
@pytest.mark.parametrize("page", [1, 4])
@pytest.mark.parametrize("overlap", [False, True])
def test_a_full_window_pool_blocks_admission_and_retracts(overlap: bool, page: int) -> None:
    """The window pool is enough for three of ten requests; short requests share it, long ones wait or are retracted."""
    config = bounded(replace(PRESSED, num_slots=4000, page_size=page), 24, requests=3)
    sim = Simulation(config, overlap=overlap, check_every=5, worker=WindowedWorker(config))
    rng = random.Random(page)
    running = []
    for i in range(60):
        short = i % 3 == 0
        prompt = [rng.randrange(50) for _ in range(rng.randint(1, 6 if short else 90))]
        sim.add(make_request(f"r{i}", prompt, rng.randint(1, 4 if short else 60), ignore_eos=True))
        for _ in range(rng.randrange(4)):
            sim.turn()
            running.append(sim.scheduler.stats().num_running)
    sim.run_to_end()
    assert sim.scheduler.stats().num_retractions_total > 0
    assert max(running) > 3
    sim.check_end()


@pytest.mark.each_value
@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("seed", range(4))
def test_failed_steps(overlap: bool, seed: int) -> None:
    config = bounded(SchedulerConfig(num_slots=300, context_len=120, max_rows=5, chunked_prefill_size=24), 7)
    sim, bad = failures.play_poisoned(config, FailingWindowedWorker, random.Random(seed), seed, overlap)
    failures.check(sim, bad, apart=False)


def test_a_match_ends_where_the_window_is_there() -> None:
    config = bounded(SchedulerConfig(num_slots=200, context_len=100, max_rows=2, chunked_prefill_size=16), 4)
    sim = Simulation(config, worker=WindowedWorker(config))
    prompt = list(range(2, 42))
    sim.add(make_request("first", prompt, 2, ignore_eos=True))
    sim.run_to_end()
    kv_cache = kv_cache_of(sim)
    assert kv_cache.tree.peek(prompt, 40).length == 40
    path = kv_cache.tree.prefix_slots(kv_cache.tree.match(prompt, 40))
    kv_cache.windows.drop([path[37]])
    assert kv_cache.tree.peek(prompt, 40).length == 37
    kv_cache.windows.drop([path[30]])
    assert kv_cache.tree.peek(prompt, 40).length == 37
    assert kv_cache.tree.peek(prompt, 33).length == 30
    kv_cache.windows.drop(path)
    assert kv_cache.tree.peek(prompt, 40).length == 0
    sim.add(make_request("second", prompt, 2, ignore_eos=True))
    sim.run_to_end()
    assert kv_cache.tree.peek(prompt, 40).length == 40, "the shared pages get the new window pages"
    sim.check_end()


def test_pages_behind_the_window_are_free_after_the_step_in_flight() -> None:
    config = replace(bounded(SchedulerConfig(num_slots=60, context_len=60, max_rows=1), 4), num_window_slots=8)
    kv_cache = WindowedKVCacheManager(config)
    request = make_request("r", list(range(2, 10)), 8)
    kv_cache.attach(request, kv_cache.tree.root())
    assert kv_cache.extend(request, 8) is not None
    request.num_computed, kv_cache.step = 8, 1
    kv_cache.cache_unfinished(request)
    assert request.window_start == 5
    assert not kv_cache.make_room(kv_cache.decode_need([request]))
    kv_cache.retire(1)
    assert kv_cache.make_room(kv_cache.decode_need([request]))
    kv_cache.take_decode_slots([request])
    assert len(kv_cache.windows.page_of.keys() & set(request.slots[5:])) == 4


def test_pages_that_left_the_window_are_free_with_their_request() -> None:
    config = SchedulerConfig(num_slots=200, context_len=200, max_rows=1, disable_radix_cache=True)
    config = replace(bounded(config, 4), num_window_slots=100)
    kv_cache = WindowedKVCacheManager(config)
    request = make_request("r", list(range(100)), 8)
    kv_cache.attach(request, kv_cache.tree.root())
    assert kv_cache.extend(request, 90) is not None
    request.num_computed, kv_cache.step = 90, 1
    kv_cache.cache_unfinished(request)
    kv_cache.retire(1)
    kv_cache.step = 2
    assert kv_cache.extend(request, 1) is not None
    kv_cache.release(request)
    pool = kv_cache.windows.pool
    assert pool.num_pending == 4 and pool.num_free == 96, "step 2 reads four pages of the window"
    assert kv_cache.slots.num_pending == 91
    kv_cache.retire(2)
    assert pool.num_free == 100


class TestWindowPages:
    def test_pages_are_held_back_until_the_last_reader_ends(self) -> None:
        pages = WindowPages(2, 1)
        pages.assign([10, 11])
        assert pages.take_writes() == [10, 1, 11, 2]
        pages.unpin([10], after_step=3)
        assert not pages.make_room(1)
        with pytest.raises(MoeEngineError, match="1 are needed, 1 are pinned"):
            pages.assign([12])
        pages.pool.retire(3)
        assert pages.make_room(1)
        pages.assign([12])
        assert pages.page_of == {11: 2, 12: 1}

    def test_the_least_recently_used_page_is_evicted(self) -> None:
        pages = WindowPages(3, 1)
        pages.assign([10, 11, 12])
        pages.unpin([10, 11, 12], 0)
        pages.pin([10])
        pages.unpin([10], 0)
        assert pages.make_room(1)
        pages.assign([13])
        assert pages.page_of.keys() == {10, 12, 13}

    def test_a_pinned_page_cannot_be_freed(self) -> None:
        pages = WindowPages(2, 1)
        pages.assign([10])
        with pytest.raises(MoeEngineError, match="while a request reads"):
            pages.drop([10])

    def test_a_shared_page_takes_the_window_page(self) -> None:
        pages = WindowPages(4, 1)
        pages.assign([10, 11, 21])
        pages.take_writes()
        pages.unpin([21], 0)
        pages.replace([10, 11], [20, 21], 5)
        pages.drop([10, 11])
        assert pages.take_writes() == [20, 1]
        assert pages.check([20, 21], {20, 21}) == []
        assert pages.pool.pending_ids() == {5: [2]}

    def test_invalid_mappings_are_not_repeated(self) -> None:
        pages = WindowPages(4, 1)
        pages.assign([10, 11])
        writes = pages.take_writes()
        pages.unpin([10], 0)
        pages.drop([10])
        pages.repeat_writes(writes)
        assert pages.take_writes() == [11, 2]

    def test_check_repairs_pins(self) -> None:
        pages = WindowPages(4, 1)
        pages.assign([10, 11])
        assert len(pages.check([10], {10, 11})) == 1
        assert pages.check([10], {10, 11}) == []
        assert pages.check([10, 12], {10}) != []
