"""Host tier of a model with bounded windows: traces and faults, with a worker that checks every window."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from moe_engine.errors import ConfigError
from moe_engine.scheduler import SchedulerConfig
from moe_engine.scheduler.kv_cache.windowed_kv_cache import WindowedKVCacheManager
from tests.examples import examples
from tests.scheduler.simulator import make_request
from tests.scheduler.test_host_tier import play
from tests.scheduler.test_simulation import configs
from tests.scheduler.test_storage_tier import POLICIES, STORAGE
from tests.scheduler.tier_simulator import TierSimulation
from tests.scheduler.traces import play_failures
from tests.scheduler.windowed_worker import bounded

PROMPT = [i % 50 for i in range(100)]
OTHER = [49 - i % 50 for i in range(190)]


def tiered(config: SchedulerConfig, window: int, requests: int | None, places: int, entries: int) -> SchedulerConfig:
    """`config` with a window pool and a host tier; `entries`: pages of its window pool."""
    config = bounded(replace(config, disable_radix_cache=False), window, requests)
    return replace(config, host_tier_tokens=places, host_window_slots=entries * config.page_size)


BASE = SchedulerConfig(num_slots=200, context_len=200, max_rows=4, chunked_prefill_size=16, page_size=4)


@settings(max_examples=examples(30), suppress_health_check=list(HealthCheck))
@given(
    config=configs(),
    window=st.sampled_from([1, 2, 7, 16, 40]),
    requests=st.sampled_from([1, 2, None]),
    entries=st.sampled_from([1, 4, 60]),
    write=st.sampled_from(POLICIES),
    overlap=st.booleans(),
    seed=st.integers(0, 10**6),
    abort=st.sampled_from([0.0, 0.1]),
    late=st.sampled_from([0.0, 0.5, 0.95]),
)
def test_every_window_is_there(
    config: SchedulerConfig, window: int, requests: int | None, entries: int, write: str, overlap: bool, seed: int,
    abort: float, late: float,
) -> None:  # fmt: skip
    config = replace(tiered(config, window, requests, 2 * config.num_slots, entries), hicache_write_policy=write)
    rng = random.Random(seed)
    sim = TierSimulation(config, rng, overlap=overlap, late=late)
    play(sim, rng, 30, 0.5, abort)
    check_free(sim)


def check_free(sim: TierSimulation) -> None:
    """No window page is lost after the cache was flushed."""
    kv_cache = sim.scheduler.kv_cache
    assert isinstance(kv_cache, WindowedKVCacheManager)
    windows = kv_cache.windows
    assert windows.pool.num_free == windows.pool.num_total and not (windows.page_of or windows.loading)
    assert not windows.resumed


@settings(max_examples=examples(12), suppress_health_check=list(HealthCheck))
@given(
    seed=st.integers(0, 10**6),
    window=st.sampled_from([3, 20]),
    write=st.sampled_from(POLICIES),
    overlap=st.booleans(),
    late=st.sampled_from([0.0, 0.5, 0.95]),
)
def test_windows_of_failed_steps_are_never_used(seed: int, window: int, write: str, overlap: bool, late: float) -> None:
    rng = random.Random(seed)
    config = replace(tiered(BASE, window, 2, 400, 30), hicache_write_policy=write)
    sim = TierSimulation(config, rng, overlap=overlap, late=late)
    play_failures(sim, rng, 40)
    check_free(sim)


def served(sim: TierSimulation, rid: str, prompt: list[int]) -> tuple[int, int, int]:
    """(cached tokens, tokens loaded, window pages loaded) of a request."""
    sim.keep_plans, sim.plans = True, []
    request = make_request(rid, prompt, 2, ignore_eos=True)
    sim.add(request)
    sim.run_to_end()
    loads = [load for plan in sim.plans if plan.kv_ops is not None for load in plan.kv_ops.loads]
    return request.cached_tokens, request.loaded_host, sum(len(load.windows) for load in loads)


@pytest.mark.parametrize("write", POLICIES)
def test_an_evicted_prefix_comes_back_with_its_last_window(write: str) -> None:
    config = replace(tiered(BASE, 12, 1, 400, 8), hicache_write_policy=write)
    sim = TierSimulation(config, random.Random(0), overlap=True, late=0.5)
    served(sim, "first", PROMPT)
    served(sim, "other", OTHER)
    cached, loaded, pages = served(sim, "again", [*PROMPT, 7])
    assert cached == 100 and loaded >= 60 and pages == 3
    sim.check_end()


def test_only_the_window_is_loaded_if_the_kv_is_on_the_device() -> None:
    sim = TierSimulation(tiered(replace(BASE, num_slots=800), 12, 1, 400, 8), random.Random(0), overlap=True, late=0.5)
    served(sim, "first", PROMPT)
    served(sim, "other", OTHER)  # takes all window pages
    assert served(sim, "again", [*PROMPT, 7]) == (100, 0, 3)
    assert served(sim, "more", [*PROMPT, 7, 8]) == (100, 0, 0)
    sim.check_end()


def test_entries_used_least_recently_leave_first() -> None:
    """Four entries hold one window of three pages: that of the last prompt."""
    sim = TierSimulation(tiered(BASE, 12, 1, 1200, 4), random.Random(0), overlap=True, late=0.5)
    for rid, prompt in (("first", PROMPT), ("second", PROMPT[::-1]), ("other", OTHER)):
        served(sim, rid, prompt)
    assert served(sim, "second again", [*PROMPT[::-1], 7])[0] == 100
    assert served(sim, "first again", [*PROMPT, 7])[0] == 0
    sim.check_end()


@pytest.mark.parametrize("changes", [{"host_window_slots": 0}, {"kv_connector": "a:B"}, {"storage": STORAGE}])
def test_a_tier_without_windows_of_its_own_is_refused(changes: dict[str, object]) -> None:
    with pytest.raises(ConfigError, match="a bounded window needs the host-RAM tier"):
        replace(tiered(BASE, 12, 1, 400, 8), **changes)  # type: ignore[arg-type]
