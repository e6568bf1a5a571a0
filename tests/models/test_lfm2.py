"""LFM2: the planner's count of parameters, refusals, and published and saved names of config.json's fields."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from moe_engine.errors import ConfigError
from moe_engine.models import sizes
from moe_engine.models.config_file import load_model_config
from moe_engine.tuning.costs.model_facts import model_facts
from tests.models.checkpoints import make_checkpoint


@pytest.mark.parametrize("kind", ["lfm2", "lfm2_moe"])
def test_planner_and_refusals(kind: str, tmp_path: Path) -> None:
    file = make_checkpoint(kind, tmp_path, tokenizer=False) / "config.json"
    raw = json.loads(file.read_text())
    config, facts = load_model_config(tmp_path), model_facts(raw)
    assert config.state_layers == {0, 2} and config.kv_layers == (1,)
    assert 0 <= sizes.num_parameters(config) - facts.num_parameters < 2000  # one embedding, which is the head
    states = sum(group.num_bytes("bfloat16") for group in config.state_groups)
    assert sum(each.layers * each.state_numbers for each in facts.attention) * 4 == states
    for wrong, message in (
        ({"layer_types": ["conv"] * 3}, "layer_types has no layer of attention"),
        ({"layer_types": ["conv", "linear_attention", "conv"]}, "layer_types needs 3 of conv, full_attention"),
        ({"conv_bias": True}, "conv_bias True is not supported"),
        ({"conv_L_cache": 1}, "conv_L_cache must be at least 2"),
    ):
        file.write_text(json.dumps(raw | wrong))
        with pytest.raises(ConfigError, match=message):
            load_model_config(tmp_path)


def test_published_names_of_fields(tmp_path: Path) -> None:
    """Layers with attention by their numbers, the width of dense layers and the tied head under other names."""
    file = make_checkpoint("lfm2", tmp_path, tokenizer=False) / "config.json"
    raw = json.loads(file.read_text())
    saved = load_model_config(tmp_path)
    published = {"full_attn_idxs": [1], "layer_types": None, "block_ff_dim": 96, "intermediate_size": 7}
    file.write_text(json.dumps(raw | published | {"tie_embedding": False}))
    found = load_model_config(tmp_path)
    assert found.state_groups == saved.state_groups and found.intermediate_size == saved.intermediate_size == 72
    assert saved.tie_word_embeddings and not found.tie_word_embeddings
    file.write_text(json.dumps(raw | {"block_auto_adjust_ff_dim": False}))
    assert load_model_config(tmp_path).intermediate_size == 96
