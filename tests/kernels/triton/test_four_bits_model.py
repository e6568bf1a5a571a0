"""A tiny mixture whose weights stay in 4 bits on the Triton rows, experts and others, by every format of checkpoints
that has such weights: logits are those of the values that the formats define, memory is that of the ledger, parts of
uneven width add up."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from moe_engine.kernels.backends import plan_kernels
from moe_engine.kernels.device import Device
from moe_engine.kernels.experts.triton_experts import TritonExperts
from moe_engine.kernels.linear.triton_linear import TritonLinear
from moe_engine.kernels.weight_forms import FOUR_BITS, FP8_BLOCKS, families
from moe_engine.models import sizes
from moe_engine.models.config import GQAConfig
from moe_engine.models.config_file import load_model_config
from moe_engine.models.expert_format import experts_format, width_group
from moe_engine.models.footprint import held_bytes
from moe_engine.models.formats.online import online_format
from moe_engine.models.formats.plain import PLAIN
from moe_engine.models.layers.feed_forward.stored_experts import StoredExperts
from moe_engine.models.layers.linear import load_linear
from moe_engine.models.loader import LoadOptions, load_model
from moe_engine.models.needs import need_of_model
from moe_engine.models.tensors.model import expert_names, model_tensors
from moe_engine.models.weights import WeightReader
from moe_engine.parallel.share import Share
from moe_engine.parallel.topology import Topology
from tests.models.checkpoints import make_checkpoint
from tests.models.format_checks import step_logits, write_pair
from tests.models.quantized import quantize, section
from tests.models.quantized_floats import FLOATS, quantize_floats
from tests.models.stepper import Stepper, make_backends

SIZES = {
    "hidden_size": 128, "intermediate_size": 128, "moe_intermediate_size": 128, "num_hidden_layers": 2,
    "num_experts": 4, "num_experts_per_tok": 2, "mlp_only_layers": [0],
}  # fmt: skip
INTEGERS: dict[str, dict[str, Any]] = {
    "compressed int4": {"layout": "pack-quantized"},
    "compressed int4, zeros": {"layout": "pack-quantized", "symmetric": False, "group": 64},
    "awq": {"layout": "awq", "symmetric": False, "group": 128},
    "gptq": {"layout": "gptq", "group": 128},
}
pytestmark = pytest.mark.drawn(3)

NAMES = [*INTEGERS, *(name for name in FLOATS if "fp4" in name)]
KEPT = {"experts": frozenset((FOUR_BITS,))}
BOTH = KEPT | {"linear": frozenset((FOUR_BITS,))}
kernel, linear = TritonExperts(), TritonLinear()


def written(folder: Path, name: str, **fields: int) -> tuple[Path, Path]:
    """A checkpoint of that name, and one with its values."""
    path = make_checkpoint("qwen3_moe", folder / name, seed=4, tokenizer=False, **(SIZES | fields))
    tensors = load_file(path / "model.safetensors")
    if name in INTEGERS:
        stored, plain = quantize(tensors, seed=3, **INTEGERS[name])
        dtype = "float16" if name in ("awq", "gptq") else "bfloat16"
        return write_pair(path, stored, plain, {"torch_dtype": dtype, "quantization_config": section(**INTEGERS[name])})
    return write_pair(path, *quantize_floats(tensors, name), {"quantization_config": FLOATS[name][1]})


def loaded(path: Path, **rows: Any) -> Stepper:
    config = load_model_config(path)
    backends = replace(make_backends(config), **rows)
    return Stepper(load_model(path, config, LoadOptions("float32"), backends), config, backends)


@pytest.mark.parametrize("name", NAMES)
def test_logits_and_memory(tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    path, plain = written(tmp_path, name)
    monkeypatch.setattr(TritonExperts, "load_expert", None)  # would be dequantized
    stepper = loaded(path, experts=kernel)
    want = step_logits(loaded(plain))
    torch.testing.assert_close(step_logits(stepper), want, rtol=1e-4, atol=1e-4 * float(want.abs().max()))
    format = stepper.config.weight_format.held_by(KEPT)
    counted, dense = (sizes.weight_bytes(stepper.config, 4, format=form) for form in (format, PLAIN))
    assert held_bytes(stepper.model) == pytest.approx(counted, rel=0.01)
    experts = 4 * 3 * 128 * 128
    each = experts_format(stepper.config)
    assert each is not None and dense - counted == experts * (4 - each.bytes_on_gpu())


@pytest.mark.parametrize("name", NAMES)
def test_dense_weights(tmp_path: Path, name: str) -> None:
    """Attention and the dense layer too, q, k and v as one weight."""
    path, plain = written(tmp_path, name)
    stepper, want = loaded(path, experts=kernel, linear=linear), step_logits(loaded(plain))
    torch.testing.assert_close(step_logits(stepper), want, rtol=1e-4, atol=1e-4 * float(want.abs().max()))
    format = stepper.config.weight_format.held_by(BOTH)
    counted, some = (sizes.weight_bytes(stepper.config, 4, format=form) for form in (format, format.held_by(KEPT)))
    assert held_bytes(stepper.model) == pytest.approx(counted, rel=0.01)
    form, attention = experts_format(stepper.config), stepper.config.attention
    assert form is not None and isinstance(attention, GQAConfig)
    query, rows = (
        attention.head_dim * n for n in (attention.num_heads, attention.num_heads + 2 * attention.num_kv_heads)
    )
    numbers = 3 * 128**2 + 2 * 128 * (rows + query * form.takes(query))  # o_proj: narrower than some groups
    assert some - counted == pytest.approx(numbers * (4 - float(form.bytes_on_gpu())), rel=0.02)


def test_a_split_group_is_dequantized_and_counted_so(tmp_path: Path) -> None:
    """Two ranks hold 64 columns each of a dense layer whose scales are of 128."""
    path, _ = written(tmp_path, "gptq")
    config = load_model_config(path)
    kept = config.weight_format.held_by(BOTH)
    reader = WeightReader(path, torch.float32, format=config.weight_format)
    half = load_linear(linear, reader, ["model.layers.0.mlp.down_proj"], [128], 128, in_share=Share(1, 2))
    whole = load_linear(linear, reader, ["model.layers.0.mlp.down_proj"], [128], 128)
    assert isinstance(half.weight.data, Tensor) and not isinstance(whole.weight.data, Tensor)
    down = next(spec for spec in model_tensors(config) if spec.name == "model.layers.0.mlp.down_proj.weight")
    table = sizes.tensor_bytes(config, [], 2)
    counted = [sizes.tensor_bytes(config, [down], 2, Topology(ranks), format=kept) - table for ranks in (1, 2)]
    assert counted == [whole.num_bytes, half.num_bytes // 2]  # the reader's dtype is float32


@pytest.mark.parametrize("name", ["compressed int4", "nvfp4"])
def test_parts_of_uneven_width_add_up(tmp_path: Path, name: str) -> None:
    """Three groups of 32 columns on two ranks; with fewer groups than ranks the ledger counts dequantized experts."""
    path, _ = written(tmp_path, name, moe_intermediate_size=96)
    config = load_model_config(path)
    assert config.moe is not None
    reader = WeightReader(path, torch.float32, format=config.weight_format)
    x, ids = torch.randn(3, 128), torch.tensor([[0, 1], [3, 2], [2, 0]], dtype=torch.int32)
    group = width_group(config)

    def run(share: Share) -> tuple[Tensor, int]:
        stored = StoredExperts(
            kernel, "model.layers.1.mlp.experts", config.moe, 128, expert_names(config), share, group=group
        )  # fmt: skip
        weights = stored.load(reader, range(4))
        assert weights.data.format is not None
        return kernel.run_routed(x, torch.rand(3, 2, generator=torch.Generator().manual_seed(1)), ids, weights), (
            weights.width
        )

    (whole, _), *parts = (run(share) for share in (Share(), Share(0, 2), Share(1, 2)))
    assert [width for _, width in parts] == [64, 32]
    torch.testing.assert_close(sum(part for part, _ in parts), whole, rtol=1e-4, atol=1e-5)
    format = config.weight_format.held_by(KEPT)
    two, four = (sizes.weight_bytes(config, 2, topology=Topology(ranks), format=format) for ranks in (2, 4))
    dense_two, dense_four = (sizes.weight_bytes(config, 2, topology=Topology(ranks)) for ranks in (2, 4))
    assert four == dense_four and two < dense_two


def test_the_triton_row_is_chosen_before_libraries(tmp_path: Path) -> None:
    path, _ = written(tmp_path, "compressed int4")
    config = load_model_config(path)
    plan = plan_kernels(Device("cuda", "H200", (9, 0), compiler="c++"), need_of_model(config, "bfloat16"))
    assert plan.row("experts").name == plan.row("linear").name == "triton"
    assert families(plan.multiplied, FOUR_BITS) == BOTH.keys()
    asked = plan_kernels(Device("cuda", "H200", (9, 0)), need_of_model(config, "bfloat16"), {"linear": "torch"})
    assert families(asked.multiplied, FOUR_BITS) == KEPT.keys()
    online = online_format("int4")
    assert online is not None and online.held_by(KEPT) != PLAIN
    assert config.weight_format.held_by({"experts": frozenset((FP8_BLOCKS,))}) == PLAIN


FP8_ROWS = {"num_bits": 8, "type": "float", "symmetric": True, "strategy": "channel", "dynamic": False}


def experts_alone(form: str) -> dict[str, Any]:
    """`quantization_config` with 4 bits of experts only, beside unquantized linears or linears in FP8."""
    others = r"re:.*self_attn.*", r"re:.*shared_experts.*", r"re:.*mlp\.(gate|up|gate_up|down)_proj.*"
    if form == "plain linears":  # as Kimi K2
        return section("pack-quantized", ignore=("lm_head", *others))
    found = section("pack-quantized")
    four_bits: dict[str, Any] = found["config_groups"]["group_0"]
    experts = four_bits | {"targets": [r"re:.*mlp\.experts\..*"], "format": "pack-quantized"}
    linears = {"targets": ["Linear"], "weights": FP8_ROWS, "format": "float-quantized"}
    return found | {"format": "mixed-precision", "config_groups": {"group_0": experts, "group_1": linears}}


@pytest.mark.parametrize("form", ["plain linears", "FP8 linears"])
def test_experts_in_four_bits_do_not_choose_the_row_of_other_matrices(tmp_path: Path, form: str) -> None:
    """The experts' row is the one that multiplies 4 bits, also if other matrices have a scheme of their own."""
    path = make_checkpoint("qwen3_moe", tmp_path, seed=4, tokenizer=False, **SIZES)
    file = path / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"quantization_config": experts_alone(form)}))
    config = load_model_config(path)
    need = need_of_model(config, "bfloat16")
    assert FOUR_BITS not in need.linear_forms and need.experts is not None and need.experts.form == FOUR_BITS
    found = experts_format(config)
    assert found is not None and found.group == width_group(config) == 32
    file.write_text(json.dumps(json.loads(file.read_text()) | {"quantization_config": section("pack-quantized")}))
    assert need_of_model(load_model_config(path), "bfloat16").linear_forms == {FOUR_BITS}
