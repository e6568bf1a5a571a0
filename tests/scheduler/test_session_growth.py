"""Expected growth of sessions: against a sum over the sessions one by one."""

from __future__ import annotations

import math

from hypothesis import given, settings
from hypothesis import strategies as st

from moe_engine.scheduler.session_growth import MAX_TURNS, Projection, ReturnShares
from tests.examples import examples

SHARES = st.lists(st.floats(0.0, 1.0), min_size=MAX_TURNS, max_size=MAX_TURNS)
SESSION = st.tuples(st.integers(0, MAX_TURNS - 1), st.floats(0, 900), st.floats(0, 100), st.floats(0.0, 1.0))


def expected(shares: list[float], growth: float, member: tuple[int, float, float, float], n: int) -> float:
    """Tokens of one session after n turns, beyond those that it has."""
    turn, has, more, returns = member
    if n == 0:
        return more
    alive = returns
    for later in range(1, n):
        alive *= shares[min(turn + later, MAX_TURNS - 1)]
    return alive * (has + more + n * growth) - has


def begun(shares: list[float], growth: float, arrivals: tuple[float, int, float], n: int) -> float:
    """Tokens of the sessions of one turn, n turns after their first."""
    per_turn, turn, size = arrivals
    return per_turn * math.prod(shares[min(turn + i, MAX_TURNS - 1)] for i in range(n)) * (size + n * growth)


@settings(max_examples=examples(40))
@given(
    shares=SHARES,
    growth=st.floats(0, 50),
    members=st.lists(SESSION, max_size=8),
    num_turns=st.integers(1, 2 * MAX_TURNS),
    new=st.tuples(st.integers(0, MAX_TURNS - 1), st.floats(1, 500)),
    arrivals=st.tuples(st.floats(0, 3), st.integers(0, MAX_TURNS - 1), st.floats(1, 500)),
)
def test_peak_is_that_of_the_sum(
    shares: list[float],
    growth: float,
    members: list[tuple[int, float, float, float]],
    num_turns: int,
    new: tuple[int, float],
    arrivals: tuple[float, int, float],
) -> None:
    steps = range(min(num_turns, MAX_TURNS) + 1)
    projection = Projection(growth, shares, num_turns)
    projection.add_all((turn, has, has + more, returns) for turn, has, more, returns in members)
    projection.add_arrivals(*arrivals)
    later = [sum(begun(shares, growth, arrivals, n - first) for first in range(1, n + 1)) for n in steps]
    sums = [sum(expected(shares, growth, member, n) for member in members) + later[n] for n in steps]
    assert math.isclose(projection.peak, max(0.0, *sums), rel_tol=1e-6, abs_tol=1e-3)
    own = [expected(shares, growth, (new[0], new[1], 0.0, shares[new[0]]), n) for n in steps]
    both = max(0.0, *(a + b for a, b in zip(sums, own)))
    assert math.isclose(projection.peak_with(*new), both, rel_tol=1e-6, abs_tol=1e-3)
    alone = Projection(growth, shares, num_turns)
    assert math.isclose(alone.peak_with(*new), alone.growth_of(*new), abs_tol=1e-6)
    projection.add(*new)
    assert math.isclose(projection.peak, both, rel_tol=1e-6, abs_tol=1e-3)


def test_sessions_admitted_together_need_more_later() -> None:
    """Ten sessions of one turn, each of exactly four turns of 100 tokens: a fourfold peak."""
    shares = [1.0, 1.0, 1.0, 1.0, *[0.0] * (MAX_TURNS - 4)]
    young, mixed = Projection(100, shares, 10), Projection(100, shares, 10)
    young.add_all([(1, 100, 100, 1.0)] * 10)
    assert math.isclose(young.peak, 10 * 300)
    mixed.add_all([(turn, 100 * turn, 100 * turn, shares[turn]) for turn in (1, 2, 3, 4) for _ in range(5)])
    assert mixed.peak == 0.0  # of 20, five end in each turn
    mixed.add_arrivals(5, 1, 100)
    assert mixed.peak == 0.0  # and five begin
    young.add_arrivals(2.5, 1, 100)
    assert math.isclose(young.peak, 10 * 300 + 2.5 * (100 + 200 + 300))


def test_shares_depend_on_the_length() -> None:
    """Sessions end after the third turn; lengths that were never seen have the share of all."""
    seen = ReturnShares()
    for _ in range(200):
        for turn in range(3):
            seen.observe(turn, turn < 2)
    shares = seen.shares()
    assert min(shares[:2]) > 0.95 and shares[2] < 0.05 and 0.6 < shares[9] < 0.72
    seen.doubted[9] = 30.0
    assert seen.shares()[9] < 0.05


@settings(max_examples=examples(20), deadline=None)
@given(seen=st.lists(st.tuples(st.integers(0, MAX_TURNS - 1), st.booleans()), max_size=30), growth=st.floats(1, 500))
def test_demands_are_those_of_all_later_turns(seen: list[tuple[int, bool]], growth: float) -> None:
    known = ReturnShares()
    for turn, returned in seen:
        known.observe(turn, returned)
    shares = known.shares()
    turns, tokens = known.demands(growth)
    for turn in range(MAX_TURNS):
        alive = [math.prod(shares[turn + 1 : turn + k]) for k in range(1, MAX_TURNS - turn + 1)]
        assert math.isclose(turns[turn], sum(alive), rel_tol=1e-6)
        assert math.isclose(tokens[turn], sum(growth * k * each for k, each in enumerate(alive, 1)), rel_tol=1e-6)
