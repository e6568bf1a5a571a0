"""Speculation with every pair of other features, on tiny checkpoints: see `matrix`. The long form is
``python -m tests.speculation.all_cases``."""

from __future__ import annotations

import random
from itertools import combinations
from typing import Any

import pytest

from tests.speculation.matrix import FACTORS, Matrix, Outcome, Scale, allowed
from tests.speculation.pairwise import pairs_of, pairwise_cover

CASES = pairwise_cover(FACTORS, allowed)


@pytest.fixture(scope="module")
def matrix(tmp_path_factory: pytest.TempPathFactory) -> Matrix:
    scale = Scale(num_requests=10, max_new_tokens=24, tiny_pool=128)
    return Matrix(tmp_path_factory.mktemp("matrix"), scale, seed=random.Random(41).randrange(1 << 20))


def test_cover_has_every_allowed_pair_and_nothing_else() -> None:
    met = set().union(*(pairs_of(case, list(FACTORS)) for case in CASES))
    assert all(allowed(case) for case in CASES)
    for a, b in combinations(FACTORS, 2):
        for x in FACTORS[a]:
            for y in FACTORS[b]:
                assert (((a, x), (b, y)) in met) == allowed({a: x, b: y})
    assert len(CASES) < 40


@pytest.fixture(scope="module")
def outcomes() -> list[tuple[dict[str, Any], Outcome]]:
    """Counts of the cases run so far."""
    return []


@pytest.mark.parametrize("case", CASES, ids=lambda case: "-".join(str(value) for value in case.values()))
def test_same_tokens_as_without_speculation(matrix: Matrix, outcomes: list, case: dict[str, Any]) -> None:
    outcome = matrix.run(case)
    assert not outcome.differences
    assert outcome.speculation.verify_total > 0
    outcomes.append((case, outcome))


def test_something_was_accepted_and_something_retracted(outcomes: list) -> None:
    """Otherwise the cases would not be meaningful."""
    if len(outcomes) < len(CASES):
        pytest.skip("needs all cases before it")
    accepted = {case["drafter"]: 0 for case, _ in outcomes}
    for case, outcome in outcomes:
        accepted[case["drafter"]] += sum(outcome.speculation.accepted)
    assert min(accepted.values()) > 10, accepted
    assert sum(outcome.retractions for _, outcome in outcomes) > 4
