"""Nemotron-H: published names, modules that stay unquantized, bounded step widths, and what is refused by name."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from moe_engine.config.args import EngineArgs
from moe_engine.errors import ConfigError, NotAvailableYet
from moe_engine.models.checkpoint_files import read_checkpoint
from moe_engine.models.config_file import load_model_config
from moe_engine.models.header_check import check_headers
from moe_engine.models.nemotron_names import inner_name, quantization_names
from moe_engine.planning.eagle_checks import check_head
from moe_engine.planning.resolution_log import Record
from moe_engine.planning.resolve import resolve
from tests.config.conftest import machine
from tests.models import stepper
from tests.models.checkpoints import dequantized_copy, make_checkpoint, write_tensors
from tests.models.conftest import reference_logits
from tests.models.fp8 import dequantize_fp8
from tests.models.rows import all_rows
from tests.models.stepper import Chunk
from tests.models.test_parity import assert_close

UNQUANTIZED = ("backbone.layers.0.mixer", "backbone.layers.1.mixer.experts.3", "backbone.layers.2.mixer.q_proj")


def test_names() -> None:
    for stored, here in (
        ("backbone.embeddings.weight", "model.embed_tokens.weight"),
        ("backbone.norm_f.weight", "model.norm.weight"),
        ("backbone.layers.3.norm.weight", "model.layers.3.input_layernorm.weight"),
        ("backbone.layers.3.mixer.norm.weight", "model.layers.3.linear_attn.norm.weight"),
        ("backbone.layers.3.mixer.A_log", "model.layers.3.linear_attn.A_log"),
        ("backbone.layers.5.mixer.k_proj.k_scale", "model.layers.5.self_attn.k_proj.k_scale"),
        ("backbone.layers.7.mixer.experts.12.up_proj.weight", "model.layers.7.mlp.experts.12.up_proj.weight"),
        ("model.layers.7.mixer.fc1_latent_proj.weight", "model.layers.7.mlp.routed_expert_down_proj.weight"),
        ("mtp.layers.0.mixer.q_proj.weight", "model.mtp.layers.0.mixer.q_proj.weight"),
        ("lm_head.weight", "lm_head.weight"),
    ):
        assert inner_name(stored) == here
    section = {"ignore": ["lm_head", "re:.*conv1d", "backbone.layers.4.mixer"], "method": "fp8", "bits": 8}
    blocks = [f"model.layers.4.{block}" for block in ("linear_attn", "self_attn", "mlp")]
    assert quantization_names(section) == section | {"ignore": ["lm_head", "re:.*conv1d", *blocks]}
    by_module = {"quantized_layers": {"backbone.layers.4.mixer.in_proj": {"quant_algo": "FP8"}}}
    assert list(quantization_names(by_module)["quantized_layers"]) == ["model.layers.4.linear_attn.in_proj"]


@pytest.mark.parametrize("row", all_rows())
def test_modules_that_stay_unquantized(row: str, tmp_path: Path) -> None:
    """Block FP8 with an expert, a whole mixer and a projection left out, by their published names."""
    path = make_checkpoint("nemotron_h", tmp_path / "fp8", random.randrange(2**31), fp8=True, tokenizer=False)
    tensors = load_file(path / "model.safetensors")
    scales = [name for name in tensors if name.endswith("_scale_inv") and name.startswith(UNQUANTIZED)]
    names = [name.removesuffix("_scale_inv") for name in scales]
    assert len(names) == 2 + 2 + 1
    plain = dequantize_fp8({name: tensors.pop(name) for name in (*names, *scales)})
    write_tensors(path, tensors | plain)
    config = json.loads((path / "config.json").read_text())
    config["quantization_config"]["modules_to_not_convert"] = ["lm_head", *UNQUANTIZED]
    (path / "config.json").write_text(json.dumps(config))
    check_headers(path, read_checkpoint(path), load_model_config(path))
    tokens, want = reference_logits(dequantized_copy(path, tmp_path / "plain"), random.randrange(1000))
    assert_close(stepper.load(path, row).step([Chunk(0, tokens, False)])[0], want)


def test_step_widths_are_bounded(tmp_path: Path) -> None:
    """Bounds that no step width reaches change nothing, others do; a model saved by transformers has an infinity."""
    tokens, found = list(range(5, 45)), {}
    path = make_checkpoint("nemotron_h", tmp_path, 7, tokenizer=False)
    fields = json.loads((path / "config.json").read_text())
    for name, limits in (("open", [0.0, {"__float__": "Infinity"}]), ("wide", [1e-9, 1e9]), ("narrow", [0.6, 0.65])):
        (path / "config.json").write_text(json.dumps(fields | {"time_step_limit": limits}))
        found[name] = stepper.load(path, "torch").step([Chunk(0, tokens, False)])[0]
    assert torch.equal(found["open"], found["wide"])
    assert (found["narrow"] - found["open"]).abs().max() > 1e-3


def test_mtp_layers_are_not_read_and_refused_by_name(tmp_path: Path) -> None:
    path = make_checkpoint("nemotron_h", tmp_path, tokenizer=False)
    tensors = load_file(path / "model.safetensors")
    mtp = {
        f"mtp.layers.{i}.{part}.weight": torch.ones(4) for i in range(2) for part in ("eh_proj", "norm", "mixer.q_proj")
    }
    write_tensors(path, tensors | mtp)
    fields = json.loads((path / "config.json").read_text()) | {"num_nextn_predict_layers": 1}
    (path / "config.json").write_text(json.dumps(fields))
    config = load_model_config(path)
    assert config.num_nextn_predict_layers == 0
    check_headers(path, read_checkpoint(path), config)
    asked = {"speculative_algorithm": "NEXTN", "speculative_num_steps": 1, "speculative_eagle_topk": 1}
    with pytest.raises(ConfigError, match=r"NEXTN: .*MTP layers of NemotronHForCausalLM.*use NGRAM"):
        resolve(EngineArgs.from_kwargs(**asked), config, machine())


def test_eagle_heads_are_refused_by_name(tmp_path: Path) -> None:
    config = load_model_config(make_checkpoint("nemotron_h", tmp_path, tokenizer=False))

    class Head:
        block, is_eagle3, path, a_kind = None, True, tmp_path, "an EAGLE-3 head"

    head: Any = Head()
    with pytest.raises(NotAvailableYet, match="heads for NemotronHForCausalLM"):
        check_head(EngineArgs.from_kwargs(speculative_algorithm="EAGLE3"), config, head, 64, Record())
