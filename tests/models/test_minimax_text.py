"""MiniMax-Text-01: the published file, decays, sizes, weight updates by names, refusals. Logits: `test_parity.py`."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch

from moe_engine.errors import ConfigError
from moe_engine.models import sizes
from moe_engine.models.config import GQAConfig
from moe_engine.models.layers.states.lightning_attention import decay_rates
from moe_engine.models.tensors.model import model_tensors
from moe_engine.tuning.costs.model_facts import model_facts
from tests.models import stepper
from tests.models.checkpoints import make_checkpoint
from tests.models.parameters import num_active_parameters
from tests.models.test_config import parse

PUBLISHED: dict[str, Any] = {
    "architectures": ["MiniMaxText01ForCausalLM"], "model_type": "minimax_text_01", "vocab_size": 200064,
    "hidden_size": 6144, "intermediate_size": 9216, "num_hidden_layers": 80, "num_attention_heads": 64,
    "num_key_value_heads": 8, "head_dim": 128, "rotary_dim": 64, "num_local_experts": 32, "num_experts_per_tok": 2,
    "attn_type_list": [0, 0, 0, 0, 0, 0, 0, 1] * 10, "postnorm": True, "shared_intermediate_size": 0,
    "layernorm_full_attention_alpha": 3.5565588200778455, "layernorm_full_attention_beta": 1.0,
    "layernorm_linear_attention_alpha": 3.5565588200778455, "layernorm_linear_attention_beta": 1.0,
    "layernorm_mlp_alpha": 3.5565588200778455, "layernorm_mlp_beta": 1.0, "max_position_embeddings": 10240000,
    "rope_theta": 10000000, "rms_norm_eps": 1e-5, "tie_word_embeddings": False, "sliding_window": None,
}  # fmt: skip


def test_the_published_model(tmp_path: Path) -> None:
    """456B, 46B of them for a token; a request's states of 70 layers take 280 MiB."""
    config = parse(tmp_path, PUBLISHED)
    assert sizes.num_parameters(config) == pytest.approx(456e9, rel=5e-3)
    embedding = config.vocab_size * config.hidden_size
    assert num_active_parameters(config) - embedding == pytest.approx(45.9e9, rel=2e-3)
    assert config.kv_layers == tuple(range(7, 80, 8)) and len(config.state_layers) == 70
    (group,) = config.state_groups
    assert group.num_bytes("bfloat16") == 70 * 64 * 128 * 128 * 4
    assert isinstance(config.attention, GQAConfig) and config.rope.width == 64
    assert config.residual_scales is not None and config.residual_scales.state == (3.5565588200778455, 1.0)
    facts = model_facts(PUBLISHED)
    small = sizes.num_parameters(config) - embedding - facts.num_parameters
    assert 0 <= small < 3e6
    assert [(kind.layers, kind.state_numbers) for kind in facts.attention] == [(10, 0), (70, 64 * 128 * 128)]


def test_decays_of_the_reference() -> None:
    """Those that transformers' class keeps as buffers."""
    transformers = pytest.importorskip("transformers.models.minimax.modeling_minimax")
    config = transformers.MiniMaxConfig(
        num_attention_heads=6, num_key_value_heads=2, hidden_size=48, num_hidden_layers=5, block_size=4
    )
    for layer in (1, 3):
        own = transformers.MiniMaxLightningAttention(config, layer)
        torch.testing.assert_close(decay_rates(layer, 5, 6), own.slope_rate.flatten())


def test_modules_name_all_tensors(tmp_path: Path) -> None:
    """Each tensor belongs to one module, so that a weight update builds it again."""
    loaded = stepper.load(make_checkpoint("minimax", tmp_path, tokenizer=False), "torch")
    modules = [module.prefixes for module in loaded.model.modules()]
    for spec in model_tensors(loaded.config):
        assert sum(spec.name.startswith(prefixes) for prefixes in modules) == 1, spec.name


def test_refusals(tmp_path: Path) -> None:
    for wrong, message in (
        ({"postnorm": False}, "postnorm False is not supported; supported: True"),
        ({"shared_intermediate_size": 64}, "shared_intermediate_size 64 is not supported; supported: 0"),
        ({"attn_type_list": [0] * 80}, "layer_types has no layer of attention"),
        ({"attn_type_list": [2] * 80}, "attn_type_list needs 80 of 0, 1"),
        ({"sliding_window": 4096}, "sliding_window is not supported in this family"),
    ):
        with pytest.raises(ConfigError, match=re.escape(message)):
            parse(tmp_path, PUBLISHED | wrong)
