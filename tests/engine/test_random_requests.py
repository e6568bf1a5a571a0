"""Random fields of requests on an engine with random flags: answers are those of the requests one by one."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.engine.random_requests import check, draw
from tests.models.checkpoints import KINDS, MORE_KINDS
from tests.models.random_shapes import check_draws

pytestmark = pytest.mark.usefixtures("forked_processes")

ATTEMPTS = 12


def test_answers_are_those_of_a_plain_engine(tmp_path: Path) -> None:
    pytest.importorskip("dill", reason="custom logit processors need dill")
    check_draws(tmp_path, ATTEMPTS, lambda rng: draw(rng.choice([*KINDS, *MORE_KINDS]), rng), check)
