"""Granite 3: hidden states for draft heads, and refusals. `test_parity.py` compares logits."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest
import torch
import transformers

from moe_engine.errors import ConfigError
from moe_engine.models import sizes
from moe_engine.models.config_file import load_model_config
from moe_engine.models.layers.hidden_taps import HiddenTaps
from moe_engine.tuning.costs.model_facts import model_facts
from tests.models import stepper
from tests.models.checkpoints import make_checkpoint
from tests.models.stepper import Chunk


def test_taps_are_the_published_models_hidden_states(tmp_path: Path) -> None:
    """The residual here is divided by the factor of results."""
    path = make_checkpoint("granite", tmp_path, random.randrange(1000), tokenizer=False)
    loaded = stepper.load(path, "torch")
    loaded.model.taps = taps = HiddenTaps((0, 1, 2), scale=loaded.config.residual_scale)  # type: ignore[attr-defined]
    tokens = [random.randrange(256) for _ in range(9)]
    taps.during(lambda _: loaded.step([Chunk(0, tokens, False)])[0], None)  # type: ignore[arg-type]
    reference = transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    with torch.no_grad():
        states = reference(torch.tensor([tokens]), output_hidden_states=True).hidden_states
    torch.testing.assert_close(taps.take(), torch.cat(states[:3], -1)[0], rtol=1e-4, atol=1e-4)


def test_granite_4(tmp_path: Path) -> None:
    """The planner's count of parameters, and what is refused: several groups, whose norm is one, and no attention."""
    file = make_checkpoint("granitemoehybrid", tmp_path, tokenizer=False) / "config.json"
    raw = json.loads(file.read_text())
    config, facts = load_model_config(tmp_path), model_facts(raw)
    assert config.state_layers == {0, 2} and config.rope.kind == "none"
    assert 0 <= sizes.num_parameters(config) - facts.num_parameters < 5000  # one embedding, which is the head
    for wrong, message in (
        ({"mamba_n_groups": 2}, "mamba_n_groups 2 is not supported"),
        ({"layer_types": ["linear_attention"] * 3}, "layer_types has no layer of attention"),
        ({"position_embedding_type": "alibi"}, "position_embedding_type 'alibi' is not supported"),
    ):
        file.write_text(json.dumps(raw | wrong))
        with pytest.raises(ConfigError, match=message):
            load_model_config(tmp_path)


def test_a_factor_of_zero_is_refused(tmp_path: Path) -> None:
    path = make_checkpoint("granite", tmp_path, tokenizer=False)
    file = path / "config.json"
    file.write_text(file.read_text().replace('"residual_multiplier": 0.22', '"residual_multiplier": 0'))
    with pytest.raises(ConfigError, match="residual_multiplier must be more than 0, found 0"):
        load_model_config(path)
