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
from moe_engine.models.checkpoint_names.nemotron_names import inner_name, quantization_names
from moe_engine.models.config_file import load_model_config
from moe_engine.models.header_check import check_headers
from moe_engine.models.quantized_copy.checkpoint import quantize_checkpoint
from moe_engine.models.quantized_copy.target import Target
from moe_engine.planning.resolution_log import Record
from moe_engine.planning.speculation.eagle_checks import check_head
from tests.models import stepper
from tests.models.checkpoints import dequantized_copy, make_checkpoint, write_tensors
from tests.models.conftest import reference_logits
from tests.models.format_checks import ledger_fits, write_pair
from tests.models.fp8 import dequantize_fp8
from tests.models.quantized_floats import nvfp4
from tests.models.rows import all_rows
from tests.models.stepper import Chunk
from tests.models.test_mtp import Drafter
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
        ("mtp.layers.0.norm.weight", "model.layers.9.input_layernorm.weight"),
        ("mtp.layers.0.mixer.q_proj.weight", "model.layers.9.self_attn.q_proj.weight"),
        ("language_model.mtp.layers.0.eh_proj.weight", "model.layers.9.eh_proj.weight"),
        ("mtp.layers.1.norm.weight", "model.layers.9.post_attention_layernorm.weight"),
        ("mtp.layers.1.mixer.experts.3.up_proj.weight", "model.layers.9.mlp.experts.3.up_proj.weight"),
        ("mtp.layers.3.mixer.fc2_latent_proj.weight", "model.layers.10.mlp.routed_expert_up_proj.weight"),
        ("mtp.layers.1.final_layernorm.weight", "model.layers.9.shared_head.norm.weight"),
        ("lm_head.weight", "lm_head.weight"),
    ):
        assert inner_name(stored, 9) == here
    section = {"ignore": ["lm_head", "re:.*conv1d", "backbone.layers.4.mixer"], "method": "fp8", "bits": 8}
    blocks = [f"model.layers.4.{block}" for block in ("linear_attn", "self_attn", "mlp")]
    assert quantization_names(section, 9) == section | {"ignore": ["lm_head", "re:.*conv1d", *blocks]}
    stored = ("backbone.layers.4.mixer.in_proj", "mtp.layers.0.mixer.q_proj")
    by_module = {"quantized_layers": {key: {"quant_algo": "FP8"} for key in stored}}
    here = ["model.layers.4.linear_attn.in_proj", "model.layers.9.self_attn.q_proj"]
    assert list(quantization_names(by_module, 9)["quantized_layers"]) == here
    attention = [f"model.layers.9.{part}" for part in ("eh_proj", *(f"self_attn.{name}_proj" for name in "qkvo"))]
    experts = ["experts", "shared_experts", "routed_expert_down_proj", "routed_expert_up_proj"]
    both = [*attention, *(f"model.layers.9.mlp.{part}" for part in experts)]
    for name, modules in (("mtp*", both), ("re:.*mtp.*", both), ("mtp.layers.0*", attention), ("Linear", [])):
        assert quantization_names([name], 9, 1) == [name, *modules]


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


def test_other_mtp_layers_are_refused_by_name(tmp_path: Path) -> None:
    path = make_checkpoint("nemotron_h", tmp_path, tokenizer=False)
    fields = json.loads((path / "config.json").read_text()) | {"num_nextn_predict_layers": 1}
    fields.pop("mtp_layers_block_type", None)
    for pattern, message in (("ME", "is ME: only MTP layers of attention and experts"), ("*X", "unknown layers X")):
        (path / "config.json").write_text(json.dumps(fields | {"mtp_hybrid_override_pattern": pattern}))
        with pytest.raises(ConfigError, match=rf"mtp_hybrid_override_pattern .*{message}"):
            load_model_config(path)


def test_eagle_heads_are_refused_by_name(tmp_path: Path) -> None:
    config = load_model_config(make_checkpoint("nemotron_h", tmp_path, tokenizer=False))

    class Head:
        block, is_eagle3, path, a_kind = None, True, tmp_path, "an EAGLE-3 head"

    head: Any = Head()
    with pytest.raises(NotAvailableYet, match="heads for NemotronHForCausalLM"):
        check_head(EngineArgs.from_kwargs(speculative_algorithm="EAGLE3"), config, head, 64, Record())


@pytest.mark.each_value
@pytest.mark.parametrize("format", ["int4", "int8", "fp8"])
def test_experts_without_a_gate_stay_as_stored(tmp_path: Path, format: str) -> None:
    """In integers: the C++ row holds them as stored, and the ledger counts them. FP8 is dequantized."""
    wide = {"hidden_size": 128, "moe_intermediate_size": 256, "moe_shared_expert_intermediate_size": 256}
    seed = random.randrange(2**31)
    source = make_checkpoint("nemotron_h", tmp_path / "a", seed, dtype="bfloat16", tokenizer=False, **wide)
    quantize_checkpoint(source, tmp_path / "b", Target(format, 32), lambda _: None)
    model = stepper.load(tmp_path / "b", "cpu")
    kept = [moe.weights.data.form for moe in model.model.moes]
    assert kept and all(bool(form) == (format != "fp8") for form in kept)
    assert (ledger_fits(model) < 0.6) == (format != "fp8")


@pytest.mark.parametrize("row", all_rows())
def test_nvfp4_as_published(tmp_path: Path, row: str) -> None:
    """ModelOpt's NVFP4 of the experts; other matrices and the MTP layer are left out by name. The C++ row keeps the
    experts' codes."""
    wide = {"hidden_size": 128, "moe_intermediate_size": 96, "moe_shared_expert_intermediate_size": 96}
    path = make_checkpoint("nemotron_h", tmp_path / "a", random.randrange(2**31), num_mtp_layers=1, **wide)
    stored, plain = {}, {}
    for name, tensor in load_file(path / "model.safetensors").items():
        quantized = ".experts." in name and not name.startswith("mtp.")
        parts, plain[name] = nvfp4(tensor.float()) if quantized else ({"": tensor}, tensor)
        stored |= {name.removesuffix(".weight") + part if quantized else name: value for part, value in parts.items()}
    left_out = ["lm_head", "mtp*", "*in_proj", "*out_proj", "*_latent_proj", "*shared_experts*"]
    left_out += [f"*{name}_proj" for name in "qkvo"]
    section = {"quant_method": "modelopt", "quant_algo": "NVFP4", "group_size": 16, "ignore": left_out}
    write_pair(path, stored, plain, {"quantization_config": section})
    check_headers(path, read_checkpoint(path), load_model_config(path), include_mtp=True)
    tokens, want = reference_logits(tmp_path / "plain", random.randrange(1000))
    drafter = Drafter(path, row)
    assert_close(drafter.main.step([Chunk(0, tokens, False)])[0], want)
    kept = [getattr(moe.weights.data, "form", None) for moe in drafter.main.model.moes]
    assert all(kept) == (row == "cpu") and not any(
        getattr(moe.weights.data, "form", None) for moe in drafter.mtp.feed_forwards
    )
