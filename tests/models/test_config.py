"""config.json of every family and dialect, contradictions, sizes; reading needs no torch."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from moe_engine.errors import ConfigError, MoeEngineError
from moe_engine.kernels.gate_form import SILU, GatedActivation
from moe_engine.models import sizes, step_memory
from moe_engine.models.activation_dtype import activation_dtype
from moe_engine.models.checkpoint_files import read_checkpoint, read_header
from moe_engine.models.config import CacheGroup, GQAConfig, MLAConfig, ModelConfig
from moe_engine.models.config_defaults import with_defaults
from moe_engine.models.config_file import load_model_config
from moe_engine.models.formats.block_fp8 import BlockFP8Format
from moe_engine.models.formats.plain import PLAIN
from moe_engine.models.registry import _BY_MODEL_TYPE
from moe_engine.parallel.topology import Topology
from moe_engine.tuning.costs.model_facts import model_facts
from tests.models.checkpoints import KINDS, MORE_KINDS, SPARSE_KINDS, hub_fields, make_checkpoint
from tests.models.parameters import num_active_parameters
from tests.models.published import (
    AXK1,
    COMMAND_A_PLUS,
    FLINT,
    GEMMA_2_9B,
    GEMMA_TOWER,
    GRANITE_SWA,
    K_EXAONE,
    KIMI_LINEAR,
    LFM2_8B_A1B,
    LING_FLASH,
    LING_MINI,
    LLAMA,
    LONGCAT_FLASH,
    NEMOTRON_3_NANO,
    QWEN3_NEXT,
    V2_LITE,
)
from tests.models.published import YARN_V3 as V3


def write(directory: Path, fields: dict[str, Any], generation: dict[str, Any] | None = None) -> Path:
    directory.mkdir(exist_ok=True)
    (directory / "config.json").write_text(json.dumps(fields))
    if generation is not None:
        (directory / "generation_config.json").write_text(json.dumps(generation))
    return directory


def parse(directory: Path, fields: dict[str, Any], **kwargs: Any) -> ModelConfig:
    return load_model_config(write(directory, fields), **kwargs)


def test_deepseek_v3_sizes(tmp_path: Path) -> None:
    config = parse(tmp_path, V3)
    assert sizes.num_parameters(config) == pytest.approx(671.0e9, rel=5e-4)
    assert sizes.num_parameters(config, include_mtp=True) - sizes.num_parameters(config) == pytest.approx(
        11.6e9, rel=5e-3
    )
    assert num_active_parameters(config) == pytest.approx(36.6e9, rel=5e-3)
    assert config.attention.cache_width == 576
    assert config.kv_bytes_per_token("bfloat16") == 70_272
    assert config.rope.attention_factor == 1.0
    assert 192**-0.5 * config.rope.softmax_factor == pytest.approx(0.135234, rel=1e-5)
    assert config.moe_layers == (False,) * 3 + (True,) * 58
    assert config.weight_format == BlockFP8Format((128, 128))
    assert config.context_length == 163840
    assert activation_dtype(config) == "bfloat16"
    second_kv_b = 61 * 128 * 256 * 512
    assert sizes.weight_bytes(config, 2) == pytest.approx(2 * (sizes.num_parameters(config) + second_kv_b), rel=1e-3)


def test_deepseek_v2_lite(tmp_path: Path) -> None:
    config = parse(tmp_path, V2_LITE)
    assert sizes.num_parameters(config) == pytest.approx(15.71e9, rel=1e-3)
    assert config.kv_bytes_per_token("bfloat16") == 31_104
    assert isinstance(config.attention, MLAConfig) and config.attention.q_lora_rank is None
    assert 192**-0.5 * config.rope.softmax_factor == pytest.approx(0.114721, rel=1e-5)
    assert config.moe is not None and config.moe.shared_width == 2816 and config.moe.group_score is None


def test_llama(tmp_path: Path) -> None:
    config = parse(tmp_path, LLAMA)
    assert sizes.num_parameters(config) == pytest.approx(8.03e9, rel=1e-3)
    assert config.attention.cache_width == 2 * 8 * 128
    assert config.eos_token_ids == (128001, 128008, 128009)
    assert isinstance(config.attention, GQAConfig) and config.attention.head_dim == 128


MINIMAX_M2: dict[str, Any] = {
    "architectures": ["MiniMaxM2ForCausalLM"], "model_type": "minimax_m2", "hidden_size": 3072,
    "intermediate_size": 1536, "num_hidden_layers": 62, "num_attention_heads": 48, "num_key_value_heads": 8,
    "head_dim": 128, "rotary_dim": 64, "num_local_experts": 256, "num_experts_per_tok": 8, "use_qk_norm": True,
    "qk_norm_type": "per_layer", "use_routing_bias": True, "scoring_func": "sigmoid", "attn_type_list": [1] * 62,
    "shared_intermediate_size": 0, "rope_theta": 5000000, "max_position_embeddings": 196608, "vocab_size": 200064,
    "eos_token_id": 200020, "rms_norm_eps": 1e-6, "torch_dtype": "bfloat16", "num_mtp_modules": 3,
    "quantization_config": V3["quantization_config"],
}  # fmt: skip


def test_minimax_m2(tmp_path: Path) -> None:
    config = parse(tmp_path, MINIMAX_M2)
    assert sizes.num_parameters(config) == pytest.approx(228.7e9, rel=1e-3)
    assert num_active_parameters(config) == pytest.approx(10.4e9, rel=1e-2)
    assert config.rope.width == 64 and config.kv_bytes_per_token("bfloat16") == 62 * 2 * 8 * 128 * 2
    assert isinstance(config.attention, GQAConfig) and config.attention.qk_norm == "projection"
    assert config.moe is not None and config.moe.renormalize and config.moe.scale == 1.0 and config.moe.has_bias


def test_qwen3_next(tmp_path: Path) -> None:
    config = parse(tmp_path, QWEN3_NEXT)
    assert sizes.num_parameters(config) == pytest.approx(79.67e9, rel=1e-3)
    assert num_active_parameters(config) == pytest.approx(3.6e9, rel=2e-2)
    assert config.rope.width == 64 and config.kv_bytes_per_token("bfloat16") == 12 * 2 * 2 * 256 * 2
    (group,) = config.state_groups
    assert group.layers == tuple(i for i in range(48) if i % 4 != 3) and config.cache_groups[0].layers[:2] == (3, 7)
    assert group.num_bytes("bfloat16") == 36 * (32 * 128 * 128 * 4 + (2 * 2048 + 4096) * 3 * 2)
    for wrong, message in (
        ({"linear_num_value_heads": 24}, "linear_num_value_heads 24 is not a multiple"),
        ({"layer_types": ["mamba"] * 48}, "layer_types needs 48 of linear_attention, full_attention"),
    ):
        with pytest.raises(ConfigError, match=message):
            parse(tmp_path, QWEN3_NEXT | wrong)


def test_nemotron_3(tmp_path: Path) -> None:
    config = parse(tmp_path, NEMOTRON_3_NANO)
    assert sizes.num_parameters(config) == pytest.approx(31.58e9, rel=1e-3)
    assert num_active_parameters(config) == pytest.approx(3.2e9, rel=1e-2)  # 3.6 G with the embedding
    (group,) = config.state_groups
    assert len(group.layers) == 23 and config.kv_layers == (5, 12, 19, 26, 33, 42) and sum(config.moe_layers) == 23
    assert group.num_bytes("bfloat16") == 23 * (64 * 64 * 128 * 4 + (4096 + 2 * 1024) * 3 * 2)
    assert config.kv_bytes_per_token("bfloat16") == 6 * 2 * 2 * 128 * 2 and config.context_length == 262144
    assert config.blocks[:4] == ((0, 1), (2, 3), (4, None), (5, 6)) and not config.has_dense
    facts = model_facts(NEMOTRON_3_NANO)
    assert (facts.moe_layers, facts.dense_layers, facts.bare_layers) == (23, 0, 6)
    norms_and_small = sizes.num_parameters(config) - config.vocab_size * config.hidden_size - facts.num_parameters
    assert 0 <= norms_and_small < 2e6
    listed = [{"M": "mamba", "E": "moe", "*": "attention"}[kind] for kind in NEMOTRON_3_NANO["hybrid_override_pattern"]]
    other = {k: v for k, v in NEMOTRON_3_NANO.items() if k != "hybrid_override_pattern"} | {"layers_block_type": listed}
    assert dataclasses.replace(parse(tmp_path, other), raw=None) == dataclasses.replace(config, raw=None)
    for wrong, message in (
        ({"hybrid_override_pattern": "MEXE*" * 11}, "has unknown layers X"),
        ({"hybrid_override_pattern": "ME*EE" * 11}, "feed-forward at layer 4 behind no Mamba2 or attention"),
        ({"hybrid_override_pattern": "ME" * 26}, "has no layer of attention"),
        ({"hybrid_override_pattern": "ME*"}, "has 3 layers, and num_hidden_layers is 52"),
        ({"mlp_hidden_act": "silu"}, "mlp_hidden_act 'silu' is not supported"),
        ({"moe_intermediate_size": 1857}, "moe_intermediate_size 1857 is odd"),
        ({"time_step_limit": [1, 0]}, "time_step_limit must be a list of two ascending numbers"),
        ({"n_groups": 7}, "n_groups 7 does not divide mamba_num_heads 64"),
    ):
        with pytest.raises(ConfigError, match=message):
            parse(tmp_path, NEMOTRON_3_NANO | wrong)


def test_kimi_linear(tmp_path: Path) -> None:
    config = parse(tmp_path, KIMI_LINEAR)
    assert sizes.num_parameters(config) == pytest.approx(49.1e9, rel=2e-3)
    assert num_active_parameters(config) == pytest.approx(3.107e9, rel=1e-3)
    (group,) = config.state_groups
    assert config.cache_groups[0].layers == config.kv_layers == (3, 7, 11, 15, 19, 23, 26)
    assert len(group.layers) == 20 and config.kv_bytes_per_token("bfloat16") == 7 * 576 * 2
    assert group.num_bytes("bfloat16") == 20 * (32 * 128 * 128 * 4 + 3 * 4096 * 3 * 2)
    assert config.context_length == 1 << 20 and sizes.num_gate_elements(config) == 26 * 256 * 2304
    facts = model_facts(KIMI_LINEAR)
    norms_and_small = sizes.num_parameters(config) - config.vocab_size * config.hidden_size - facts.num_parameters
    assert 0 <= norms_and_small < 2e6
    lists = KIMI_LINEAR["linear_attn_config"]
    for wrong, message in (
        ({"mla_use_nope": False}, "mla_use_nope is false"),
        ({"moe_router_activation_func": "softmax"}, "moe_router_activation_func 'softmax' is not supported"),
        ({"linear_attn_config": lists | {"kda_layers": [1]}}, "layer_types, linear_attn_config give 27 layers one of"),
        ({"layer_types": ["linear_attention"] * 27}, "have no layer of MLA"),
    ):
        with pytest.raises(ConfigError, match=message):
            parse(tmp_path, KIMI_LINEAR | wrong)


def test_ling(tmp_path: Path) -> None:
    config = parse(tmp_path, LING_FLASH)
    assert sizes.num_parameters(config) == pytest.approx(124.6e9, rel=5e-3)
    assert num_active_parameters(config) == pytest.approx(5.1e9, rel=2e-2)
    (group,) = config.state_groups
    assert config.kv_layers == (5, 11, 17, 23, 29, 35, 41) and config.kv_bytes_per_token("bfloat16") == 7 * 576 * 2
    assert group.num_bytes("bfloat16") == 35 * (32 * 128 * 128 * 4 + 3 * 4096 * 3 * 2)
    facts = model_facts(LING_FLASH)
    norms_and_small = sizes.num_parameters(config) - config.vocab_size * config.hidden_size - facts.num_parameters
    assert 0 <= norms_and_small < 3e6 and facts.mtp_layers == 1
    moe = parse(tmp_path, LING_FLASH | {"expert_swiglu_limit_list": [0] * 40 + [None, 7]}).moe
    assert moe is not None and moe.clamped and config.moe is not None and not config.moe.clamped
    found = [moe.activation(layer, shared) for layer, shared in ((40, False), (41, False), (41, True), (42, False))]
    assert found == [SILU, GatedActivation(-7.0), SILU, SILU]
    for wrong, message in (
        ({"layer_group_size": 5}, "layer_group_size 5 does not divide the 42 layers; give layer_types"),
        ({"kda_lower_bound": 5.0}, "kda_lower_bound must be negative"),
        ({"no_kda_lora": False}, "no_kda_lora is false"),
        ({"use_mla_nope": True}, "use_mla_nope is set"),
        ({"gated_attention_proj_granularity_type": "element_wise"}, "'element_wise' is not supported"),
        ({"score_function": "softmax"}, "score_function 'softmax' is not supported"),
        ({"num_kv_heads_for_linear_attn": 8}, "num_kv_heads_for_linear_attn 8 is not supported"),
        ({"moe_router_enable_expert_bias": False}, "moe_router_enable_expert_bias is false"),
        ({"expert_swiglu_limit_list": [7] + [0] * 41}, "expert_swiglu_limit_list has a limit of a layer without exp"),
        ({"share_expert_swiglu_limit_list": [0] * 41 + [-7]}, "share_expert_swiglu_limit_list must have numbers of at"),
        ({"expert_swiglu_limit_list": 7}, "expert_swiglu_limit_list must be a list with a number for each layer"),
    ):
        with pytest.raises(ConfigError, match=message):
            parse(tmp_path, LING_FLASH | wrong)


def test_longcat_flash(tmp_path: Path) -> None:
    """Its report has 560 billion parameters, of which a token uses 18.6 to 31.3 billion, 27 billion on average: 12
    experts to none, 8 on average."""
    config = parse(tmp_path, LONGCAT_FLASH)
    attention, moe = config.attention, config.moe
    assert isinstance(attention, MLAConfig) and moe is not None
    assert sizes.num_parameters(config) == pytest.approx(560e9, rel=5e-3)
    each = 28 * 3 * moe.width * config.hidden_size
    most = num_active_parameters(config)
    assert most == pytest.approx(31.3e9, rel=2e-2) and most - 12 * each == pytest.approx(18.6e9, rel=2e-2)
    facts = model_facts(LONGCAT_FLASH)
    assert (facts.top_k, facts.zero_experts, facts.layers, facts.moe_layers) == (8, 256, 56, 28)
    norms_and_small = sizes.num_parameters(config) - config.vocab_size * config.hidden_size - facts.num_parameters
    assert 0 <= norms_and_small < 2e6
    mtp = sizes.num_parameters(config, include_mtp=True) - sizes.num_parameters(config)
    assert mtp == pytest.approx(2 * 6144**2 + 3 * 6144 * 12288 + 90e6, rel=0.1)
    assert config.kv_bytes_per_token("bfloat16") == 56 * 576 * 2 and config.num_nextn_predict_layers == 1
    assert config.moe_layers == (True, False) * 28 and moe.num_choices == 768
    assert config.rope.softmax_factor == 2.0 and attention.latent_factor == pytest.approx(12**0.5)
    plain = parse(tmp_path, LONGCAT_FLASH | {"mla_scale_q_lora": False, "mla_scale_kv_lora": False})
    assert plain.rope.softmax_factor == plain.attention.latent_factor == 1.0  # type: ignore[union-attr]
    cut = parse(tmp_path, LONGCAT_FLASH, overrides={"num_layers": 3})
    assert cut.num_layers == 6 and cut.stored_layers == 56
    ignored = {"modules_to_not_convert": ["model.layers.3.self_attn.1.o_proj", "model.layers.2.mlp.router"]}
    quantized = LONGCAT_FLASH | {"quantization_config": LONGCAT_FLASH["quantization_config"] | ignored}
    format = dataclasses.replace(parse(tmp_path, quantized).weight_format, kept=frozenset({"linear"}))  # type: ignore[type-var]
    assert [format.bytes_per_element(f"model.layers.{i}.self_attn.o_proj", (6144, 8192), 2) > 1.5 for i in (6, 7)] == [
        False, True,
    ]  # fmt: skip
    for wrong, message in (
        ({"zero_expert_type": "copy"}, "zero_expert_type 'copy' is not supported; supported: identity"),
        ({"router_bias": True}, "router_bias True is not supported"),
        ({"attention_method": "GQA"}, "attention_method 'GQA' is not supported"),
        ({"index_topk": 2048}, "index_topk is set"),
        ({"oe_vocab_size_ratio": 2.5}, "oe_vocab_size_ratio is set"),
        ({"n_routed_experts": 8}, "num_experts_per_tok 12 is more than the 8 experts"),
    ):
        with pytest.raises(ConfigError, match=message):
            parse(tmp_path, LONGCAT_FLASH | wrong)


def test_longrope_by_the_longest_request(tmp_path: Path) -> None:
    """One list of factors for all positions: the long one if requests may exceed the original length."""
    long, short = [1.0 + i for i in range(64)], [1.0] * 64
    scaling = {"type": "longrope", "long_factor": long, "short_factor": short}
    fields = LLAMA | {"rope_scaling": scaling, "original_max_position_embeddings": 4096}
    config = parse(tmp_path, fields)
    assert config.context_length == 131072 and config.rope.pair_factors == tuple(long)
    assert config.rope.attention_factor == pytest.approx((1 + 5 / 12) ** 0.5)
    assert config.within(4097).rope == config.rope
    within = config.within(4096).rope
    assert within.pair_factors == tuple(short) and within.attention_factor == config.rope.attention_factor
    assert parse(tmp_path, fields | {"max_position_embeddings": 4096}).rope.pair_factors == tuple(short)
    both = fields | {"rope_scaling": scaling | {"short_mscale": 1.1, "long_mscale": 1.3}}  # Phi-3.5-MoE
    config = parse(tmp_path, both)
    assert (config.rope.attention_factor, config.within(4096).rope.attention_factor) == (1.3, 1.1)
    for wrong, message in (
        ({"long_factor": long[1:]}, "rope_scaling.long_factor must be a list of 64 numbers"),
        ({"short_factor": [0.0] * 64}, "rope_scaling.short_factor must have numbers above 0"),
        ({"long_mscale": 0}, "rope_scaling.long_mscale must be more than 0"),
    ):
        with pytest.raises(ConfigError, match=message):
            parse(tmp_path, LLAMA | {"rope_scaling": scaling | wrong, "original_max_position_embeddings": 4096})


QWEN3_5: dict[str, Any] = {
    "architectures": ["Qwen3_5ForConditionalGeneration"], "model_type": "qwen3_5", "image_token_id": 248056,
    "vision_config": {"depth": 27, "hidden_size": 1152, "num_heads": 16, "intermediate_size": 4304}
    | {"out_hidden_size": 5120, "deepstack_visual_indexes": []},
    "text_config": {
        "model_type": "qwen3_5_text", "hidden_size": 5120, "intermediate_size": 17408, "num_hidden_layers": 64,
        "num_attention_heads": 24, "num_key_value_heads": 4, "head_dim": 256, "full_attention_interval": 4,
        "linear_conv_kernel_dim": 4, "linear_key_head_dim": 128, "linear_num_key_heads": 16,
        "linear_num_value_heads": 48, "linear_value_head_dim": 128, "max_position_embeddings": 262144,
        "vocab_size": 248320, "mtp_num_hidden_layers": 1, "eos_token_id": 248044, "dtype": "bfloat16",
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000000, "partial_rotary_factor": 0.25}
        | {"mrope_section": [11, 11, 10], "mrope_interleaved": True},
    },
}  # fmt: skip
QWEN3_5_MOE_TEXT: dict[str, Any] = {
    "model_type": "qwen3_5_moe_text", "hidden_size": 2048, "num_hidden_layers": 40, "num_attention_heads": 16,
    "num_key_value_heads": 2, "linear_num_value_heads": 32, "num_experts": 256, "num_experts_per_tok": 8,
    "moe_intermediate_size": 512, "shared_expert_intermediate_size": 512,
}  # fmt: skip


def test_qwen3_5(tmp_path: Path) -> None:
    """27B, and 35B-A3B, whose fields have no dense width."""
    config = parse(tmp_path, QWEN3_5)
    assert config.vision is not None and not config.vision.deepstack_layers and config.num_nextn_predict_layers == 1
    assert sizes.num_parameters(config) == pytest.approx(27.4e9, rel=1e-2)
    assert config.rope.width == 64 and len(config.rope.axes) == 32 and config.delta is not None
    assert [config.rope.axes.count(axis) for axis in range(3)] == [11, 11, 10] and config.delta.shared == 3
    text = {key: value for key, value in QWEN3_5["text_config"].items() if key != "intermediate_size"}
    moe = {"text_config": text | QWEN3_5_MOE_TEXT, "architectures": ["Qwen3_5MoeForConditionalGeneration"]}
    moe |= {"vision_config": QWEN3_5["vision_config"] | {"out_hidden_size": 2048}}
    config = parse(tmp_path, QWEN3_5 | moe)
    assert sizes.num_parameters(config) == pytest.approx(35.1e9, rel=1e-2)
    assert num_active_parameters(config) == pytest.approx(3.4e9, rel=5e-2)
    alone = parse(tmp_path, text | QWEN3_5_MOE_TEXT | {"architectures": ["Qwen3_5MoeForCausalLM"]})
    assert alone.vision is None and alone.moe == config.moe


GLM_47_FLASH: dict[str, Any] = {
    "architectures": ["Glm4MoeLiteForCausalLM"], "model_type": "glm4_moe_lite", "hidden_size": 2048,
    "intermediate_size": 10240, "moe_intermediate_size": 1536, "num_hidden_layers": 47, "num_attention_heads": 20,
    "num_key_value_heads": 20, "n_routed_experts": 64, "n_shared_experts": 1, "num_experts_per_tok": 4, "n_group": 1,
    "topk_group": 1, "topk_method": "noaux_tc", "norm_topk_prob": True, "routed_scaling_factor": 1.8,
    "kv_lora_rank": 512, "q_lora_rank": 768, "qk_rope_head_dim": 64, "qk_nope_head_dim": 192, "v_head_dim": 256,
    "first_k_dense_replace": 1, "num_nextn_predict_layers": 1, "rope_theta": 1000000, "vocab_size": 154880,
    "max_position_embeddings": 202752, "eos_token_id": [154820, 154827, 154829], "rms_norm_eps": 1e-5,
}  # fmt: skip


def test_glm_47_flash(tmp_path: Path) -> None:
    config = parse(tmp_path, GLM_47_FLASH)
    assert sizes.num_parameters(config) == pytest.approx(29.9e9, rel=1e-2)
    assert num_active_parameters(config) == pytest.approx(3.3e9, rel=1e-1)
    assert config.moe_layers == (False,) + (True,) * 46
    kinds = {"mlp_layer_types": ["dense", "dense"] + ["sparse"] * 45}
    assert parse(tmp_path, GLM_47_FLASH | kinds).moe_layers == (False,) * 2 + (True,) * 45
    with pytest.raises(ConfigError, match="mlp_layer_types needs 47 of dense, sparse"):
        parse(tmp_path, GLM_47_FLASH | {"mlp_layer_types": ["dense"]})


GLM_45: dict[str, Any] = {
    "architectures": ["Glm4MoeForCausalLM"], "model_type": "glm4_moe", "hidden_size": 5120,
    "intermediate_size": 12288, "moe_intermediate_size": 1536, "num_hidden_layers": 92, "num_attention_heads": 96,
    "num_key_value_heads": 8, "head_dim": 128, "partial_rotary_factor": 0.5, "attention_bias": True,
    "use_qk_norm": True, "n_routed_experts": 160, "n_shared_experts": 1, "num_experts_per_tok": 8, "n_group": 1,
    "topk_group": 1, "routed_scaling_factor": 2.5, "norm_topk_prob": True, "first_k_dense_replace": 3,
    "num_nextn_predict_layers": 1, "rope_theta": 1000000, "max_position_embeddings": 131072, "vocab_size": 151552,
    "eos_token_id": [151329, 151336, 151338], "rms_norm_eps": 1e-5, "torch_dtype": "bfloat16",
}  # fmt: skip


def test_glm_45(tmp_path: Path) -> None:
    config = parse(tmp_path, GLM_45)
    assert sizes.num_parameters(config) == pytest.approx(352.8e9, rel=2e-3)
    assert num_active_parameters(config) == pytest.approx(32.0e9, rel=4e-2)
    assert config.moe_layers == (False,) * 3 + (True,) * 89 and config.rope.width == 64
    attention = config.attention
    assert isinstance(attention, GQAConfig) and attention.qk_norm == "head"
    assert attention.qkv_bias and not attention.o_bias
    no_part = {name: value for name, value in GLM_45.items() if name != "partial_rotary_factor"}
    air = parse(tmp_path, no_part | {"use_qk_norm": False})
    assert air.rope.width == 64 and not air.attention.qk_norm  # type: ignore[union-attr]


def test_a_rank_may_read_more_than_its_share_of_experts(tmp_path: Path) -> None:
    """12 blocks of 128 channels: three on each of 4 ranks, two or one on each of 8. Whole experts are equal parts."""
    fp8 = {"quant_method": "fp8", "weight_block_size": [128, 128], "activation_scheme": "dynamic"}
    blocks = parse(tmp_path, GLM_45 | {"quantization_config": fp8})
    plain = parse(tmp_path, GLM_45)

    def experts(config: ModelConfig, **ranks: int) -> float:
        return sizes.bytes_per_weight(config, 2, Topology(**ranks), config.weight_format)[0]

    assert experts(blocks, tp_size=4) == experts(blocks, tp_size=8, ep_size=8) == pytest.approx(1 + 4 / 128**2)
    assert experts(blocks, tp_size=8) == pytest.approx(4 / 3 * (1 + 4 / 128**2))
    assert experts(plain, tp_size=8) == 2


def test_kimi_k2_reads_as_deepseek_v3(tmp_path: Path) -> None:
    kimi = {"model_type": "kimi_k2", "num_attention_heads": 64, "n_routed_experts": 384, "n_group": 1, "topk_group": 1}
    config = parse(tmp_path, V3 | kimi | {"num_nextn_predict_layers": 0, "architectures": None})
    assert config.moe is not None and config.moe.num_experts == 384 and config.attention.num_heads == 64
    assert config.architecture == "DeepseekV3ForCausalLM"
    both = parse(tmp_path, V3 | {"architectures": ["UnknownForCausalLM", "DeepseekV3ForCausalLM"]})
    assert both.architecture == "DeepseekV3ForCausalLM"


SIZES: list[tuple[dict[str, Any], float, float]] = [
    (
        {"architectures": ["Dots1ForCausalLM"], "model_type": "dots1", "hidden_size": 4096, "intermediate_size": 10944}
        | {"moe_intermediate_size": 1408, "num_hidden_layers": 62, "num_attention_heads": 32, "vocab_size": 152064}
        | {"num_key_value_heads": 32, "n_routed_experts": 128, "n_shared_experts": 2, "num_experts_per_tok": 6}
        | {"first_k_dense_replace": 1, "norm_topk_prob": True, "routed_scaling_factor": 2.5, "sliding_window": None},
        142.8e9, 14.2e9,
    ),
    (
        {"architectures": ["Ernie4_5_MoeForCausalLM"], "model_type": "ernie4_5_moe", "hidden_size": 2560}
        | {"intermediate_size": 12288, "moe_intermediate_size": 1536, "num_hidden_layers": 28, "vocab_size": 103424}
        | {"num_attention_heads": 20, "num_key_value_heads": 4, "moe_num_experts": 64, "moe_k": 6}
        | {"moe_num_shared_experts": 2, "moe_layer_start_index": 1, "moe_layer_end_index": 28, "use_bias": False},
        21.8e9, 3.0e9,
    ),
    (
        {"architectures": ["HunYuanMoEV1ForCausalLM"], "model_type": "hunyuan_v1_moe", "hidden_size": 4096}
        | {"intermediate_size": 3072, "moe_intermediate_size": [3072] * 32, "moe_topk": [8] * 32, "num_experts": 64}
        | {"num_shared_expert": [1] * 32, "num_hidden_layers": 32, "num_attention_heads": 32, "vocab_size": 128167}
        | {"num_key_value_heads": 8, "attention_head_dim": 128, "use_cla": False, "tie_word_embeddings": True}
        | {"rope_scaling": {"type": "dynamic", "alpha": 1000.0, "factor": 1.0, "beta_fast": 32, "mscale": 1.0}},
        80.4e9, 13.0e9,
    ),
    (
        {"architectures": ["Phi3ForCausalLM"], "model_type": "phi3", "hidden_size": 5120, "intermediate_size": 17920}
        | {"num_hidden_layers": 40, "num_attention_heads": 40, "num_key_value_heads": 10, "vocab_size": 100352}
        | {"rope_theta": 250000, "sliding_window": None, "rope_scaling": None},
        14.7e9, 14.1e9,
    ),
    (
        {"architectures": ["MinistralForCausalLM"], "model_type": "ministral", "hidden_size": 4096, "head_dim": 128}
        | {"intermediate_size": 12288, "num_hidden_layers": 36, "num_attention_heads": 32, "num_key_value_heads": 8}
        | {"vocab_size": 131072, "sliding_window": 32768},
        8.02e9, 7.48e9,
    ),
    (
        {"architectures": ["Olmo2ForCausalLM"], "model_type": "olmo2", "hidden_size": 5120, "intermediate_size": 27648}
        | {"num_hidden_layers": 64, "num_attention_heads": 40, "num_key_value_heads": 8, "vocab_size": 100352},
        32.2e9, 31.7e9,
    ),
    (
        {"architectures": ["Olmo3ForCausalLM"], "model_type": "olmo3", "hidden_size": 4096, "intermediate_size": 11008}
        | {"num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 32, "vocab_size": 100278}
        | {"sliding_window": 4096, "rope_theta": 500000},
        7.3e9, 6.89e9,
    ),
    (
        {"architectures": ["SmolLM3ForCausalLM"], "model_type": "smollm3", "hidden_size": 2048, "num_hidden_layers": 36}
        | {"intermediate_size": 11008, "num_attention_heads": 16, "num_key_value_heads": 4, "vocab_size": 128256}
        | {"no_rope_layer_interval": 4, "use_sliding_window": False},
        3.08e9, 3.08e9,
    ),
    (
        {"architectures": ["Exaone4ForCausalLM"], "model_type": "exaone4", "hidden_size": 5120, "head_dim": 128}
        | {"intermediate_size": 27392, "num_hidden_layers": 64, "num_attention_heads": 40, "num_key_value_heads": 8}
        | {"vocab_size": 102400, "sliding_window": 4096, "sliding_window_pattern": "LLLG"}
        | {"layer_types": (["sliding_attention"] * 3 + ["full_attention"]) * 16},
        32.0e9, 31.5e9,
    ),
    (
        {"architectures": ["GraniteForCausalLM"], "model_type": "granite", "hidden_size": 4096, "vocab_size": 49155}
        | {"intermediate_size": 12800, "num_hidden_layers": 40, "num_attention_heads": 32, "num_key_value_heads": 8}
        | {"tie_word_embeddings": True, "embedding_multiplier": 12.0, "residual_multiplier": 0.22}
        | {"attention_multiplier": 0.0078125, "logits_scaling": 16.0},
        8.17e9, 8.17e9,
    ),
    (
        {"architectures": ["GraniteMoeForCausalLM"], "model_type": "granitemoe", "hidden_size": 1536}
        | {"intermediate_size": 512, "num_hidden_layers": 32, "num_attention_heads": 24, "num_key_value_heads": 8}
        | {"num_local_experts": 40, "num_experts_per_tok": 8, "vocab_size": 49155, "tie_word_embeddings": True},
        3.3e9, 0.88e9,
    ),
    (
        {"architectures": ["GraniteMoeHybridForCausalLM"], "model_type": "granitemoehybrid", "hidden_size": 1536}
        | {"intermediate_size": 512, "num_hidden_layers": 40, "num_attention_heads": 12, "num_key_value_heads": 4}
        | {"num_local_experts": 64, "num_experts_per_tok": 6, "vocab_size": 100352, "tie_word_embeddings": True}
        | {"shared_intermediate_size": 1024, "mamba_n_heads": 48, "mamba_d_state": 128, "mamba_d_head": 64}
        | {"layer_types": ["mamba" if i not in (5, 15, 25, 35) else "attention" for i in range(40)]},
        6.94e9, 1.47e9,
    ),
    (
        {"architectures": ["GlmForCausalLM"], "model_type": "glm", "hidden_size": 4096, "intermediate_size": 13696}
        | {"num_hidden_layers": 40, "num_attention_heads": 32, "num_key_value_heads": 2, "vocab_size": 151552}
        | {"attention_bias": True, "partial_rotary_factor": 0.5, "head_dim": 128},
        9.4e9, 8.8e9,
    ),
    (
        {"architectures": ["Glm4ForCausalLM"], "model_type": "glm4", "hidden_size": 6144, "intermediate_size": 23040}
        | {"num_hidden_layers": 61, "num_attention_heads": 48, "num_key_value_heads": 8, "vocab_size": 151552}
        | {"attention_bias": False, "partial_rotary_factor": 0.5, "head_dim": 128},
        33.1e9, 32.2e9,
    ),
    (
        {"architectures": ["OlmoeForCausalLM"], "model_type": "olmoe", "hidden_size": 2048, "intermediate_size": 1024}
        | {"num_hidden_layers": 16, "num_attention_heads": 16, "num_experts": 64, "num_experts_per_tok": 8}
        | {"vocab_size": 50304, "norm_topk_prob": False},
        6.9e9, 1.3e9,
    ),
    (
        {"architectures": ["FlexOlmoForCausalLM"], "model_type": "flex_olmo", "hidden_size": 4096}
        | {"intermediate_size": 11008, "num_hidden_layers": 32, "num_attention_heads": 32, "num_experts": 7}
        | {"num_experts_per_tok": 5, "vocab_size": 100352},
        33.3e9, 24.2e9,
    ),
    (K_EXAONE, 236.0e9, 22.9e9),
    (FLINT, 40.0e9, 2.5e9),
    (LING_MINI, 16.3e9, 1.11e9),  # 789 million without embedding and head
    (
        {"architectures": ["MellumForCausalLM"], "model_type": "mellum", "hidden_size": 2304, "num_hidden_layers": 28}
        | {"intermediate_size": 7168, "num_attention_heads": 32, "moe_intermediate_size": 896, "vocab_size": 98304}
        | {"layer_types": ["full_attention", *["sliding_attention"] * 3] * 7, "num_local_experts": 64},
        12.1e9, 2.5e9,
    ),
    (
        {"architectures": ["MiMoForCausalLM"], "model_type": "mimo", "hidden_size": 4096, "intermediate_size": 11008}
        | {"num_hidden_layers": 36, "num_attention_heads": 32, "num_key_value_heads": 8, "attention_bias": True}
        | {"vocab_size": 151680, "num_nextn_predict_layers": 1, "use_sliding_window": False, "rope_theta": 640000},
        7.62e9, 6.99e9,
    ),
    (AXK1, 519e9, 33e9),
    (LFM2_8B_A1B, 8.34e9, 1.56e9),
    (
        {"architectures": ["Lfm2ForCausalLM"], "model_type": "lfm2", "hidden_size": 2048, "block_ff_dim": 12288}
        | {"intermediate_size": 12288, "block_auto_adjust_ff_dim": True, "block_ffn_dim_multiplier": 1.0}
        | {"block_multiple_of": 256, "full_attn_idxs": [2, 5, 8, 10, 12, 14], "num_hidden_layers": 16}
        | {"num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 65536},
        1.17e9, 1.17e9,
    ),
    (GRANITE_SWA, 2.15e9, 2.15e9),
    (
        {"architectures": ["YoutuForCausalLM"], "model_type": "youtu", "hidden_size": 2048, "intermediate_size": 6144}
        | {"num_hidden_layers": 32, "num_attention_heads": 16, "q_lora_rank": 1536, "kv_lora_rank": 512}
        | {"qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128, "vocab_size": 128256},
        1.96e9, 1.96e9,
    ),
    (
        {"architectures": ["SeedOssForCausalLM"], "model_type": "seed_oss", "hidden_size": 5120}
        | {"intermediate_size": 27648, "num_hidden_layers": 64, "num_attention_heads": 80, "num_key_value_heads": 8}
        | {"vocab_size": 155136, "rope_theta": 10000000.0, "attention_bias": True},
        36.2e9, 35.4e9,
    ),
    (GEMMA_2_9B, 9.24e9, 9.24e9),
    (
        {"architectures": ["Gemma3ForCausalLM"], "model_type": "gemma3_text", "hidden_size": 1152}
        | {"intermediate_size": 6912, "num_hidden_layers": 26, "num_attention_heads": 4, "num_key_value_heads": 1}
        | {"head_dim": 256, "vocab_size": 262144, "sliding_window": 512, "sliding_window_pattern": 6},
        1.0e9, 1.0e9,
    ),
    (
        {"architectures": ["Gemma4ForConditionalGeneration"], "model_type": "gemma4", "vision_config": {}}
        | {
            "text_config": {"model_type": "gemma4_text", "hidden_size": 2816, "intermediate_size": 2112}
            | {"num_hidden_layers": 30, "num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 256}
            | {"num_global_key_value_heads": 2, "attention_k_eq_v": True, "hidden_size_per_layer_input": 0}
            | {"enable_moe_block": True, "num_experts": 128, "top_k_experts": 8, "moe_intermediate_size": 704}
            | {"sliding_window": 1024, "final_logit_softcapping": 30.0, "use_bidirectional_attention": "vision"}
        },
        25.2e9, 3.8e9,
    ),
    (
        {"architectures": ["Gemma3ForConditionalGeneration"], "model_type": "gemma3", "mm_tokens_per_image": 256}
        | {"vision_config": GEMMA_TOWER}
        | {
            "text_config": {"model_type": "gemma3_text", "hidden_size": 5376, "intermediate_size": 21504}
            | {"num_hidden_layers": 62, "num_attention_heads": 32, "num_key_value_heads": 16, "head_dim": 128}
            | {"query_pre_attn_scalar": 168, "rope_scaling": {"factor": 8.0, "rope_type": "linear"}}
            | {"sliding_window": 1024}
        },
        27.4e9, 27.0e9,
    ),
    (
        {"architectures": ["Qwen2MoeForCausalLM"], "model_type": "qwen2_moe", "hidden_size": 3584}
        | {"intermediate_size": 18944, "moe_intermediate_size": 2560, "shared_expert_intermediate_size": 20480}
        | {"num_hidden_layers": 28, "num_attention_heads": 28, "num_key_value_heads": 4, "num_experts": 64}
        | {"num_experts_per_tok": 8, "norm_topk_prob": False, "vocab_size": 151936},
        57.4e9, 14.2e9,
    ),
    (
        {"architectures": ["Cohere2ForCausalLM"], "model_type": "cohere2", "hidden_size": 4096, "head_dim": 128}
        | {"intermediate_size": 14336, "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8}
        | {"vocab_size": 256000, "rope_theta": 50000, "max_position_embeddings": 132096, "logit_scale": 0.25},
        8.03e9, 8.03e9,
    ),
    (
        {"architectures": ["Cohere2ForCausalLM"], "model_type": "cohere2", "hidden_size": 12288, "head_dim": 128}
        | {"intermediate_size": 36864, "num_hidden_layers": 64, "num_attention_heads": 96, "num_key_value_heads": 8}
        | {"vocab_size": 256000, "rope_theta": 50000, "max_position_embeddings": 131072, "logit_scale": 0.25},
        111e9, 111e9,
    ),
    (COMMAND_A_PLUS, 218e9, 25e9),
    (
        {"architectures": ["PhiMoEForCausalLM"], "model_type": "phimoe", "hidden_size": 4096, "intermediate_size": 6400}
        | {"num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 32064}
        | {"num_local_experts": 16, "num_experts_per_tok": 2, "attention_bias": True, "lm_head_bias": True}
        | {"sliding_window": 131072, "rope_theta": 10000.0, "rope_scaling": None},
        41.9e9, 6.6e9,
    ),
    (
        {"architectures": ["HYV3ForCausalLM"], "model_type": "hy_v3", "hidden_size": 4096, "intermediate_size": 13312}
        | {"num_hidden_layers": 80, "num_attention_heads": 64, "num_key_value_heads": 8, "head_dim": 128}
        | {"num_experts": 192, "num_experts_per_tok": 8, "num_shared_experts": 1, "moe_intermediate_size": 1536}
        | {"router_scaling_factor": 2.826, "vocab_size": 120832, "num_nextn_predict_layers": 1},
        295e9, 21e9,
    ),
    (
        {"architectures": ["Mistral3ForConditionalGeneration"], "vision_config": {"model_type": "pixtral"}}
        | {
            "text_config": {"model_type": "mistral4", "hidden_size": 4096, "intermediate_size": 12288}
            | {"moe_intermediate_size": 2048, "num_hidden_layers": 36, "num_attention_heads": 32, "vocab_size": 131072}
            | {"n_routed_experts": 128, "n_shared_experts": 1, "num_experts_per_tok": 4, "first_k_dense_replace": 0}
            | {"kv_lora_rank": 256, "q_lora_rank": 1024, "qk_rope_head_dim": 64, "qk_nope_head_dim": 64}
            | {"v_head_dim": 128, "max_position_embeddings": 1048576, "n_group": 1, "topk_group": 1}
            | {"rope_parameters": V3["rope_scaling"] | {"llama_4_scaling_beta": 0.1, "rope_theta": 1e4}}
        },
        119e9, 6.5e9,
    ),
]  # fmt: skip


@pytest.mark.parametrize(("fields", "total", "active"), SIZES, ids=lambda value: str(value)[:40])
def test_sizes_of_published_models(tmp_path: Path, fields: dict[str, Any], total: float, active: float) -> None:
    config = parse(tmp_path, {"max_position_embeddings": 32768, "eos_token_id": 2} | fields)
    assert sizes.num_parameters(config) == pytest.approx(total, rel=1e-2)
    assert num_active_parameters(config) == pytest.approx(active, rel=0.13)  # some count a head, some an embedding


@pytest.mark.parametrize("kind", [*KINDS, *MORE_KINDS])
def test_both_dialects_say_the_same(tmp_path: Path, kind: str) -> None:
    hub = load_model_config(make_checkpoint(kind, tmp_path / "hub", dialect="hub", tokenizer=False))
    saved = load_model_config(make_checkpoint(kind, tmp_path / "saved", dialect="transformers", tokenizer=False))
    same = {"source": "", "raw": None}
    assert dataclasses.replace(hub, **same) == dataclasses.replace(saved, **same)  # type: ignore[arg-type]


def test_ints_may_be_floats_and_eos_ids_are_joined(tmp_path: Path) -> None:
    fields = V3 | {"hidden_size": 7168.0, "rope_scaling": V3["rope_scaling"] | {"factor": 40.0, "beta_fast": 32.0}}
    fields |= {"bos_token_id": 0.0, "eos_token_id": 1.0}
    fields["quantization_config"] = V3["quantization_config"] | {"weight_block_size": [128.0, 64.0]}
    path = write(tmp_path, fields, {"eos_token_id": [1, 128805]})
    config = load_model_config(path)
    assert config.hidden_size == 7168 and isinstance(config.hidden_size, int)
    assert config.eos_token_ids == (1, 128805)
    with pytest.raises(ConfigError, match=r"generation_config\.json: eos_token_id must be an integer"):
        load_model_config(write(tmp_path, fields, {"eos_token_id": [1, "x"]}))
    assert config.weight_format == BlockFP8Format((128, 64))


def test_overrides_are_merged(tmp_path: Path) -> None:
    overrides = {"num_hidden_layers": 4, "rope_scaling": {"factor": 2}}
    config = parse(tmp_path, V3, overrides=overrides)
    assert config.num_layers == len(config.moe_layers) == 4
    assert config.rope.factor == 2 and config.rope.original_max_position == 4096


def test_head_dim_and_kv_heads_mean_nothing_to_mla(tmp_path: Path) -> None:
    assert parse(tmp_path, V3 | {"head_dim": 64, "num_key_value_heads": 1}).attention.cache_width == 576


def test_sliding_windows_by_layer(tmp_path: Path) -> None:
    mistral = LLAMA | {"architectures": ["MistralForCausalLM"], "model_type": "mistral", "sliding_window": 4096}
    config = parse(tmp_path, mistral)
    assert config.context_length == 131072 and config.windows == (4096,) * config.num_layers
    assert config.cache_groups == (CacheGroup(tuple(range(config.num_layers)), 4096),)
    assert config.within(4096).windows == () and config.within(4097) is config
    qwen = LLAMA | {"architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "sliding_window": 4096}
    for off in ({}, {"use_sliding_window": False}):
        assert parse(tmp_path, qwen | off).windows == () and len(parse(tmp_path, qwen | off).cache_groups) == 1
    half = parse(tmp_path, qwen | {"use_sliding_window": True, "max_window_layers": 3})
    assert half.cache_groups[0] == CacheGroup((0, 1, 2)) and half.cache_groups[1].window == 4096
    assert half.cache_groups[1].layers == tuple(range(3, half.num_layers))
    kinds = ["sliding_attention", "full_attention"] * half.num_layers
    mixed = parse(tmp_path, qwen | {"use_sliding_window": True, "layer_types": kinds[: half.num_layers]})
    assert mixed.windows[:3] == (4096, None, 4096)
    assert parse(tmp_path, LLAMA | {"sliding_window": 4096}).windows == ()


QWEN2 = LLAMA | {"architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "sliding_window": 8}

SIZED = {fields["architectures"][0]: fields for fields, *_ in SIZES}
BAD: list[tuple[dict[str, Any], list[str]]] = [
    (
        QWEN2 | {"use_sliding_window": True, "layer_types": ["chunked_attention"] * 99},
        ["layer_types", "sliding_attent"],
    ),
    (V3 | {"architectures": ["FalconForCausalLM"]}, ["FalconForCausalLM", "DeepseekV3ForCausalLM", "LlamaForCausalLM"]),
    (MINIMAX_M2 | {"attn_type_list": [0, 1]}, ["attn_type_list", "linear attention"]),
    (MINIMAX_M2 | {"qk_norm_type": "per_head"}, ["qk_norm_type", "per_head", "per_layer"]),
    (MINIMAX_M2 | {"rotary_dim": 256}, ["rotary_dim", "256", "128"]),
    (V3 | {"topk_method": "best"}, ["topk_method", "best", "noaux_tc"]),
    (
        SIZED["Ernie4_5_MoeForCausalLM"] | {"max_position_embeddings": 9, "use_bias": True},
        ["use_bias", "not supported"],
    ),
    (
        SIZED["HunYuanMoEV1ForCausalLM"] | {"max_position_embeddings": 9, "moe_topk": [8, 7] * 16},
        ["moe_topk", "same value", "32 layers"],
    ),
    (SIZED["HunYuanMoEV1ForCausalLM"] | {"max_position_embeddings": 9, "use_cla": True}, ["use_cla", "another layer"]),
    (
        SIZED["Mistral3ForConditionalGeneration"] | {"text_config": {"model_type": "pixtral"}},
        ["text_config.model_type", "pixtral", "ministral3"],
    ),
    (V3 | {"scoring_func": "tanh"}, ["scoring_func", "sigmoid"]),
    (V3 | {"n_group": 7}, ["n_group", "7", "256"]),
    (V3 | {"topk_group": 9}, ["topk_group", "9"]),
    (V3 | {"num_experts_per_tok": 200}, ["num_experts_per_tok", "128"]),
    (V3 | {"kv_lora_rank": None}, ["kv_lora_rank", "missing"]),
    (V3 | {"hidden_size": "big"}, ["hidden_size", "whole number", "big"]),
    (V3 | {"hidden_size": 0}, ["hidden_size", "at least 1"]),
    (V3 | {"quantization_config": {"quant_method": "hqq"}}, ["quantization_config.quant_method", "hqq"]),
    (V3 | {"rope_scaling": {"type": "ntk", "factor": 2}}, ["rope_scaling.rope_type", "longrope", "yarn"]),
    (V3 | {"rope_scaling": {"type": "longrope", "factor": 2}}, ["rope_scaling.long_factor", "a list of 32 numbers"]),
    (V3 | {"rope_scaling": [1]}, ["rope_scaling", "object"]),
    (V3 | {"rope_theta": 0}, ["rope_theta", "more than 0"]),
    (V3 | {"rms_norm_eps": -1e-6}, ["rms_norm_eps", "more than 0"]),
    (V3 | {"rope_scaling": {"type": "yarn", "factor": -4}}, ["rope_scaling.factor", "more than 0"]),
    (V3 | {"hidden_size": float("inf")}, ["hidden_size", "inf"]),
    (
        LLAMA | {"rope_scaling": {"rope_type": "llama3", "factor": 8, "low_freq_factor": 4, "high_freq_factor": 3}},
        ["rope_scaling.high_freq_factor", "3 is less than low_freq_factor 4"],
    ),
    (V3 | {"hidden_act": "gelu"}, ["hidden_act", "gelu"]),
    (LLAMA | {"num_key_value_heads": 5}, ["num_key_value_heads", "5", "32"]),
    (LLAMA | {"hidden_size": 4097}, ["hidden_size", "4097", "32"]),
    (LLAMA | {"eos_token_id": "stop"}, ["eos_token_id"]),
    (LLAMA | {"tie_word_embeddings": "yes"}, ["tie_word_embeddings", "true or false"]),
]


@pytest.mark.parametrize(("fields", "words"), BAD, ids=["-".join(words[:2]) for _, words in BAD])
def test_contradictions_name_file_and_field(tmp_path: Path, fields: dict[str, Any], words: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        parse(tmp_path, fields)
    assert str(tmp_path / "config.json") in str(caught.value)
    for word in words:
        assert word in str(caught.value)


LISTS = (
    "layer_types", "mlp_layer_types", "mlp_only_layers", "yarn_only_types", "partial_rotary_factors", "indexer_types",
    "mtp_layers_block_type", "num_attention_heads_per_layer",
)  # fmt: skip


@pytest.mark.parametrize("name", LISTS)
def test_members_of_a_wrong_type(tmp_path: Path, name: str) -> None:
    """A list by layer that is none, or has members without a hash: an error of every family, or no effect."""
    refused = 0
    for kind in {*KINDS, *MORE_KINDS, *SPARSE_KINDS} & {*_BY_MODEL_TYPE}:
        for value in (1.5, [{"a": 1}] * 9):
            try:
                parse(tmp_path, hub_fields(kind) | {"model_type": kind, name: value})
            except ConfigError as error:
                refused += name.removesuffix("s") in str(error)
    assert refused


def test_missing_and_broken_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match="no such file"):
        load_model_config(tmp_path)
    (tmp_path / "config.json").write_text("{")
    (tmp_path / "weights").write_text("a file, not a directory")
    with pytest.raises(ConfigError, match="weights: a file; --model-path must be a Hugging Face checkpoint directory"):
        load_model_config(tmp_path / "weights")
    with pytest.raises(ConfigError, match="JSON"):
        load_model_config(tmp_path)
    parse(tmp_path, LLAMA)
    (tmp_path / "config.json").write_text((tmp_path / "config.json").read_text(), encoding="utf-8-sig")
    load_model_config(tmp_path)  # with the byte order mark of an editor
    (tmp_path / "generation_config.json").symlink_to(tmp_path / "blobs")
    with pytest.raises(ConfigError, match=r"generation_config\.json: a link to a missing file; copy the whole"):
        load_model_config(tmp_path)

    (tmp_path / "pipe").mkdir()
    for name, read in (("config.json", load_model_config), ("pytorch_model.bin", read_checkpoint)):
        os.mkfifo(tmp_path / "pipe" / name)  # to open it would block
        with pytest.raises(MoeEngineError, match=rf"{name}: cannot be read \(no regular file\)"):
            read(tmp_path / "pipe")

    def denied(*_: object, **__: object) -> None:
        raise PermissionError(13, "Permission denied")

    for name in ("read_text", "open"):
        monkeypatch.setattr(Path, name, denied)
    with pytest.raises(ConfigError, match=r"config\.json: cannot be read \(Permission denied\)$"):
        load_model_config(tmp_path)
    with pytest.raises(ConfigError, match=r"weights: cannot be read .*; give the user of this process the permission"):
        read_header(tmp_path / "weights")


def test_activation_dtype(tmp_path: Path) -> None:
    llama = parse(tmp_path, LLAMA)
    wide = dataclasses.replace(llama, checkpoint_dtype="float32")
    half = dataclasses.replace(llama, checkpoint_dtype="float16")
    assert [activation_dtype(c) for c in (llama, wide, half)] == ["bfloat16", "float32", "float16"]
    assert activation_dtype(wide, device_kind="cuda") == "float16"
    assert activation_dtype(wide, "bfloat16") == "bfloat16"
    unquantized = dataclasses.replace(parse(tmp_path, V3), weight_format=PLAIN, checkpoint_dtype="float16")
    assert activation_dtype(unquantized) == "bfloat16"
    with pytest.raises(ConfigError, match="--dtype"):
        activation_dtype(llama, "int8")


def test_rotary_base_of_scaled_positions_without_one() -> None:
    """The default of transformers' config class, of whole models and of their text models."""
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    for kind in [kind for kind in _BY_MODEL_TYPE if kind in CONFIG_MAPPING]:
        text: Any = CONFIG_MAPPING[kind].sub_configs.get("text_config", CONFIG_MAPPING[kind])
        for name in {kind, getattr(text, "model_type", "") or kind}:
            found = with_defaults({"model_type": name, "rope_scaling": {"type": "linear", "factor": 2.0}})
            expected = getattr(text, "rope_theta", getattr(text, "default_theta", 1e4))  # a field of some classes
            if isinstance(expected, dict):  # one of each kind of layer: in the parser of the family
                continue
            assert found.get("rope_theta", 1e4) == expected, name


def test_activation_estimate_grows(tmp_path: Path) -> None:
    config = parse(tmp_path, V3)
    small, large = (step_memory.largest_step_activation_bytes(config, n, 2) for n in (128, 8192))
    assert 0 < small < large
    assert (
        step_memory.largest_step_activation_bytes(config, 128, 2, num_logits=128) - small == 128 * config.vocab_size * 6
    )


def test_reading_a_config_imports_no_torch(tmp_path: Path) -> None:
    path = write(tmp_path, V3)
    code = (
        "import sys; from moe_engine.models import load_model_config, sizes; import moe_engine.models.registry;"
        f"sizes.weight_bytes(load_model_config({str(path)!r}), 2); assert 'torch' not in sys.modules"
    )
    root = Path(__file__).parents[2]
    subprocess.run([sys.executable, "-c", code], check=True, cwd=root)
