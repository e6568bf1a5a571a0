"""The kernel plan of a launch: the best combination of row and page size that can be captured, chosen once."""

from __future__ import annotations

import json
import pickle
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moe_engine.config.args import EngineArgs
from moe_engine.errors import ConfigError
from moe_engine.kernels import tables
from moe_engine.kernels.backends import FAMILIES, KernelPlan, page_sizes_of, plan_kernels
from moe_engine.kernels.device import Device, HeadWidths, Need
from moe_engine.kernels.registry import Choice, Row
from moe_engine.kernels.triton import availability as triton
from moe_engine.kernels.vendors import probe
from moe_engine.kernels.weight_forms import FP8_BLOCKS
from moe_engine.parallel.dispatch import tables as dispatch_tables
from moe_engine.planning.prepare import prepare
from moe_engine.planning.resolved_config import ResolvedConfig
from moe_engine.tuning.hardware.table import find_gpu
from moe_engine.worker.startup.kernel_choice import build_backends
from tests.models.published import V3

FA3, FLASHINFER, FLASHMLA = ("flash_attn_interface", "flashinfer", "flash_mla")
LIBRARIES = (FA3, FLASHINFER, FLASHMLA, "deep_gemm")
PACKAGE = Path(__file__).parents[2]


@pytest.fixture
def launch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., ResolvedConfig]:
    """A launch on an H200 with some vendor libraries; Triton is always installed."""
    monkeypatch.setattr(triton, "installed", lambda: True)
    monkeypatch.setattr(triton, "version", lambda: triton.OLDEST_WITH_BLACKWELL_MLA)

    def make(*installed: str, gpu: str = "h200", **flags: Any) -> ResolvedConfig:
        monkeypatch.setattr(probe, "_found", lambda name: name in installed)
        (tmp_path / "config.json").write_text(json.dumps(V3))
        args = EngineArgs.from_kwargs(model_path=str(tmp_path), load_format="dummy", tp=8, **flags)
        return prepare(args, find_gpu(gpu).machine(8))

    return make


def attention(config: ResolvedConfig) -> str:
    return config.kernels.model.row("attention").name


def reason_of(config: ResolvedConfig, name: str) -> str:
    return next(decision.reason for decision in config.decisions if decision.name == name)


def test_auto_prefers_rows_that_can_be_captured(launch: Callable[..., ResolvedConfig]) -> None:
    """FlashMLA's kernel over FP8 records cannot be captured on Hopper; Triton's can."""
    fp8 = launch(*LIBRARIES, kv_cache_dtype="fp8_ds_mla")
    assert attention(fp8) == "triton" and fp8.graphs.sizes
    assert "take no list lengths" in fp8.kernels.model.choices[3].refused["flashmla"].replace("takes", "take")
    eager = launch(*LIBRARIES, kv_cache_dtype="fp8_ds_mla", disable_cuda_graph=True)
    assert attention(eager) == "flashmla" and not eager.graphs.sizes
    named = launch(*LIBRARIES, kv_cache_dtype="fp8_ds_mla", attention_backend="flashmla")
    assert attention(named) == "flashmla" and not named.graphs.sizes
    assert any(note.startswith("no CUDA graphs: FlashMLA's kernel") for note in named.notes)


@pytest.mark.parametrize(("strategy", "row"), [("channel", "triton"), ("tensor", "deep_gemm")])
def test_fp8_is_multiplied_by_rows_that_keep_it(
    launch: Callable[..., ResolvedConfig], strategy: str, row: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """DeepGEMM multiplies blocks, and would dequantize weights with a scale per row. Half the bytes of bf16."""
    weights = {"num_bits": 8, "type": "float", "strategy": strategy, "dynamic": False, "symmetric": True}
    section = {"quant_method": "compressed-tensors", "format": "float-quantized", "ignore": ["lm_head"]}
    section["config_groups"] = {"group_0": {"targets": ["Linear"], "weights": weights}}
    blocks = launch(*LIBRARIES, attn_dp_size=8, ep=8, moe_a2a_backend="symm_mem")
    monkeypatch.setitem(V3, "quantization_config", section)
    config = launch(*LIBRARIES, attn_dp_size=8, ep=8, moe_a2a_backend="symm_mem")
    assert (config.kernels.model.row("linear").name, config.kernels.model.row("experts").name) == (row, row)
    held, want = (next(row.num_bytes for row in each.ledger.rows if row.name == "weights") for each in (config, blocks))
    assert held == pytest.approx(want, rel=0.01)
    assert config.parallel.dispatch_fp8 and blocks.parallel.dispatch_fp8


def test_fused_experts_serve_local_block_fp8_on_blackwell(launch: Callable[..., ResolvedConfig]) -> None:
    """Each of 8 ranks of V3 holds an eighth of every expert; 4 of them share an expert with EP2."""
    named = {"gpu": "b200", "moe_runner_backend": "flashinfer_trtllm"}
    for flags, width, count in (({}, 256, 257), ({"ep": 2}, 512, 129)):
        config = launch(*LIBRARIES, gpu="b200", **flags)
        assert config.kernels.model.row("experts").name == "flashinfer_trtllm"
        widths = config.kernels.model.need.experts
        assert widths is not None and (widths.width, widths.form, widths.dispatched) == (width, FP8_BLOCKS, False)
        row = next(row for row in config.ledger.rows if row.name == "experts workspace")
        assert f"8 of {count} experts" in row.detail and row.num_bytes > 1 << 28
    with pytest.raises(ConfigError, match=r"--moe-runner-backend flashinfer_trtllm.* leave --moe-a2a-backend out"):
        launch(*LIBRARIES, ep=8, moe_a2a_backend="all_to_all", **named)
    with pytest.raises(ConfigError, match="has kernels for sm_100"):
        launch(*LIBRARIES, moe_runner_backend="flashinfer_trtllm")


def test_megamoe_serves_v3_on_hopper(launch: Callable[..., ResolvedConfig], monkeypatch: pytest.MonkeyPatch) -> None:
    """Dispatch and experts are chosen together; the buffer is a row of the ledger."""
    monkeypatch.setattr("moe_engine.parallel.dispatch.symm_mem.why_not", lambda *place: None)
    flags = {"enable_dp_attention": True, "dp_size": 8, "ep": 8, "moe_a2a_backend": "megamoe"}
    config = launch(*LIBRARIES, max_running_requests=1024, chunked_prefill_size=1024, **flags)
    assert config.kernels.model.row("experts").name == "mega_moe" and config.graphs.sizes
    (row,) = (row for row in config.ledger.rows if row.name == "dispatch buffers")
    capacity = -(-config.limits.dispatch_tokens // 128) * 128
    pool = 8 * capacity * 8 + 32 * 128
    assert row.detail == f"{pool} rows, megamoe"
    assert row.num_bytes > pool * (7168 + 2048) + capacity * (7168 + 8 * 2 * 7168)
    for more, text in (
        ({"enable_two_batch_overlap": True}, "one buffer holds the tokens of one batch"),
        ({"moe_dispatch_dtype": "bf16"}, "sends FP8"),
        ({"gpu": "b200"}, "MegaMoE has kernels for sm_90"),
        ({"moe_runner_backend": "triton"}, "does not run with --moe-a2a-backend megamoe"),
        ({"chunked_prefill_size": 1 << 19}, "dispatch buffers 4.* GB.* it fits with --chunked-prefill-size"),
    ):
        with pytest.raises(ConfigError, match=text):
            launch(*LIBRARIES, **flags, **more)


def test_a_named_row_counts_as_installed_on_other_hardware(launch: Callable[..., ResolvedConfig]) -> None:
    """`plan --hardware 8xH200` on a laptop; `auto` takes what this machine has."""
    named = {"attention_backend": "fa3", "linear_backend": "deep_gemm", "moe_runner_backend": "deep_gemm"}
    config = launch(**named, enable_dp_attention=True, dp_size=8, ep=8, moe_a2a_backend="deepep")
    rows = {choice.family: (choice.row.name, choice.reason) for choice in config.kernels.model.choices}
    for family, name in (("attention", "fa3"), ("linear", "deep_gemm"), ("experts", "deep_gemm")):
        assert rows[family][0] == name and "not on this machine" in rows[family][1]
    assert rows["ops"][0] == "triton" and config.parallel.dispatch.row.name == "deepep"
    assert attention(launch()) == "triton"
    with pytest.raises(ConfigError, match="has kernels for sm_100"):  # nothing else is taken for granted
        launch(attention_backend="trtllm_mla")
    here = find_gpu("h200").machine(8)
    here = replace(here, device=replace(here.device, elsewhere=False))
    with pytest.raises(ConfigError, match=r"cannot run here: .* is not installed"):
        prepare(config.args.replace(moe_a2a_backend="none"), here)


def test_a_plan_is_the_launch_of_a_machine_with_the_libraries(launch: Callable[..., ResolvedConfig]) -> None:
    """`plan` on a laptop without vendor libraries, and `serve` on GPUs with those of `pip install -e '.[gpu]'`."""
    modules = {name for library in probe.LIBRARIES for name in library.modules}
    flags: dict[str, Any] = {"enable_dp_attention": True, "dp_size": 8, "ep": 8}
    there = launch(*modules, **flags)
    laptop = launch(**flags)
    planned = prepare(laptop.args, find_gpu("h200").machine(has_libraries=True))
    rows = {choice.family: choice.row.name for choice in planned.kernels.model.choices}
    assert rows == {choice.family: choice.row.name for choice in there.kernels.model.choices}
    assert planned.ledger == there.ledger and planned.max_total_num_tokens == there.max_total_num_tokens
    assert (rows["linear"], rows["attention"]) == ("deep_gemm", "fa3") and attention(laptop) == "triton"
    reasons = {choice.family: choice.reason for choice in planned.kernels.model.choices}
    assert "not on this machine: deep_gemm is not installed" in reasons["linear"]


@pytest.mark.parametrize("gpu", ["h200", "b200"])
def test_triton_counts_as_installed_on_other_hardware(
    launch: Callable[..., ResolvedConfig], monkeypatch: pytest.MonkeyPatch, gpu: str
) -> None:
    """torch for CUDA brings it; without it V3's FP8 weights counted as bf16, which no GPU holds."""
    flags = {"gpu": gpu, "enable_dp_attention": True, "dp_size": 8, "ep": 8, "moe_a2a_backend": "auto"}
    expected = launch(**flags)
    monkeypatch.setattr(triton, "installed", lambda: False)
    monkeypatch.setattr(triton, "version", lambda: (0, 0))
    monkeypatch.setattr("moe_engine.parallel.dispatch.symm_mem.availability.triton_installed", lambda: False)
    found = launch(**flags)
    assert found.kernels == expected.kernels and found.ledger == expected.ledger
    assert found.parallel.dispatch.row.name == "symm_mem"
    assert launch(gpu=gpu).parallel.all_reduce.is_custom


def test_auto_takes_the_page_size_of_the_best_row(launch: Callable[..., ResolvedConfig]) -> None:
    best = launch(FLASHINFER, FLASHMLA)
    assert (attention(best), best.page_size) == ("flashmla", 64)
    assert reason_of(best, "page_size") == "flashmla attention reads pages of 64"
    assert (launch(FLASHINFER, FLASHMLA, page_size=1).kernels.model.row("attention").name) == "flashinfer"
    single = launch(FA3, FLASHINFER, FLASHMLA)
    assert (attention(single), single.page_size) == ("fa3", 1)
    assert launch(FLASHINFER, FLASHMLA, attention_backend="flashmla").page_size == 64


def test_chains_of_drafts_take_rows_that_read_lengths_on_the_device(launch: Callable[..., ResolvedConfig]) -> None:
    """With FlashInfer, which plans by exact lengths, a step with drafts would wait."""
    chain = {"speculative_algorithm": "NGRAM", "speculative_num_steps": 2}
    drafting = launch(FLASHINFER, **chain)
    assert attention(drafting) == "triton"
    assert "would wait" in drafting.kernels.model.choices[3].refused["flashinfer"]
    assert attention(launch(FLASHINFER)) == "flashinfer"
    tree: dict[str, Any] = {"speculative_algorithm": "NEXTN", "speculative_num_steps": 2, "speculative_eagle_topk": 2}
    tree |= {"speculative_num_draft_tokens": 4}
    trees = launch(FLASHINFER, **tree)
    assert attention(trees) == "triton" and trees.graphs.trees and trees.graphs.counts == (1, 4)
    lossy = tree | {"speculative_accept_threshold_single": 0.5}  # trees that are not captured
    assert launch(FLASHINFER, **lossy).graphs.counts == (1,)
    for flags in (chain | {"disable_cuda_graph": True}, chain | {"attention_backend": "flashinfer"}, lossy):
        assert attention(launch(FLASHINFER, **flags)) == "flashinfer"


@pytest.mark.parametrize("flags", [{"chunked_prefill_size": 1000}, {"max_total_tokens": 32, "context_length": 16}])
def test_a_page_size_that_given_sizes_exclude_is_not_chosen(
    launch: Callable[..., ResolvedConfig], flags: dict[str, int]
) -> None:
    config = launch(FLASHINFER, FLASHMLA, **flags)
    assert (attention(config), config.page_size) == ("flashinfer", 1)


@given(
    installed=st.sets(st.sampled_from(LIBRARIES)),
    kv_dtype=st.sampled_from(["auto", "fp8_e4m3", "fp8_e5m2"]),
    heads=st.sampled_from([8, 16, 64, 128]),
    capability=st.sampled_from([(9, 0), (10, 0)]),
    attention_kind=st.sampled_from(["mla", "gqa"]),
    deterministic=st.booleans(),
    captured=st.booleans(),
    chains=st.booleans(),
)
def test_no_other_plan_is_better(
    installed: set[str],
    kv_dtype: str,
    heads: int,
    capability: tuple[int, int],
    attention_kind: str,
    deterministic: bool,
    captured: bool,
    chains: bool,
) -> None:
    """Compared with every combination of row and page size."""
    widths = HeadWidths(heads, 1, 192, 128, 512, 64) if attention_kind == "mla" else HeadWidths(heads, 8, 128, 128)
    need = Need("bfloat16", kv_dtype, attention_kind, 1, widths, deterministic, chains=chains)
    device = Device("cuda", "GPU", capability)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(triton, "installed", lambda: True)
        patch.setattr(triton, "version", lambda: triton.OLDEST_WITH_BLACKWELL_MLA)
        patch.setattr(probe, "_found", lambda name: name in installed)
        plan = plan_kernels(device, need, pages=page_sizes_of(need), captured=captured)
        rows = tables.MLA if attention_kind == "mla" else tables.GQA
        able = [
            (not captured or row.refuses_capture(device, fitting) is None, row.score(device, fitting))
            for page in (1, 16, 64)
            for row in rows
            if row.why_not(device, fitting := replace(need, page_size=page)) is None
        ]
        chosen = plan.row("attention")
        assert chosen.why_not(device, plan.need) is None
        found = (not captured or chosen.refuses_capture(device, plan.need) is None, chosen.score(device, plan.need))
        assert found == max(able)
        assert [choice.family for choice in plan.choices] == list(FAMILIES)


def test_the_launch_chooses_once(launch: Callable[..., ResolvedConfig]) -> None:
    """Only the resolution plans kernels; the ranks get the plan with the configuration."""
    users = [path for path in (PACKAGE / "moe_engine").rglob("*.py") if "plan_kernels(" in path.read_text()]
    assert [path.name for path in users if "kernels" not in path.parent.parts[-1:]] == ["resolve_kernels.py"]
    config = launch(*LIBRARIES)
    assert pickle.loads(pickle.dumps(config.kernels)) == config.kernels


def test_every_row_reaches_the_processes_of_an_engine() -> None:
    """They get the plan as a pickle: functions of rows have names."""
    for rows in (*tables.FAMILIES.values(), dispatch_tables.ROWS):
        assert pickle.loads(pickle.dumps(rows)) == rows


def test_flashmla_gets_another_row_for_the_expanded_form(launch: Callable[..., ResolvedConfig]) -> None:
    choice = launch(FLASHINFER, FLASHMLA, kv_cache_dtype="fp8_e4m3", disable_cuda_graph=True).kernels.model.choices[3]
    other = choice.options["expanded"]
    assert isinstance(other, Choice) and (choice.row.name, other.row.name) == ("flashmla", "flashinfer")


class Built:
    """A row that has been built."""


def _plan(rows: list[Row], captured: bool) -> KernelPlan:
    with pytest.MonkeyPatch.context() as patch:
        for family in tables.FAMILIES:
            patch.setitem(tables.FAMILIES, family, rows)
        return plan_kernels(Device("cuda", "GPU", (9, 0)), Need("bfloat16"), captured=captured)


def test_the_next_best_row_replaces_one_that_fails_to_load(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [
        Row("torch", f"{__name__}:Built", 0, lambda device, need: None),
        Row("second", f"{__name__}:Built", 10, lambda device, need: None),
        Row("third", f"{__name__}:Missing", 20, lambda device, need: None),
        Row("fourth", f"{__name__}:Missing", 30, lambda device, need: None),
    ]
    plan = _plan(rows, False)
    for family in tables.FAMILIES:
        monkeypatch.setitem(tables.FAMILIES, family, rows)
    for choice in build_backends(plan).choices:
        assert choice.row.name == "second" and {"third", "fourth"} < set(choice.refused)


def test_a_row_that_cannot_be_captured_does_not_replace_one_of_a_captured_launch(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    rows = [
        Row("torch", f"{__name__}:Built", 0, lambda *_: None, why_not_captured=lambda *_: "it reads counts"),
        Row("best", f"{__name__}:Missing", 20, lambda *_: None),
    ]
    plan = _plan(rows, True)
    for family in tables.FAMILIES:
        monkeypatch.setitem(tables.FAMILIES, family, rows)
    with pytest.raises(ConfigError, match=r"'best' failed to load.*torch would replace it, but.*it reads counts"):
        build_backends(plan)


def test_tokens_travel_as_the_experts_read_them(launch: Callable[..., ResolvedConfig], monkeypatch) -> None:
    """Bytes of a dispatched token: 7,168 and 56 scales instead of 14,336."""
    monkeypatch.setitem(V3, "quantization_config", {"quant_method": "fp8", "weight_block_size": [128, 128]})
    monkeypatch.setitem(V3, "num_hidden_layers", 12)  # fits unquantized too
    travels: dict[str, Any] = {"ep_size": 8, "enable_dp_attention": True, "dp_size": 8, "moe_a2a_backend": "all_to_all"}
    fp8 = launch("deep_gemm", **travels)
    assert fp8.parallel.dispatch_fp8 and reason_of(fp8, "moe_dispatch_dtype") == "deep_gemm experts read FP8"
    assert launch(**travels).parallel.dispatch_fp8  # Triton's experts read FP8 too
    assert not launch("deep_gemm", **travels, moe_dispatch_dtype="bf16").parallel.dispatch_fp8
    assert not launch("deep_gemm", **travels, moe_runner_backend="torch").parallel.dispatch_fp8
    assert not launch("deep_gemm", ep_size=8).parallel.dispatch_fp8  # no dispatch
    monkeypatch.delitem(V3, "quantization_config")
    assert not launch("deep_gemm", **travels).parallel.dispatch_fp8
