"""Random drafters on random targets: answers are those of the requests one by one without drafts."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from tests.examples import examples
from tests.models.random_shapes import Refused
from tests.speculation.random_drafts import KINDS, check, draw

ATTEMPTS = 8


@pytest.mark.drawn(2)
@pytest.mark.parametrize("kind", KINDS)
def test_answers_are_those_without_drafts(tmp_path: Path, kind: str) -> None:
    for number in range(examples(1)):
        for attempt in range(ATTEMPTS):
            rng = random.Random(random.getrandbits(32))
            drawn = draw(kind, rng)
            try:
                check(drawn, tmp_path / f"{number}-{attempt}", rng)
                break
            except Refused:
                continue
            except AssertionError as error:
                raise AssertionError(f"{error}: {drawn}") from error
        else:
            raise AssertionError(f"{ATTEMPTS} draws were refused")
