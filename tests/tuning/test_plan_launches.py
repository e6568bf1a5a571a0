"""Plans are launches: memory, bytes and operations follow the tables by which `serve` selects kernels."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from moe_engine.cli.main import main
from moe_engine.config.args import EngineArgs
from moe_engine.kernels import weight_forms as forms
from moe_engine.models import needs, sizes
from moe_engine.models.config_file import load_model_config
from moe_engine.models.tensors.model import model_tensors
from moe_engine.parallel.topology import Topology
from moe_engine.planning.prepare import prepare
from moe_engine.tuning.costs.efficiency import Efficiency
from moe_engine.tuning.costs.form import Form, Precision
from moe_engine.tuning.costs.model_facts import MLP, model_facts, stored_dtype
from moe_engine.tuning.costs.overheads import Launches
from moe_engine.tuning.hardware.table import parse_cluster
from moe_engine.tuning.planner.candidate import Candidate
from moe_engine.tuning.planner.launch import subject_of
from moe_engine.tuning.planner.memory import Memory
from tests.models.published import GLM_5_2, KIMI_K3, V3
from tests.tuning.plan_models import small_deepseek, small_grouped, write

ROUTER = "re:.*mlp.gate$"


def compressed(form: str, bits: int, group: int, kind: str = "float", ignore: tuple[str, ...] = ()) -> dict[str, Any]:
    weights = {"num_bits": bits, "type": kind, "strategy": "group", "group_size": group, "symmetric": True}
    groups = {"group_0": {"targets": ["Linear"], "weights": weights}}
    return {
        "quant_method": "compressed-tensors", "format": form, "config_groups": groups,
        "ignore": ["lm_head", ROUTER, *ignore],
    }  # fmt: skip


def nvfp4() -> dict[str, Any]:
    return {"quant_method": "modelopt", "quant_algo": "NVFP4", "group_size": 16, "exclude_modules": ["lm_head"]}


BLOCKS = V3["quantization_config"]
AWQ = {"quant_method": "awq", "bits": 4, "group_size": 128, "zero_point": True, "version": "gemm"}
GPTQ8 = {"quant_method": "gptq", "bits": 8, "group_size": 128, "desc_act": False, "sym": True}
NF4 = {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}
MIXTURE = {
    "hidden_size": 512, "moe_intermediate_size": 512, "num_experts": 16, "num_key_value_heads": 8, "head_dim": 64,
}  # fmt: skip


def folder(path: Path, quantization: dict[str, Any] | None, **fields: Any) -> str:
    """A Qwen3-MoE config whose widths all formats divide."""
    config = small_grouped() | MIXTURE | fields
    return write(path / "model", config if quantization is None else config | {"quantization_config": quantization})


def memory_of(path: str, hardware: str, **flags: Any) -> Memory:
    args = EngineArgs.from_kwargs(model_path=path, **flags)
    return Memory(subject_of(args, Path(path)), parse_cluster(hardware), args)


FOUR_BITS = 0.5 + 1 / 16
TP8, DP8 = Form(8), Form(8, 8, 8, True)


@pytest.mark.parametrize(
    ("quantization", "form", "num_bytes", "other", "units", "dispatch"),
    [
        (None, TP8, 2, 2, "bf16", "bf16"),
        (None, DP8, 2, 2, "bf16", "bf16"),
        (BLOCKS, DP8, 1 + 4 / 128**2, 1 + 4 / 128**2, "fp8", "fp8"),
        # a float32 factor for each row of q, k, v (512 columns) and o (512, or the 64 of one of 8 ranks)
        (nvfp4(), TP8, FOUR_BITS, FOUR_BITS + (3 * 4 / 512 + 4 / 64) / 4, "bf16", "bf16"),
        (nvfp4(), DP8, FOUR_BITS, FOUR_BITS + 4 / 512, "bf16", "bf16"),
        (compressed("nvfp4-pack-quantized", 4, 16), DP8, FOUR_BITS, FOUR_BITS + 4 / 512, "bf16", "bf16"),
        (compressed("mxfp4-pack-quantized", 4, 32), DP8, 0.5 + 1 / 32, 0.5 + 1 / 32, "bf16", "bf16"),
        (compressed("pack-quantized", 4, 32, "int"), TP8, FOUR_BITS, FOUR_BITS, "bf16", "bf16"),
        (AWQ, DP8, 0.5 + 4 / 128, 0.5 + 4 / 128, "bf16", "bf16"),
        # 64 of 512 columns are a part of a group: experts and o are dequantized
        (AWQ, TP8, 2, (3 * (0.5 + 4 / 128) + 2) / 4, "bf16", "bf16"),
        (GPTQ8, DP8, 2, 2, "bf16", "bf16"),
        (NF4, DP8, 2, 2, "bf16", "bf16"),
    ],
)
def test_weights_are_counted_as_kernels_hold_them(
    tmp_path: Path, quantization: dict[str, Any] | None, form: Form, num_bytes: float, other: float, units: str,
    dispatch: str,
):  # fmt: skip
    path = folder(tmp_path, quantization)
    for hardware in ("8xh200", "8xb200"):
        held = memory_of(path, hardware).held(form)
        assert held is not None
        assert held.experts.num_bytes == pytest.approx(num_bytes) and held.other.num_bytes == pytest.approx(other)
        assert (held.experts.units, held.dispatch) == (units, dispatch)


@pytest.mark.parametrize(
    ("form", "flags", "slots"),
    [(TP8, {}, True), (TP8, {"disable_shared_experts_fusion": True}, False), (DP8, {}, False)],
)
def test_shared_experts_in_slots_are_no_kernels_of_their_own(
    tmp_path: Path, form: Form, flags: dict[str, Any], slots: bool
):
    held = memory_of(write(tmp_path, V3), "8xh200", **flags).held(form)
    assert held is not None and held.shared_slots == slots
    facts, share = model_facts(V3), Efficiency("any")
    apart = Launches(facts, Precision("fp8", "fp8", held=replace(held, shared_slots=False)), share).decode_s
    less = apart - Launches(facts, Precision("fp8", "fp8", held=held), share).decode_s
    assert less == pytest.approx(slots * 58 * MLP * share.kernel_us * 1e-6)


def test_a_part_of_the_layers_may_be_left_out(tmp_path: Path):
    """Of four layers one is not quantized: the mean of its bytes and those of the others."""
    names = ("re:model.layers.1.*",)
    path = folder(tmp_path, compressed("pack-quantized", 4, 32, "int", names), num_hidden_layers=4)
    held = memory_of(path, "8xh200").held(DP8)
    assert held is not None and held.experts.num_bytes == pytest.approx((3 * FOUR_BITS + 2) / 4)


def test_a_mean_of_about_a_byte_is_not_fp8(tmp_path: Path):
    """Half of the projections in 4 bits, half in bf16: none are multiplied in FP8."""
    names = ("re:.*(q|k)_proj$",)
    held = memory_of(folder(tmp_path, compressed("mxfp4-pack-quantized", 4, 32, "float", names)), "8xh200").held(DP8)
    assert held is not None and held.other.units == "bf16"
    assert held.other.num_bytes == pytest.approx((2 + 0.5 + 1 / 32) / 2)


@pytest.mark.parametrize(
    ("quantization", "flags"),
    [
        (nvfp4(), []),
        (compressed("mxfp4-pack-quantized", 4, 32), ["--ep-size", "8", "--attn-dp-size", "8"]),
        (None, ["--quantization", "int4"]),
        (None, ["--quantization", "fp8"]),
        (None, ["--workload-profile", "long-context"]),
        (None, ["--workload-profile", "multi-turn"]),
        (BLOCKS, ["--workload-profile", "throughput", "--moe-a2a-backend", "auto", "--attn-dp-size", "8", "--ep", "8"]),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_the_ledger_of_a_form_is_that_of_serve(
    capsys, tmp_path: Path, quantization: dict[str, Any] | None, flags: list[str]
):
    launch = ["--model-path", folder(tmp_path, quantization), "--tp-size", "8", *flags]
    load = ["--hardware", "8xH200", "--workload", "in=200,out=20", "--concurrency", "16", "--json"]
    assert main(["plan", *launch, *load]) == 0
    memory = json.loads(capsys.readouterr().out)["plans"][0]["memory"]
    args = EngineArgs.from_cli([*launch, "--device", "cuda", "--load-format", "dummy"])
    ledger = prepare(args, parse_cluster("8xH200").machine).ledger
    assert memory["total_bytes"] == ledger.total_bytes
    assert [row["num_bytes"] for row in memory["rows"]] == [row.num_bytes for row in ledger.all_rows()]


def test_equal_layers_are_summed_at_once(tmp_path: Path):
    """The sums of a ledger are those of every tensor alone."""
    names = ("re:model.layers.1.*", "re:.*down_proj$")
    for number, raw in enumerate((small_deepseek(), V3, small_grouped() | MIXTURE)):
        whole = raw.get("quantization_config") or compressed("pack-quantized", 4, 32, "int", names)
        config = load_model_config(write(tmp_path / str(number), raw | {"quantization_config": whole}))
        kept = config.weight_format.held_by(
            {"linear": frozenset((forms.FP8_BLOCKS,)), "experts": frozenset((forms.FP8_BLOCKS, forms.FOUR_BITS))}
        )
        assert kept.name
        for topology, redundant in ((Topology(), 0), (Topology(8, 8, 8, moe_a2a_backend="auto"), 16), (Topology(4), 0)):
            further = 2, topology, redundant, kept
            rotary = sizes.tensor_bytes(config, (), *further)
            parts = [sizes.tensor_bytes(config, (spec,), *further) - rotary for spec in model_tensors(config)]
            found = sizes.weight_bytes(config, 2, False, topology, redundant, kept)
            assert 0 <= found - rotary - sum(parts) <= len(parts)  # each part is rounded down


@pytest.mark.parametrize("raw", [GLM_5_2, KIMI_K3], ids=["indexer", "schemes"])
def test_further_launches_walk_no_tensors(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, raw: dict[str, Any]):
    """A search resolves hundreds of launches of a model; walks over its tensors took most of the time."""
    walks: list[str] = []
    for module in (sizes, needs):
        walk = module.model_tensors
        monkeypatch.setattr(module, "model_tensors", lambda *args, walk=walk: walks.append("") or walk(*args))
    memory = memory_of(write(tmp_path, raw), "16xh200")
    found = []
    for rows in (8, 16, 32):
        memory.of(Candidate(Form(16), 1, "bf16", 2048, rows))
        found.append(len(walks))
    assert found[0] > 0 and found[1:] == [found[0]] * 2


def test_int4_weights_are_faster_than_those_they_are_made_of(capsys, tmp_path: Path):
    path = folder(tmp_path, None, hidden_size=4096, moe_intermediate_size=2048, num_hidden_layers=6)
    found = {}
    for flags in ([], ["--quantization", "int4"]):
        one = ["--hardware", "H200", "--workload", "in=200,out=20", "--tp-size", "1", "--concurrency", "8", "--json"]
        assert main(["plan", "--model-path", path, *one, *flags]) == 0
        found[bool(flags)] = json.loads(capsys.readouterr().out)["plans"][0]["predicted"]["tpot_ms"]
    assert found[True] < 0.7 * found[False]


@pytest.mark.parametrize(
    ("quantization", "dtype"),
    [
        (None, "bf16"), (BLOCKS, "fp8"), (nvfp4(), "fp4"), (compressed("mxfp4-pack-quantized", 4, 32), "fp4"),
        (compressed("pack-quantized", 4, 32, "int"), "int4"), (compressed("int-quantized", 8, 128, "int"), "fp8"),
        (AWQ, "int4"), (GPTQ8, "fp8"), (GPTQ8 | {"bits": 4}, "int4"), (NF4, "int4"),
    ],
)  # fmt: skip
def test_dtypes_of_other_engines_are_those_of_the_checkpoint(quantization: dict[str, Any] | None, dtype: str):
    assert stored_dtype({"quantization_config": quantization} if quantization else {}) == dtype


def test_a_model_of_the_hub_is_planned_without_its_weights(capsys, monkeypatch, tmp_path: Path):
    path, asked = folder(tmp_path, None), []

    def download(name: str, **options: Any) -> str:
        asked.append((name, options["allow_patterns"]))
        return path

    monkeypatch.setattr("huggingface_hub.snapshot_download", download)
    load = ["--hardware", "8xH200", "--workload", "in=200,out=20", "--tp-size", "8", "--concurrency", "16"]
    assert main(["plan", "--model-path", "owner/model", *load]) == 0
    assert asked == [("owner/model", ["*.json"])]
    assert "moe-engine serve --model-path owner/model" in capsys.readouterr().out
