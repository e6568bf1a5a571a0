"""Random forms of an engine on a random shape: answers are those of the requests one by one."""

from __future__ import annotations

from pathlib import Path

from tests.engine.random_forms import FORMULAS, check, draw
from tests.models.checkpoints import KINDS, MORE_KINDS
from tests.models.random_shapes import check_draws

ATTEMPTS = 12


def test_answers_are_those_of_the_requests_alone(tmp_path: Path) -> None:
    check_draws(tmp_path, ATTEMPTS, lambda rng: draw(rng.choice([*KINDS, *MORE_KINDS, *FORMULAS]), rng), check)
