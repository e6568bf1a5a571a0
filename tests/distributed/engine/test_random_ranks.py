"""Random forms of an engine on several ranks: answers are those of one rank."""

from __future__ import annotations

import random
from pathlib import Path

from tests.distributed.engine.random_ranks import Case, can_compare, check, draw_form, kinds
from tests.models.random_shapes import check_draws

ATTEMPTS = 30


def test_answers_are_those_of_one_rank(tmp_path: Path) -> None:
    def draw(rng: random.Random) -> Case | None:
        case = draw_form(rng.choice(kinds()), "cpu", 2, rng)
        return case if can_compare(case) else None

    check_draws(tmp_path, ATTEMPTS, draw, check)
