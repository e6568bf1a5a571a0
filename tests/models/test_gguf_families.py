"""GGUF files of families with other names, orders of rows and values: logits are those of transformers on the hub
layout with the file's values."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from moe_engine.errors import CheckpointError, ConfigError
from moe_engine.gguf_container import read_container
from moe_engine.models.checkpoint.cut import Cut
from moe_engine.models.checkpoint_files import read_checkpoint
from moe_engine.models.config_file import load_model_config
from moe_engine.models.header_check import check_headers
from moe_engine.models.tensors.model import model_tensors
from moe_engine.models.weights import WeightReader
from tests.models.checkpoints import PHI_ROPE, make_checkpoint, write_tensors
from tests.models.format_checks import ledger_fits, loaded, step_logits
from tests.models.gguf import write_container
from tests.models.gguf_families import write_family

_LONG = {
    **{key: value for key, value in PHI_ROPE.items() if "mscale" not in key},
    **{f"{name}_factor": [1.0 + i / 9 for i in range(24)] for name in ("long", "short")},
}  # fmt: skip
"""transformers chooses a list by the length of a text."""
_WIDE = {"hidden_size": 256, "intermediate_size": 256}
_SHORT = _WIDE | {"sliding_window": 5}
"""A window shorter than the prompt."""
_NET = {"linear_key_head_dim": 32, "linear_value_head_dim": 64, "moe_intermediate_size": 256}
FAMILIES: dict[str, dict[str, Any]] = {
    "phi3": _WIDE | {"rope_scaling": _LONG, "original_max_position_embeddings": 32},
    "granite": _WIDE,
    "granitemoe": _WIDE,
    "granitemoeshared": _WIDE | {"shared_intermediate_size": 256},
    "granitemoehybrid": _WIDE | {"mamba_d_head": 64, "shared_intermediate_size": 256},
    "glm4": _WIDE | {"head_dim": 64},
    "glm4_moe": _WIDE | {"moe_intermediate_size": 256, "n_routed_experts": 8},
    "qwen2_moe": _WIDE | {"moe_intermediate_size": 256, "shared_expert_intermediate_size": 256, "mlp_only_layers": []},
    "qwen3_next": _WIDE | _NET | {"shared_expert_intermediate_size": 256},
    "qwen3_5": _WIDE | _NET,
    "qwen3_5_moe": _WIDE | _NET | {"shared_expert_intermediate_size": 256},
    "nemotron_h": _WIDE | {"hybrid_override_pattern": "ME*MEM", "n_group": 1, "topk_group": 1, "mamba_head_dim": 32}
    | {"moe_intermediate_size": 256, "moe_shared_expert_intermediate_size": 256, "n_routed_experts": 8},
    "gemma4": _WIDE | {"moe_intermediate_size": 256},
    "gemma2": _SHORT | {"head_dim": 64, "query_pre_attn_scalar": 64},
    "olmo2": _WIDE,
    "olmo3": _SHORT,
    "exaone4": _SHORT | {"head_dim": 64},
    "cohere2": _SHORT | {"attention_bias": False, "num_hidden_layers": 4, "layer_types": None},
    "ernie4_5": _WIDE | {"head_dim": 64},
    "ernie4_5_moe": _WIDE | {"moe_intermediate_size": 256},
    "dots1": _WIDE | {"moe_intermediate_size": 256, "n_routed_experts": 8, "n_group": 1, "topk_group": 1},
}  # fmt: skip


def write_both(folder: Path, kind: str, type_of: Any, **options: Any) -> tuple[Path, Path]:
    """A GGUF file, and a checkpoint in hub layout with its values."""
    plain = make_checkpoint(kind, folder / "plain", torch.initial_seed() % 1000, **FAMILIES[kind] | options)
    path = folder / "model.gguf"
    write_tensors(plain, write_family(plain, path, type_of))
    return path, plain


def mixed(name: str) -> str:
    """Like llama.cpp's Q4_K_M."""
    return "Q6_K" if name in ("output.weight", "blk.0.attn_v.weight") or "ffn_down" in name else "Q4_K"


@pytest.mark.parametrize("kind", FAMILIES)
def test_logits_are_those_of_transformers(tmp_path: Path, kind: str) -> None:
    drawn = random.choice([lambda name: "F16", lambda name: "Q8_0", mixed])
    path, plain = write_both(tmp_path, kind, drawn)
    config = load_model_config(path)
    check_headers(path, read_checkpoint(path), config)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(plain, dtype=torch.float32, attn_implementation="eager")
    with torch.inference_mode():
        want = theirs(torch.tensor([[3, 141, 59, 26, 5, 9, 7, 11]])).logits[0]
    scale = float(want.abs().max())
    torch.testing.assert_close(step_logits(loaded(path)), want, rtol=1e-4, atol=1e-4 * scale)
    stepper = loaded(path, "cpu")
    torch.testing.assert_close(step_logits(stepper), want, rtol=1e-3, atol=1e-3 * scale)
    if not config.tie_word_embeddings:
        assert ledger_fits(stepper) < 1.01


def test_rotary_settings_of_phi_3(tmp_path: Path) -> None:
    """The file has the factors of long contexts and of others as tensors."""
    lists = {f"{name}_factor": [1.0 + i / number for i in range(24)] for name, number in (("long", 9), ("short", 11))}
    path, plain = write_both(tmp_path, "phi3", lambda name: "F16", rope_scaling=_LONG | lists)
    found, want = load_model_config(path).rope, load_model_config(plain).rope
    assert found.short_factors == pytest.approx(want.short_factors) and len(found.short_factors) == 24
    assert found.pair_factors == pytest.approx(want.pair_factors)
    assert found.attention_factor == pytest.approx(want.attention_factor)


@pytest.mark.parametrize("kind", ["phi3", "glm4", "granitemoe", "qwen3_5_moe"])
def test_kernels_multiply_joined_and_reordered_rows_as_stored(tmp_path: Path, kind: str) -> None:
    path, _ = write_both(tmp_path, kind, lambda name: "Q4_0", tie_word_embeddings=False)
    assert ledger_fits(loaded(path, "cpu")) < 0.5


def test_mtp_layers(tmp_path: Path) -> None:
    path, plain = write_both(tmp_path, "glm4_moe", lambda name: "F16", num_mtp_layers=1)
    config = load_model_config(path)
    assert (config.num_layers, config.num_nextn_predict_layers) == (3, 1)
    found, want = WeightReader(path, torch.float32), WeightReader(plain, torch.float32)
    specs = [spec for spec in model_tensors(config, True) if spec.name.startswith("model.layers.3.")]
    assert {"eh_proj", "enorm", "hnorm"} <= {spec.name.split(".")[3] for spec in specs}
    for name, shape in ((name, spec.shape) for spec in specs for name in spec.names()):
        assert torch.equal(found.tensor(name, shape), want.tensor(name, shape)), name


@pytest.mark.parametrize("type", ["F16", "Q4_0", "Q4_K"])
def test_slices_of_reordered_columns(tmp_path: Path, type: str) -> None:
    """The value heads of a key head are apart; blocks of 256 numbers have parts of several heads."""
    path, plain = write_both(tmp_path, "qwen3_5", lambda name: type)
    name, shape = "model.layers.0.linear_attn.out_proj", (256, 256)
    whole = WeightReader(plain, torch.float32).linear(name, shape)
    reader = WeightReader(path, torch.float32, format=load_model_config(path).weight_format)
    for cut in (Cut(), Cut(slice(3, 90)), Cut(None, slice(128, 256)), Cut(slice(5, 9), slice(64, 192))):
        torch.testing.assert_close(reader.linear(name, shape, cut), cut.of(whole), rtol=1e-6, atol=1e-6)


def test_metadata_that_cannot_be_served_are_refused(tmp_path: Path) -> None:
    path, _ = write_both(tmp_path, "phi3", lambda name: "F16")
    metadata = dict(read_container(path).metadata)
    other = tmp_path / "other.gguf"
    for name, changed, tensors, message in (
        (
            "phi3",
            {"phi3.attention.head_count_kv": 3},
            {"blk.0.attn_qkv.weight": (512, 8)},
            "has no rows of 4 and twice 3 heads",
        ),
        (
            "olmo2",
            {"olmo2.attention.sliding_window": 5, "olmo2.rope.freq_base_swa": 5.0},
            {},
            r"olmo2\.rope\.freq_base_swa is not the base of layers without a window",
        ),
        (
            "ernie4_5-moe",
            {"ernie4_5-moe.expert_count": 8, "ernie4_5-moe.expert_used_count": 2},
            {},
            "no layer has a router",
        ),
        ("gemma4", {}, {}, r"rope_freqs\.weight has no factors of Gemma 4"),
        ("mamba", {}, {}, "general.architecture 'mamba' is not served from GGUF files; served are llama"),
    ):
        own = {key.replace("phi3", name): value for key, value in metadata.items()}
        own |= {
            "general.architecture": name,
            **changed,
            f"{name}.rope.dimension_count": 64,
            "gemma4.attention.sliding_window_pattern": [1, 0, 0],
        }
        made = {"token_embd.weight": (8, 64)} | tensors
        stored = {key: ("F16", shape, bytes(2 * shape[0] * shape[1])) for key, shape in made.items()}
        with pytest.raises((ConfigError, CheckpointError), match=message):
            load_model_config(write_container(other, own, stored))
