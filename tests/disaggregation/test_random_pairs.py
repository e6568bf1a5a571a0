"""Random forms of a prefill and a decode engine: answers are those of one rank."""

from __future__ import annotations

import random
from pathlib import Path

from tests.disaggregation.random_pairs import PairCase, check, draw_pair
from tests.distributed.engine.random_ranks import can_compare, kinds
from tests.models.random_shapes import check_draws

ATTEMPTS = 30


def test_answers_are_those_of_one_rank(tmp_path: Path) -> None:
    def draw(rng: random.Random) -> PairCase | None:
        case = draw_pair(rng.choice(kinds()), "cpu", 2, rng)
        return case if can_compare(case) else None

    check_draws(tmp_path, ATTEMPTS, draw, check)
