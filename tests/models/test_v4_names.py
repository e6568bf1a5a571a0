"""Names of DeepSeek V4's tensors: published, of MTP layers, and as transformers saves them."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file
from torch import Tensor

from moe_engine.errors import CheckpointError
from moe_engine.models.checkpoint_files import read_checkpoint
from moe_engine.models.config_file import load_model_config
from moe_engine.models.header_check import check_headers
from moe_engine.models.tensors.model import names_outside_model
from tests.models.checkpoints import write_tensors
from tests.models.v4_checkpoints import FIELDS, PUBLISHED_RATES, make_v4, v4_model


def inner_tensors(path: Path) -> dict[str, Tensor]:
    """All tensors by the model's names."""
    found = {}
    for name, file in read_checkpoint(path).items():
        with safe_open(file.path, "pt") as stored:
            found[name] = stored.get_tensor(file.stored_name(name))
    return found


def test_the_model_finds_its_tensors(tmp_path: Path) -> None:
    """With and without MTP layers."""
    path = make_v4(tmp_path, num_mtp_layers=1, **PUBLISHED_RATES)
    for include_mtp in (False, True):
        check_headers(path, read_checkpoint(path), load_model_config(path), include_mtp)
    tensors = load_file(path / "model.safetensors")
    for name in ("layers.1.ffn.gate.tid2eid", "layers.2.attn.indexer.compressor.ape", "mtp.0.hc_head_fn"):
        write_tensors(path, {key: tensor for key, tensor in tensors.items() if key != name})
        with pytest.raises(CheckpointError, match=r"1 tensors do not match config\.json: .* is missing"):
            check_headers(path, read_checkpoint(path), load_model_config(path), include_mtp=True)


def test_saved_by_transformers(tmp_path: Path) -> None:
    seed = random.randrange(1 << 30)
    published = inner_tensors(make_v4(tmp_path / "published", seed))
    v4_model(FIELDS, seed).save_pretrained(tmp_path / "saved")
    saved = inner_tensors(tmp_path / "saved")
    assert "model.layers.0.attn.norm.weight" in load_file(tmp_path / "saved" / "model.safetensors")
    assert saved.keys() == published.keys()
    assert all(torch.equal(saved[name], tensor) for name, tensor in published.items())


def test_mtp_layers_come_after_the_main_layers(tmp_path: Path) -> None:
    path = make_v4(tmp_path, num_mtp_layers=2)
    stored, found = load_file(path / "model.safetensors"), inner_tensors(path)
    for index, layer in enumerate(("model.layers.5.", "model.layers.6.")):
        for inner, published in {
            "e_proj.weight": "e_proj.weight", "h_proj.weight": "h_proj.weight", "enorm.weight": "enorm.weight",
            "hnorm.weight": "hnorm.weight", "shared_head.norm.weight": "norm.weight",
            "shared_head.hc_head.base": "hc_head_base", "hc_attn.scale": "hc_attn_scale",
            "self_attn.sinks": "attn.attn_sink", "mlp.gate.weight": "ffn.gate.weight",
            "mlp.gate.e_score_correction_bias": "ffn.gate.bias", "self_attn.kv_layernorm.weight": "attn.kv_norm.weight",
            "mlp.experts.3.up_proj.weight": "ffn.experts.3.w3.weight",
        }.items():  # fmt: skip
            assert torch.equal(found[f"{layer}{inner}"], stored[f"mtp.{index}.{published}"]), inner
        own = {name.removeprefix(layer) for name in found if name.startswith(layer)}
        like = {name.removeprefix("model.layers.4.") for name in found if name.startswith("model.layers.4.")}
        outside = {"e_proj.weight", "h_proj.weight", "enorm.weight", "hnorm.weight", "shared_head.norm.weight"}
        outside |= {f"shared_head.hc_head.{part}" for part in ("fn", "base", "scale")}
        entries = {name for name in like if "compressor" in name or "indexer" in name}
        assert own == (like - entries) | outside
    passed_over = names_outside_model(load_model_config(path), found)
    assert passed_over == {name for name in found if name.startswith(("model.layers.5.", "model.layers.6."))}
