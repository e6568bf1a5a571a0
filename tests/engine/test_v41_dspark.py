"""Blocks of DeepSeek V4.1's DSpark layers in whole engines: the model's tokens, the acceptance of an offline count."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest

from moe_engine.config.args import EngineArgs
from moe_engine.errors import ConfigError
from moe_engine.planning.prepare import prepare
from tests.engine.test_v4_dspark import FORMS, check_acceptance
from tests.models.v41_dspark import V41DSparkReference, make_v41_dspark

pytestmark = pytest.mark.usefixtures("forked_processes")

MORE: dict[str, dict[str, Any]] = {
    "ep": {"tp_size": 2, "ep_size": 2},
    "moved experts": {"tp_size": 2, "ep_size": 2, "ep_num_redundant_experts": 2},
}


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, V41DSparkReference]:
    path = make_v41_dspark(tmp_path_factory.mktemp("v41"), random.randrange(1 << 30), agreeing=True)
    return path, V41DSparkReference(path)


@pytest.mark.drawn(1)
@pytest.mark.parametrize("form", FORMS | MORE)
def test_acceptance(reference: tuple[Path, V41DSparkReference], form: str) -> None:
    check_acceptance(*reference, (FORMS | MORE)[form])


def test_other_drafters(reference: tuple[Path, V41DSparkReference]) -> None:
    """The model starts without its draft layers; NEXTN names the algorithm that it has; ranks divide the experts."""
    more = {"model_path": str(reference[0]), "device": "cpu", "skip_tokenizer_init": True}
    assert prepare(EngineArgs.from_kwargs(**more)).speculation is None
    with pytest.raises(ConfigError, match="fill in blocks, and are no MTP layers; use --speculative-algorithm DSPARK"):
        prepare(EngineArgs.from_kwargs(**more, speculative_algorithm="NEXTN"))
    ranks = {"tp_size": 4, "ep_size": 4}
    assert prepare(EngineArgs.from_kwargs(**more, **ranks)).parallel.topology.ep_size == 4
    with pytest.raises(ConfigError, match=r"--ep-size 4: the draft layers .* have 6 experts"):
        prepare(EngineArgs.from_kwargs(**more, **ranks, speculative_algorithm="DSPARK"))


def test_the_ledger_has_a_dispatcher_of_the_draft_layers(reference: tuple[Path, V41DSparkReference]) -> None:
    flags = {"model_path": str(reference[0]), "device": "cpu", **FORMS["tokens that travel"]}
    rows = {row.name: row for row in prepare(EngineArgs.from_kwargs(**flags, **{
        "speculative_algorithm": "DSPARK", "max_total_tokens": 2048, "skip_tokenizer_init": True,
    })).ledger.rows}  # fmt: skip
    assert rows["draft dispatch buffers"].num_bytes > 0 and "3 DSpark layers" in rows["draft weights"].detail
