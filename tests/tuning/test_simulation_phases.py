"""Phases and steps of simulations beside measured ones, and what calibration learns from recorded steps."""

from __future__ import annotations

import math
import random
import time
from dataclasses import replace

import numpy as np
import pytest

from benchmarks import simulation_phases
from moe_engine.core.step_reporter import StepReporter
from moe_engine.errors import MoeEngineError
from moe_engine.scheduler.config import SchedulerConfig
from moe_engine.scheduler.scheduler import Scheduler
from moe_engine.tuning import mixed_probe, phases, under_load
from moe_engine.tuning.answer import Answer
from moe_engine.tuning.costs.measured import CostFile, Curve, MeasuredCosts, own_and_cached_pairs
from moe_engine.tuning.costs.step_cost import StepShape
from moe_engine.tuning.measured_points import CACHED, LONG_TAILS, PREFILL, Limits, MeasuredPoints
from moe_engine.tuning.rounds import Rounds
from moe_engine.tuning.simulator.fleet import Fleet, FleetSpec
from moe_engine.tuning.simulator.joint_step import joint_cost
from moe_engine.tuning.simulator.replica_spec import ReplicaSpec
from moe_engine.tuning.simulator.workload import Arrival, Fixed
from moe_engine.tuning.stats import median
from moe_engine.tuning.step_records import StepRecords, busiest, joint_steps
from moe_engine.types import Request, SamplingParams, StepResult

FILE = CostFile({0: Curve((1, 8), (0.002, 0.004))}, Curve((1, 101), (0.002, 0.012)), pair_second=1e-7)
COSTS = MeasuredCosts(FILE)


@pytest.mark.parametrize("exact", [False, True])
def test_phases_of_a_simulated_request_add_up_to_its_times(exact):
    rng, now, arrivals = random.Random(random.getrandbits(32)), 0.0, []
    for number in range(30):
        now += rng.expovariate(40)
        arrivals.append(Arrival(now, [number * 1000 + i for i in range(rng.randint(1, 90))], rng.randint(2, 40)))
    config = SchedulerConfig(num_slots=8000, context_len=512, max_rows=16, chunked_prefill_size=256)
    replica, way, reply = ReplicaSpec(config, COSTS, exact=exact, arrival_seconds=1e-3), rng.uniform(0, 0.005), 0.004
    spec = FleetSpec(replica, request_seconds=3e-3, token_seconds=1e-4, way_seconds=way)
    fleet = Fleet(spec, Fixed(arrivals, 30), answer_seconds=0.01)
    fleet.recorder.keeps_details, fleet.recorder.reply_seconds = True, reply
    outcome = fleet.run()
    for answer in outcome.recorder.answers:
        found = answer.phases
        assert set(found) == set(phases.PHASES) and min(found.values()) > -1e-9
        parts = [found[name] for name in (phases.READ, phases.QUEUE, phases.PREFILL, phases.DELIVERY)]
        assert sum(parts) == pytest.approx(answer.ttft)
        whole = sum(parts[:3]) + found[phases.DECODE] * (answer.output_len - 1) + found[phases.END]
        assert whole == pytest.approx(answer.latency)
        assert found[phases.READ] > way + 3e-3 - 1e-9 and found[phases.DELIVERY] == found[phases.END] == reply
    steps = outcome.recorder.steps
    assert len(steps) == outcome.num_steps
    delays = sum(seconds for *_, seconds in steps) - outcome.busy_seconds
    assert 1e-3 < delays < 30e-3 + 1e-9  # of the requests that arrive during a step
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


def test_steps_that_a_server_records():
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
    assert [step[:4] for step in state["step_times"]] == [(0, 40, 2, 0), (2, 0, 0, 0), (2, 0, 0, 0)]
    assert all(0 < step[-1] < 60 and abs(step[4] - time.time()) < 60 for step in state["step_times"])
    for states in ([state], [state, state]):  # two schedulers that step together
        found = [simulation_phases.step_times({"internal_states": states}, [done] * len(states)) for done in (1, 3)]
        assert [step[:2] for step in found[0]] == [(2 * len(states), 0)] * 2 and not found[1]
    assert "up to 64 prompt tokens" in simulation_phases.step_table(state["step_times"] * 3, [(0, 40, 0.01)] * 3)


def recorded_parts(rng, arrival, end, prefill_factor, sent=0.0, slowness=1.0):
    """Steps beside requests at Poisson times: each part has its own slowness, which also changes within the part; the
    delays by arrivals are drawn from a gamma distribution, and 2 % of the steps are interrupted by something else.
    `slowness`: of all parts; `sent`: delay of a step by each request that decoded in the step before."""
    parts, now = [], 1e9
    for _ in range(4):
        slow, drift, moment, due = slowness * rng.uniform(0.85, 1.15), rng.uniform(-0.05, 0.05), now, now
        rate = 0.8 * mixed_probe.rate_of(COSTS, 0)
        calls = [due := due + rng.expovariate(rate) for _ in range(90)]
        waiting, running, steps, arrivals, ends, ended, decoded = [], [], [], [], [], 0, 0
        while calls or running or waiting:
            if not running and not waiting:
                moment, decoded = max(moment, calls[0]), 0
                arrivals.append((calls[0], calls.pop(0) + 0.0005))
                waiting.append(mixed_probe.request_lengths(rng, 999))
            tokens, rows = sum(prompt for prompt, _ in waiting), 0 if waiting else len(running)
            pairs = mixed_probe.pairs_of(tokens, len(waiting))
            seconds = COSTS.step(StepShape(rows, rows * 80, 0, tokens, pairs, rows + tokens)).seconds
            seconds *= prefill_factor if tokens else 1.0
            seconds *= slow * (1 + drift * (moment - now))
            seconds *= max(rng.gauss(1, 0.1), 0.5)
            seconds += ended * end * slow * rng.gammavariate(4, 1 / 4) + (rng.random() < 0.02) * rng.expovariate(250)
            seconds, decoded = seconds + decoded * sent * slow, rows
            ends += [moment + 0.0002] * ended
            prompts = len(waiting)
            running = [left - 1 for left in running] if not waiting else running + [left - 1 for _, left in waiting]
            ended, running, waiting = running.count(0), [left for left in running if left], []
            while calls and calls[0] < moment + seconds:
                seconds += arrival * slow * rng.gammavariate(2, 1 / 2)
                arrivals.append((calls[0], calls.pop(0) + 0.0005))
                waiting.append(mixed_probe.request_lengths(rng, 999))
            moment += seconds
            steps.append((rows, tokens, prompts, 0, moment, seconds))
        parts.append(mixed_probe.Part(steps, arrivals, ends, machine=slow))
        now = moment + 5
    return parts


def test_time_that_requests_add_to_the_steps_beside_them():
    """The machine's speed differs by up to 30 % between the parts, and prompts may cost less under load: the median of
    three recordings is within 20 % of the truth."""
    rng = random.Random(random.getrandbits(32))
    arrival, end, prefill_factor = rng.uniform(0.001, 0.004), rng.uniform(0.0005, 0.001), rng.uniform(0.8, 1.2)
    found = [mixed_probe.effects(recorded_parts(rng, arrival, end, prefill_factor), COSTS, 0) for _ in range(3)]
    assert median([one.arrival for one in found]) == pytest.approx(arrival, rel=0.2)
    assert median([one.end for one in found]) == pytest.approx(end, rel=0.3)
    sent = rng.uniform(0.5e-4, 1e-4)
    parts = recorded_parts(rng, arrival, end, 1.0, sent)
    known, unknown = (mixed_probe.effects(parts, COSTS, 0, sent_seconds=seconds) for seconds in (sent, 0.0))
    assert median(known.decode) == pytest.approx(1.0, abs=0.2) and median(unknown.decode) > median(known.decode)
    assert mixed_probe.effects([mixed_probe.Part([], [], [])], COSTS, 0) is None


def test_the_spread_of_steps_leaves_out_late_results():
    """Steps of log-normal seconds, of which one that ends late makes the next one shorter, and some are interrupted."""
    rng, spread = np.random.default_rng(random.getrandbits(32)), random.uniform(0.05, 0.5)
    expected = rng.choice([1.0, 1.3], 20_000)
    variance = math.log1p(spread**2)
    taken = expected * rng.lognormal(-variance / 2, math.sqrt(variance), len(expected))
    late = rng.random(len(expected) + 1) * 0.4
    taken += late[1:] - late[:-1] + (rng.random(len(expected)) < 0.01) * 20
    part_of = np.arange(len(expected)) // 5000
    seen = mixed_probe.spread_of_steps(taken, expected, part_of)
    by_single_steps = float(np.std(late[1:] - late[:-1]))
    # half the variance of two late results is left in a sum of two steps; the core of a log-normal sum is narrower
    assert 0.85 * spread < seen < 1.1 * math.hypot(spread, by_single_steps / math.sqrt(2))
    assert mixed_probe.spread_of_steps(taken[:1], expected[:1], part_of[:1]) == 0.0


def test_a_part_beside_other_programs_counts_less():
    """One of four parts has steps that another program lengthens at random."""
    rng = random.Random(random.getrandbits(32))
    found = []
    for _ in range(3):
        parts = recorded_parts(rng, 0.002, 0.0005, 1.0)
        steps = [(*step[:-1], step[-1] * rng.uniform(1, 6)) for step in parts[0].steps]
        found.append(mixed_probe.effects([replace(parts[0], steps=steps), *parts[1:]], COSTS, 0))
    assert median([one.arrival for one in found]) == pytest.approx(0.002, rel=0.25)


def test_load_of_the_measurement_beside_each_other():
    rng = random.Random(random.getrandbits(32))
    lengths = [mixed_probe.request_lengths(rng, 70) for _ in range(2000)]
    assert min(lengths)[0] >= 1 and max(lengths)[0] <= 70
    assert sum(answer for _, answer in lengths) / 2000 == pytest.approx(mixed_probe.MEAN_ANSWER, rel=0.1)
    for tokens, groups in ((1.0, 1), (1.6, 1), (1.0, 2)):
        expected = groups / (0.002 + 63e-4 + 32 / tokens * 0.004 / 8)
        assert mixed_probe.rate_of(COSTS, 0, tokens, groups) == pytest.approx(expected, rel=0.01)
    one = 1 / (0.002 + 63e-4 + 32 * 0.002)
    assert mixed_probe.rate_of(COSTS, 0, most_rows=1) == pytest.approx(one, rel=0.01)


def test_points_of_rounds_on_a_machine_that_drifts():
    """Points and rounds with 2 % of noise; every round has its own speed, and some points were left out."""
    rng = random.Random(random.getrandbits(32))
    rounds, truth = Rounds(), {number: rng.uniform(0.001, 0.1) for number in range(20)}
    speeds = [rng.uniform(0.8, 1.25) for _ in range(4)]
    for speed in speeds:
        rounds.begin()
        for number, seconds in truth.items():
            if number < 15 or rng.random() < 0.7:
                for _ in range(3):
                    rounds.add(number, seconds * speed * rng.gauss(1, 0.02))
    slowness, scale = rounds.slowness(), median(speeds)
    assert slowness == pytest.approx([speed / scale for speed in speeds], rel=0.05)
    for number in range(15):
        assert rounds.value(number) == pytest.approx(truth[number] * scale, rel=0.08)
    with pytest.raises(KeyError):
        rounds.value("another")
    limited = Rounds(1e-9)
    with limited.timed("slow"):
        assert limited.wants("other")
    assert not limited.wants("slow")


def test_steps_of_a_measurement():
    first = [(4, 0, 0, 0, 10.0 + i, 0.002 + (i == 3)) for i in range(8)]
    second = [(0, 20, 1, 8, 20.5, 0.01), (0, 12, 1, 0, 20.9, 0.02), (1, 0, 0, 0, 21.0, 1.0)]
    states = [{"step_times": steps, "total_steps": len(steps)} for steps in (first, second)]
    records = StepRecords.of({"internal_states": states})
    assert records.decode(4, 10.5, 20.0) == pytest.approx(0.002) and records.decode(3, 0, 99) is None
    assert records.prompt(32, 20.1, 21.0) == pytest.approx(0.03) and records.prompt(64, 20.1, 21.0) is None
    assert records.prompt(20, 20.1, 21.0) == pytest.approx(0.01)  # beside one of 12 tokens
    with pytest.raises(MoeEngineError, match="--record-step-times"):
        StepRecords.of({"internal_states": [{}]})


def test_steps_of_schedulers_that_step_together():
    """The lists begin and end at different steps: old ones are dropped, and one of them may not have ended."""
    rng = random.Random(random.getrandbits(32))
    steps = [
        [(rng.randint(0, 9), rng.choice([0, rng.randint(1, 99)]), 1, 0, float(n), 0.01) for n in range(40)]
        for _ in "ab"
    ]
    (first, to), (begin, last) = [(rng.randint(0, 9), rng.randint(30, 40)) for _ in "ab"]
    states = [
        {"step_times": steps[0][first:to], "total_steps": to},
        {"step_times": steps[1][begin:last], "total_steps": last},
    ]
    both = range(max(first, begin), min(to, last))
    assert joint_steps(states) == [[steps[0][n], steps[1][n]] for n in both]
    found = StepRecords.of({"internal_states": states}).together(0.0, 99.0)
    expected = [(max(steps[0][n][0], steps[1][n][0]), max(steps[0][n][1], steps[1][n][1]), n) for n in both]
    assert [(rows, tokens, end) for rows, tokens, _, _, end, _ in found] == [
        one for one in expected if one[0] or one[1]
    ]
    assert all(step[-1] == pytest.approx(0.01) for step in found)


def test_a_joint_step_costs_as_much_in_the_calibration_as_in_the_simulator():
    """Groups with a prompt and groups that decode compute at the same time: the slower one counts, not the sum."""
    rng = random.Random(random.getrandbits(32))
    for _ in range(50):
        shapes, parts = [], []
        for _ in range(rng.randint(2, 4)):
            rows, tokens = rng.choice([(rng.randint(1, 60), 0), (0, rng.randint(1, 99)), (0, 0)])
            parts.append((rows, tokens, int(tokens > 0), 0, 1.0, 0.01))
            shapes.append(StepShape(rows, rows * 80, 0, tokens, tokens * (tokens + 1) // 2, rows + tokens))
        shapes = [shape for shape in shapes if shape.global_tokens]
        if not shapes:
            continue
        whole = joint_cost(COSTS, shapes).seconds
        assert whole == pytest.approx(max(COSTS.step(shape).seconds for shape in shapes))
        (found,) = mixed_probe._joint_costs_of([busiest(parts)], COSTS, 0)
        assert found.min() == 0 and found.max() == pytest.approx(whole)


def test_steps_are_slower_beside_requests_than_alone():
    """The slowness of the parts is that of the steps under load, times that of the machine, and goes into the costs."""
    rng = random.Random(random.getrandbits(32))
    decode, prefill, machine = rng.uniform(1, 1.4), rng.uniform(0.7, 1.3), [rng.uniform(0.8, 1.2) for _ in range(4)]
    parts = [tuple(factor * slow for slow in machine) for factor in (decode, prefill)]
    effects = mixed_probe.Effects(0.001, 0.0005, *parts)
    assert effects.slowness(machine) == pytest.approx((decode, prefill))
    unknown = mixed_probe.Effects(0.001, 0.0005, (decode, 0.0), (0.0, 0.0))
    assert unknown.slowness([1.0, 1.0]) == pytest.approx((decode, 1.0))

    file = CostFile(
        {0: Curve((1, 8), (0.002, 0.004))}, Curve((1, 101), (0.002, 0.012)), context_second=1e-6, cached_second=1e-6,
        pair_second=1e-7, behind=Curve((1, 64), (0.001, 0.003)), idle_seconds=0.02,
    )  # fmt: skip
    slower = file.slower(Curve((1.0,), (decode,)), prefill)
    before, after = MeasuredCosts(file), MeasuredCosts(slower)
    for shape, factor in (
        (StepShape(5, 500, 0, 0, 0, 5), decode),
        (StepShape(0, 0, 0, 64, 64 * 65 // 2, 64), prefill),
        (StepShape(0, 0, 0, 32, 32 * 100 + 32 * 33 // 2, 32, prefill_cached=100), prefill),
    ):
        assert after.step(shape).seconds == pytest.approx(before.step(shape).seconds * factor)
    lone = file.prefill.at(64) + file.idle_seconds
    assert slower.prefill.at(64) + slower.idle_seconds == pytest.approx(lone)


def test_cost_file_of_a_machine_whose_speed_differs_between_the_rounds():
    """Delays are in the seconds of the median round. Prompts of a single scheduler are measured as they are under load;
    schedulers that step together take longer."""
    rng = random.Random(random.getrandbits(32))
    rounds, groups = Rounds(), rng.choice((1, 2))
    points = MeasuredPoints(Limits(8, 1000, 10000, 1000, range(9), num_groups=groups))
    points.rounds, points.file = rounds, lambda: replace(FILE, request_seconds=1.0)
    measured = []
    for slow in (0.7, 1.0, 1.4):
        rounds.begin()
        for name in "abc":
            rounds.add(name, slow)
        for part in recorded_parts(rng, 0.002, 0.0005, 1.0, slowness=slow):
            measured.append(replace(part, machine=1.0, round=rounds.number, load=rng.choice(mixed_probe.LOADS)))
    file = under_load.cost_file(points, measured)
    known = [replace(part, machine=rounds.slowness()[part.round]) for part in measured]
    work = replace(FILE, request_seconds=1.0)
    effects = mixed_probe.effects(known, COSTS, 0, groups)
    if groups > 1:
        prefill = effects.slowness([part.machine for part in known])[1]
        work = work.slower(mixed_probe.slowness_by_rows(known, effects), prefill)
        assert work.prefill != FILE.prefill
    assert effects.spread > 0 and file == replace(
        work, arrival_seconds=effects.arrival, end_seconds=effects.end, step_spread=effects.spread
    )
    replicas = under_load.cost_file(points, [])
    assert replicas == replace(FILE, request_seconds=1.0)


def test_many_decodes_are_slower_by_another_factor_than_few():
    """The factor is that of each load at its mean number of requests, a line between, constant beyond."""
    rng = random.Random(random.getrandbits(32))
    few, many, machine = rng.uniform(1, 1.3), rng.uniform(0.8, 1.2), [rng.uniform(0.8, 1.2) for _ in range(4)]
    parts = []
    for place, slow in enumerate(machine):
        rows = (8, 40)[place % 2]
        steps = [(rows - 2, 0, 0, 0, 1.0, 0.01), (0, 50, 1, 0, 2.0, 0.01), (rows + 2, 0, 0, 0, 3.0, 0.01)]
        parts.append(mixed_probe.Part(steps, [], [], load=mixed_probe.LOADS[place % 2], machine=slow))
    decode = tuple((few, many)[place % 2] * slow for place, slow in enumerate(machine))
    effects = mixed_probe.Effects(0.0, 0.0, decode, (1.0,) * 4)
    found = mixed_probe.slowness_by_rows(parts, effects)
    assert found.counts == (8, 40) and found.seconds == pytest.approx((few, many))
    alone = mixed_probe.slowness_by_rows(parts[::2], effects.of([0, 2]))
    assert alone.counts == (8,) and alone.seconds == pytest.approx((few,))

    counts = (1, 8, 24, 40, 64)
    before = CostFile({0: Curve(counts, (0.001, 0.002, 0.004, 0.008, 0.016))}, Curve((1,), (0.002,)))
    curve = before.slower(found, 1.0).decode[0]
    factors = [after / seconds for after, seconds in zip(curve.seconds, before.decode[0].seconds)]
    assert factors == pytest.approx([few, few, (few + many) / 2, many, many])


def test_steps_with_several_prompts_and_with_cached_prefixes():
    rng = random.Random(random.getrandbits(32))
    curve = Curve((1, 1001), (0.002, 0.102))
    costs = MeasuredCosts(CostFile({0: Curve((1,), (0.002,))}, curve, 0, 0, 1e-6, pair_second=2e-8, split_second=1e-8))
    for _ in range(20):
        prompts, each, prefix = rng.randint(1, 5), rng.randint(1, 100), rng.choice([0, rng.randint(1, 500)])
        tokens, own, cached = prompts * each, prompts * each * (each + 1) // 2, prompts * each * prefix
        found = own_and_cached_pairs(tokens, prompts * prefix, own + cached)
        assert found == pytest.approx((own, cached), rel=1e-6, abs=1e-3)
        seconds = costs.step(StepShape(0, 0, 0, tokens, own + cached, tokens, prefill_cached=prompts * prefix)).seconds
        whole = curve.at(tokens) - (tokens * (tokens + 1) / 2 - own) * 1e-8 + prompts * prefix * 1e-6 + cached * 2e-8
        assert seconds == pytest.approx(max(whole, 0.002))


def test_what_several_prompts_in_a_step_save():
    points = MeasuredPoints(Limits(64, 2000, 9999, 512, range(9)))
    points.rounds.begin()
    for length in points.prompt_lengths():
        points.rounds.add((PREFILL, length), 0.002 + 1e-4 * length)
    assert points.split_second() is None
    with pytest.raises(MoeEngineError, match="no step of the point"):
        points.file()
    points.split = [(0, (0, 256, 4, 0, 0.0, 0.002 + 0.0256 - (256 * 257 // 2 - 4 * 64 * 65 // 2) * 3e-8))] * 3
    assert points.split_second() == pytest.approx(3e-8)
    points.split = [(0, (0, 256, 4, 0, 0.0, 0.05))]
    assert points.split_second() == 0


def test_prompts_behind_cached_prefixes():
    """Steps whose prompts all have a cached prefix have a curve of their own, here with a step behind 64 tokens."""
    rng = random.Random(random.getrandbits(32))
    token, pair = rng.choice([0.0, rng.uniform(1e-7, 2e-6)]), rng.choice([0.0, rng.uniform(1e-9, 5e-8)])
    points = MeasuredPoints(Limits(64, 2000, 9999, 512, range(9)))
    points.rounds.begin()
    points.prefix = [0] * rng.choice([150, 600, 1000])
    tails, short, long = points.tails(), points.short_prefix, len(points.prefix)
    assert points.cached_costs() == (0.0, 0.0, None)
    truth = {tail: 0.001 + tail * 3e-5 + 0.001 * (tail > 64) for tail in tails}
    places = [(tail, short) for tail in tails] + [(tails[place], long) for place in LONG_TAILS]
    for tail, prefix in places:
        points.rounds.add((CACHED, tail, prefix), truth[tail] + prefix * (token + pair * tail))
    found = points.cached_costs()
    assert found[:2] == pytest.approx((token, pair), abs=1e-12)
    assert dict(zip(found[2].counts, found[2].seconds)) == pytest.approx(truth)

    prefill = Curve((1, 1001), (0.002, 0.042))
    file = CostFile({0: Curve((1,), (0.002,))}, prefill, 0, 0, token, pair, split_second=0.0, behind=found[2])
    without = replace(file, behind=None)

    def seconds(costs, tail, prefix, fresh=0):
        pairs = tail * prefix + tail * (tail + 1) // 2
        return MeasuredCosts(costs).step(StepShape(0, 0, 0, tail, pairs, tail, 0.0, prefix, fresh)).seconds

    for tail in tails:
        assert seconds(file, tail, 300) == pytest.approx(truth[tail] + 300 * (token + pair * tail))
        assert seconds(file, tail, 300, tail) == seconds(without, tail, 300)
        assert seconds(file, tail, 0) == pytest.approx(prefill.at(tail))
    beyond = truth[tails[-1]] - prefill.at(tails[-1])
    assert seconds(file, 900, 300) == pytest.approx(prefill.at(900) + beyond + 300 * (token + pair * 900))


def test_a_curve_beyond_its_last_point():
    """A last point that is too high by a tenth raises three times as many requests by five tenths of it, not by more
    than a whole one, as the line through its neighbor would."""
    counts = (1, 2, 4, 8, 16, 32, 48, 56, 64)
    base, slope = random.uniform(1e-4, 1e-3), random.uniform(1e-5, 1e-3)
    truth = [base + slope * count for count in counts]
    for count in (1.5, 3, 52, 64, 65, 128, 512):
        assert Curve(counts, tuple(truth)).at(count) == pytest.approx(base + slope * count)
    high = Curve(counts, (*truth[:-1], truth[-1] * 1.1))
    assert high.at(192) / (base + slope * 192) == pytest.approx(1 + 0.5 * truth[-1] / (base + slope * 192))
    assert Curve((4.0,), (0.5,)).at(9) == 0.5
    assert Curve((5, 6), (0.5, 0.6)).at(9) == pytest.approx(0.9)
