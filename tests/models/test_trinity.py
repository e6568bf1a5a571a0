"""Trinity: the published file, sizes, weight updates by names, and refusals. `test_parity.py` compares logits."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from moe_engine.errors import ConfigError
from moe_engine.models import sizes
from moe_engine.models.config import GQAConfig
from moe_engine.models.tensors.model import model_tensors
from moe_engine.tuning.costs.model_facts import model_facts
from tests.models import stepper
from tests.models.checkpoints import make_checkpoint
from tests.models.parameters import num_active_parameters
from tests.models.test_config import parse

PUBLISHED: dict[str, Any] = {
    "architectures": ["AfmoeForCausalLM"], "model_type": "afmoe", "vocab_size": 200192, "hidden_size": 2048,
    "intermediate_size": 6144, "moe_intermediate_size": 1024, "num_hidden_layers": 32, "num_dense_layers": 2,
    "num_attention_heads": 32, "num_key_value_heads": 4, "head_dim": 128, "num_experts": 128, "num_experts_per_tok": 8,
    "num_shared_experts": 1, "route_norm": True, "route_scale": 2.826, "score_func": "sigmoid", "n_group": 1,
    "topk_group": 1, "global_attn_every_n_layers": 4, "sliding_window": 2048, "mup_enabled": True,
    "max_position_embeddings": 131072, "rope_theta": 10000, "rope_scaling": None, "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False, "torch_dtype": "bfloat16", "eos_token_id": 3, "attention_bias": False,
}  # fmt: skip
"""Trinity-Mini."""


def test_the_published_model(tmp_path: Path) -> None:
    """26B, 3B of them for a token."""
    config = parse(tmp_path, PUBLISHED)
    assert sizes.num_parameters(config) == pytest.approx(26.1e9, rel=5e-3)
    assert num_active_parameters(config) == pytest.approx(3e9, rel=0.1)
    full, windowed = config.cache_groups
    assert full.layers == tuple(range(3, 32, 4)) and windowed.window == 2048
    attention = config.attention_of(0)
    assert isinstance(attention, GQAConfig) and attention.gate_width == 128 and attention == config.attention_of(3)
    assert [(rope.kind, rope.width) for rope in config.ropes] == [("zero", 4), ("default", 128)]
    assert config.moe is not None and (config.moe.scale, config.moe.shared_width) == (2.826, 1024)
    assert config.moe_layers == (False,) * 2 + (True,) * 30 and config.embed_scale == 2048**0.5
    facts = model_facts(PUBLISHED)
    small = sizes.num_parameters(config) - config.vocab_size * config.hidden_size - facts.num_parameters
    assert 0 <= small < 1e6 and facts.dense_layers == 2
    assert [(kind.layers, kind.keeps) for kind in facts.attention] == [(8, 0), (24, 2048)]


@pytest.mark.parametrize("kind", ["afmoe", "glm4", "olmo2"])
def test_modules_name_all_tensors(tmp_path: Path, kind: str) -> None:
    """Each tensor belongs to one module, so that a weight update builds it again: families with norms of results."""
    loaded = stepper.load(make_checkpoint(kind, tmp_path, tokenizer=False), "torch")
    modules = [module.prefixes for module in loaded.model.modules()]
    for spec in model_tensors(loaded.config):
        assert sum(spec.name.startswith(prefixes) for prefixes in modules) == 1, spec.name


def test_refusals(tmp_path: Path) -> None:
    for wrong, message in (
        ({"score_func": "softmax"}, "score_func 'softmax' is not supported; supported: sigmoid"),
        ({"n_group": 2}, "n_group 2 is not supported; supported: 1"),
        ({"num_experts": None}, "num_experts is missing"),
    ):
        with pytest.raises(ConfigError, match=re.escape(message)):
            parse(tmp_path, PUBLISHED | wrong)
