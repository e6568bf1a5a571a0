"""Laguna: the published file, sizes, NVFP4 as published, and refusals. `test_parity.py` compares logits."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from moe_engine.errors import ConfigError
from moe_engine.models import sizes
from moe_engine.models.checkpoint_files import read_checkpoint
from moe_engine.models.config import GQAConfig
from moe_engine.models.config_file import load_model_config
from moe_engine.models.header_check import check_headers
from moe_engine.models.widths import widths_of
from moe_engine.tuning.costs.model_facts import model_facts
from tests.models.checkpoints import make_checkpoint
from tests.models.format_checks import logits_of, write_pair
from tests.models.parameters import num_active_parameters
from tests.models.quantized_floats import nvfp4_compressed
from tests.models.test_config import parse

KINDS = ["sliding_attention" if i % 4 else "full_attention" for i in range(40)]
PUBLISHED: dict[str, Any] = {
    "architectures": ["LagunaForCausalLM"], "model_type": "laguna", "vocab_size": 100352, "hidden_size": 2048,
    "intermediate_size": 8192, "num_hidden_layers": 40, "num_attention_heads": 48, "num_key_value_heads": 8,
    "head_dim": 128, "max_position_embeddings": 131072, "attention_bias": False, "rms_norm_eps": 1e-6,
    "num_experts": 256, "num_experts_per_tok": 8, "moe_intermediate_size": 512, "shared_expert_intermediate_size": 512,
    "norm_topk_prob": True, "mlp_only_layers": [0], "decoder_sparse_step": 1, "moe_routed_scaling_factor": 2.5,
    "moe_router_logit_softcapping": 0.0, "moe_apply_router_weight_on_input": False, "gating": True,
    "swa_attention_sink_enabled": False, "eos_token_id": [2, 24], "tie_word_embeddings": False,
    "torch_dtype": "bfloat16", "sliding_window": 512, "layer_types": KINDS,
    "num_attention_heads_per_layer": [64 if kind == KINDS[1] else 48 for kind in KINDS],
    "rope_parameters": {
        "full_attention": {
            "rope_theta": 500000.0, "rope_type": "yarn", "factor": 32.0, "original_max_position_embeddings": 4096,
            "beta_slow": 1.0, "beta_fast": 64.0, "attention_factor": 1.0, "partial_rotary_factor": 0.5,
        },
        "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 1.0},
        "original_max_position_embeddings": 4096,
    },
}  # fmt: skip
"""Laguna XS.2."""


def test_the_published_model(tmp_path: Path) -> None:
    """33B, 3B of them for a token with the embedding."""
    config = parse(tmp_path, PUBLISHED)
    assert sizes.num_parameters(config) == pytest.approx(33.4e9, rel=5e-3)
    assert num_active_parameters(config) + 100352 * 2048 == pytest.approx(3.0e9, rel=1e-2)
    full, windowed = config.cache_groups
    assert full.layers == tuple(range(0, 40, 4)) and windowed.window == 512
    whole, own = config.attention_of(0), config.attention_of(1)
    assert isinstance(whole, GQAConfig) and isinstance(own, GQAConfig)
    assert (whole.num_heads, own.num_heads, own.gate_width, own.gate_softplus) == (48, 64, 1, True)
    ropes = [(rope.kind, rope.theta, rope.width, rope.attention_factor) for rope in config.ropes]
    assert ropes == [("yarn", 5e5, 64, 1.0), ("default", 1e4, 128, 1.0)]
    assert config.moe is not None and config.moe.scale == 2.5 and config.moe.has_bias
    assert config.moe_layers == (False,) + (True,) * 39 and config.context_length == 131072
    assert widths_of(config).num_heads == 16
    facts = model_facts(PUBLISHED)
    small = sizes.num_parameters(config) - config.vocab_size * config.hidden_size - facts.num_parameters
    assert 0 <= small < 1e6 and facts.dense_layers == 1
    assert [(kind.layers, kind.keeps) for kind in facts.attention] == [(10, 0), (30, 512)]
    by_channel = parse(tmp_path, PUBLISHED | {"gating": "per-element"})
    more = sizes.num_parameters(by_channel) - sizes.num_parameters(config)
    assert more == 127 * 2048 * (10 * 48 + 30 * 64)
    own_facts = model_facts(PUBLISHED | {"gating": "per-element"})
    assert own_facts.num_parameters - facts.num_parameters == more


def test_nvfp4_beside_unquantized_attention(tmp_path: Path) -> None:
    """As published: experts and shared experts in compressed-tensors' NVFP4, other matrices in bf16."""
    path = make_checkpoint("laguna", tmp_path / "q", tokenizer=False)
    stored, plain = {}, {}
    for name, tensor in load_file(path / "model.safetensors").items():
        quantized = "expert" in name and name.endswith("_proj.weight")
        parts, plain[name] = nvfp4_compressed(tensor.float()) if quantized else ({"": tensor}, tensor)
        prefix = name.removesuffix(".weight") if quantized else name
        stored |= {prefix + end: part for end, part in parts.items()}
    section = {
        "quant_method": "compressed-tensors", "format": "nvfp4-pack-quantized",
        "ignore": ["lm_head", "re:.*self_attn.*", "re:.*mlp.gate$", "re:model.layers.0.mlp.*"],
        "config_groups": {
            "group_0": {
                "targets": ["Linear"],
                "weights": {"num_bits": 4, "group_size": 16, "type": "float", "strategy": "tensor_group"},
            },
        },
    }  # fmt: skip
    path, other = write_pair(path, stored, plain, {"quantization_config": section})
    check_headers(path, read_checkpoint(path), load_model_config(path))
    torch.testing.assert_close(logits_of(path), logits_of(other), rtol=1e-4, atol=1e-4)


def test_refusals(tmp_path: Path) -> None:
    for wrong, message in (
        ({"moe_router_logit_softcapping": 30.0}, "moe_router_logit_softcapping 30.0 is not supported; supported: 0"),
        ({"gating": False}, "gating False is not supported; supported: True, per-head, per-element"),
        ({"swa_attention_sink_enabled": True}, "swa_attention_sink_enabled True is not supported"),
        ({"norm_topk_prob": False}, "norm_topk_prob False is not supported"),
        ({"num_attention_heads_per_layer": [*range(8, 328, 8)]}, "num_attention_heads_per_layer has [8, 40, 72"),
        (
            {"num_attention_heads_per_layer": [60 if kind == KINDS[1] else 48 for kind in KINDS]},
            "num_attention_heads_per_layer has 60, no multiple of the 8 KV heads",
        ),
    ):
        with pytest.raises(ConfigError, match=re.escape(message)):
            parse(tmp_path, PUBLISHED | wrong)
