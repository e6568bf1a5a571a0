"""Servers of a model with states refuse each other if their ranks or pages differ; others do not."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from moe_engine.config.args import EngineArgs
from moe_engine.core.kv_transfer.schema import cache_schema
from moe_engine.planning.prepare import prepare
from tests.config.conftest import machine
from tests.config.test_speculation import LLAMA
from tests.disaggregation.agents import AgentPair
from tests.models.published import QWEN3_NEXT

SMALL = QWEN3_NEXT | {"num_hidden_layers": 4, "num_experts": 16}


def schema(folder: Path, config: dict[str, Any], **flags: Any) -> dict[str, str]:
    (folder / "config.json").write_text(json.dumps(config))
    args = EngineArgs.from_kwargs(
        model_path=str(folder), load_format="dummy", device="cpu", disaggregation_mode="prefill", context_length=2048,
        max_total_tokens=4096, **flags,
    )  # fmt: skip
    return cache_schema(prepare(args, machine(1000, 1000)))


@pytest.mark.parametrize(
    ("flags", "ours", "theirs"),
    [
        ({"page_size": 8}, "on 1 rank, --page-size 4", "on 1 rank, --page-size 8"),
        ({"page_size": 4, "tp_size": 2}, "on 1 rank, --page-size 4", "on 2 ranks, --page-size 4"),
    ],
)
def test_the_handshake_names_both_sides(flags: dict[str, int], ours: str, theirs: str, tmp_path: Path) -> None:
    with AgentPair(schemas=(schema(tmp_path, SMALL, page_size=4), schema(tmp_path, SMALL, **flags))) as pair:
        pair.prefill.link.command("offer", 1, b"d")
        pair.want(1, 0, 10, list(range(10)))
        reason = pair.decode.wait(1, "filled", "failed")[2]
        refusal, _, other = reason.partition(", decode server ")
        assert "refuses: states: prefill server " in refusal and refusal.endswith(ours) and other.endswith(theirs)
        assert pair.prefill.of(1) == []  # it may still meet another decode server


def test_pages_and_ranks_of_models_without_states_may_differ(tmp_path: Path) -> None:
    pair = schema(tmp_path, LLAMA, page_size=4), schema(tmp_path, LLAMA, page_size=8, tp_size=2)
    assert pair[0] == pair[1]
