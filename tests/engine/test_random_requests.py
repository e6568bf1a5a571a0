"""Random fields of requests on an engine with random flags: answers are those of the requests one by one."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from tests.engine.random_requests import check, draw
from tests.examples import examples
from tests.models.checkpoints import KINDS, MORE_KINDS
from tests.models.random_shapes import Refused

pytestmark = pytest.mark.usefixtures("forked_processes")

ATTEMPTS = 12


def test_answers_are_those_of_a_plain_engine(tmp_path: Path) -> None:
    pytest.importorskip("dill", reason="custom logit processors need dill")
    for number in range(examples(1)):
        for attempt in range(ATTEMPTS):
            rng = random.Random(random.getrandbits(32))
            case = draw(rng.choice([*KINDS, *MORE_KINDS]), rng)
            try:
                check(case, tmp_path / f"{number}-{attempt}", rng)
                break
            except Refused:
                continue
            except AssertionError as error:
                raise AssertionError(f"{error}: {case}") from error
        else:
            raise AssertionError(f"{ATTEMPTS} forms were refused")
