"""Whole traces with speculation under random configurations: the outputs without speculation, and no leaks at the
end."""

from __future__ import annotations

import random
from dataclasses import replace
from unittest.mock import Mock

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from moe_engine.core.deltas import deltas_of
from moe_engine.scheduler import Scheduler, SchedulerConfig
from moe_engine.scheduler.draft_depth import IN_VAIN
from moe_engine.types import SpeculationConfig, StepPlan, StepResult
from tests.examples import examples
from tests.scheduler.drafting_worker import DraftingWorker
from tests.scheduler.simulator import EOS, Simulation, make_request, random_prompt
from tests.scheduler.test_simulation import PRESSED, configs, play


@st.composite
def speculations(draw: st.DrawFn) -> SpeculationConfig:
    method = draw(st.sampled_from(["nextn", "standalone", "ngram"]))
    depth = draw(st.integers(1, 5))
    auto = draw(st.booleans())
    topk = 1 if auto or method == "ngram" else draw(st.sampled_from([1, 2, 4]))
    nodes = draw(st.integers(2, topk + (depth - 1) * topk**2 + 1)) if topk > 1 else 0
    return SpeculationConfig(method, depth, topk, nodes, auto_depth=auto)


def simulate(config: SchedulerConfig, *, overlap: bool, seed: int, luck: float, check_every: int = 1) -> Simulation:
    worker = DraftingWorker(config, seed, luck)
    return Simulation(config, overlap=overlap, check_every=check_every, worker=worker)


@settings(max_examples=examples(40), suppress_health_check=list(HealthCheck))
@given(
    config=configs(),
    speculation=speculations(),
    overlap=st.booleans(),
    seed=st.integers(0, 10**6),
    luck=st.sampled_from([0.0, 0.5, 0.9, 1.0]),
    arrival=st.sampled_from([0.1, 0.5, 0.9]),
    abort=st.sampled_from([0.0, 0.05, 0.3]),
    long=st.booleans(),
)
def test_any_configuration_computes_the_same(
    config: SchedulerConfig,
    speculation: SpeculationConfig,
    overlap: bool,
    seed: int,
    luck: float,
    arrival: float,
    abort: float,
    long: bool,
) -> None:
    config = replace(config, speculation=speculation)
    sim = simulate(config, overlap=overlap, seed=seed, luck=luck)
    play(sim, random.Random(seed), 30, arrival, abort, long)


@pytest.mark.parametrize(
    ("speculation", "page", "overlap", "steps"),
    [
        (SpeculationConfig("nextn", 3), 1, True, examples(3_000)),
        (SpeculationConfig("standalone", 3, 4, 20), 16, True, 1000),
        (SpeculationConfig("nextn", 4, auto_depth=True), 4, True, 1000),
        (SpeculationConfig("nextn", 2, 2, 7), 4, False, 1000),
    ],
    ids=["chain", "tree", "auto", "small tree"],
)
def test_pool_is_whole_after_many_steps(speculation: SpeculationConfig, page: int, overlap: bool, steps: int) -> None:
    config = replace(PRESSED, page_size=page, policy="lpm", enable_mixed_chunk=page == 4, vocab_size=50)
    config = replace(config, speculation=speculation)
    sim = simulate(config, overlap=overlap, seed=page, luck=0.4, check_every=steps // 50)
    play(sim, random.Random(page), steps // 10, 0.5, 0.01, long=True)
    stats, worker = sim.scheduler.stats(), sim.worker
    assert isinstance(worker, DraftingWorker) and stats.speculation is not None
    assert worker.speculative_steps > steps and worker.accepted > 300
    assert stats.num_retractions_total > 10 and stats.cached_tokens_total > 200
    assert sum(stats.speculation.accepted) <= worker.accepted  # some belonged to ended requests


@pytest.mark.parametrize("page", [1, 8, 24])
def test_drafts_leave_prompts_a_share_of_mixed_steps(page: int) -> None:
    """Decodes with drafts fill the chunk long before all rows are taken; the last page of it is the first to go."""
    turns = []
    for mixed in (False, True):
        config = SchedulerConfig(4800, 300, page, 24, chunked_prefill_size=24, enable_mixed_chunk=mixed)
        config = replace(config, speculation=SpeculationConfig("ngram", 3))
        sim = simulate(config, overlap=True, seed=0, luck=0.5)
        for i in range(60):
            sim.add(make_request(str(i), random_prompt(random.Random(i), 30), 100, ignore_eos=True))
        most = 0
        while sim.turn():
            most = max(most, sim.scheduler.table.num_running)
        sim.check_end()
        assert most == 24
        turns.append(sim.turns)
    assert turns[1] < 1.2 * turns[0]


@settings(max_examples=examples(15))
@given(
    depth=st.integers(1, 5),
    accepted=st.lists(st.integers(0, 5), max_size=4),
    last=st.integers(0, 5),
    kept=st.integers(1, 6),
    by_length=st.booleans(),
)
def test_drafts_behind_the_end_are_not_counted(
    depth: int, accepted: list[int], last: int, kept: int, by_length: bool
) -> None:
    """Each step accepts some drafts; the last one, which accepts `last`, ends the request at token `kept`."""
    accepted = [min(right, depth) for right in accepted]
    last, kept = min(last, depth), min(kept, min(last, depth) + 1)
    length = 1 + sum(right + 1 for right in accepted) + kept
    s = Scheduler(SchedulerConfig(num_slots=1000, context_len=500, speculation=SpeculationConfig("ngram", depth)))
    s.add(make_request("a", [5, 6, 7], length if by_length else length + depth))
    assert s.speculator is not None
    observe = Mock(wraps=s.speculator.observe)
    s.speculator.observe = observe  # type: ignore[method-assign]
    brought = [[9]] + [[9] * (right + 1) for right in accepted]
    brought.append([9] * (kept - 1) + [9 if by_length else EOS] + [9] * (last + 1 - kept))
    drafts = []
    for tokens in brought:
        plan = s.schedule()
        assert isinstance(plan, StepPlan)
        drafts.append(plan.counts[0] - 1 if plan.num_decodes else 0)
        (event,) = s.update(StepResult(plan.number, plan.rows, [tokens[: drafts[-1] + 1]]))
    assert event.finish_reason is not None and event.finish_reason.type == ("length" if by_length else "stop")
    outcomes = [(depth, right) for right in accepted]  # verified drafts and accepted drafts, by step
    if drafts[-1]:  # a request with one remaining token gets no drafts
        outcomes.append((min(depth, kept), min(last, kept)))
    observed = [outcome for call in observe.call_args_list for outcome in call.args[2]]
    assert sum(used for *_, used in observed) == sum(accepted) + (kept - 1 if drafts[-1] else 0)
    stats = s.stats().speculation
    assert stats is not None and stats.verify_total == len(outcomes)
    assert stats.proposed == [sum(i < judged for judged, _ in outcomes) for i in range(depth)]
    assert stats.accepted == [sum(i < right for _, right in outcomes) for i in range(depth)]
    if outcomes:
        assert event.speculation is not None and event.speculation.proposed == sum(judged for judged, _ in outcomes)
        assert event.speculation.histogram == [
            sum(right == count for _, right in outcomes) for count in range(max(right for _, right in outcomes) + 1)
        ]


@pytest.mark.parametrize("stop", [(), ("\n",)])
def test_totals_are_known_before_a_stop_string_ends_the_request(stop: tuple[str, ...]) -> None:
    """The frontend finds stop strings, and the last event of the request is too late for the answer."""
    now = iter(range(100))
    config = SchedulerConfig(num_slots=1000, context_len=500, speculation=SpeculationConfig("ngram", 3))
    s = Scheduler(config, clock=lambda: float(next(now)))
    request = make_request("a", [5, 6, 7], 100)
    request.sampling = replace(request.sampling, stop=stop)
    s.add(request)
    for tokens in ([9], [9, 9]):
        plan = s.schedule()
        assert isinstance(plan, StepPlan)
        (delta,) = deltas_of(s.update(StepResult(plan.number, plan.rows, [tokens])))
    assert (delta.queue_time > 0, delta.speculation) == ((True, (1, 3, [0, 1])) if stop else (False, None))


def test_drafts_of_a_request_that_has_ended_are_in_vain() -> None:
    """A step that was planned before the request ended counts for the policy, and in no statistic."""
    s = Scheduler(SchedulerConfig(num_slots=1000, context_len=500, speculation=SpeculationConfig("ngram", 3)))
    s.add(make_request("a", [5, 6, 7], 100))
    assert s.speculator is not None
    observe = Mock(wraps=s.speculator.observe)
    s.speculator.observe = observe  # type: ignore[method-assign]
    prompt = s.schedule()
    assert isinstance(prompt, StepPlan)
    s.update(StepResult(prompt.number, prompt.rows, [[9]]))
    plans = [s.schedule(), s.schedule()]
    for plan, tokens in zip(plans, ([9, EOS], [9, 9, 9])):
        assert isinstance(plan, StepPlan) and plan.counts == [4]
        s.update(StepResult(plan.number, plan.rows, [tokens]))
    assert [call.args[2] for call in observe.call_args_list] == [[], [(2, 1, 1)], [IN_VAIN]]
    stats = s.stats().speculation
    assert stats is not None and (stats.verify_total, sum(stats.proposed), sum(stats.accepted)) == (1, 2, 1)
