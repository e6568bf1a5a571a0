"""Phi-3 and Phi-4: matrices that are joined by rows in the files. `test_parity.py` compares logits."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from moe_engine.errors import CheckpointError, ConfigError
from moe_engine.models.checkpoint_files import read_checkpoint
from moe_engine.models.config_file import load_model_config
from moe_engine.models.header_check import check_headers
from moe_engine.models.weights import WeightReader
from tests.models.checkpoints import make_checkpoint

LAYER = "model.layers.1."


def test_rows_are_tensors_of_their_own(tmp_path: Path) -> None:
    """In the order of the file."""
    path = make_checkpoint("phi3", tmp_path / "model", tokenizer=False)
    stored = load_file(path / "model.safetensors")
    read = WeightReader(path, torch.float32)
    joined = stored[f"{LAYER}self_attn.qkv_proj.weight"]
    rows = {"q": 64, "k": 32, "v": 32}
    parts = [read.linear(f"{LAYER}self_attn.{name}_proj", (count, 64)) for name, count in rows.items()]
    assert torch.equal(torch.cat(parts), joined)
    both = [read.linear(f"{LAYER}mlp.{name}_proj", (96, 64)) for name in ("gate", "up")]
    assert torch.equal(torch.cat(both), stored[f"{LAYER}mlp.gate_up_proj.weight"])
    name = f"{LAYER}mlp.up_proj.weight"
    assert read_checkpoint(path)[name].stored_name(name) == f"{LAYER}mlp.gate_up_proj.weight"


def test_an_older_name_of_longrope(tmp_path: Path) -> None:
    path = make_checkpoint("phi3", tmp_path / "model", tokenizer=False)
    lists = {name: [1.5] * 6 for name in ("long_factor", "short_factor")}
    found, want = (
        load_model_config(path, {"rope_scaling": {"type": kind, **lists}, "original_max_position_embeddings": 64}).rope
        for kind in ("su", "longrope")
    )
    assert found == want and want.kind == "longrope"


def test_refusals(tmp_path: Path) -> None:
    path = make_checkpoint("phi3", tmp_path / "model", tokenizer=False)
    tensors, config = load_file(path / "model.safetensors"), load_model_config(path)
    del tensors[f"{LAYER}self_attn.o_proj.weight"]  # by which the rows of q are known
    save_file(tensors, path / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"layers\.1\.self_attn\.q_proj\.weight \[64, 64\] is missing"):
        check_headers(path, read_checkpoint(path), config)
    for fields, message in (
        ({"quantization_config": {"quant_method": "fp8"}}, "quantization_config is not supported with joined matrices"),
        ({"attention_bias": True}, "attention_bias True is not supported"),
    ):
        with pytest.raises(ConfigError, match=message):
            load_model_config(path, fields)
