"""Names of DeepSeek V4's tensors: published, of MTP layers, and as transformers saves them."""

from __future__ import annotations

import random
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import load_file
from torch import Tensor

from moe_engine.models.checkpoint_files import read_checkpoint
from moe_engine.models.config_compressed import parse_deepseek_v4
from moe_engine.models.config_fields import Fields
from moe_engine.models.tensors import model_tensors, names_outside_model
from tests.models.v4_checkpoints import FIELDS, PUBLISHED_RATES, make_v4, v4_model

ROUTER = (".mlp.gate.e_score_correction_bias", ".mlp.gate.tid2eid")


def inner_tensors(path: Path) -> dict[str, Tensor]:
    """All tensors by the model's names."""
    found = {}
    for name, file in read_checkpoint(path).items():
        with safe_open(file.path, "pt") as stored:
            found[name] = stored.get_tensor(file.stored_name(name))
    return found


def test_the_model_finds_its_tensors(tmp_path: Path) -> None:
    fields = {key: value for key, value in (FIELDS | PUBLISHED_RATES).items() if value is not None}
    found = inner_tensors(make_v4(tmp_path, **PUBLISHED_RATES))
    config = parse_deepseek_v4(Fields(fields | {"architectures": ["DeepseekV4ForCausalLM"]}, "config.json"), {})
    wanted = {name: spec.shape for spec in model_tensors(config) for name in spec.names()}
    for names in (found, wanted):
        for name in [name for name in names if name.endswith(ROUTER)]:
            del names[name]
    assert {name: tuple(tensor.shape) for name, tensor in found.items()} == wanted


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
            "hnorm.weight": "hnorm.weight", "shared_head.norm.weight": "norm.weight", "hc_head.base": "hc_head_base",
            "hc_attn.scale": "hc_attn_scale", "self_attn.sinks": "attn.attn_sink", "mlp.gate.weight": "ffn.gate.weight",
            "mlp.gate.e_score_correction_bias": "ffn.gate.bias", "self_attn.kv_layernorm.weight": "attn.kv_norm.weight",
            "mlp.experts.3.up_proj.weight": "ffn.experts.3.w3.weight",
        }.items():  # fmt: skip
            assert torch.equal(found[f"{layer}{inner}"], stored[f"mtp.{index}.{published}"]), inner
        own = {name.removeprefix(layer) for name in found if name.startswith(layer)}
        like = {name.removeprefix("model.layers.4.") for name in found if name.startswith("model.layers.4.")}
        outside = {"e_proj.weight", "h_proj.weight", "enorm.weight", "hnorm.weight", "shared_head.norm.weight"}
        outside |= {f"hc_head.{part}" for part in ("fn", "base", "scale")}
        entries = {name for name in like if "compressor" in name or "indexer" in name}
        assert own == (like - entries) | outside
    config = parse_deepseek_v4(Fields(FIELDS | {"architectures": ["DeepseekV4ForCausalLM"]}, "config.json"), {})
    passed_over = names_outside_model(config, found)
    assert passed_over == {name for name in found if name.startswith(("model.layers.5.", "model.layers.6."))}
