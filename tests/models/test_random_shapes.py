"""Logits of random shapes of random families equal transformers', with fields of config.json left out."""

from __future__ import annotations

import random
from pathlib import Path

from tests.examples import examples
from tests.models.checkpoints import KINDS, MORE_KINDS
from tests.models.random_shapes import TOLERANCE, Refused, check, draw


def test_logits_equal_transformers(tmp_path: Path) -> None:
    wanted = examples(3)
    compared = 0
    for number in range(5 * wanted):
        shape = draw(random.choice([*KINDS, *MORE_KINDS]), random.Random(random.getrandbits(32)))
        try:
            error = check(shape, tmp_path / str(number), random.randrange(2**31))
        except Refused:
            continue
        assert error < TOLERANCE, (error, shape)
        compared += 1
        if compared == wanted:
            return
    raise AssertionError(f"transformers refused {5 * wanted - compared} of {5 * wanted} shapes")
