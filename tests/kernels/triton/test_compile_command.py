"""``moe-engine compile``: flags, sizes of steps, rows without kernels. `test_aot.py` runs the command."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.gpu_suite.launched import recorded
from benchmarks.step_costs.models import MODELS, shortened
from moe_engine.cli.compile_kernels.absent_deep_gemm import note
from moe_engine.cli.compile_kernels.command import GPUS
from moe_engine.cli.compile_kernels.exercise import exercise, one_layer_of_each
from moe_engine.cli.compile_kernels.other_rows import NoExperts, build_triton
from moe_engine.cli.main import main
from moe_engine.config.args import EngineArgs
from moe_engine.kernels.backends import plan_kernels
from moe_engine.kernels.device import Device, Need
from moe_engine.kernels.experts.batch import ExpertBatch
from moe_engine.kernels.experts.reference import TorchExperts
from moe_engine.kernels.vendors import probe
from moe_engine.kernels.warmup_sizes import StepSize, ladder, step_sizes
from moe_engine.models.config_file import load_model_config
from moe_engine.models.dummy_weights import DummyReader
from moe_engine.planning.prepare import prepare
from moe_engine.tuning.hardware.table import find_gpu
from moe_engine.types.row_sizes import row_width

GridExecutor = pytest.importorskip("triton.runtime.interpreter", reason="needs triton").GridExecutor


def test_rows_in_plain_torch_need_no_compilation():
    """The expert loop of the torch row counts rows on the host, which is impossible for tensors without values."""
    flags = {"max_running_requests": 2, "chunked_prefill_size": 4, "context_length": 32}
    families = ("attention", "linear", "moe_runner", "ops", "sampling")
    rows = {f"{family}_backend": "torch" for family in families}
    config = prepare(EngineArgs.from_kwargs(device="cuda", **flags, **rows), find_gpu("h200").machine())
    sizes = [StepSize(2, 1, 8), StepSize(0, 1, 0, 4, 8), StepSize(1, 1, 8, 3)]
    assert list(exercise(config, build_triton(config.kernels.model.choices), sizes)) == sizes


def test_torch_experts_of_other_ranks_tokens_need_no_compilation():
    """Both layouts of tokens from other ranks."""
    experts = NoExperts()
    weights = experts.allocate(4, 16, 8, torch.bfloat16, "meta")
    counts, offsets = (torch.empty(count, dtype=torch.int32, device="meta") for count in (4, 5))
    padded = torch.empty(4, 3, 16, dtype=torch.bfloat16, device="meta")
    for batch in (ExpertBatch("padded", padded, counts=counts), ExpertBatch("grouped", padded[0], offsets=offsets)):
        out = experts.run(batch, weights)
        assert (out.shape, out.dtype, out.device.type) == (batch.x.shape, torch.bfloat16, "meta")
        with pytest.raises(RuntimeError, match="meta"):  # raised by the stand-in
            TorchExperts().run(batch, weights)


def test_flags_at_fault(capsys):
    assert main(["compile"]) == 2
    assert "--output DIR is missing" in capsys.readouterr().err
    assert main(["compile", "--output", "x", "--model-path", "/nowhere"]) == 2
    assert not Path("x").exists()


def test_steps_reach_every_size_and_the_largest():
    assert ladder(1) == [1]
    assert ladder(9) == [1, 2, 3, 4, 8, 9]
    sizes = list(step_sizes(max_requests=5, max_chunk=300, max_context=1000, num_drafts=2))
    assert {size.decodes for size in sizes if not size.prefill} == {1, 2, 3, 4, 5}
    assert {size.queries for size in sizes if size.decodes > 1} == {1, 3}
    assert {size.queries for size in sizes if size.decodes == 1} == {1, 2, 3, 4, 8, 16, 32, 64, 128, 256, 300}
    assert max(size.prefill for size in sizes) == 300
    assert {size.prefix for size in sizes if size.prefill == 4} == {0, 995}
    assert all(size.prefix + size.prefill <= 1000 and size.context <= 1000 for size in sizes)


@pytest.mark.parametrize(
    ("model", "layers"), [("v3", 5), ("gpt-oss-120b", 3), ("v4-flash", 6), ("v41-flash", 40), ("qwen3-next", 5)]
)
def test_a_layer_of_each_kind_runs(model: str, layers: int, tmp_path: Path) -> None:
    """Layers with windows and without, with entries of each rate, with experts chosen by token ids."""
    (tmp_path / "config.json").write_text(json.dumps(MODELS[model]))
    whole = load_model_config(str(tmp_path))
    cut = one_layer_of_each(whole)
    assert cut.num_layers == layers
    assert {whole.window_of(i) for i in range(whole.num_layers)} == {cut.window_of(i) for i in range(layers)}


def test_one_expert_is_prepared_for_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of 92 layers of 896 experts would take hours, and no kernel depends on them."""
    (tmp_path / "config.json").write_text(json.dumps(shortened(MODELS["kimi-k2"])[0]))
    args = EngineArgs.from_kwargs(model_path=str(tmp_path), load_format="dummy", device="cuda", context_length=64)
    read, linear = list[str](), DummyReader.linear

    def noted(self: DummyReader, prefix: str, *rest: Any, **more: Any) -> Any:
        read.append(prefix)
        return linear(self, prefix, *rest, **more)

    monkeypatch.setattr(DummyReader, "linear", noted)
    config = prepare(args, find_gpu("h200").machine())
    with recorded():
        assert list(exercise(config, build_triton(config.kernels.model.choices), [StepSize(2, 1, 8)]))
    routed = [name for name in read if ".experts." in name]
    assert routed and {name.partition(".experts.")[2].partition(".")[0] for name in routed} == {"0"}


def test_slot_tables_are_as_wide_as_the_workers() -> None:
    """Kernels are other ones if a table's rows are no multiple of 16 long."""
    flags = {"max_running_requests": 2, "chunked_prefill_size": 4, "context_length": 37}
    config = prepare(EngineArgs.from_kwargs(device="cuda", **flags), find_gpu("h200").machine())
    with recorded() as launches:
        assert list(exercise(config, build_triton(config.kernels.model.choices), [StepSize(2, 1, 8)]))
    strides = {launch.arguments.table_stride for launch in launches if launch.kernel == "latent_kernel"}
    assert strides == {row_width(37)} == {48}


def test_targets_have_shared_memory_limits():
    from moe_engine.kernels.triton.aot import SHARED_LIMIT

    assert {find_gpu(name).arch for name in GPUS} <= set(SHARED_LIMIT)


@pytest.mark.parametrize("row", ["torch", "triton"])
def test_kernels_that_only_some_models_need_are_built(row: str) -> None:
    rows = dict.fromkeys(("attention", "experts", "linear", "ops", "sampling", "delta"), row)
    device = Device("cuda", "absent", (9, 0), compiler="c++")
    choices = plan_kernels(device, Need("bfloat16", attention="gqa", delta=True), rows).choices
    delta = build_triton(choices).delta
    assert delta is not None and delta.name == row


@pytest.mark.parametrize(("gpu", "takes_ends"), [("h200", True), ("h200", False), ("b200", True)])
def test_rows_of_deep_gemm_launch_the_kernels_around_them(
    gpu: str, takes_ends: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without the library and without a GPU: block-FP8 layers and experts run on meta tensors, in every layout."""
    from tests.models.checkpoints import make_checkpoint

    monkeypatch.setattr(probe, "_found", lambda name: name == "deep_gemm")
    blocks = {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [128, 128], "activation_scheme": "dynamic"}
    path = make_checkpoint(
        "deepseek_v3", tmp_path / "model", 1, num_hidden_layers=2, first_k_dense_replace=1, hidden_size=128,
        intermediate_size=128, moe_intermediate_size=128,
    )  # fmt: skip
    config_file = path / "config.json"
    config_file.write_text(json.dumps(json.loads(config_file.read_text()) | {"quantization_config": blocks}))
    rows = {"attention_backend": "triton", "linear_backend": "deep_gemm", "moe_runner_backend": "deep_gemm"}
    args = EngineArgs.from_kwargs(
        model_path=str(path), load_format="dummy", device="cuda", max_running_requests=2, chunked_prefill_size=512,
        context_length=512, **rows,
    )  # fmt: skip
    config = prepare(args, find_gpu(gpu).machine())
    choices = config.kernels.model.choices
    assert [choice.family for choice in choices if choice.row.name == "deep_gemm"] == ["linear", "experts"]
    sizes = [StepSize(2, 1, 8), StepSize(0, 1, 0, 512, 0)]
    launched: set[str] = set()
    monkeypatch.setattr(GridExecutor, "__call__", lambda self, *args, **more: launched.add(self.fn.__name__))
    backends = build_triton(choices, find_gpu(gpu).capability, takes_ends)
    assert list(exercise(config, backends, sizes)) == sizes
    assert "DG_JIT_CACHE_DIR" in note(["linear"]) and launched
