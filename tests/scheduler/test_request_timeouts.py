"""Time limits of requests on the simulator's clock: 0.01 s a turn."""

from __future__ import annotations

from typing import Any

import pytest

from moe_engine.errors import InputError
from moe_engine.scheduler import SchedulerConfig
from moe_engine.scheduler.request_timeouts import LEAST_PAUSE, RequestTimeouts
from moe_engine.types import FinishReason
from tests.scheduler.simulator import Simulation, make_request

WAITED = "--request-waiting-timeout (0.2 s)"
RAN = "--request-running-timeout (0.2 s)"


def config(**changes: Any) -> SchedulerConfig:
    return SchedulerConfig(**{"num_slots": 600, "context_len": 200, **changes})


def test_without_limits_there_is_nothing_to_call() -> None:
    assert Simulation(config()).scheduler.table.timeouts is None


@pytest.mark.parametrize("overlap", [False, True])
def test_a_request_that_waits_too_long_ends_and_the_running_one_does_not(overlap: bool) -> None:
    sim = Simulation(config(max_rows=1, request_waiting_timeout=0.2), overlap=overlap)
    for rid in ("runs", "waits", "waits too"):
        sim.add(make_request(rid, [3, 4, len(rid)], 100, eos=False, ignore_eos=True))
    sim.run_to_end()
    assert sim.outcomes["runs"].reason == "length" and len(sim.outcomes["runs"].tokens) == 100
    for rid in ("waits", "waits too"):
        outcome = sim.outcomes[rid]
        assert (outcome.reason, outcome.tokens) == ("abort", []) and WAITED in outcome.message
    stats = sim.scheduler.stats()
    assert (stats.waiting_timeouts_total, stats.running_timeouts_total) == (2, 0)
    sim.check_end()


@pytest.mark.parametrize("overlap", [False, True])
def test_a_request_that_runs_too_long_ends_and_short_ones_do_not(overlap: bool) -> None:
    sim = Simulation(config(request_running_timeout=0.2, chunked_prefill_size=16), overlap=overlap)
    sim.add(make_request("long", [3] * 5, 150, eos=False, ignore_eos=True))
    sim.add(make_request("short", [4] * 5, 6, eos=False, ignore_eos=True))
    sim.run_to_end()
    long = sim.outcomes["long"]
    assert long.reason == "abort" and RAN in long.message and 10 < len(long.tokens) < 25
    assert sim.outcomes["short"].reason == "length"
    sim.check_end()


def test_a_prompt_in_chunks_is_running() -> None:
    sim = Simulation(config(request_running_timeout=0.2, request_waiting_timeout=0.05, chunked_prefill_size=4))
    sim.add(make_request("a", [5, 6] * 80, 8, eos=False))
    sim.run_to_end()
    assert sim.outcomes["a"].reason == "abort" and RAN in sim.outcomes["a"].message
    sim.check_end()


def test_a_retracted_request_keeps_the_clock_of_its_first_step() -> None:
    eager = {"num_slots": 64, "init_new_token_ratio": 0.1, "retract_decode_steps": 1}
    sim = Simulation(config(request_waiting_timeout=0.05, request_running_timeout=9.0, **eager))
    for i in range(2):
        sim.add(make_request(str(i), [3 + i] * 6, 40, eos=False, ignore_eos=True))
    sim.run_to_end()
    assert sim.scheduler.totals.retractions > 0  # and a wait of more than 0.05 s for the other to end
    assert all(outcome.reason == "length" for outcome in sim.outcomes.values())
    sim.check_end()


@pytest.mark.parametrize("retract", [False, True])
def test_a_pause_of_generation_is_not_running(retract: bool) -> None:
    """Steps of 0.1 s, a pause of 0.5 s, steps until the limit of 0.2 s: the tokens are those without a pause."""

    def tokens(pause: int) -> int:
        sim = Simulation(config(request_running_timeout=0.2))
        sim.add(make_request("long", [3] * 5, 150, eos=False, ignore_eos=True))
        for _ in range(10):
            sim.turn()
        if pause:
            sim.finish_one()
            sim.scheduler.pause(retract)
            for _ in range(pause):
                sim.now += 0.01
                assert sim.scheduler.overdue() == [] and sim.scheduler.schedule() is None
            sim.scheduler.resume()
        sim.run_to_end()
        assert sim.outcomes["long"].reason == "abort" and RAN in sim.outcomes["long"].message
        sim.check_end()
        return len(sim.outcomes["long"].tokens)

    assert abs(tokens(50) - tokens(0)) <= 2  # the pause waits for the step in flight, the prompt is computed again


@pytest.mark.parametrize("arrives", ["before", "during"])
def test_a_pause_of_generation_is_not_waiting(arrives: str) -> None:
    """A request waits 0.1 s, 0.5 s of a pause, and then until the limit of 0.2 s without the pause."""
    sim = Simulation(config(max_rows=1, request_waiting_timeout=0.2))
    sim.add(make_request("runs", [3] * 5, 150, eos=False, ignore_eos=True))
    sim.turn()
    if arrives == "before":
        sim.add(make_request("waits", [4] * 5, 5, eos=False))
    for _ in range(10):
        sim.turn()
    sim.finish_one()
    sim.scheduler.pause(retract=False)
    if arrives == "during":
        sim.add(make_request("waits", [4] * 5, 5, eos=False))
    for _ in range(50):
        sim.now += 0.01
        assert sim.scheduler.overdue() == [] and sim.scheduler.schedule() is None
    sim.scheduler.resume()
    resumed = sim.now
    while sim.outcomes["waits"].reason is None:
        sim.turn()
    assert WAITED in sim.outcomes["waits"].message
    waited = sim.now - resumed
    assert abs(waited - (0.1 if arrives == "before" else 0.2)) < 0.03
    sim.run_to_end()
    assert sim.outcomes["runs"].reason == "length"
    sim.check_end()


def test_requests_are_scanned_only_when_one_may_be_late() -> None:
    now, scans = 0.0, 0
    table = {name: make_request(name, [3]) for name in "ab"}
    timeouts = RequestTimeouts(config(request_waiting_timeout=5.0, request_running_timeout=3.0), lambda: now)

    def live() -> Any:
        nonlocal scans
        scans += 1
        yield from table.values()

    def late() -> list[list[str]]:
        return [rids for _, rids, _ in timeouts.overdue(live())]

    table["a"].queued_at, table["b"].queued_at = -4.0, 0.0
    assert late() == [] and scans == 1
    now = 0.9
    assert late() == [] and scans == 1  # a is late at 1.0
    now = 1.0
    assert late() == [["a"]] and scans == 2
    table["a"].to_abort = FinishReason("abort")  # until its step has ended
    table["b"].first_scheduled = 1.0
    now = 1.0 + LEAST_PAUSE / 2
    assert late() == [] and scans == 2
    now = 4.0
    assert late() == [["b"]] and scans == 3


def test_limits_change_while_requests_wait_and_run() -> None:
    """`/set_internal_state` changes and removes the limits of existing requests."""
    sim = Simulation(config(max_rows=1))
    settings = sim.scheduler.table.settings
    for i in range(3):
        sim.add(make_request(str(i), [3 + i] * 6, 150, eos=False, ignore_eos=True))
    for _ in range(5):
        sim.turn()
    assert sim.scheduler.table.timeouts is None
    settings.set({"request_waiting_timeout": 0.02})
    for _ in range(20):
        sim.turn()
    assert [outcome.reason for outcome in sim.outcomes.values()] == [None, "abort", "abort"]
    settings.set({"request_waiting_timeout": None, "request_running_timeout": None})
    assert sim.scheduler.table.timeouts is None
    settings.set({"request_running_timeout": 0.001})
    sim.run_to_end()
    assert sim.outcomes["0"].reason == "abort"
    with pytest.raises(InputError, match=r"request_running_timeout: expected a number of at least 0\.001, or null"):
        settings.set({"request_running_timeout": 0})
    sim.check_end()
