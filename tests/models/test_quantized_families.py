"""Every family in every format of `moe-engine quantize` and of --quantization: each is served with the error of the
format, or refused before weights are read, by a message that names what works.

What vLLM 0.32.0 takes was found by loading copies of these families with its own model classes and loaders on a CPU,
and by comparing each of its parameters, dequantized, with those of the unquantized checkpoint.
"""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from moe_engine.config.args import EngineArgs
from moe_engine.errors import ConfigError
from moe_engine.kernels.quantization.quantize import RANGES, short_scales
from moe_engine.models.config import ModelConfig
from moe_engine.models.config_file import load_model_config
from moe_engine.models.formats.fused_experts import FusedExpertsFormat
from moe_engine.models.formats.online import INT4_GROUP, Online
from moe_engine.models.formats.schemes import SchemeFormat
from moe_engine.models.quantized_copy.checkpoint import quantize_checkpoint
from moe_engine.models.quantized_copy.target import Target
from moe_engine.models.tensors.model import Kind, model_tensors
from moe_engine.models.weights import WeightReader
from moe_engine.planning.model.quantization import with_quantization
from tests.models import stepper
from tests.models.checkpoints import BLOCK_SPARSE, KINDS, MORE_KINDS, SPARSE_KINDS, hub_fields, make_checkpoint
from tests.models.format_checks import step_logits
from tests.models.ling_v2_5 import make_ling
from tests.models.sparse import with_margin
from tests.models.v4_checkpoints import make_v4

SIZES = {"hidden_size": 128, "intermediate_size": 128, "moe_intermediate_size": 128}
OWN_SIZES: dict[str, dict[str, Any]] = {
    "deepseek_v2": {"n_shared_experts": 1}, "deepseek_v2_lite": {"n_shared_experts": 1},
    "dots1": {"n_shared_experts": 1}, "ernie4_5_moe": {"moe_num_shared_experts": 1},
    "hunyuan_v1_moe": {"moe_intermediate_size": None}, "cohere2_moe": {"num_shared_experts": 1},
    "llama4": {"moe_intermediate_size": None, "intermediate_size_mlp": 128},
    "longcat_flash": dict.fromkeys(("intermediate_size", "moe_intermediate_size"))
    | dict.fromkeys(("ffn_hidden_size", "expert_ffn_hidden_size"), 128),
    "deepseek_v4": {"intermediate_size": None, "q_lora_rank": 128},
    "ling_v2_5": {"moe_shared_expert_intermediate_size": 128},
    "kimi_linear": {"linear_attn_config": hub_fields("kimi_linear")["linear_attn_config"] | {"head_dim": 32}},
}  # fmt: skip
"""The `cpu` row computes several shared experts apart, each with scales of its own columns, so there is one. Kimi
Linear's `q_proj` and DeepSeek V4's `wq_a` have whole FP8 blocks, unlike projections that vLLM joins with them."""
FAMILIES = (*KINDS, *MORE_KINDS, *SPARSE_KINDS, BLOCK_SPARSE, "deepseek_v4", "ling_v2_5")
ERRORS = {"fp8": (0.015, 0.04), "int8": (0.002, 0.015), "int4": (0.05, 0.15)}
"""Least and largest relative error of a quantized weight, which is normally distributed."""
JOINED = (
    {"q_proj", "k_proj", "v_proj", "b_proj", "f_a_proj"}, {"q_a_proj", "kv_a_proj_with_mqa"}, {"wq_a", "wkv"},
    {"gate_proj", "up_proj"}, {"w1", "w3"}, {"in_proj_qkv", "in_proj_z"}, {"in_proj_b", "in_proj_a"},
)  # fmt: skip
"""vLLM 0.32.0: projections of a block that are one matrix, which it refuses if only some of them are quantized."""
PLAIN_BESIDE_INTEGERS = (".kv_b_proj", ".wo_a", ".indexer.wk")
"""vLLM 0.32.0 absorbs or multiplies the first two by head, and reads the last in FP8 or unquantized only."""
ENDS = ("_scale_inv", "_packed")
TIE = 1e-6
"""Sums of squares in float32 have smaller errors."""

NEAR = 2e-5
"""Distance of two experts' scores, relative to the largest one. One of some hundred checkpoints has less."""


def make(kind: str, path: Path) -> Path:
    seed = random.randrange(1000)
    sizes = {k: v for k, v in (SIZES | OWN_SIZES.get(kind, {})).items() if v is not None}
    if kind == "deepseek_v4":
        return make_v4(path, seed, tokenizer=False, **sizes)
    if kind == "ling_v2_5":
        return make_ling(path, seed, tokenizer=False, **sizes)
    return make_checkpoint(kind, path, seed, tokenizer=False, **sizes)


def scales_are_clear(path: Path) -> bool:
    """Whether rounding decides no scale of a group in int4: those of the ranges have errors that differ."""
    for tensor in load_file(path / "model.safetensors").values():
        if tensor.dim() < 2 or tensor.shape[-1] % INT4_GROUP:
            continue
        groups, parts = tensor.float().reshape(-1, INT4_GROUP), torch.tensor([part / 7 for part in RANGES])
        scales, groups = short_scales(groups.abs().amax(1) * parts[:, None]).double(), groups.double()
        codes = (groups / scales[..., None]).round().clamp(-8, 7)
        best, second = (codes * scales[..., None] - groups).square().sum(-1).topk(2, dim=0, largest=False).values
        if float(((second - best) / best).min()) < TIE:
            return False
    return True


def logits(path: Path, row: str, asked: str | None = None) -> Tensor:
    def change(config: ModelConfig) -> ModelConfig:
        return with_quantization(config, EngineArgs.from_kwargs(quantization=asked))

    return step_logits(stepper.load(path, row, page_size=8 if "deepseek_v4" in str(path) else 1, change=change))


def rows_agree(path: Path, asked: str | None = None) -> None:
    """The row that multiplies weights as stored, and the one that dequantizes them; not if their rounding, of 2^-16 of
    rows in the former, may choose other experts."""
    found, (want, margin) = logits(path, "cpu", asked), with_margin(lambda: logits(path, "torch", asked), needed=False)
    if margin > NEAR:
        torch.testing.assert_close(found, want, rtol=1e-3, atol=1e-3 * float(want.abs().max()))


def errors(source: Path, path: Path, config: ModelConfig) -> dict[str, float]:
    """Relative error of each projection of the decoder layers, read with the format of `config`."""
    exact = WeightReader(source, torch.float32, format=load_model_config(source).weight_format)
    read, found = WeightReader(path, torch.float32, format=config.weight_format), {}
    specs = [spec for spec in model_tensors(config) if spec.kind is Kind.LINEAR and "layers." in spec.name]
    for name, (n, k) in ((name, spec.shape) for spec in specs for name in list(spec.names())[:2]):
        prefix = name.removesuffix(".weight")
        want = exact.linear(prefix, (n, k))
        found[prefix] = float((read.linear(prefix, (n, k)) - want).norm() / want.norm())
    return found


@pytest.mark.drawn(5, group="quantized families")
@pytest.mark.parametrize("format", [*ERRORS, "mxfp4"])
@pytest.mark.parametrize("kind", FAMILIES)
def test_a_copy_is_served(tmp_path: Path, kind: str, format: str) -> None:
    source, output = make(kind, tmp_path / kind), tmp_path / f"{kind}-copy"
    if (format == "mxfp4") != (kind == "gpt_oss"):
        with pytest.raises(ConfigError, match=r"use --format mxfp4|use fp8, int8 or int4"):
            quantize_checkpoint(source, output, Target(format), lambda _: None)
        assert not output.exists()
        return
    if kind == "step3p7" and format != "fp8":
        with pytest.raises(ConfigError, match=r"gate and up apart .* use --format fp8"):
            quantize_checkpoint(source, output, Target(format, 32), lambda _: None)
        assert not output.exists()
        return
    quantize_checkpoint(source, output, Target(format, 32), lambda _: None)
    rows_agree(output)
    if kind == "gpt_oss":
        return  # its values: test_quantized_checkpoint
    config, stored = load_model_config(output), set(load_file(output / "model.safetensors"))
    low, high = ERRORS[format]
    found = errors(source, output, config).values()
    assert any(found) and all(error == 0 or low < error < high for error in found), (kind, format, found)
    assert kind != "deepseek_v4" or json.loads((output / "config.json").read_text()).get("expert_dtype") == (
        "fp8" if format == "fp8" else None
    )
    quantized = {
        name.removesuffix(end).removesuffix(".weight") for name in stored for end in ENDS if name.endswith(end)
    }
    plain = {name.removesuffix(".weight") for name in stored if name.endswith(".weight")} - quantized
    assert format == "fp8" or not [name for name in quantized if name.endswith(PLAIN_BESIDE_INTEGERS)]
    for name in plain:
        block, _, last = name.rpartition(".")
        joined = next((group for group in JOINED if last in group), {last})
        assert not {f"{block}.{other}" for other in joined} & quantized, name


@pytest.mark.drawn(4, group="families quantized while loading")
@pytest.mark.parametrize("format", list(ERRORS))
@pytest.mark.parametrize("kind", FAMILIES)
def test_quantized_while_loading(tmp_path: Path, kind: str, format: str) -> None:
    source = make(kind, tmp_path / kind)
    while format == "int4" and not scales_are_clear(source):  # else the rows may quantize with two equally good scales
        source = make(kind, tmp_path / kind)
    config, asked = load_model_config(source), EngineArgs.from_kwargs(quantization=format)
    if isinstance(config.weight_format, FusedExpertsFormat):
        copy = "mxfp4" if kind == "gpt_oss" else format
        with pytest.raises(ConfigError, match=f"moe-engine quantize --format {copy}"):
            with_quantization(config, asked)
        return
    config = with_quantization(config, asked)
    assert isinstance(config.weight_format, SchemeFormat)
    assert isinstance(config.weight_format.rules[0][1], Online)
    low, high = ERRORS[format]
    found = errors(source, source, config)
    assert any(found.values()) and all(error == 0 or low < error < high for error in found.values()), found
    rows_agree(source, format)
