"""The form of a model's experts: of its own layers and their names, whatever schemes other matrices have."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from moe_engine.models.config_file import load_model_config
from moe_engine.models.expert_format import experts_format, width_group
from tests.models.checkpoints import make_checkpoint
from tests.models.test_gguf import WIDE, write_both


def groups(path: Path, schemes: dict[str, int]) -> int:
    """Columns of a group of a checkpoint with a scheme for each of these patterns, with groups of so many columns."""
    weights: dict[str, Any] = {"num_bits": 4, "type": "int", "strategy": "group", "symmetric": True}
    config = {
        f"group_{i}": {"targets": [f"re:{pattern}"], "weights": weights | {"group_size": size}}
        for i, (pattern, size) in enumerate(schemes.items())
    }
    section = {"quant_method": "compressed-tensors", "format": "pack-quantized", "config_groups": config}
    file = path / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"quantization_config": section}))
    return width_group(load_model_config(path))


@pytest.mark.parametrize(("kind", "block"), [("qwen3_moe", "mlp"), ("mixtral", "block_sparse_moe")])
def test_a_scheme_of_a_layer_counts_if_the_model_has_the_layer(tmp_path: Path, kind: str, block: str) -> None:
    layers = 130
    path = make_checkpoint(kind, tmp_path, seed=4, tokenizer=False, num_hidden_layers=layers, hidden_size=64)
    experts = rf".*\.{block}\.experts\..*"
    others = {r".*self_attn.*": 32, experts: 64}
    assert groups(path, others) == 64
    assert groups(path, {rf".*layers\.{layers - 1}{experts}": 128} | others) == 1
    assert groups(path, {rf".*layers\.{layers}{experts}": 128} | others) == 64


def test_experts_of_mixtral_in_a_gguf_file(tmp_path: Path) -> None:
    path, _ = write_both(tmp_path, "mixtral", lambda name: "Q4_K" if "exps" in name else "Q6_K", **WIDE)
    config = load_model_config(path)
    form = experts_format(config)
    assert form is not None and form.bits == 4 and width_group(config) == 256
