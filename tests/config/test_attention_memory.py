"""Workspaces of attention backends: computed by the backends, counted by the ledger; unusable backends are refused
early."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from moe_engine.config.args import EngineArgs
from moe_engine.errors import ConfigError
from moe_engine.kernels import workspaces
from moe_engine.kernels.device import HeadWidths
from moe_engine.kernels.vendors import probe
from moe_engine.kernels.workspaces import MIB, AttentionLoad
from moe_engine.models.config_file import load_model_config
from moe_engine.models.step_memory import DRAFT_CATCH_UP, DRAFT_FEW
from moe_engine.planning.output.explain import explain_text
from moe_engine.planning.prepare import prepare
from moe_engine.planning.resolve import resolve
from moe_engine.planning.resolved_config import ResolvedConfig
from moe_engine.planning.speculation.resolve_speculation import DraftModel
from tests.config.conftest import SMALL, machine
from tests.config.test_speculation import LLAMA
from tests.models.published import V3

V3_WIDTHS = HeadWidths(128, 1, 192, 128, 512, 64)


@pytest.fixture
def prepared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., ResolvedConfig]:
    """A launch on a Hopper GPU with every library installed."""
    monkeypatch.setattr(probe, "_found", lambda name: True)

    def make(config: dict[str, Any] = V3, capability: tuple[int, int] = (9, 0), **flags: Any) -> ResolvedConfig:
        (tmp_path / "config.json").write_text(json.dumps(config))
        gpu = machine(1000, 1000, "cuda", capability=capability)
        args = EngineArgs.from_kwargs(model_path=str(tmp_path), load_format="dummy", **flags)
        return prepare(args, gpu)

    return make


def workspace(config: ResolvedConfig) -> tuple[int, str]:
    (row,) = (row for row in config.ledger.rows if row.name == "attention workspace")
    return row.num_bytes, row.detail


@pytest.mark.parametrize("name", ["flashinfer", "flashmla", "fa3", "triton"])
def test_the_ledger_counts_what_the_backend_states(prepared: Callable[..., ResolvedConfig], name: str) -> None:
    flags = {"attention_backend": name, "page_size": 64, "max_running_requests": 256, "context_length": 8192}
    with_graphs, without = prepared(**flags), prepared(**flags, disable_cuda_graph=True)
    num_bytes, detail = workspace(with_graphs)
    assert name in detail and f"{with_graphs.graphs.num_graphs} captured steps" in detail
    load = AttentionLoad(256, 1, V3_WIDTHS, 8196 // 64 + 1, with_graphs.graphs.num_graphs, 256, expanded=16384)
    assert ("a copy of expanded keys" in detail) == (name != "triton")
    assert num_bytes == getattr(workspaces, name)(load)
    assert workspace(without)[0] < num_bytes
    assert with_graphs.max_total_num_tokens < without.max_total_num_tokens
    assert "attention workspace" in explain_text(with_graphs)


def test_no_workspace_on_a_cpu(resolved: Callable[..., ResolvedConfig]) -> None:
    assert all(row.name != "attention workspace" for row in resolved().ledger.rows)


@pytest.mark.parametrize(("width", "topk", "name"), [(64, 2, "flashinfer"), (64, 1, "fa3"), (16, 1, "fa3")])
def test_a_draft_model_has_a_workspace_of_its_own(
    model_dir: Callable[..., Path], monkeypatch: pytest.MonkeyPatch, width: int, topk: int, name: str
) -> None:
    """The draft model's backend is another instance, also for draft extends of many tokens per request."""
    monkeypatch.setattr(probe, "_found", lambda name: True)
    folder, drafter = model_dir(SMALL), model_dir({**LLAMA, "head_dim": width}, name="draft")
    args = EngineArgs.from_kwargs(
        speculative_algorithm="STANDALONE", speculative_draft_model_path=str(drafter), max_running_requests=300,
        speculative_num_steps=3, speculative_eagle_topk=topk, speculative_num_draft_tokens=4,
    )  # fmt: skip
    gpu = machine(1000, 1000, "cuda", capability=(9, 0))
    draft = DraftModel(str(drafter), load_model_config(drafter))
    config = resolve(args, load_model_config(folder), gpu, model_path=str(folder), draft=draft)
    (row,) = (row for row in config.ledger.rows if row.name == "draft attention workspace")
    assert name in row.detail and "LlamaForCausalLM" in row.detail
    states = getattr(workspaces, {"flashinfer": "flashinfer_gqa"}.get(name, name))
    widths, depth = HeadWidths(4, 2, width, width), config.speculation.num_draft_tokens  # type: ignore[union-attr]
    pages = -(-config.limits.row_width // config.page_size)
    many = AttentionLoad(DRAFT_CATCH_UP // DRAFT_FEW, DRAFT_FEW, widths, pages)
    assert row.num_bytes == max(states(AttentionLoad(300, depth, widths, pages)), states(many)) > 0


def test_widths_and_capabilities_are_refused_at_start(prepared: Callable[..., ResolvedConfig]) -> None:
    with pytest.raises(ConfigError, match=r"--attention-backend flashmla:.*512\+64 channels, not 64\+16"):
        prepared(SMALL, attention_backend="flashmla", page_size=64)
    with pytest.raises(ConfigError, match=r"--attention-backend fa3:.*sm_90"):
        prepared(attention_backend="fa3", capability=(10, 0))
    assert "triton" in workspace(prepared(SMALL))[1]
    assert "fa3" in workspace(prepared())[1]
    assert "trtllm_mla" in workspace(prepared(capability=(10, 0)))[1]
    assert "flashinfer" in workspace(prepared(capability=(10, 0), page_size=1))[1]
    with pytest.raises(
        ConfigError, match=r"--attention-backend trtllm_mla:.*pages of 32 or 64 tokens, --page-size is 16"
    ):
        prepared(attention_backend="trtllm_mla", page_size=16, capability=(10, 0))


def test_sizes_by_hand() -> None:
    """The libraries' own formulas, for DeepSeek V3 on one GPU."""
    eager = AttentionLoad(256, 1, V3_WIDTHS, 128)
    recorded = dataclasses.replace(eager, graphs=36, recorded=256)
    result = 4 * 128 * 513  # of one query token
    decodes, prompts = (256 + 160 // 2) * result, (128 + 8 * 8) * MIB  # prompts run on FlashInfer
    assert workspaces.flashmla(eager) == decodes + prompts
    assert workspaces.flashmla(recorded) == 2 * decodes + 4 * 256 * 128 + prompts
    records = dataclasses.replace(recorded, record_page=64)  # a list of every context instead of its pages
    assert workspaces.flashmla(records) == 2 * decodes + 4 * 256 * 128 * 64 + prompts
    assert workspaces.flashinfer(recorded) == (128 + (8 + 36) * 8) * MIB + 4 * 256 * 128
    assert workspaces.fa3(eager) == 256 * MIB
    assert workspaces.fa3(dataclasses.replace(eager, requests=2)) == 128 * 2 * result
    assert workspaces.triton(recorded) == 2 * 4 * 160 * 256 * 513
    prompt = dataclasses.replace(eager, expanded=1000)  # keys of 192 channels, values of 128, of 128 heads in bf16
    keys, values = 1000 * 128 * 192 * 2, 1000 * 128 * 128 * 2
    both = keys + values + 96 * MIB  # and plans of the parts
    for states, copies in (
        (workspaces.flashinfer, both), (workspaces.flashmla, both), (workspaces.fa3, keys), (workspaces.triton, 0),
    ):  # fmt: skip
        assert states(prompt) - states(eager) == copies


@pytest.mark.parametrize("tokens", [1, 7, 8, 31, 256, 5000])
def test_fa3_is_asked_for_no_more_splits_than_fit(tokens: int) -> None:
    splits, each = workspaces.fa3_splits(tokens, 128, 512), 4 * tokens * 128 * 513
    assert splits == 0 or splits == 1 or splits * each <= 256 * MIB
    assert (splits or workspaces.FA3_MOST_SPLITS) * each <= max(256 * MIB, each)
    assert (splits == 0) == (tokens <= 7)


def test_recorded_gqa_plans_of_flashinfer_may_need_more_than_it_recommends() -> None:
    """The library's padded number of tiles, each of them for all heads."""
    assert workspaces.flashinfer_gqa_bytes(64, 4, 32, 8, 128) == 128 * MIB
    many = workspaces.flashinfer_gqa_bytes(512, 8, 64, 8, 128)
    assert many >= 512 * 16 * 64 * 129 * 4 > 128 * MIB
    widths = HeadWidths(64, 8, 128, 128)
    eager = AttentionLoad(512, 1, widths, 100)
    recorded = dataclasses.replace(eager, graphs=51, recorded=512)
    assert workspaces.flashinfer_gqa(recorded) == workspaces.flashinfer(recorded) + many
    assert workspaces.flashinfer_gqa(eager) == workspaces.flashinfer(eager)
