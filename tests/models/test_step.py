"""Step 3.5 and 3.7: the published file, experts of a layer in common tensors, FP8 blocks, MTP layers beside the model,
sizes, and refusals."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from moe_engine.config.args import EngineArgs
from moe_engine.errors import ConfigError
from moe_engine.models import sizes
from moe_engine.models.checkpoint_files import read_checkpoint
from moe_engine.models.config import GQAConfig
from moe_engine.models.config_file import load_model_config
from moe_engine.models.header_check import check_headers
from moe_engine.models.needs import head_widths
from moe_engine.models.widths import local_heads, widths_of
from moe_engine.planning.prepare import prepare
from moe_engine.tuning.costs.model_facts import model_facts
from tests.models import stepper
from tests.models.checkpoints import make_checkpoint, write_tensors
from tests.models.conftest import reference_logits
from tests.models.fp8 import quantize_fp8
from tests.models.parameters import num_active_parameters
from tests.models.rows import all_rows
from tests.models.stepper import Chunk
from tests.models.test_config import parse
from tests.models.test_parity import assert_close

KINDS = ["sliding_attention" if i % 4 else "full_attention" for i in range(48)]
PUBLISHED: dict[str, Any] = {
    "architectures": ["Step3p5ForCausalLM"], "model_type": "step3p5", "hidden_size": 4096, "intermediate_size": 11264,
    "num_hidden_layers": 45, "num_attention_heads": 64, "num_attention_groups": 8, "head_dim": 128,
    "max_seq_len": 262144, "vocab_size": 128896, "torch_dtype": "bfloat16", "use_qk_norm": True, "use_moe": True,
    "moe_layers_enum": ",".join(map(str, range(3, 45))), "moe_num_experts": 288, "moe_top_k": 8,
    "moe_intermediate_size": 1280, "share_expert_dim": 1280, "moe_layer_offset": 0, "moe_every_n_layer": 1,
    "norm_expert_weight": True, "moe_router_activation": "sigmoid", "moe_router_scaling_factor": 3.0,
    "use_moe_router_bias": True, "need_fp32_gate": True, "att_impl_type": "GQA", "use_head_wise_attn_gate": True,
    "sliding_window": 512, "layer_types": KINDS, "num_nextn_predict_layers": 3, "yarn_only_types": ["full_attention"],
    "rope_theta": [10000.0 if kind == KINDS[1] else 5000000.0 for kind in KINDS],
    "partial_rotary_factors": [1.0 if kind == KINDS[1] else 0.5 for kind in KINDS],
    "rope_scaling": {
        "rope_type": "llama3", "factor": 2.0, "original_max_position_embeddings": 131072, "low_freq_factor": 1.0,
        "high_freq_factor": 32.0,
    },
    "attention_other_setting": {
        "attention_type": "sliding_attention", "num_attention_heads": 96, "num_attention_groups": 8, "head_dim": 128,
    },
    "swiglu_limits": [0.0] * 43 + [7.0, 7.0] + [0.0] * 3, "swiglu_limits_shared": [0.0] * 44 + [16.0] + [0.0] * 3,
    "bos_token_id": 0, "eos_token_id": [1, 2, 128007],
}  # fmt: skip


def test_the_published_model(tmp_path: Path) -> None:
    """196B, 11B of them for a token."""
    config = parse(tmp_path, PUBLISHED)
    assert sizes.num_parameters(config) == pytest.approx(196.9e9, rel=2e-3)
    assert num_active_parameters(config) == pytest.approx(11e9, rel=5e-2)
    full, windowed = config.cache_groups
    assert full.layers == tuple(range(0, 45, 4)) and full.window is None and windowed.window == 512
    whole, own = config.attention_of(0), config.attention_of(1)
    assert isinstance(whole, GQAConfig) and isinstance(own, GQAConfig)
    assert (whole.num_heads, own.num_heads, own.num_kv_heads, own.gate_width) == (64, 96, 8, 1)
    ropes = [(rope.kind, rope.theta, rope.width) for rope in config.ropes]
    assert ropes == [("llama3", 5e6, 64), ("default", 1e4, 128)]
    assert config.moe is not None and config.moe.has_bias and config.moe.scale == 3.0
    assert config.moe.layer_limits[43:] == (7.0, 7.0) and config.moe.shared_limits[43:] == (0.0, 16.0)
    assert config.moe_layers == (False,) * 3 + (True,) * 42 and config.norm_plus == 1.0
    assert config.context_length == 262144 and config.kv_bytes_per_token("bfloat16") == 45 * 2 * 8 * 128 * 2
    assert (widths_of(config).num_heads, head_widths(config).heads) == (32, 96)
    assert head_widths(local_heads(config, 8)).heads == 12
    facts = model_facts(PUBLISHED)
    small = sizes.num_parameters(config) - config.vocab_size * config.hidden_size - facts.num_parameters
    assert 0 <= small < 1e6 and facts.dense_layers == 3 and facts.mtp_layers == 3
    assert [(kind.layers, kind.kv_width, kind.keeps) for kind in facts.attention] == [(12, 2048, 0), (33, 2048, 512)]
    assert facts.attention[1].decode_flops == 1.5 * facts.attention[0].decode_flops
    outer = {"architectures": ["Step3p7ForConditionalGeneration"], "model_type": "step3p7", "text_config": PUBLISHED}
    seen = parse(tmp_path, outer | {"vision_config": {"model_type": "perception_encoder"}})
    assert seen.architecture == "Step3p7ForConditionalGeneration" and seen.vision is None
    assert sizes.num_parameters(seen) == sizes.num_parameters(config)


def test_fields_by_layer_mean_those_by_kind(tmp_path: Path) -> None:
    """The published file, and the one that transformers saves."""
    published = load_model_config(make_checkpoint("step3p7", tmp_path / "a", tokenizer=False))
    saved = load_model_config(make_checkpoint("step3p7", tmp_path / "b", tokenizer=False, dialect="transformers"))
    for name in ("attention", "other_layers", "rope", "moe", "moe_layers", "windows", "norm_eps", "context_length"):
        assert getattr(published, name) == getattr(saved, name), name


def with_mtp(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """The tensors, and those of an MTP layer, which is not read."""
    layer, hidden = "model.layers.3.", tensors["model.norm.weight"].shape[0]
    parts = {"enorm": (hidden,), "hnorm": (hidden,), "eh_proj": (hidden, 2 * hidden), "input_layernorm": (hidden,)}
    parts |= {"transformer.shared_head.norm": (hidden,), "transformer.shared_head.output": (320, hidden)}
    parts |= {"self_attn.g_proj": (6, hidden), "mlp.up_proj": (96, hidden)}
    return tensors | {f"{layer}{name}.weight": torch.randn(shape) for name, shape in parts.items()}


@pytest.mark.parametrize("row", all_rows())
def test_fp8_blocks(tmp_path: Path, row: str) -> None:
    """Experts in common tensors with a grid of scales each, as published; the gates are not quantized. An MTP layer
    stands beside the model."""
    wide = {"hidden_size": 160, "moe_intermediate_size": 136, "share_expert_dim": 136, "moe_num_experts": 4}
    path = make_checkpoint("step3p7", tmp_path / "q", tokenizer=False, **wide)
    tensors, plain, stored = load_file(path / "model.safetensors"), {}, {}
    for name, tensor in tensors.items():
        by_expert = quantize(name, tensor) if ".layers." in name and "g_proj" not in name else None
        plain[name] = tensor if by_expert is None else by_expert[1]
        stored |= {name: tensor} if by_expert is None else by_expert[0]
    (tmp_path / "plain").mkdir()
    (tmp_path / "plain" / "config.json").write_text((path / "config.json").read_text())
    write_tensors(tmp_path / "plain", plain)
    write_tensors(path, with_mtp(stored))
    raw = json.loads((path / "config.json").read_text())
    raw["quantization_config"] = {
        "quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [128, 128],
        "modules_to_not_convert": [f"model.layers.{i}.self_attn.g_proj" for i in range(3)],
    }  # fmt: skip
    (path / "config.json").write_text(json.dumps(raw))
    check_headers(path, read_checkpoint(path), load_model_config(path))
    tokens, want = reference_logits(tmp_path / "plain", 0)
    model = stepper.load(path, row)
    got = [model.step([Chunk(0, tokens[:70], False)])[0], model.step([Chunk(0, tokens[70:], True)])[0]]
    assert_close(torch.cat(got), want)


def quantize(name: str, tensor: Tensor) -> tuple[dict[str, Tensor], Tensor] | None:
    """A matrix, or those of all experts, in FP8 blocks, and its values; None: not a projection."""
    if "_proj" not in name or tensor.ndim < 2:
        return None
    each = [quantize_fp8({"x_proj.weight": part.float()}) for part in (tensor if tensor.ndim == 3 else tensor[None])]
    data, grid = (torch.stack([part[f"x_proj.weight{end}"] for part in each]) for end in ("", "_scale_inv"))
    whole = grid.repeat_interleave(128, 1).repeat_interleave(128, 2)[:, : data.shape[1], : data.shape[2]]
    values = data.float() * whole
    if tensor.ndim == 2:
        data, grid, values = data[0], grid[0], values[0]
    return {name: data, f"{name}_scale_inv": grid}, values


def test_refusals(tmp_path: Path) -> None:
    for wrong, message in (
        ({"moe_router_activation": "softmax"}, "moe_router_activation 'softmax' is not supported; supported: sigmoid"),
        ({"use_head_wise_attn_gate": False}, "use_head_wise_attn_gate False is not supported; supported: True"),
        ({"moe_num_experts": None}, "moe_num_experts is missing"),
        ({"moe_layers_enum": "3,x"}, "moe_layers_enum must be numbers of layers, found '3,x'"),
        ({"swiglu_limits": [7.0] * 45}, "swiglu_limits has a limit of a layer without experts"),
        ({"rope_theta": [*range(1, 46)]}, "rope_theta has 12 values for layers of full_attention: they must be the"),
        ({"query_pre_attn_scalar": 64}, "query_pre_attn_scalar is not head_dim 128"),
        (
            {"attention_other_setting": {"num_attention_heads": 96, "num_attention_groups": 7}},
            "attention_other_setting has 7 KV heads, which do not divide its 96 heads",
        ),
    ):
        with pytest.raises(ConfigError, match=re.escape(message)):
            parse(tmp_path, PUBLISHED | wrong)
    path = make_checkpoint("step3p7", tmp_path / "model")
    for flags, message in (
        ({"speculative_algorithm": "NEXTN"}, "NEXTN"),
        ({"enable_torch_compile": True}, "--enable-torch-compile: not available yet: layers with output gates"),
    ):
        with pytest.raises(ConfigError, match=message):
            prepare(EngineArgs.from_kwargs(model_path=str(path), max_total_tokens=64, **flags))
