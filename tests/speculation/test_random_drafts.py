"""Random drafters on random targets: answers are those of the requests one by one without drafts."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.models.random_shapes import check_draws
from tests.speculation.random_drafts import KINDS, check, draw

ATTEMPTS = 8


@pytest.mark.drawn(2)
@pytest.mark.parametrize("kind", KINDS)
def test_answers_are_those_without_drafts(tmp_path: Path, kind: str) -> None:
    check_draws(tmp_path, ATTEMPTS, lambda rng: draw(kind, rng), check)
