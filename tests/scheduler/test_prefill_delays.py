"""Prompts wait by `--prefill-decode-interval` and `--enable-prefill-delayer`."""

from __future__ import annotations

import random
from collections.abc import Sequence

import prometheus_client as prom
import pytest
from prometheus_client.parser import text_string_to_metric_families as parse

from moe_engine.core.dp_sync import PrefillTurns
from moe_engine.scheduler import Scheduler, SchedulerConfig
from moe_engine.scheduler.prefill_delayer import Outcome, PrefillDelayer
from moe_engine.scheduler.prefill_delays import PrefillDelays
from moe_engine.server.metric_families import MetricFamilies
from moe_engine.server.prefill_delayer_metrics import PrefillDelayerMetrics
from moe_engine.types import StepFacts, StepPlan, StepResult
from moe_engine.types.prefill_delay import DelayerSettings, DelayFacts
from tests.scheduler.simulator import make_request


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def scheduler(**changes: object) -> Scheduler:
    values: dict[str, object] = {"num_slots": 1000, "context_len": 500} | changes
    return Scheduler(SchedulerConfig(**values))  # type: ignore[arg-type]


def step(s: Scheduler) -> tuple[int, int]:
    """(decodes, prompts) of the next step."""
    plan = s.schedule()
    assert isinstance(plan, StepPlan)
    rows = [row for row, samples in zip(plan.rows, plan.samples) if samples]
    s.update(StepResult(plan.number, rows, [[9] for _ in rows]))
    return plan.num_decodes, len(plan.rows) - plan.num_decodes


def add(s: Scheduler, name: str, prompt: int = 4, new: int = 60) -> None:
    s.add(make_request(name, [len(name) + 5, *range(prompt - 1)], new, eos=False))


@pytest.mark.parametrize("mixed", [False, True])
def test_decode_steps_follow_each_step_with_prompts(mixed: bool) -> None:
    s = scheduler(chunked_prefill_size=8, prefill_decode_interval=3, enable_mixed_chunk=mixed)
    add(s, "a")
    assert step(s) == (0, 1)
    add(s, "long", prompt=24, new=1)
    steps = [step(s) for _ in range(12)]
    decode, prompt = (1, 0), ((1, 1) if mixed else (0, 1))
    chunks = [decode, decode, decode, prompt]
    if mixed:  # the decode takes a token of each chunk
        assert steps[:8] == chunks * 2
    else:
        assert steps == chunks * 3


def test_the_interval_needs_requests_that_decode() -> None:
    s = scheduler(prefill_decode_interval=5, prefill_decode_interval_min_bs=2)
    kinds = []
    for i in range(3):
        add(s, "x" * (i + 1))
        kinds.append([step(s) for _ in range(2)])
    assert kinds[:2] == [[(0, 1), (1, 0)]] + [[(0, 1), (2, 0)]], "below two requests prompts do not wait"
    assert kinds[2] == [(2, 0), (2, 0)]
    s.abort(["x", "xx"])
    assert step(s) == (0, 1), "nothing decodes"


@pytest.mark.parametrize("mixed", [False, True])
def test_prompts_run_in_a_step_whose_decodes_were_all_retracted(mixed: bool) -> None:
    """The pool is full in the step of a chunk, or in a decode step of the interval behind a chunk. The less urgent
    request is retracted, and the prompt continues in the same step."""
    found = []
    for num_slots in range(39, 43):
        s = scheduler(
            num_slots=num_slots, chunked_prefill_size=8, prefill_decode_interval=3, enable_mixed_chunk=mixed,
            uses_priority=True, schedule_conservativeness=0.01,
        )  # fmt: skip
        s.add(make_request("a", [5, 1, 2, 3], 24, eos=False, priority=0))
        assert step(s) == (0, 1)
        s.add(make_request("long", [6, *range(28)], 1, eos=False, priority=1))
        while not s.totals.retractions and s.num_waiting:
            decodes, prompts = step(s)
        if s.totals.retractions:
            found.append((decodes, prompts))
    assert found and set(found) == {(0, 1)}


def group(waiting: int, running: int, usual: int = 0, **more: bool) -> DelayFacts:
    return DelayFacts(waiting, running, usual, **more)


def play(delayer: PrefillDelayer, groups: Sequence[DelayFacts], steps: int) -> list[Outcome]:
    found = []
    for _ in range(steps):
        outcome = delayer.decide(groups)
        delayer.advance(outcome)
        delayer.planned(outcome, groups[0], int(outcome.allow and groups[0].waiting > 0))
        found.append(outcome)
    return found


def words(outcomes: Sequence[Outcome]) -> list[str]:
    return [outcome.reason for outcome in outcomes]


@pytest.mark.parametrize(
    ("settings", "groups", "reasons"),
    [
        ({}, [group(0, 3), group(0, 2)], ["", ""]),
        ({}, [group(2, 3), group(1, 2)], ["no_wait", "no_wait"]),
        ({}, [group(2, 3), group(0, 2)], ["delay", "delay", "wait_timeout", "delay"]),
        ({"max_delay_passes": 1}, [group(2, 3), group(0, 2)], ["wait_timeout", "wait_timeout"]),
        ({}, [group(2, 0), group(0, 0)], ["no_wait"]),  # no request decodes
        ({}, [group(2, 3, in_prompt=True), group(0, 2)], ["no_wait"]),
        ({}, [group(2, 3, low_usage=True), group(0, 2)], ["token_watermark"]),
        ({}, [group(2, 3), group(1, 2, low_usage=True)], ["token_watermark"]),
        # seven of eight rows in use, batches of two: only the first one starts at once
        ({}, [group(1, 7, usual=2)], ["no_wait", "delay", "delay", "wait_timeout", "delay"]),
        ({}, [group(1, 6, usual=2)], ["no_wait", "no_wait"]),
        # the queue has less than half of the running requests
        ({"queue_min_ratio": 0.5}, [group(1, 4, usual=3)], ["no_wait", "delay", "delay", "wait_timeout"]),
        ({"queue_min_ratio": 0.5}, [group(2, 4, usual=3)], ["no_wait", "no_wait"]),
        ({"queue_min_ratio": 0.5}, [group(1, 4, usual=1)], ["no_wait", "no_wait"]),
        ({"queue_min_ratio": 0.5, "prefill_max_requests": 1}, [group(1, 4, usual=3)], ["no_wait", "no_wait"]),
        ({"queue_min_ratio": 0.5}, [group(1, 4, usual=3, overdue=True)], ["no_wait", "no_wait"]),
    ],
)  # fmt: skip
def test_rules_of_the_delayer(settings: dict[str, object], groups: list[DelayFacts], reasons: list[str]) -> None:
    delayer = PrefillDelayer(DelayerSettings(**({"max_delay_passes": 3} | settings)), 8, Clock())  # type: ignore[arg-type]
    assert words(play(delayer, groups, len(reasons))) == reasons


def test_waits_are_counted_and_limited_in_time() -> None:
    clock = Clock()
    settings = DelayerSettings(max_delay_passes=10, queue_min_ratio=0.5, max_delay_ms=250.0, seconds_buckets=(0.2, 1.0))
    delayer = PrefillDelayer(settings, 8, clock)
    for _ in range(2):
        delayer.planned(Outcome("all", True, "no_wait"), group(3, 0), 3)
    found = []
    for _ in range(6):
        own = delayer.facts(1, 4, 0.5, False)
        found += play(delayer, [own], 1)
        clock.now += 0.1
    assert words(found) == ["no_wait", "delay", "delay", "delay", "wait_success", "delay"]
    assert found[4].passes == 3 and found[4].seconds == pytest.approx(0.3)
    assert delayer.facts(0, 4, 0.5, False).usual == 3
    state = delayer.state()
    assert state["passes"] == {"bounds": [0.0, 5.0, 9.0], "counts": [3, 4, 4, 4], "sum": 3.0}
    assert state["seconds"]["counts"] == [3, 3, 4, 4] and state["seconds"]["sum"] == pytest.approx(0.3)
    assert ["all", False, "delay", False, 4] in state["outcomes"]


def test_a_scheduler_waits_for_a_batch_that_fills_its_rows() -> None:
    s = scheduler(max_rows=4, delayer=DelayerSettings(max_delay_passes=4))
    for name in ("a", "bb", "ccc"):
        add(s, name)
    assert step(s) == (0, 3)
    steps = []
    for name in ("dddd", "eeeee"):
        s.abort(["dddd"])
        add(s, name)
        steps.append([step(s) for _ in range(6)])
    assert steps[0] == [(3, 0), (0, 1), (4, 0), (4, 0), (4, 0), (4, 0)], "a decode step, and the first wait is skipped"
    assert steps[1] == [(3, 0)] * 3 + [(0, 1), (4, 0), (4, 0)], "one free row, batches of three: three steps, not more"
    state = s.stats().prefill_delayer
    assert state is not None
    outcomes = {tuple(row[:-1]): row[-1] for row in state["outcomes"]}
    assert outcomes[("all", False, "delay", False)] == 3 and outcomes[("all", True, "wait_timeout", True)] == 1


def test_a_wait_ends_with_prompts_beside_suspects() -> None:
    """The running requests are suspects of a failed step, and no request decodes in a step of the others: a prompt runs
    although it would wait, and no pass of a wait is counted."""
    s = scheduler(max_rows=4, delayer=DelayerSettings(max_delay_passes=4))
    for name in ("a", "bb", "ccc", "dddd"):
        add(s, name)
    assert step(s) == (0, 4)
    s.abort(["dddd"])
    add(s, "eeeee")
    assert [step(s), step(s)] == [(3, 0), (0, 1)], "the first wait is skipped"
    plan = s.schedule()
    assert isinstance(plan, StepPlan) and plan.num_decodes == 4
    s.step_failed(plan.number, "broken")
    add(s, "ffffff")
    assert step(s) == (0, 1) and s.table.live["ffffff"].row < 0, "a suspect, alone"
    assert step(s) == (0, 1) and s.table.live["ffffff"].row >= 0
    assert s.delays is not None and s.delays.delayer is not None
    outcomes = s.delays.delayer.outcomes
    assert not [key for key in outcomes if not key[1]] and outcomes[("all", True, "no_wait", True)] >= 2
    assert s.delays.facts(s.table) is not None
    assert s.delays.delayer.decide((group(1, 3),)).passes == 0


@pytest.mark.parametrize("interval", [0, 2])
def test_groups_decide_alike(interval: int) -> None:
    """Every group decides from the exchanged facts: random facts lead to equal decisions, and to progress. Without a
    waiting prompt the turn is closed, so that no prompt begins before it is counted."""
    rng = random.Random(random.getrandbits(32))
    config = SchedulerConfig(100, 100, max_rows=8, prefill_decode_interval=interval, delayer=DelayerSettings(4, 0.1))
    delays = [PrefillDelays(config, Clock()) for _ in range(3)]
    turns = [PrefillTurns(delays=own) for own in delays]
    closed = 0
    for own in delays:
        own.shared = True
    for _ in range(200):
        steps = []
        for own in delays:
            waiting, running = rng.choice([0, 0, 2]), rng.choice([0, 3, 7])
            assert own.delayer is not None
            facts = own.delayer.facts(waiting, running, rng.random(), False)
            prefilled = turns[0].open and rng.random() < 0.3
            steps.append(StepFacts(prefills=prefilled, num_running=running, num_waiting=waiting, delay=facts))
        for group_turns, own_delays, facts_of in zip(turns, delays, steps):
            own_delays.planned(int(facts_of.prefills))
            group_turns.after(tuple(steps), facts_of.delay)
        assert len({group_turns.open for group_turns in turns}) == 1
        if not any(facts.num_running for facts in steps):
            assert turns[0].open
        waits = any(facts.num_waiting for facts in steps)
        assert waits or turns[0].open == (not any(facts.num_running for facts in steps))
        closed = closed + 1 if waits and not turns[0].open else 0
        assert closed <= 3 + interval


def test_metrics_are_sums_over_schedulers() -> None:
    states = []
    for reason in ("no_wait", "no_wait", "wait_success"):
        delayer = PrefillDelayer(DelayerSettings(max_delay_passes=10), 8, Clock())
        delayer.planned(Outcome("all", True, reason, 7, 1.5), group(1, 2), 2)
        states.append(delayer.state())
    registry = prom.CollectorRegistry()
    PrefillDelayerMetrics(MetricFamilies(registry, {"model_name": "m"})).set(states)
    page = prom.generate_latest(registry).decode()
    samples = {(s.name, *sorted(s.labels.items())): s.value for f in parse(page) for s in f.samples}
    name, model = "sglang:prefill_delayer_wait_", ("model_name", "m")
    passes = [samples[f"{name}forward_passes_bucket", ("le", bound), model] for bound in ("0.0", "5.0", "9.0", "+Inf")]
    assert passes == [0, 0, 3, 3] and samples[f"{name}forward_passes_sum", model] == 21
    assert samples[f"{name}seconds_bucket", ("le", "1.0"), model] == 0
    assert samples[f"{name}seconds_bucket", ("le", "2.0"), model] == samples[f"{name}seconds_count", model] == 3
    labels = {"actual_execution": "true", "input_estimation": "all", "output_allow": "true", "output_reason": "no_wait"}
    key = ("sglang:prefill_delayer_outcomes_total", *sorted({**labels, "model_name": "m"}.items()))
    assert samples[key] == 2  # type: ignore[index]
