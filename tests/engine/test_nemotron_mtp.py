"""Drafts of Nemotron-3's MTP layer in whole engines, beside layers with states: tokens of transformers, the acceptance
of an offline count."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest

from tests.engine.test_step_mtp import check_acceptance
from tests.models.nemotron_mtp import NemotronOracle
from tests.speculation.agreeing import agreeing_checkpoint

pytestmark = pytest.mark.usefixtures("forked_processes")

FORMS: dict[str, dict[str, Any]] = {
    "one rank": {},
    "small chunks": {"chunked_prefill_size": 32, "page_size": 16},
    "tp": {"tp_size": 2},
    "dp attention": {"tp_size": 2, "attn_dp_size": 2},
    "tokens that travel": {"tp_size": 2, "attn_dp_size": 2, "ep_size": 2, "moe_a2a_backend": "all_to_all"},
}


@pytest.fixture(scope="module")
def oracle(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, NemotronOracle]:
    folder, seed = tmp_path_factory.mktemp("nemotron"), random.randrange(1 << 30)
    path = agreeing_checkpoint("nemotron_h", folder, seed, num_mtp_layers=1, moe_latent_size=40)
    return path, NemotronOracle(path)


@pytest.mark.drawn(2)
@pytest.mark.parametrize("form", FORMS)
def test_acceptance(oracle: tuple[Path, NemotronOracle], form: str) -> None:
    check_acceptance(*oracle, **FORMS[form])
