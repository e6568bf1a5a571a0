"""Random shapes in whole engines of random forms: tokens and log-probabilities are those of the oracles."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from tests.engine.random_served import KINDS, check, draw
from tests.models.random_shapes import Refused

pytestmark = pytest.mark.usefixtures("forked_processes")

ATTEMPTS = 12


@pytest.mark.drawn(1)
@pytest.mark.parametrize("kind", KINDS)
def test_answers_are_those_of_the_oracle(tmp_path: Path, kind: str) -> None:
    pytest.importorskip("PIL", reason="images need pillow: pip install -e '.[vision]'")
    for attempt in range(ATTEMPTS):
        form = draw(kind, random.Random(random.getrandbits(32)))
        try:
            check(form, tmp_path / str(attempt), random.randrange(2**31))
            return
        except Refused:
            continue
        except AssertionError as error:
            raise AssertionError(f"{error}: {form}") from error
    raise AssertionError(f"{ATTEMPTS} forms were refused")
