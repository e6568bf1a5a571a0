"""Random forms of a prefill and a decode engine, on CPUs and simulated GPUs: answers are those of one rank."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from tests.disaggregation.random_pairs import PairCase, check, draw_pair
from tests.distributed.engine.random_ranks import can_compare, kinds
from tests.models.random_shapes import Refused, check_draws
from tests.simulated_cuda.install import require

pytestmark = pytest.mark.drawn(1)

ATTEMPTS = 30


def test_answers_are_those_of_one_rank(tmp_path: Path) -> None:
    def draw(rng: random.Random) -> PairCase | None:
        case = draw_pair(rng.choice(kinds()), "cpu", 2, rng)
        return case if can_compare(case) else None

    check_draws(tmp_path, ATTEMPTS, draw, check)


def test_two_and_two_simulated_gpus(tmp_path: Path) -> None:
    """KV is transferred between ranks on four devices; answers are those of one rank of a CPU."""
    require()

    def draw(rng: random.Random) -> PairCase | None:
        for _ in range(200):
            case = draw_pair(rng.choice(kinds()), "cuda", 2, rng)
            if all(flags.get("tp_size") == 2 for flags in (case.flags, case.other)) and can_compare(case):
                case.event = ""
                case.other["base_gpu_id"] = 2
                return case
        return None

    def check_transfers(case: PairCase, folder: Path, rng: random.Random) -> None:
        found = check(case, folder, rng)
        if "'transferred': 0," in found:  # short prompts, or aborted ones
            raise Refused(found)

    check_draws(tmp_path, ATTEMPTS, draw, check_transfers)
