"""A step that fails because of one request ends that request only: the others generate their expected tokens."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from moe_engine.errors import InputError
from moe_engine.scheduler import Scheduler, SchedulerConfig
from moe_engine.scheduler.suspects import PROBE_RID
from moe_engine.types import Request, SpeculationConfig, StepPlan
from tests.scheduler.failing_worker import FailingDraftingWorker, FailingSimulation, FailingWorker, Poison
from tests.scheduler.simulator import expected_outputs, make_request, random_request
from tests.scheduler.test_simulation import configs
from tests.scheduler.test_speculation import speculations


def fill(rng: random.Random, config: SchedulerConfig, count: int) -> list[Request]:
    return [random_request(rng, f"{i}.", config, max_prompt=60, max_new=30) for i in range(count)]


def poisoned(rng: random.Random, requests: list[Request], share: float) -> dict[str, int]:
    """Poison requests, and the failing position of each: in its prompt, or in its output."""
    found = {}
    for request in requests:
        known = len(request.prompt_ids) + len(expected_outputs(request)[0])
        if rng.random() < share:
            found[request.rid] = rng.choice([0, len(request.prompt_ids) - 1, rng.randrange(known)])
    return found


def play(sim: FailingSimulation, rng: random.Random, requests: list[Request], abort: float) -> None:
    """Runs all requests; clients abort some."""
    left = list(requests)
    while left:
        if rng.random() < 0.5:
            request = left.pop(0)
            try:
                sim.add(request)
            except InputError:
                del sim.outcomes[request.rid]
        if rng.random() < abort and sim.outcomes:
            sim.abort(rng.choice(list(sim.outcomes)))
        sim.turn()
    sim.run_to_end(20_000)


def check(sim: FailingSimulation, bad: dict[str, int], apart: bool) -> None:
    """Checks that a request that ended with 500 has a failing position, and ended there; without cached prefixes all
    poison requests end so."""
    sim.check_end()
    for rid, outcome in sim.outcomes.items():
        prompt, status = len(outcome.request.prompt_ids), sim.status.get(rid)
        computed = prompt + max(0, len(expected_outputs(outcome.request)[0]) - 1)
        if status == 500:
            length, first = prompt + len(outcome.tokens), max(bad.get(rid, -2) + 1, prompt)
            # a cached position is computed only if the request is retracted, when it has more tokens
            assert rid in bad and (length == first if apart else length >= first), rid
        elif apart and status is None and outcome.reason != "abort":
            assert bad.get(rid, computed) >= computed, rid


def play_poisoned(
    config: SchedulerConfig,
    make_worker: Callable[[SchedulerConfig, Poison], Any],
    rng: random.Random,
    seed: int,
    overlap: bool,
) -> tuple[FailingSimulation, dict[str, int]]:
    """A trace with steps that fail for a request, and some for none; the simulation, and the poison requests."""
    requests = fill(rng, config, 40)
    bad = poisoned(rng, requests, 0.1)
    poison = Poison(seed, bad, chance=0.02)
    sim = FailingSimulation(config, overlap=overlap, worker=make_worker(config, poison))
    play(sim, rng, requests, 0.02)
    assert poison.failures > 2
    return sim, bad


@settings(max_examples=80, suppress_health_check=list(HealthCheck))
@given(
    config=configs(),
    overlap=st.booleans(),
    seed=st.integers(0, 10**6),
    share=st.sampled_from([0.05, 0.2, 0.6]),
    abort=st.sampled_from([0.0, 0.1]),
    chance=st.sampled_from([0.0, 0.05]),
    apart=st.booleans(),
)
def test_only_the_poison_request_ends(
    config: SchedulerConfig, overlap: bool, seed: int, share: float, abort: float, chance: float, apart: bool
) -> None:
    rng = random.Random(seed)
    requests = fill(rng, config, rng.randint(3, 12))
    bad = poisoned(rng, requests, share)
    for request in requests:
        if apart and request.rid in bad:
            request.extra_key = request.rid
    poison = Poison(seed, bad, chance=chance)
    sim = FailingSimulation(config, overlap=overlap, worker=FailingWorker(config, poison))
    play(sim, rng, requests, abort)
    check(sim, bad, apart)


@settings(max_examples=80, suppress_health_check=list(HealthCheck))
@given(
    config=configs(),
    speculation=speculations(),
    overlap=st.booleans(),
    seed=st.integers(0, 10**6),
    luck=st.sampled_from([0.0, 0.6, 1.0]),
)
def test_only_the_poison_request_ends_with_drafts(
    config: SchedulerConfig, speculation: SpeculationConfig, overlap: bool, seed: int, luck: float
) -> None:
    rng, config = random.Random(seed), replace(config, speculation=speculation)
    requests = fill(rng, config, rng.randint(3, 10))
    bad = poisoned(rng, requests, 0.3)
    worker = FailingDraftingWorker(config, seed, luck, Poison(seed, bad, chance=0.03))
    sim = FailingSimulation(config, overlap=overlap, worker=worker)
    play(sim, rng, requests, 0.0)
    sim.check_end()
    for rid, outcome in sim.outcomes.items():  # drafts extend beyond the accepted tokens
        last = len(outcome.request.prompt_ids) + len(outcome.tokens) - 1
        if sim.status.get(rid) == 500:
            # a cached prefix contains the position until a retraction, behind which it is computed
            computed_again = outcome.request.retractions > 0
            assert rid in bad and (not outcome.tokens or last <= bad[rid] or computed_again)


@pytest.mark.parametrize("overlap", [False, True])
def test_requests_that_fail_together_run_in_separate_steps(overlap: bool) -> None:
    """No request fails on its own: all generate their tokens, and failures stop."""
    config = SchedulerConfig(num_slots=400, context_len=100, max_rows=8)
    poison = Poison(0, {}, pairs={frozenset({"0", "1"}), frozenset({"2", "3"})})
    sim = FailingSimulation(config, overlap=overlap, worker=FailingWorker(config, poison))
    for i in range(6):
        sim.add(make_request(str(i), [2 + i] * 9, 30, ignore_eos=True))
    sim.run_to_end(1000)
    sim.check_end()
    assert not sim.status and 2 <= poison.failures <= 4


def test_the_cause_is_found_and_other_suspects_are_cleared() -> None:
    """The newest suspect runs first; after it fails alone the others run together at once, and prompts stay cached."""
    config = SchedulerConfig(num_slots=2000, context_len=300, max_rows=8)
    sim = FailingSimulation(config, worker=FailingWorker(config, Poison(0, {"bad": 40})))
    for i in range(4):
        sim.add(make_request(str(i), [2 + i] * 100, 20, ignore_eos=True))
    for _ in range(6):
        sim.turn()
    sim.add(make_request("bad", [9] * 80, 20))
    sim.keep_plans = True
    sim.run_to_end()
    sim.check_end()
    assert sim.status == {"bad": 500} and sim.worker.poison.failures == 2
    computed = sum(plan.num_tokens for plan in sim.plans)
    assert computed < 4 * 20 + 2 * 80 + 40  # its prompt twice, no other prompt again
    sizes = [len(plan.rows) for plan in sim.plans]
    assert sizes[:3] == [1, 5, 1] and set(sizes[3:]) == {4}  # the second was planned after the first, and is dropped


def test_a_device_that_always_fails_ends_the_engine() -> None:
    config = SchedulerConfig(num_slots=400, context_len=100, max_rows=8)
    sim = FailingSimulation(
        config, worker=FailingWorker(config, Poison(0, {str(i): 0 for i in range(8)} | {PROBE_RID: 0}))
    )
    for i in range(8):
        sim.add(make_request(str(i), [2 + i] * 9, 30))
    turns = 0
    while not sim.scheduler.is_broken:
        assert sim.turn() and turns < 50
        turns += 1
    assert sorted(sim.status.values()) == [500] * 3


def test_many_poisoned_requests_do_not_end_the_engine() -> None:
    """After three failures of single requests a probe runs; the engine ends only if its step fails too."""
    config = SchedulerConfig(num_slots=900, context_len=100, max_rows=16)
    sim = FailingSimulation(config, worker=FailingWorker(config, Poison(0, {f"bad{i}": 5 for i in range(9)})))
    sim.add(make_request("good", [3] * 9, 60, ignore_eos=True))
    for _ in range(4):
        sim.turn()
    for i in range(9):
        sim.add(make_request(f"bad{i}", [4 + i] * 9, 30))
    while sim.turn():
        assert not sim.scheduler.is_broken
    sim.check_end()
    assert len(sim.status) == 9 and sim.outcomes["good"].reason == "length"


def test_poisoned_requests_alone_in_the_engine_do_not_end_it() -> None:
    """No other request succeeds between them."""
    config = SchedulerConfig(num_slots=400, context_len=100, max_rows=2, max_queued_requests=9)
    sim = FailingSimulation(config, worker=FailingWorker(config, Poison(0, {f"bad{i}": 0 for i in range(9)})))
    for i in range(9):
        sim.add(make_request(f"bad{i}", [4 + i] * 9, 30))
    while sim.turn():
        assert not sim.scheduler.is_broken
    sim.check_end()
    assert list(sim.status.values()) == [500] * 9


@pytest.mark.parametrize("seed", range(4))
def test_row_writes_of_a_failed_step_are_repeated(seed: int) -> None:
    """Two equal prompts are prefilled in one step: the failing plan switches one of them to the other's slots."""
    config = SchedulerConfig(num_slots=400, context_len=100, max_rows=8)
    sim = FailingSimulation(config, overlap=False, worker=FailingWorker(config, Poison(seed, {"bad": 22})))
    sim.keep_plans = True
    for i, rid in enumerate(("bad", "other")):
        sim.add(make_request(rid, [2 + i] * 20, 30, ignore_eos=True))
        sim.turn()
    suspects = sim.scheduler.suspects
    while not suspects or sim.outcomes["other"].request in suspects:
        sim.turn()
    for rid in ("a", "b"):
        sim.add(make_request(rid, [7] * 20, 30, ignore_eos=True))
    sim.run_to_end()
    sim.check_end()
    failed = next(plan for plan in sim.plans if plan.row_writes)
    assert len(failed.rows) == 1 and sim.status == {"bad": 500}


def test_start_over_skips_the_step_number_behind_a_failed_one() -> None:
    """Ranks were lost in a failed step: the new worker never gets the step with the next number."""
    scheduler = Scheduler(SchedulerConfig(num_slots=400, context_len=100, max_rows=8))
    scheduler.add(make_request("a", [3] * 9, 30))
    first = scheduler.schedule()
    scheduler.start_over()
    again = scheduler.schedule()
    assert isinstance(first, StepPlan) and isinstance(again, StepPlan)
    assert again.number > first.number + 1
