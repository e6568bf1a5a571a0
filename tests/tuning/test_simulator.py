"""The simulator against single steps, queueing theory and its own requests."""

from __future__ import annotations

import math
import random
from collections import Counter
from dataclasses import dataclass, replace
from itertools import islice, pairwise, repeat

import pytest

from moe_engine.frontend.dp_routing import WEIGHTS, Load, Room, Router
from moe_engine.parallel.expert_settings import ExpertSettings, RebalanceSettings
from moe_engine.parallel.placement.layout import ExpertLayout
from moe_engine.scheduler.config import SchedulerConfig
from moe_engine.scheduler.scheduler import Scheduler
from moe_engine.tuning import serving_report
from moe_engine.tuning.costs.step_cost import StepCost, StepShape
from moe_engine.tuning.simulator.agents import Agents, AgentShape
from moe_engine.tuning.simulator.arrivals import arrival_times
from moe_engine.tuning.simulator.expert_load import ExpertLoad, zipf_counts
from moe_engine.tuning.simulator.faults import Fault
from moe_engine.tuning.simulator.fleet import Fleet, FleetSpec, Outcome
from moe_engine.tuning.simulator.load_table import TableRouter
from moe_engine.tuning.simulator.replica_spec import ReplicaSpec
from moe_engine.tuning.simulator.step_noise import StepNoise
from moe_engine.tuning.simulator.workload import DRAWN, Arrival, Fixed, Limited, Numbers, Workload, random_prompt
from moe_engine.types import SpeculationConfig, StepPlan
from moe_engine.types.prefill_delay import DelayerSettings
from tests.examples import examples

pytestmark = pytest.mark.drawn(16)


@dataclass(frozen=True)
class Linear:
    """Costs that depend on every count."""

    fixed: float = 0.01
    row: float = 1e-4
    token: float = 5e-5

    def step(self, shape: StepShape) -> StepCost:
        seconds = self.fixed + shape.decode_rows * self.row + shape.decode_context * 1e-8
        seconds += shape.prefill_tokens * self.token + shape.prefill_pairs * 1e-10
        seconds += shape.prefill_cached * 1e-7 + shape.prefill_fresh * self.token / 3
        return StepCost(seconds * (1 + shape.expert_skew / 10))


def requests(rng: random.Random, count: int, rate: float, most_new: int = 200) -> Fixed:
    now, numbers, shared = 0.0, Numbers(1 << 40), list(range(rng.randint(0, 300)))
    arrivals = []
    for _ in range(count):
        now += rng.expovariate(rate)
        length = rng.randint(1, 800)
        first, new = numbers.take(length), rng.randint(1, most_new)
        prompt = [*shared, *range(first, first + length)]
        arrivals.append(Arrival(now, prompt, new, rng.choice([new, new, most_new + 100])))
    return Fixed(arrivals, count)


def sessions(rng: random.Random, rate: float) -> Agents:
    shape = AgentShape(turns=6, system_len=40, input_len=rng.choice([30, 200]), output_len=60, pause=1.0, groups=2)
    return Agents(shape, arrival_times("poisson", rate / 3, rng), 15, seed=rng.getrandbits(32))


def config(**changes: object) -> SchedulerConfig:
    values: dict[str, object] = {"num_slots": 64_000, "context_len": 4096, "max_rows": 64, "chunked_prefill_size": 2048}
    return SchedulerConfig(**(values | changes))  # type: ignore[arg-type]


def simulate(spec: FleetSpec, workload: Workload, answer_seconds: float = 0.0) -> tuple[Fleet, Outcome]:
    fleet = Fleet(spec, workload, answer_seconds=answer_seconds)
    outcome = fleet.run()
    for replica in fleet.replicas:
        for group in replica.groups:
            assert group.scheduler.check_integrity() == []
            assert group.load_tokens == group.run_rows == 0 and not group.running
    assert len(outcome.recorder.answers) == workload.total
    return fleet, outcome


def summary(outcome: Outcome) -> list[tuple[object, ...]]:
    return sorted(
        (answer.started, answer.output_len, answer.success, answer.cached_tokens, answer.ttft, answer.latency)
        for answer in outcome.recorder.answers
    )


def scheduler_counters(fleet: Fleet) -> list[tuple[int, ...]]:
    """Counters and cached tokens of all schedulers."""
    schedulers = [group.scheduler for replica in fleet.replicas for group in replica.groups]
    return [
        (
            scheduler.totals.generated_tokens, scheduler.totals.prompt_tokens, scheduler.totals.cached_tokens,
            scheduler.kv_cache.tree.num_evictable, scheduler.kv_cache.step, scheduler.table.num_released,
        )
        for scheduler in schedulers
    ]  # fmt: skip


@pytest.mark.parametrize("example", range(examples(12)))
def test_runs_equal_single_steps(example):
    """The same times, hits and retractions if the scheduler plans every step or many at once: decodes, and chunks of
    long prompts between them."""
    rng = random.Random(random.getrandbits(32))
    small = rng.random() < 0.5  # chunks, in many attention groups: runs have chunks
    limits = config(
        num_slots=rng.choice([30, 60, 200]) * 64,
        page_size=rng.choice([1, 4, 64]),
        max_rows=rng.choice([4, 16, 64]),
        chunked_prefill_size=rng.choice([64, 100]) if small else rng.choice([64, 256, 2048]),
        enable_mixed_chunk=not small and rng.random() < 0.3,
        policy=rng.choice(["fcfs", "lpm"]),
        schedule_conservativeness=rng.choice([0.3, 1.0]),
        session_hold=rng.choice([0.0, None, None]),
        max_consecutive_prefills=rng.choice([1, 3, 32]),
        max_delayed_tokens=rng.choice([None, 400, 5000]),
        prefill_decode_interval=rng.choice([0, 0, 1, 7]),
        prefill_decode_interval_min_bs=rng.choice([0, 3]),
    )
    experts = None
    if rng.random() < 0.5:
        rebalance = RebalanceSettings(rng.randint(20, 200), rng.choice([1, 3]))
        counts = zipf_counts(1.0, [True] * 6, 16, rng.getrandbits(32))
        experts = ExpertLoad(counts, ExpertLayout(16, 4), ExpertSettings(rebalance=rebalance))
    num_groups = rng.choice([2, 5, 16]) if small else rng.choice([1, 1, 2, 5, 16])
    spec = ReplicaSpec(limits, Linear(), num_groups, overlap=small or rng.random() < 0.8, experts=experts)
    beside = {name: rng.choice([0.0, 0.003]) for name in ("arrival_seconds", "end_seconds", "sent_seconds")}
    spec = replace(spec, **beside, idle_seconds=rng.choice([0.0, 0.002]), step_spread=rng.choice([0.0, 0.0, 0.4]))
    num_replicas, seed = rng.choice([1, 2]), rng.getrandbits(32)
    faults = ()
    if spec.num_groups > 1 and rng.random() < 0.2:
        ranks = num_replicas * spec.num_groups
        faults = (Fault(rng.randrange(ranks), rng.uniform(0.1, 2.0), ranks),)
    work = {"request_seconds": 0.004, "token_seconds": 1e-4, "busy_seconds": rng.choice([0.0, 0.002])}
    work = work if num_replicas == 1 and rng.random() < 0.5 else {}
    count, rate = rng.randint(20, 80), rng.choice([5.0, 20.0, 60.0])
    method = rng.choice(["cache_aware", "total_tokens", "round_robin"])
    fleet_spec = FleetSpec(spec, num_replicas, method, faults, elastic=rng.random() < 0.5, restart_seconds=3.0, **work)
    found = []
    turns = rng.random() < 0.5  # sessions of several turns, whose KV is held
    if turns and num_replicas > 1:  # an answer's follower may delay the step before or after that of single steps
        spec = replace(spec, arrival_seconds=0.0, end_seconds=0.0)
    for exact in (True, False):
        one = replace(fleet_spec, replica=replace(spec, exact=exact))
        load = sessions(random.Random(seed), rate) if turns else requests(random.Random(seed), count, rate)
        found.append(simulate(one, load))
    (single_fleet, single), (runs_fleet, runs) = found
    assert scheduler_counters(runs_fleet) == scheduler_counters(single_fleet)
    assert runs.retractions == single.retractions and runs.num_steps == single.num_steps
    for a, b in zip(summary(single), summary(runs)):
        assert a[1:4] == b[1:4] and (a[0], *a[4:]) == pytest.approx((b[0], *b[4:]), abs=1e-4)
    ours, theirs = runs.recorder.gaps.distribution("x"), single.recorder.gaps.distribution("x")
    assert runs.recorder.gaps.num_gaps == single.recorder.gaps.num_gaps
    assert ours["mean_x_ms"] == pytest.approx(theirs["mean_x_ms"], rel=1e-3)
    assert ours["median_x_ms"] == pytest.approx(theirs["median_x_ms"], rel=0.01)
    assert runs.recorder.gaps.peak_tokens == pytest.approx(single.recorder.gaps.peak_tokens, rel=0.02, abs=64)


def test_prompts_that_wait_for_memory_begin_with_an_end_as_in_single_steps():
    """An end frees the row of a prompt that waits; a run that goes on behind the end would delay it."""
    for _ in range(8):
        seed, spec = random.getrandbits(32), ReplicaSpec(config(max_rows=2, session_hold=0.0), Linear(), num_groups=8)
        runs, single = (
            simulate(
                FleetSpec(replace(spec, exact=exact), method="round_robin"),
                requests(random.Random(seed), 60, 60.0, most_new=60),
            )[1]
            for exact in (False, True)
        )
        assert runs.num_steps == single.num_steps
        assert [answer[5] for answer in summary(runs)] == pytest.approx([a[5] for a in summary(single)], abs=1e-4)


def test_chunks_of_long_prompts_are_planned_many_at_once(monkeypatch):
    """With many attention groups: a scheduler plans the first and the last chunk of a prompt, and the steps around an
    end."""
    planned, schedule = [0], Scheduler.schedule

    def counted(scheduler, hold_prefill=False):
        planned[0] += 1
        return schedule(scheduler, hold_prefill)

    monkeypatch.setattr(Scheduler, "schedule", counted)
    found, seed = [], random.getrandbits(32)
    for exact in (True, False):
        rng, planned[0] = random.Random(seed), 0
        firsts = [number << 20 for number in range(1, 30)]
        prompts = [list(range(first, first + rng.randint(1500, 1900))) for first in firsts]
        arrivals = [Arrival(number * 0.05, prompt, 40) for number, prompt in enumerate(prompts)]
        spec = ReplicaSpec(config(chunked_prefill_size=32), Linear(), num_groups=8, exact=exact)
        simulate(FleetSpec(spec), Fixed(arrivals, len(arrivals)))
        found.append(planned[0])
    assert found[1] < found[0] / 8


@pytest.fixture
def planned(monkeypatch):
    """Step plans of all schedulers."""
    plans, schedule = [], Scheduler.schedule

    def counted(scheduler, hold_prefill=False):
        plan = schedule(scheduler, hold_prefill)
        plans.extend([plan] if isinstance(plan, StepPlan) else [])
        return plan

    monkeypatch.setattr(Scheduler, "schedule", counted)
    return plans


def test_an_answer_takes_two_plans(planned):
    """The prompt and the first decode: a run takes all further decodes of answers that end by their length."""
    for num_groups in (1, 4):
        planned.clear()
        arrivals = [Arrival(10.0 * number, [number, number], random.randint(3, 90)) for number in range(1, 9)]
        simulate(FleetSpec(ReplicaSpec(config(), Linear(), num_groups=num_groups)), Fixed(arrivals, len(arrivals)))
        assert len(planned) == 2 * len(arrivals)


def test_ends_of_answers_and_last_chunks_take_no_plan(planned):
    """A prompt in chunks takes one plan with its answer, beside others too, as long as none of them arrives at the same
    group meanwhile. An end takes none."""
    starts = [(0.0, 90), (1.2, 20), (2.4, 60)]  # the second one ends first, beside the others
    for num_groups, length, plans in ((1, 10, 2), (2, 300, 1)):
        planned.clear()
        prompts = [list(range(number << 20, (number << 20) + length)) for number in range(1, 4)]
        arrivals = [Arrival(at, prompt, new) for prompt, (at, new) in zip(prompts, starts)]
        spec = ReplicaSpec(config(chunked_prefill_size=100), Linear(0.05), num_groups=num_groups)
        simulate(FleetSpec(spec, method="total_requests" if num_groups == 1 else "cache_aware"), Fixed(arrivals, 3))
        assert len(planned) == plans * len(arrivals)


def test_prompts_that_follow_each_other_take_a_plan_each(planned):
    """The last chunk of a prompt is in one step with the first chunk of the next one; a run begins with that step."""
    prompts = [list(range(number << 20, (number << 20) + random.randint(410, 440))) for number in range(1, 5)]
    arrivals = [Arrival(0.0, prompt, 90) for prompt in prompts]
    spec = ReplicaSpec(config(chunked_prefill_size=100), Linear(), num_groups=2)
    simulate(FleetSpec(spec, method="round_robin"), Fixed(arrivals, len(arrivals)))
    assert sum(len(plan.new_rows) for plan in planned) == len(planned) == len(arrivals)


def test_a_prompt_that_waits_for_its_turn_takes_no_plan_of_the_decodes(planned):
    """It arrives at a group that decodes while another group computes a long prompt, also if memory of an ended request
    is not free yet."""
    for _ in range(8):
        planned.clear()
        # by turns to groups 0 to 3: 0 has a long and a short answer, then 1 a long prompt, then 0 the last request
        starts = [0.0, 0.2, 0.4, 0.6, 1.0, 1.1, 1.2, 1.3, random.uniform(1.4, 2.4)]
        lengths = [10, 1, 1, 1, 10, 1500, 1, 1, 10]
        answers = [90, 2, 2, 2, 4, 20, 1, 1, 20]
        prompts = [list(range(number << 20, (number << 20) + length)) for number, length in enumerate(lengths, 1)]
        arrivals = [Arrival(*values) for values in zip(starts, prompts, answers)]
        spec = ReplicaSpec(config(chunked_prefill_size=200), Linear(0.05), num_groups=4)
        simulate(FleetSpec(spec, method="round_robin"), Fixed(arrivals, len(arrivals)))
        assert len(planned) == 15


@pytest.mark.parametrize("method", sorted(WEIGHTS))
def test_loads_in_a_table_are_routed_as_by_the_production_router(method):
    rng = random.Random(random.getrandbits(32))
    count, room = rng.randint(1, 9), Room(4000, 5)
    ours, theirs = TableRouter(count, method, room), Router(count, method, room)
    for number in range(200):
        loads = [Load(rng.randint(0, 3), rng.choice([0, 40, 900]), rng.randint(0, 90)) for _ in range(count)]
        theirs.loads = loads
        for column in ("num_requests", "num_tokens", "num_uncomputed"):
            getattr(ours.table, column)[:] = [getattr(load, column) for load in loads]
        assert list(ours.loads) == loads and ours.table[1:].num_tokens.base is not None
        able = sorted(rng.sample(range(count), rng.randint(1, count)))
        prompt = [rng.randint(0, 1)] * rng.choice([20, 100, 300]) + [number] * 20
        chosen = ours.choose(able, ours.blocks_of(prompt))
        assert chosen == theirs.choose(able, theirs.blocks_of(prompt)) and chosen in able
        assert ours.sent(chosen, ours.blocks_of(prompt)) == theirs.sent(chosen, theirs.blocks_of(prompt))


def test_random_prompts_are_simulated_by_their_first_tokens():
    """The tokens behind them, and the router's knowledge of them, change nothing; by chance prompts begin alike."""
    rng, numbers = random.Random(random.getrandbits(32)), range(1, 20)
    prompts = [rng.choices(numbers, k=rng.randint(1, 300)) for _ in range(60)]
    times = list(islice(arrival_times("poisson", 20.0, rng), len(prompts)))
    spec = FleetSpec(ReplicaSpec(config(), Linear(), num_groups=rng.choice([1, 4])), method="cache_aware")
    found = []
    for unique in (False, True):
        drawn = [random_prompt(prompt[:DRAWN], len(prompt)) if unique else prompt for prompt in prompts]
        arrivals = [Arrival(at, prompt, 20, is_unique=unique) for at, prompt in zip(times, drawn)]
        found.append(simulate(spec, Fixed(arrivals, len(arrivals)))[1])
    assert summary(found[0]) == summary(found[1]) and found[0].cached_tokens > 0


def test_discarded_caches_have_no_tokens():
    rng = random.Random(random.getrandbits(32))
    fleet = simulate(FleetSpec(ReplicaSpec(config(), Linear(), num_groups=2)), requests(rng, 20, 5.0))[0]
    trees = [group.scheduler.kv_cache.tree for group in fleet.replicas[0].groups]
    nodes = [node for tree in trees for root in tree.roots.values() for node in tree.below(root)]
    assert any(node.tokens for node in nodes)
    fleet.discard()
    assert not any(node.tokens or node.slots or node.children or node.alive for node in nodes)
    assert not any(tree.roots or tree.heap or tree.num_evictable for tree in trees)


@pytest.mark.parametrize("spread", [0.0, 0.5])
def test_waiting_times_of_a_single_server_are_those_of_queueing_theory(spread):
    """One request at a time, of constant or log-normal service: an M/D/1 or M/G/1 queue. Each wait follows from the
    previous one (Lindley's recursion), without sampling error. The mean wait is rho s (1 + spread^2) / (2 (1 - rho));
    the mean of this number has a standard deviation of 5.4 % and 6.5 % (2,000 runs of the recursion), and the tolerance
    is about 5 of them."""
    rng, service, load, count = random.Random(random.getrandbits(32)), 0.02, 0.7, 10_000
    times = list(islice(arrival_times("poisson", load / service, rng), count))
    arrivals = [Arrival(seconds, [number + 1], 1) for number, seconds in enumerate(times)]
    replica = ReplicaSpec(config(max_rows=1), Linear(fixed=service, row=0, token=0), overlap=False, step_spread=spread)
    outcome = simulate(FleetSpec(replica), Fixed(arrivals, count))[1]
    noise, waits = StepNoise(spread, 0), [0.0]
    services = [noise.seconds(service) for _ in times]
    for taken, (before, after) in zip(services, pairwise(times)):
        waits.append(max(0.0, waits[-1] + taken - (after - before)))
    found = [answer.latency - taken for answer, taken in zip(outcome.recorder.answers, services, strict=True)]
    assert [answer.started for answer in outcome.recorder.answers] == times
    assert found == pytest.approx(waits, abs=1e-5)
    assert sum(found) / count == pytest.approx(load * service * (1 + spread**2) / (2 * (1 - load)), rel=0.3)


@pytest.mark.parametrize("spread", [0.0, 0.05, 1.0])
def test_random_steps_have_their_mean_and_spread(spread):
    noise, mean, count = StepNoise(spread, random.getrandbits(32)), random.uniform(0.001, 1.0), 20_000
    found = [noise.seconds(mean) / mean for _ in range(count)]
    middle = sum(found) / count
    assert middle == pytest.approx(1.0, abs=1e-9 + 6 * spread / count**0.5)
    logs = [math.log(value) for value in found]
    center = sum(logs) / count
    variance = sum((value - center) ** 2 for value in logs) / count
    assert variance == pytest.approx(math.log1p(spread**2), rel=6 * (2 / count) ** 0.5, abs=1e-12)


def test_a_single_request_takes_its_steps():
    spec = FleetSpec(ReplicaSpec(config(), Linear(row=0, token=0)))
    outcome = simulate(spec, Fixed([Arrival(1.0, [1, 2, 3], 5)], 1), answer_seconds=0.004)[1]
    (answer,) = outcome.recorder.answers
    assert answer.ttft == pytest.approx(0.014, abs=1e-5) and answer.latency == pytest.approx(0.054, abs=1e-5)
    assert outcome.recorder.gaps.num_gaps == 4


def test_a_request_that_arrives_delays_the_step_that_runs():
    arrivals = [Arrival(0.0, [1, 2, 3], 9), Arrival(0.045, [4, 5, 6], 1)]
    ends = []
    for delay in (0.0, 0.003):
        spec = FleetSpec(ReplicaSpec(config(), Linear(row=0, token=0), arrival_seconds=delay))
        outcome = simulate(spec, Fixed([replace(arrival) for arrival in arrivals], 2))[1]
        ends.append(max(answer.latency for answer in outcome.recorder.answers))
    assert ends[1] - ends[0] == pytest.approx(0.003, abs=1e-6)


def test_a_request_that_ends_delays_the_step_behind():
    """The first request ends after three steps, which delays the fourth step of the second request."""
    delay, ends = random.uniform(0.001, 0.008), []
    for seconds in (0.0, delay):
        spec = FleetSpec(ReplicaSpec(config(), Linear(row=0, token=0), end_seconds=seconds))
        outcome = simulate(spec, Fixed([Arrival(0.0, [1, 2, 3], 3), Arrival(0.0, [4, 5, 6], 9)], 2))[1]
        ends.append(sorted(answer.latency for answer in outcome.recorder.answers))
    assert ends[1][0] == pytest.approx(ends[0][0], abs=1e-6)
    assert ends[1][1] - ends[0][1] == pytest.approx(delay, abs=1e-6)


@pytest.mark.parametrize("exact", [False, True])
def test_tokens_that_are_sent_delay_the_step_behind(exact: bool):
    """Eight decode steps of two requests, of which seven follow one that has tokens of both."""
    delay, ends = random.uniform(0.001, 0.004), []
    for seconds in (0.0, delay):
        spec = FleetSpec(ReplicaSpec(config(), Linear(row=0, token=0), sent_seconds=seconds, exact=exact))
        outcome = simulate(spec, Fixed([Arrival(0.0, [1, 2, 3], 9), Arrival(0.0, [4, 5, 6], 9)], 2))[1]
        ends.append(max(answer.latency for answer in outcome.recorder.answers))
    assert ends[1] - ends[0] == pytest.approx(7 * 2 * delay, abs=1e-6)


def test_an_idle_engine_and_a_busy_one_answer_later():
    """The first and the last request find the engine idle, the second one a running step."""
    moments, found = (1.0, 1.036, 2.0), []
    idle, busy = random.uniform(0.001, 0.003), random.uniform(0.001, 0.003)
    for times in ({}, {"idle_seconds": idle}, {"busy_seconds": busy}):
        replica = ReplicaSpec(config(), Linear(row=0, token=0), idle_seconds=times.get("idle_seconds", 0.0))
        spec = FleetSpec(replica, busy_seconds=times.get("busy_seconds", 0.0))
        arrivals = [Arrival(moment, [number + 1], 9 - 4 * number) for number, moment in enumerate(moments)]
        answers = simulate(spec, Fixed(arrivals, 3))[1].recorder.answers
        found.append([answer.ttft for answer in sorted(answers, key=lambda answer: answer.started)])
    plain, after_idle, beside_steps = found
    assert plain == pytest.approx([0.01, 0.024, 0.01], abs=1e-6)
    assert [later - ttft for later, ttft in zip(after_idle, plain)] == pytest.approx([idle, idle, idle], abs=1e-6)
    assert beside_steps[0] == plain[0] and beside_steps[2] == plain[2]
    arrival = moments[1] + busy
    assert moments[1] + beside_steps[1] == pytest.approx(arrival + (-arrival % 0.01) + 0.02, abs=1e-6)


def test_long_prompts_are_chunked_and_attention_groups_wait_for_each_other():
    limits = config(chunked_prefill_size=128)
    one = Arrival(0.0, list(range(1, 1025)), 1)
    costs = Linear(fixed=0.001, row=0, token=1e-4)
    outcome = simulate(FleetSpec(ReplicaSpec(limits, costs)), Fixed([one], 1))[1]
    assert outcome.num_steps == 8
    short = [replace(one), Arrival(0.0, list(range(5000, 5010)), 1)]
    outcome = simulate(FleetSpec(ReplicaSpec(limits, costs, num_groups=2)), Fixed(short, 2))[1]
    first = min(outcome.recorder.answers, key=lambda answer: answer.prompt_len)
    assert first.ttft == pytest.approx(0.001 + 128e-4 * 4 / 3, rel=1e-3)  # its step is as long as the other group's


@pytest.mark.parametrize("lost", [False, True])
def test_a_prefill_delayer_waits_for_prompts_of_all_groups(lost):
    """A prompt of one group waits for its limit beside decodes of another group; prompts of both groups do not wait.
    Without the delayer half of the groups suffice."""
    passes = 8
    prompt = iter(range(1, 10**6, 1000)).__next__
    arrivals = [(0.0, 400), (1.003, 2), (2.003, 3), (2.003, 4)]
    replica = ReplicaSpec(config(), Linear(0.01, 0, 0), num_groups=3 if lost else 2)
    spec = FleetSpec(replica, method="round_robin", elastic=True)
    if lost:  # the first of three groups: the others form the pair
        spec = replace(spec, faults=(Fault.parse("rank=2@t=1ms", 3),), recovery_seconds=0.0)
    waits = []
    for delayer in (None, DelayerSettings(max_delay_passes=passes)):
        one = replace(spec, replica=replace(spec.replica, scheduler=config(delayer=delayer)))
        workload = Fixed([Arrival(at, [prompt()], new) for at, new in arrivals], len(arrivals))
        fleet, outcome = simulate(one, workload)
        waits.append({answer.output_len: answer.ttft for answer in outcome.recorder.answers})
    plain, delayed = waits
    assert delayed[2] - plain[2] == pytest.approx(0.01 * (passes - 1), abs=1e-4)
    assert [delayed[n] for n in (400, 3, 4)] == pytest.approx([plain[n] for n in (400, 3, 4)], abs=1e-4)
    groups = [group for i, group in enumerate(fleet.replicas[0].groups) if i not in fleet.replicas[0].lost]
    decided = []
    for group in groups:
        counts: Counter[tuple[str, bool, str]] = Counter()
        for (*decision, _), count in group.scheduler.delays.delayer.outcomes.items():
            counts[tuple(decision)] += count
        decided.append(counts)
    assert decided[0] == decided[1] and decided[0]["mixed", False, "delay"] == passes - 1


def test_turns_of_agents_find_their_history_in_the_cache():
    shape = AgentShape(turns=4, system_len=256, input_len=64, output_len=32, pause=1.0, groups=1)
    workload = Agents(shape, arrival_times("poisson", 2.0, random.Random(1)), 5, seed=3)
    spec = FleetSpec(ReplicaSpec(config(), Linear()))
    outcome = simulate(spec, workload)[1]
    later = [answer for answer in outcome.recorder.answers if answer.cached_tokens]
    assert len(later) == 19  # all but the very first request
    assert outcome.cached_tokens / outcome.prompt_tokens > 0.7
    flat = simulate(replace(spec, replica=replace(spec.replica, scheduler=config(disable_radix_cache=True))), Agents(
        shape, arrival_times("poisson", 2.0, random.Random(1)), 5, seed=3))[1]  # fmt: skip
    assert flat.cached_tokens == 0


def test_an_idle_engine_waits_for_held_sessions():
    """More sessions than fit: at times nothing runs, and what waits would evict the KV of sessions that return."""
    shape = AgentShape(turns=6, system_len=0, input_len=300, output_len=10, pause=3.0, groups=1)
    hits = []
    for changes in ({}, {"session_hold": 0.0}):
        scheduler = config(num_slots=4000, context_len=3000, max_rows=8, **changes)
        workload = Limited(Agents(shape, repeat(0.0), 30, seed=4), 15)
        outcome = simulate(FleetSpec(ReplicaSpec(scheduler, Linear(token=0.002))), workload)[1]
        hits.append(outcome.cached_tokens / outcome.prompt_tokens)
    assert hits[0] > 2 * hits[1]


def test_limited_concurrency():
    workload = Limited(requests(random.Random(5), 60, 1e9), 7)
    running = []
    fleet = Fleet(FleetSpec(ReplicaSpec(config(), Linear())), workload)
    outcome = fleet.run(interval=0.005)
    running = [sample.running + sample.waiting for sample in outcome.samples]
    assert len(outcome.recorder.answers) == 60 and max(running) <= 7


def test_drafts_shorten_answers_as_often_as_they_are_accepted():
    speculation = SpeculationConfig("nextn", 2)
    rates = (0.8, 0.5)
    limits = config(speculation=speculation)
    arrivals = [Arrival(0.0, [number + 1], 400) for number in range(40)]
    spec = FleetSpec(ReplicaSpec(limits, Linear(), acceptance=rates))
    outcome = simulate(spec, Fixed(arrivals, 40))[1]
    assert outcome.accept_length == pytest.approx(1 + 0.8 + 0.8 * 0.5, rel=0.03)
    plain = simulate(FleetSpec(ReplicaSpec(config(), Linear())), Fixed([replace(a) for a in arrivals], 40))[1]
    assert outcome.num_steps < 0.6 * plain.num_steps


@pytest.mark.parametrize("elastic", [True, False])
def test_lost_ranks(elastic):
    workload = requests(random.Random(9), 120, 30.0)
    spec = FleetSpec(
        ReplicaSpec(config(), Linear(), num_groups=4), faults=(Fault.parse("rank=1@t=1500ms", 4),), elastic=elastic,
        recovery_seconds=2.0, restart_seconds=9.0,
    )  # fmt: skip
    fleet, outcome = simulate(spec, workload)
    failed = [answer for answer in outcome.recorder.answers if not answer.success]
    if elastic:
        assert not failed and fleet.replicas[0].lost == {1} and fleet._able == [0, 2, 3]
        assert outcome.recorder.gaps.distribution("x")["max_x_ms"] >= 2000
    else:
        assert failed and all("rank 1" in answer.error for answer in failed)
        assert outcome.recorder.ended_at > 10.5


def test_several_lost_ranks():
    """Elastic: the other ranks continue while they have slots for all experts; then the replica restarts with all
    ranks."""
    spec = FleetSpec(ReplicaSpec(config(), Linear(), num_groups=4), elastic=True, least_groups=2, restart_seconds=5.0)

    def run(*texts):
        faults = tuple(Fault.parse(text, 4) for text in texts)
        return simulate(replace(spec, faults=faults), requests(random.Random(9), 120, 30.0))

    fleet, outcome = run("rank=1@t=1s", "rank=3@t=2s", "rank=1@t=2500ms", "rank=0@t=1000h")
    assert fleet.replicas[0].lost == {1, 3} and fleet._able == [0, 2]
    assert all(answer.success for answer in outcome.recorder.answers)
    assert len(outcome.faults) == 3 and [fault.rank for fault in outcome.missed] == [0]
    fleet, outcome = run("rank=1@t=1s", "rank=3@t=1500ms", "rank=0@t=2s")
    assert fleet.replicas[0].lost == set() and fleet._able == [0, 1, 2, 3]
    assert not all(answer.success for answer in outcome.recorder.answers) and outcome.recorder.ended_at > 7
    assert {answer.error for answer in outcome.recorder.answers if not answer.success} == {"rank 0 was lost"}


@pytest.mark.parametrize("second", [1.5, 6.0])
def test_a_rank_lost_during_a_restart_delays_it(second):
    """Requests that wait for the restart are not lost again; the restart begins once more."""
    spec = FleetSpec(ReplicaSpec(config(), Linear(), num_groups=4), restart_seconds=5.0)
    found = []
    for faults in ((Fault(1, 1.5, 4),), (Fault(1, 1.5, 4), Fault(2, second, 4))):
        outcome = simulate(replace(spec, faults=faults), requests(random.Random(9), 120, 30.0))[1]
        errors = [answer.error for answer in outcome.recorder.answers if not answer.success]
        found.append((errors, outcome.recorder.ended_at))
    (one, ended), (two, later) = found
    assert one and one == two and later - ended == pytest.approx(second - 1.5, abs=0.2)


def test_costs_that_bend_within_a_jump():
    """Long answers whose context passes a bend of the costs: as with single steps."""

    @dataclass(frozen=True)
    class Bent(Linear):
        def step(self, shape: StepShape) -> StepCost:
            return StepCost(0.001 + max(shape.decode_context - bend, 0) * 5e-8)

    bend = random.randint(300, 1200)
    load = [Arrival(0.001 * i, list(range(i * 1000, i * 1000 + 40)), random.randint(200, 400)) for i in range(5)]
    found = []
    for exact in (True, False):
        arrivals = [replace(arrival) for arrival in load]
        outcome = simulate(FleetSpec(ReplicaSpec(config(), Bent(), exact=exact)), Fixed(arrivals, 5))[1]
        found.append((outcome.recorder.ended_at, outcome.recorder.gaps.peak_tokens))
    assert found[0][0] == pytest.approx(found[1][0], abs=1e-8) and found[0][1] == pytest.approx(found[1][1], abs=5)


def test_limited_concurrency_is_reported_as_such():
    """An answer ends at the very moment at which the next request is sent."""
    load = requests(random.Random(random.getrandbits(32)), 60, 500.0)
    spec = FleetSpec(ReplicaSpec(config(), Linear(0.0123, 1.7e-4), exact=True))
    outcome = simulate(spec, Limited(load, 4), answer_seconds=0.0121)[1]
    assert serving_report.peak_concurrency(outcome.recorder.answers) == 4


def test_requests_that_can_never_run_are_refused():
    arrivals = [Arrival(0.0, list(range(1, 5000)), 10), Arrival(0.1, [1], 3)]
    outcome = simulate(FleetSpec(ReplicaSpec(config(), Linear())), Fixed(arrivals, 2))[1]
    assert [answer.success for answer in outcome.recorder.answers] == [False, True]
    assert "context length" in outcome.recorder.refused[0]


def test_the_front_end_is_a_queue_in_front_of_the_scheduler_and_behind_it():
    """Lindley's recursion in front of an engine that takes no time. Behind it a token passes all requests that wait,
    except the one whose service has begun."""
    rng, work, count = random.Random(random.getrandbits(32)), 0.02, 500
    times = list(islice(arrival_times("poisson", 0.9 / work, rng), count))
    arrivals = [Arrival(seconds, [number + 1], 1) for number, seconds in enumerate(times)]
    replica = ReplicaSpec(config(max_rows=64), Linear(fixed=1e-7, row=0, token=0))
    outcome = simulate(FleetSpec(replica, request_seconds=work), Fixed(arrivals, count))[1]
    waits = [0.0]
    for before, after in pairwise(times):
        waits.append(max(0.0, waits[-1] + work - (after - before)))
    ready = [moment + wait + work for moment, wait in zip(times, waits)]
    shown = [end + work * (after < end) for end, after in zip(ready, [*times[1:], math.inf])]
    found = {answer.started: answer.ttft for answer in outcome.recorder.answers}
    assert [moment + found[moment] for moment in times] == pytest.approx(shown, abs=1e-4)


def test_a_busy_front_end_delays_first_tokens_and_not_the_engine():
    """Ten requests decode; their tokens take the frontend longer than a step of the engine."""
    first = [Arrival(0.0, [number], 100) for number in range(1, 11)]
    spec = FleetSpec(ReplicaSpec(config(), Linear(fixed=0.01, row=0, token=0)))
    found = []
    for seconds, of_results in ((0.0, 0.0), (0.0005, 0.0), (0.002, 0.0), (0.0, 0.003), (0.0, 0.02)):
        arrivals = [*map(replace, first), Arrival(0.507, [99], 1)]
        work = replace(spec, token_seconds=seconds, results_seconds=of_results)
        outcome = simulate(work, Fixed(arrivals, len(arrivals)))[1]
        found.append(max((answer.started, answer.ttft) for answer in outcome.recorder.answers)[1])
    assert found[1] - found[0] == pytest.approx(0.0005 / 2, abs=1e-4)  # the only token of its step
    assert found[2] - found[0] > 0.3  # half a second of steps, of which each adds a step's time
    assert found[3] - found[0] == pytest.approx(0.003, abs=1e-4)  # the results of its step, however few
    assert found[4] - found[0] > 0.3
