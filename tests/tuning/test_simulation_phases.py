"""Phases and steps of simulations beside measured ones, and what calibration learns from recorded steps."""

from __future__ import annotations

import random

import pytest

from benchmarks import simulation_phases
from moe_engine.core.step_reporter import StepReporter
from moe_engine.scheduler.config import SchedulerConfig
from moe_engine.scheduler.scheduler import Scheduler
from moe_engine.tuning import mixed_probe, phases
from moe_engine.tuning.answer import Answer
from moe_engine.tuning.costs.measured import CostFile, Curve, MeasuredCosts
from moe_engine.tuning.simulator.fleet import Fleet, FleetSpec
from moe_engine.tuning.simulator.replica import ReplicaSpec
from moe_engine.tuning.simulator.workload import Arrival, Fixed
from moe_engine.types import Request, SamplingParams, StepResult

COSTS = MeasuredCosts(CostFile({0: Curve((1, 8), (0.002, 0.004))}, Curve((1, 101), (0.002, 0.012)), pair_second=1e-7))


@pytest.mark.parametrize("exact", [False, True])
def test_phases_of_a_simulated_request_add_up_to_its_times(exact):
    rng, now, arrivals = random.Random(random.getrandbits(32)), 0.0, []
    for number in range(30):
        now += rng.expovariate(40)
        arrivals.append(Arrival(now, [number * 1000 + i for i in range(rng.randint(1, 90))], rng.randint(2, 40)))
    config = SchedulerConfig(num_slots=8000, context_len=512, max_rows=16, chunked_prefill_size=256)
    spec = FleetSpec(
        ReplicaSpec(config, COSTS, exact=exact, arrival_seconds=1e-3), request_seconds=3e-3, token_seconds=1e-4
    )
    fleet = Fleet(spec, Fixed(arrivals, 30), answer_seconds=0.01)
    fleet.recorder.keeps_details = True
    outcome = fleet.run()
    for answer in outcome.recorder.answers:
        found = answer.phases
        assert set(found) == set(phases.PHASES) and min(found.values()) > -1e-9
        parts = [found[name] for name in (phases.READ, phases.QUEUE, phases.PREFILL, phases.DELIVERY)]
        assert sum(parts) == pytest.approx(answer.ttft)
        whole = sum(parts[:3]) + found[phases.DECODE] * (answer.output_len - 1) + found[phases.END]
        assert whole == pytest.approx(answer.latency)
    steps = outcome.recorder.steps
    assert len(steps) == outcome.num_steps
    assert sum(seconds for *_, seconds in steps) == pytest.approx(outcome.busy_seconds)
    assert sum(tokens for _, tokens, _ in steps) == sum(len(arrival.prompt_ids) for arrival in arrivals)
    assert sum(rows for rows, *_ in steps) >= sum(arrival.output_len - 1 for arrival in arrivals)


def test_phases_of_a_measured_answer():
    answer = Answer(5, 11, started=100.0, ttft=0.5, latency=2.0)
    meta = {"request_received_ts": 1100.1, "first_token_latency": 0.3, "queue_time": 0.05, "decode_throughput": 8.0}
    found = phases.measured(answer, meta | {"e2e_latency": 1.7}, 1000.0)
    expected = {phases.READ: 0.1, phases.QUEUE: 0.05, phases.PREFILL: 0.25, phases.DELIVERY: 0.1}
    assert found == pytest.approx(expected | {phases.DECODE: 0.125, phases.END: 0.2})
    assert phases.measured(answer, {}, 1000.0) == {}
    table = simulation_phases.phase_table([found], [found])
    assert all(name in table for name in phases.PHASES) and "50.00 / 50.00" in table


def test_steps_that_a_server_records_and_what_they_took_beyond_their_costs():
    now = [5.0]
    scheduler = Scheduler(SchedulerConfig(num_slots=512, context_len=128, max_rows=4), lambda: now[0])
    reporter = StepReporter(record_steps=True)
    sampling = SamplingParams(max_new_tokens=None)
    for rid in ("a", "b"):
        scheduler.add(Request(rid, [*range(20)] if rid == "a" else [*range(50, 70)], sampling, 4, frozenset((0,))))
    for _ in range(3):
        plan = scheduler.schedule()
        reporter.planned(scheduler)
        rows = [row for row, samples in zip(plan.rows, plan.samples) if samples]
        result = StepResult(plan.number, rows, [[7] for _ in rows])
        scheduler.update(result)
        reporter.finished(result)
    assert StepReporter().state().keys() == reporter.state().keys() - {"step_times"}
    state = reporter.state()
    assert [step[:3] for step in state["step_times"]] == [(0, 40, 2), (2, 0, 0), (2, 0, 0)]
    assert all(0 < step[3] < 60 for step in state["step_times"])
    info = {"internal_states": [state]}
    assert len(simulation_phases.step_times(info, [1])) == 2 and not simulation_phases.step_times(info, [3])
    assert "up to 64 prompt tokens" in simulation_phases.step_table(state["step_times"] * 3, [(0, 40, 0.01)] * 3)


def test_time_that_requests_add_to_the_steps_beside_them():
    rng = random.Random(random.getrandbits(32))
    steps = []
    for _ in range(50):
        rows, prompts = rng.randint(1, 8), rng.randint(1, 3)
        tokens = prompts * rng.randint(1, 30)
        decode = 0.002 + (rows - 1) * 2e-3 / 7
        pairs = tokens * (tokens // prompts + 1) // 2 - tokens * (tokens + 1) // 2
        prefill = max(0.002 + (tokens - 1) * 1e-4 + pairs * 1e-7, 0.002)
        steps += [(rows, 0, 0, decode + 0.001), (0, tokens, prompts, prefill + 0.003)]
    assert mixed_probe.excess(steps, COSTS, 0, 40) == pytest.approx(50 * 0.004 / 40)
    assert mixed_probe.excess([(1, 0, 0, 0.001)], COSTS, 0, 40) == 0
    lengths = [mixed_probe.request_lengths(rng, 70) for _ in range(2000)]
    assert min(lengths)[0] >= 1 and max(lengths)[0] <= 70
    assert sum(answer for _, answer in lengths) / 2000 == pytest.approx(mixed_probe.MEAN_ANSWER, rel=0.1)
    assert mixed_probe.rate_of(COSTS, 0) == pytest.approx(0.6 / (0.002 + 63e-4 + 32 * 0.004 / 8), rel=0.01)
