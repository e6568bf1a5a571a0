"""The planner's closed loop against the simulator, which runs the production scheduler with the same costs."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from moe_engine.errors import ConfigError
from moe_engine.scheduler.config import SchedulerConfig
from moe_engine.tuning.costs.efficiency import load_efficiency
from moe_engine.tuning.costs.form import Form, Precision
from moe_engine.tuning.costs.measured import CostFile, Curve, MeasuredCosts
from moe_engine.tuning.costs.model_facts import model_facts
from moe_engine.tuning.costs.roofline import RooflineCost
from moe_engine.tuning.costs.step_cost import StepCostModel
from moe_engine.tuning.hardware.table import parse_cluster
from moe_engine.tuning.planner.steady import Load, Steady, steady_state
from moe_engine.tuning.planner.workload import parse_workload
from moe_engine.tuning.simulator.fleet import Fleet, FleetSpec
from moe_engine.tuning.simulator.replica_spec import ReplicaSpec
from moe_engine.tuning.simulator.workload import Arrival, Fixed, Limited
from moe_engine.tuning.stats import mean
from tests.models.published import V3

SHARE = replace(load_efficiency("moe-engine"), request_ms=0.0)
SMALL = MeasuredCosts(
    CostFile(
        {0: Curve((1.0, 8.0, 32.0), (0.7e-3, 1.2e-3, 3.3e-3))},
        Curve((1.0, 64.0, 256.0, 1024.0), (1.7e-3, 3.0e-3, 6.9e-3, 24e-3)),
        context_second=1e-7,
    )
)
"""A model of some million parameters on a CPU."""


def large(form: Form) -> RooflineCost:
    cluster = parse_cluster(f"{form.ranks}xh200")
    return RooflineCost(model_facts(V3), form, Precision("fp8", "fp8"), cluster, SHARE)


DP8 = Form(8, 8, 8, True)
CASES = {
    "small": (SMALL, Form(1), 2048),
    "small, dp2": (SMALL, Form(2, 2), 2048),
    "V3, tp8": (large(Form(8)), Form(8), 8192),
    "V3, dp8": (large(DP8), DP8, 8192),
}


def simulated(
    costs: StepCostModel, form: Form, chunk: int, load: Load, requests: int, **flags: bool
) -> tuple[float, float]:
    """Mean seconds until the first token and between tokens, without the requests of the start and the end."""
    rng, spread = random.Random(random.getrandbits(32)), 0.0 if load.equal else 0.5
    arrivals = []
    for number in range(max(400, 10 * requests)):
        prompt, output = (round(size * rng.uniform(1 - spread, 1 + spread)) for size in (load.prompt, load.output))
        ids = list(range(number << 20, (number << 20) + prompt))
        arrivals.append(Arrival(0.0, ids, output))
    scheduler = SchedulerConfig(
        num_slots=4_000_000, context_len=1 << 20, max_rows=4096, chunked_prefill_size=chunk, **flags
    )
    workload = Limited(Fixed(iter(arrivals), len(arrivals)), requests)
    outcome = Fleet(FleetSpec(ReplicaSpec(scheduler, costs, form.attn_dp)), workload).run()
    answers = sorted(outcome.recorder.answers, key=lambda answer: answer.started)[2 * requests : -requests]
    return mean([answer.ttft for answer in answers]), mean([answer.tpot or 0.0 for answer in answers])


def planned(costs: StepCostModel, form: Form, chunk: int, load: Load, requests: int, **options: bool) -> Steady:
    return steady_state(costs, form, load, requests, SHARE, chunk, **options)


@pytest.mark.each_value
@pytest.mark.parametrize("equal", [False, True])
@pytest.mark.parametrize("case", CASES)
def test_first_tokens_come_as_in_the_scheduler(case: str, equal: bool):
    costs, form, chunk = CASES[case]
    small = case.startswith("small")
    for prompt, output in ((100, 60), (40, 200)) if small else ((1000, 200), (300, 400)):
        for requests in (4, 16) if small else (8, 48):
            load = Load(prompt, prompt, output, equal)
            ttft, tpot = simulated(costs, form, chunk, load, requests)
            state = planned(costs, form, chunk, load, requests)
            assert state.ttft_s == pytest.approx(ttft, rel=0.25), (load, requests)
            assert state.tpot_s == pytest.approx(tpot, rel=0.12), (load, requests)


def test_mixed_steps():
    costs, form, chunk = CASES["V3, tp8"]
    load = Load(1000, 1000, 200)
    for requests in (8, 48):
        ttft, tpot = simulated(costs, form, chunk, load, requests, enable_mixed_chunk=True)
        state = planned(costs, form, chunk, load, requests, mixed=True)
        assert state.ttft_s == pytest.approx(ttft, rel=0.25)
        assert state.tpot_s == pytest.approx(tpot, rel=0.12)


@pytest.mark.parametrize(
    ("prompt", "output", "requests"), [(1, 10, 48), (1000, 200, 8), (300, 400, 48), (4000, 30, 48)]
)
def test_mixed_steps_of_equal_requests(prompt: int, output: int, requests: int):
    """Prompts of one step stay together; those of several steps part, because the first ones do not wait."""
    costs, form, chunk = CASES["V3, tp8"]
    load = Load(prompt, prompt, output, equal=True)
    ttft, tpot = simulated(costs, form, chunk, load, requests, enable_mixed_chunk=True)
    state = planned(costs, form, chunk, load, requests, mixed=True)
    assert state.ttft_s == pytest.approx(ttft, rel=0.25)
    assert state.tpot_s == pytest.approx(tpot, rel=0.12)


def test_prompts_longer_than_a_chunk():
    costs, form, _ = CASES["V3, tp8"]
    for equal in (False, True):
        load = Load(5000, 5000, 300, equal)
        ttft, tpot = simulated(costs, form, 2048, load, 8)
        state = planned(costs, form, 2048, load, 8)
        assert state.ttft_s == pytest.approx(ttft, rel=0.25)
        assert state.tpot_s == pytest.approx(tpot, rel=0.12)


def test_equal_lengths_in_a_workload():
    workload = parse_workload("in=2000,out=100,equal=1")
    assert workload.load().equal and not parse_workload("in=2000,out=100,equal=0").load().equal
    assert parse_workload(workload.text) == workload
    for text in ("in=2000,out=100,equal=2", "in=2000,out=100,turns=3,equal=1"):
        with pytest.raises(ConfigError, match="equal"):
            parse_workload(text)
