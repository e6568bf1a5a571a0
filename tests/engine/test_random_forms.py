"""Random forms of an engine on a random shape: answers are those of the requests one by one."""

from __future__ import annotations

import random
from pathlib import Path

from tests.engine.random_forms import FORMULAS, check, draw
from tests.examples import examples
from tests.models.checkpoints import KINDS, MORE_KINDS
from tests.models.random_shapes import Refused

ATTEMPTS = 12


def test_answers_are_those_of_the_requests_alone(tmp_path: Path) -> None:
    for number in range(examples(1)):
        for attempt in range(ATTEMPTS):
            rng = random.Random(random.getrandbits(32))
            form = draw(rng.choice([*KINDS, *MORE_KINDS, *FORMULAS]), rng)
            try:
                check(form, tmp_path / f"{number}-{attempt}", rng)
                break
            except Refused:
                continue
            except AssertionError as error:
                raise AssertionError(f"{error}: {form}") from error
        else:
            raise AssertionError(f"{ATTEMPTS} forms were refused")
