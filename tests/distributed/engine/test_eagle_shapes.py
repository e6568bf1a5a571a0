"""Random EAGLE heads on random targets: the acceptance of a float64 reference, and transformers' tokens."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from tests.examples import examples
from tests.models.random_shapes import Refused
from tests.speculation.eagle_shapes import MORE_TARGETS, TARGETS, check, draw

pytestmark = pytest.mark.usefixtures("forked_processes")


def test_acceptance_equals_an_offline_count(tmp_path: Path) -> None:
    wanted = examples(1)
    compared = 0
    for number in range(5 * wanted):
        rng = random.Random(random.getrandbits(32))
        drawn = draw(rng.choice([*TARGETS, *MORE_TARGETS]), rng)
        try:
            check(drawn, tmp_path / str(number), rng)
        except Refused:
            continue
        except AssertionError as error:
            raise AssertionError(f"{error}: {drawn}") from error
        compared += 1
        if compared == wanted:
            return
    raise AssertionError(f"transformers refused {5 * wanted - compared} of {5 * wanted} targets")
