"""Llama 4: the published files, sizes, checkpoints in FP8, names, and refusals. `test_parity.py` compares logits,
`test_llama4_images.py` those with images."""

from __future__ import annotations

import json
import math
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from moe_engine.errors import ConfigError
from moe_engine.kernels.attention_windows import ChunkWindow
from moe_engine.models import sizes
from moe_engine.models.checkpoint_files import read_checkpoint
from moe_engine.models.checkpoint_names.llama4_names import inner_name
from moe_engine.models.config import GQAConfig, ModelConfig
from moe_engine.models.config_file import load_model_config
from moe_engine.models.header_check import check_headers
from moe_engine.models.layers.attention.rope import make_rotary_table
from moe_engine.models.needs import need_of_model
from moe_engine.models.tensors.model import model_tensors
from moe_engine.tuning.costs.model_facts import model_facts
from tests.models import published, stepper
from tests.models.checkpoints import make_checkpoint
from tests.models.format_checks import logits_of, write_pair
from tests.models.parameters import num_active_parameters
from tests.models.quantized_floats import FLOATS, _nvfp4, quantize_floats

SCOUT = published.LLAMA_4_SCOUT
TEXT = SCOUT["text_config"]
LARGER: dict[str, Any] = {
    "num_local_experts": 128, "interleave_moe_layer_step": 2, "use_qk_norm": False, "rope_scaling": None,
    "max_position_embeddings": 1048576,
}  # fmt: skip
"""Fields of Maverick that differ from Scout's."""


def parse(folder: Path, **changed: Any) -> ModelConfig:
    (folder / "config.json").write_text(json.dumps(SCOUT | {"text_config": TEXT | changed}))
    return load_model_config(folder)


def test_scout(tmp_path: Path) -> None:
    """109B, 17B of them for a token; without the tower as the planner counts."""
    whole = parse(tmp_path)
    assert sizes.num_parameters(whole) == pytest.approx(108.6e9, rel=1e-3)
    config = replace(whole, vision=None)
    assert sizes.num_parameters(config) == pytest.approx(107.8e9, rel=5e-3)
    assert num_active_parameters(config) + 202048 * 5120 == pytest.approx(17.2e9, rel=2e-2)
    full, chunked = config.cache_groups
    assert full.layers == tuple(range(3, 48, 4)) and isinstance(chunked.window, ChunkWindow) and chunked.window == 8192
    rotated, still = config.attention_of(0), config.attention_of(3)
    assert isinstance(rotated, GQAConfig) and isinstance(still, GQAConfig)
    assert (rotated.qk_norm, still.qk_norm) == ("unweighted", "")
    ropes = [(rope.kind, rope.width, rope.query_beta) for rope in config.ropes]
    assert ropes == [("zero", 4, 0.1), ("llama3", 128, 0.0)]
    assert config.moe is not None and config.moe.scales_input and config.moe.shared_width == 8192
    assert all(config.moe_layers) and config.context_length == 10485760
    facts = model_facts(SCOUT)
    small = sizes.num_parameters(config) - config.vocab_size * config.hidden_size - facts.num_parameters
    assert 0 <= small < 1e6 and facts.dense_layers == 0
    assert [(kind.layers, kind.keeps) for kind in facts.attention] == [(12, 0), (36, 8192)]


def test_maverick(tmp_path: Path) -> None:
    """400B, 17B of them for a token."""
    config = replace(parse(tmp_path, **LARGER), vision=None)
    assert sizes.num_parameters(config) == pytest.approx(400.7e9, rel=5e-3)
    assert num_active_parameters(config) + 202048 * 5120 == pytest.approx(17.2e9, rel=2e-2)
    assert config.moe_layers == (False, True) * 24 and config.intermediate_size == 16384
    facts = model_facts(SCOUT | {"text_config": TEXT | LARGER})
    small = sizes.num_parameters(config) - config.vocab_size * config.hidden_size - facts.num_parameters
    assert 0 <= small < 1e6 and facts.dense_layers == 24


def test_requests_within_a_chunk_have_windows_that_every_row_takes(tmp_path: Path) -> None:
    config = parse(tmp_path)
    assert need_of_model(config, "bfloat16").chunked
    longer, within = config.within(8193), config.within(8192)
    assert need_of_model(longer, "bfloat16").chunked
    need = need_of_model(within, "bfloat16")
    assert need.windows and not need.chunked and within.windows == longer.windows


def test_factors_of_positions_are_normed_away(tmp_path: Path) -> None:
    """By norms behind the rotation, but for their epsilon; without norms they multiply q and k."""
    yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 8192}
    for normed in (True, False):
        config = parse(tmp_path, rope_scaling=yarn, use_qk_norm=normed)
        rotated, factor = config.attention_of(0), 1 + 0.1 * math.log(4)
        assert isinstance(rotated, GQAConfig) and config.rope_of(3).attention_factor == 1
        assert rotated.qk_eps == (pytest.approx(1e-5 / factor**2) if normed else 0)
        assert config.rope_of(0).attention_factor == (1 if normed else pytest.approx(factor))


def test_factors_of_queries(tmp_path: Path) -> None:
    """1 + 0.1 ln(1 + floor((p + 1) / 8192))."""
    rope = parse(tmp_path).rope
    scale = make_rotary_table(rope, 8192, "cpu").query_scale
    assert scale is not None and scale[8190] == 1 and scale[8191] == pytest.approx(1 + 0.1 * 0.6931472)
    assert make_rotary_table(rope, 8191, "cpu").query_scale is None


def fp8_rows(weight: Tensor) -> tuple[dict[str, Tensor], Tensor]:
    """A matrix in e4m3 with a scale for each row, and its values."""
    scale = weight.float().abs().amax(1, keepdim=True) / 448
    codes = (weight.float() / scale).to(torch.float8_e4m3fn)
    return {".weight": codes, ".weight_scale": scale.to(torch.bfloat16)}, codes.float() * scale.bfloat16().float()


def test_fp8_experts_beside_plain_matrices(tmp_path: Path) -> None:
    """A matrix for each expert, quantized; all others are listed by their published names (Maverick-FP8)."""
    path = make_checkpoint("llama4", tmp_path / "q", tokenizer=False)
    stored: dict[str, Tensor] = {}
    plain: dict[str, Tensor] = {}
    for name, tensor in load_file(path / "model.safetensors").items():
        stored_as = f"language_model.{name}"
        if ".experts." not in name:
            stored[stored_as], plain[name] = tensor, tensor
            continue
        block, _, last = name.rpartition(".")
        values = []
        for expert, matrix in enumerate(tensor.transpose(1, 2)):
            parts = ("gate_proj", "up_proj") if last == "gate_up_proj" else ("down_proj",)
            kept = []
            for part, weight in zip(parts, matrix.chunk(len(parts))):
                found, value = fp8_rows(weight)
                stored |= {f"language_model.{block}.{expert}.{part}{end}": each for end, each in found.items()}
                kept.append(value)
            values.append(torch.cat(kept).T.to(tensor.dtype))
        plain[name] = torch.stack(values)
    ignored = sorted(name.removesuffix(".weight") for name in stored if ".experts." not in name and "norm" not in name)
    assert "language_model.model.layers.0.feed_forward.gate_proj" in ignored
    section = {
        "quant_method": "compressed-tensors", "format": "float-quantized", "ignore": ignored,
        "config_groups": {
            "group_0": {
                "targets": ["Linear"],
                "weights": {"num_bits": 8, "type": "float", "strategy": "channel", "symmetric": True},
                "input_activations": {"num_bits": 8, "type": "float", "strategy": "token", "dynamic": True},
            },
        },
    }  # fmt: skip
    path, other = write_pair(path, stored, plain, {"quantization_config": section})
    check_headers(path, read_checkpoint(path), load_model_config(path))
    torch.testing.assert_close(logits_of(path), logits_of(other), rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("common", [True, False])
def test_fp8_of_modelopt(tmp_path: Path, common: bool) -> None:
    """Experts in common tensors [E, K, N] with a scale for all of them, or for each; factors of the KV cache."""
    path = make_checkpoint("llama4", tmp_path / "q", tokenizer=False)
    stored: dict[str, Tensor] = {}
    plain: dict[str, Tensor] = {}
    for name, tensor in load_file(path / "model.safetensors").items():
        joined = ".experts." in name
        if not joined and not name.endswith("_proj.weight"):
            stored[name] = plain[name] = tensor
            continue
        scale = tensor.abs().amax((1, 2) if joined and not common else None) / 448
        factor = scale.reshape(-1, *[1] * (tensor.dim() - 1))
        codes = (tensor / factor).to(torch.float8_e4m3fn)
        stored |= {name: codes, f"{name}_scale".replace("proj_", "proj_weight_"): scale.float()}
        stored[f"{name.removesuffix('.weight')}{'_' if joined else '.'}input_scale"] = torch.tensor(0.1)
        plain[name] = codes.to(tensor.dtype) * factor
        if name.endswith(("k_proj.weight", "v_proj.weight")):
            stored[f"{name.removesuffix('weight')}{name[-13]}_scale"] = torch.tensor(1.0)
    section = {"quant_method": "modelopt", "quant_algo": "FP8", "ignore": ["lm_head", "*router*", "*vision_model*"]}
    path, other = write_pair(path, stored, plain, {"quantization_config": section})
    check_headers(path, read_checkpoint(path), load_model_config(path))
    for row in ("torch", "cpu"):
        torch.testing.assert_close(logits_of(path, row), logits_of(other, row), rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("common", [True, False])
def test_nvfp4_of_modelopt(tmp_path: Path, common: bool) -> None:
    """Experts in common tensors [E, K / 2, N], with a factor for all of them, or for each."""
    path = make_checkpoint("llama4", tmp_path / "q", tokenizer=False)
    tensors = load_file(path / "model.safetensors")
    stored, plain = quantize_floats({name: each for name, each in tensors.items() if ".experts." not in name}, "nvfp4")
    for name in (name for name in tensors if ".experts." in name):
        experts = tensors[name].transpose(1, 2).contiguous()  # [E, N, K]
        if common:
            codes, scales, whole, values = _nvfp4(experts.flatten(0, 1))
            parts = [codes.view(len(experts), -1, codes.shape[1]), scales.view(len(experts), -1, scales.shape[1])]
            factor, values = torch.tensor(whole), values.view(experts.shape)
        else:
            each = [_nvfp4(expert) for expert in experts]
            parts = [torch.stack([one[i] for one in each]) for i in (0, 1)]
            factor, values = torch.tensor([one[2] for one in each]), torch.stack([one[3] for one in each])
        stored |= {name: parts[0].transpose(1, 2).contiguous(), f"{name}_weight_scale_2": factor}
        stored |= {f"{name}_weight_scale": parts[1].transpose(1, 2).contiguous(), f"{name}_input_scale": torch.ones(())}
        plain[name] = values.transpose(1, 2).contiguous()
    section = FLOATS["nvfp4"][1] | {"ignore": ["lm_head", "*router*"]}
    path, other = write_pair(path, stored, plain, {"quantization_config": section})
    config = load_model_config(path)
    check_headers(path, read_checkpoint(path), config)
    half = config.weight_format.bytes_per_element("model.layers.1.feed_forward.experts.0.up_proj", (32, 64), 4)
    assert half < 1
    want = logits_of(other, "torch")
    for row in ("torch", "cpu"):
        torch.testing.assert_close(logits_of(path, row), want, rtol=1e-3, atol=1e-3 * float(want.abs().max()))


def test_names(tmp_path: Path) -> None:
    """Each tensor belongs to one module, so that a weight update builds it again; dense layers have other names."""
    loaded = stepper.load(make_checkpoint("llama4", tmp_path, tokenizer=False), "torch")
    modules = [module.prefixes for module in loaded.model.modules()]
    for spec in model_tensors(loaded.config):
        assert sum(spec.name.startswith(prefixes) for prefixes in modules) == 1, spec.name
    published = "model.layers.0.feed_forward."
    assert inner_name(f"{published}up_proj") == "model.layers.0.mlp.up_proj"
    for other in ("shared_expert.up_proj.weight", "experts.gate_up_proj", "experts.3.up_proj.weight", "router.weight"):
        assert inner_name(published + other) == published + other


def test_refusals(tmp_path: Path) -> None:
    for wrong, message in (
        ({"num_experts_per_tok": 2}, "num_experts_per_tok 2 is not supported; supported: 1"),
        ({"no_rope_layers": [1, 0]}, "no_rope_layers needs a 1 (with positions) or 0 for each of 48 layers"),
        ({"layer_types": ["full_attention"] * 48}, "layer_types must have chunked_attention where no_rope_layers has"),
        ({"moe_layers": "all"}, "moe_layers must be a list of layers"),
        ({"attention_chunk_size": None}, "attention_chunk_size is null"),
    ):
        with pytest.raises(ConfigError, match=re.escape(message)):
            parse(tmp_path, **wrong)
