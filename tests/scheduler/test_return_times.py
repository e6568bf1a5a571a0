"""The value of held KV: compared with the best release time over all, and least squares by numpy."""

from __future__ import annotations

import math
import random

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from moe_engine.scheduler.return_times import Line, ReturnTimes, StepTimes
from moe_engine.scheduler.step_sums import MEMORY, StepSums
from tests.examples import examples

PAUSES = st.lists(st.floats(0.01, 50.0), min_size=1, max_size=20)


def best(pauses: list[float], share: float, horizon: float, silence: float) -> float:
    """Maximum over all release times: P(return before) * horizon - expected time until the release or the return."""
    later = [pause for pause in pauses if pause > silence]
    weight = share / len(pauses)
    alive = weight * len(later) + 1 - share
    found = 0.0
    for end in later:
        returned = [pause for pause in later if pause <= end]
        spent = sum(pause - silence for pause in returned) * weight + (alive - weight * len(returned)) * (end - silence)
        found = max(found, (weight * len(returned) * horizon - spent) / alive)
    return found


@settings(max_examples=examples(60))
@given(pauses=PAUSES, num_lost=st.integers(0, 20), horizon=st.floats(0.0, 100.0), silence=st.floats(0.0, 60.0))
def test_value_is_that_of_the_best_moment_to_give_up(
    pauses: list[float], num_lost: int, horizon: float, silence: float
) -> None:
    times = ReturnTimes()
    for pause in pauses:
        times.returned(pause)
    for _ in range(num_lost):
        times.lost()
    times.update(horizon)
    expected = best(pauses, times.share, horizon, silence)
    assert math.isclose(times.value(silence), expected, rel_tol=1e-6, abs_tol=1e-6)


def test_share_counts_sessions_that_return_after_all() -> None:
    times = ReturnTimes()
    assert times.share == 0.0 and times.value(0.0) == 0.0
    times.returned(1.0)
    times.lost()
    assert 0.45 < times.share < 0.55
    times.found()
    assert times.share > 0.99


@settings(max_examples=examples(30))
@given(pauses=PAUSES, share=st.one_of(st.just(0.0), st.just(1.0), st.floats(0.0, 1.0)), silence=st.floats(0.0, 60.0))
def test_a_long_silence_is_an_end(pauses: list[float], share: float, silence: float) -> None:
    """Bayes' rule with the observed pauses; a session silent for longer than all of them has ended."""
    times = ReturnTimes()
    assert math.isclose(times.follows(silence, share), share, rel_tol=1e-12)
    for pause in pauses:
        times.returned(pause)
    times.update(1.0)
    longer = share * sum(pause > silence for pause in pauses) / len(pauses)
    found = times.follows(silence, share)
    assert math.isclose(found * (longer + 1 - share), longer, rel_tol=1e-9, abs_tol=1e-12)
    if silence > max(pauses):
        assert found == 0.0


@settings(max_examples=examples(30))
@given(points=st.lists(st.tuples(st.integers(1, 500), st.floats(0.001, 1.0)), min_size=3, max_size=30))
def test_line_is_the_weighted_least_squares(points: list[tuple[int, float]]) -> None:
    line = Line()
    for x, y in points:
        line.add(x, y)
    counts, seconds = np.array(points, dtype=float).T
    if np.ptp(counts) < 1:
        assert line.slope == 0.0
        return
    weights = np.sqrt((1 - MEMORY) ** np.arange(len(points) - 1, -1, -1))
    slope, intercept = np.polyfit(counts, seconds, 1, w=weights)
    assert math.isclose(line.slope, max(slope, 0.0), rel_tol=1e-5, abs_tol=1e-9)
    if slope > 0:
        assert math.isclose(line.at(100), max(slope * 100 + intercept, 0.0), rel_tol=1e-4, abs_tol=1e-7)


def test_price_of_compute_from_step_times() -> None:
    """Decode steps of 0.02 s + 1 ms a request, prompts of 0.01 s + 1 ms a token, a fifth of the time idle."""
    times, now, spare, total = StepTimes(max_running=4), 0.0, 0.0, 0.0
    for turn in range(4000):
        idle = 0.01 if turn % 4 == 0 else 0.0
        launched = now + idle
        count, decodes = (0, turn % 4 + 1) if turn % 2 else (30 + turn % 5, 0)
        seconds = 0.02 + 0.001 * decodes if decodes else 0.01 + 0.001 * count
        now = launched + seconds
        times.add(launched, now, count, decodes, contended=True)
        spare += idle + (0.02 if 0 < decodes < 4 else 0.0)  # with all rows in use more slots have no effect
        total += idle + seconds
    assert math.isclose(times.per_token, 0.001, rel_tol=1e-6)
    assert math.isclose(times.price, total / spare - 1, rel_tol=0.05)


def test_overlapped_steps_are_not_counted_twice() -> None:
    times = StepTimes()
    for step in range(50):  # each is planned when the previous step starts
        times.add(max(step - 1, 0) * 0.1, (step + 1) * 0.1, 0, 1, contended=True)
    assert math.isclose(times._total, 5.0, rel_tol=0.1)


def test_steps_at_once_equal_steps_one_by_one() -> None:
    rng = random.Random(random.getrandbits(32))
    single, several, sums, now = StepTimes(8), StepTimes(8), StepSums(), 1.0
    for _ in range(30):
        if rng.random() < 0.5:
            launched, now, tokens, decodes = now, now + rng.uniform(0.01, 0.1), rng.randint(1, 100), rng.randint(0, 3)
            for times in (single, several):
                times.add(launched, now, tokens, decodes, contended=True)
        decodes, marks = rng.randint(1, 9), [sums.mark()]
        for contended in (False, True):
            count, first, slope = rng.randint(0, 200), rng.uniform(0.01, 0.02), rng.choice([0.0, 1e-5])
            for step in range(count):
                launched, now = now, now + first + slope * step
                single.add(launched, now, 0, decodes, contended)
            if count:
                sums.add(first, first + slope * (count - 1), count)
            marks.append(sums.mark())
        several.add_decodes(decodes, sums.since(marks[0]), sums.since(marks[1]), now)
        assert math.isclose(several.price, single.price, rel_tol=1e-6, abs_tol=1e-9)
        assert math.isclose(several.per_token, single.per_token, rel_tol=1e-6)
        assert math.isclose(several._decode.at(5), single._decode.at(5), rel_tol=1e-6)
