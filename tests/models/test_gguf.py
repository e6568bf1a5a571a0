"""GGUF files: logits are those of the values that the block types define; headers, metadata, refusals."""

from __future__ import annotations

import json
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from moe_engine.errors import CheckpointError, ConfigError
from moe_engine.gguf_container import read_container
from moe_engine.models.checkpoint.cut import Cut
from moe_engine.models.checkpoint.tensor_header import BLOCK_TYPES
from moe_engine.models.checkpoint_files import read_checkpoint
from moe_engine.models.config import ModelConfig
from moe_engine.models.config_file import load_model_config
from moe_engine.models.formats.gguf import Blocks
from moe_engine.models.formats.gguf_blocks import values_of, wide_codes_into
from moe_engine.models.header_check import check_headers
from moe_engine.models.quantized_copy.checkpoint import Target, quantize_checkpoint
from moe_engine.models.weights import WeightReader
from tests.models.checkpoints import make_checkpoint, write_tensors
from tests.models.format_checks import ledger_fits, loaded, logits_of
from tests.models.gguf import (
    NUMBERS,
    UNKNOWN_THERE,
    dequantize,
    gguf_name,
    quantize,
    write_container,
    write_gguf,
)

SCALES = {
    "Q4_1": (0, 2), "Q5_1": (0, 2), "Q4_K": (0, 2), "Q5_K": (0, 2), "Q6_K": (208,), "Q2_K": (80, 82), "Q3_K": (108,),
}  # fmt: skip
"""Places of the scales in a block; others begin with one."""
FAMILIES = ("llama", "mixtral", "qwen2", "qwen3", "qwen3_moe", "deepseek_v2", "deepseek_v3", "gemma3")
SMALL = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2}
WIDE = {"hidden_size": 256, "intermediate_size": 256, "num_hidden_layers": 2}
GEMMA = {"query_pre_attn_scalar": 24, "num_hidden_layers": 3}
"""The metadata do not contain the first: it is the width of a head."""
MLA = {"kv_lora_rank": 32, "v_head_dim": 16, "q_lora_rank": 32, "moe_intermediate_size": 32}


def write_both(
    folder: Path, kind: str, type_of: Any = lambda name: "Q4_0", split: bool = False, **options: Any
) -> tuple[Path, Path]:
    """A GGUF file, and a checkpoint in hub layout with its values."""
    overrides = SMALL | (MLA if kind.startswith("deepseek") else GEMMA if kind == "gemma3" else {}) | options
    plain = make_checkpoint(kind, folder / "plain", seed=torch.initial_seed() % 1000, **overrides)
    path = folder / "model.gguf"
    write_tensors(plain, write_gguf(plain, path, kind, type_of, split))
    return path, plain


@pytest.mark.parametrize("type", BLOCK_TYPES)
def test_values_are_those_of_the_definition(type: str) -> None:
    weight = torch.randn(6, 512).numpy()
    blocks = quantize(type, weight)
    wanted = dequantize(type, blocks)
    # MXFP4 cuts values of a block with a maximum below 4 at 3
    assert np.abs(wanted - weight).max() <= {"Q8_0": 0.03, "Q2_K": 1.5, "Q3_K": 1.5, "MXFP4": 1.0}.get(type, 0.6)
    found = values_of(type, torch.from_numpy(blocks).unflatten(1, (-1, BLOCK_TYPES[type][1])))
    assert np.abs(found.numpy() - wanted).max() <= 1e-6 * np.abs(wanted).max()
    raw = torch.randint(0, 256, (4, BLOCK_TYPES[type][1]), dtype=torch.uint8)
    for place in SCALES.get(type, (0,)):
        raw[:, place + 1] &= 0x3F  # a finite scale
    wanted = dequantize(type, raw.numpy())
    found = values_of(type, raw.unsqueeze(1))
    np.testing.assert_allclose(found.numpy(), wanted, rtol=1e-5, atol=1e-6 * np.abs(wanted).max())


@pytest.mark.parametrize("type", [type for type in BLOCK_TYPES if type not in UNKNOWN_THERE])
def test_values_are_those_of_transformers(type: str) -> None:
    from transformers.integrations.gguf import dequant

    blocks = quantize(type, torch.randn(4, 512).numpy())
    wanted = dequantize(type, blocks)
    theirs = dequant.dequantize(torch.from_numpy(blocks), NUMBERS[type])
    np.testing.assert_allclose(theirs.view(4, 512).numpy(), wanted, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("type", BLOCK_TYPES)
def test_values_are_those_of_the_gguf_package(type: str) -> None:
    gguf = pytest.importorskip("gguf", reason="pip install gguf compares with llama.cpp's own package")
    blocks = quantize(type, torch.randn(4, 512).numpy())
    theirs = gguf.dequantize(blocks, gguf.GGMLQuantizationType[type])
    np.testing.assert_allclose(theirs, dequantize(type, blocks), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("kind", FAMILIES)
def test_logits_are_those_of_the_dequantized_weights(tmp_path: Path, kind: str) -> None:
    type_of = {"llama": lambda name: "Q8_0", "qwen3": lambda name: "BF16"}.get(kind, lambda name: "Q4_0")
    path, plain = write_both(tmp_path, kind, type_of, split=kind == "deepseek_v3")
    config = load_model_config(path)
    check_headers(path, read_checkpoint(path), config)
    assert config.architecture == load_model_config(plain).architecture
    torch.testing.assert_close(logits_of(path), logits_of(plain), rtol=1e-5, atol=1e-5)


def mixed(name: str) -> str:
    """Like llama.cpp's Q4_K_M: some matrices in Q6_K."""
    return "Q6_K" if name in ("output.weight", "blk.0.attn_v.weight") or "ffn_down" in name else "Q4_K"


def test_gemma_3(tmp_path: Path) -> None:
    """Which layers have windows may be stated for each; 27B divides its scores otherwise; files of converters before
    windows have none."""
    path, plain = write_both(tmp_path, "gemma3")
    found, want = load_model_config(path), load_model_config(plain)
    assert (found.ropes, found.cache_groups, found.logit_cap) == (want.ropes, want.cache_groups, want.logit_cap)
    assert (found.norm_plus, want.norm_plus, found.tie_word_embeddings) == (0.0, 1.0, True)
    metadata = dict(read_container(path).metadata)
    table = {"token_embd.weight": ("F16", (8, 64), bytes(1024))}

    def parsed(**changed: Any) -> ModelConfig:
        changes = {f"gemma3.{key.replace('__', '.')}": value for key, value in changed.items()}
        made = {name: value for name, value in {**metadata, **changes}.items() if value is not None}
        return load_model_config(write_container(tmp_path / "other.gguf", made, table))

    assert parsed(attention__sliding_window_pattern=(1, 0, 1)).cache_groups[0].layers == (1,)
    assert parsed(attention__sliding_window_pattern=None).cache_groups[0].window == 20
    for wrong in (0, "all"):
        with pytest.raises(ConfigError, match=r"sliding_window_pattern .* is no period"):
            parsed(attention__sliding_window_pattern=wrong)
    assert len(parsed(attention__sliding_window=None).cache_groups) == 1
    narrow, wide = (parsed(block_count=layers).rope.softmax_factor for layers in (61, 62))
    assert (narrow, wide) == (1.0, pytest.approx((24 / 16) ** 0.5))


@pytest.mark.parametrize("kind", ["llama", "qwen3_moe"])
def test_mixed_types_of_256_numbers_a_block(tmp_path: Path, kind: str) -> None:
    wide = WIDE | ({"moe_intermediate_size": 256, "num_experts": 2} if kind == "qwen3_moe" else {})
    path, plain = write_both(tmp_path, kind, mixed, **wide)
    assert {tensor.dtype for f in read_checkpoint(path).values() for tensor in f.tensors.values()} >= {"Q4_K", "Q6_K"}
    want = logits_of(plain)
    torch.testing.assert_close(logits_of(path), want, rtol=1e-5, atol=1e-4)
    torch.testing.assert_close(logits_of(path, "cpu"), want, rtol=1e-3, atol=1e-3 * float(want.abs().max()))
    assert ledger_fits(loaded(path, "cpu")) < 0.8  # a dequantized stack or head takes more


@pytest.mark.parametrize(
    ("kind", "other", "part"),
    [
        ("llama", "F16", "attn_q"),
        ("llama", "MXFP4", "ffn_up"),
        ("qwen3", "BF16", "ffn_gate"),
        ("qwen3_moe", "F16", "ffn_down_exps"),
    ],
)
def test_stacks_without_a_common_form_are_dequantized_in_the_ledger_too(
    tmp_path: Path, kind: str, other: str, part: str
) -> None:
    path, plain = write_both(tmp_path, kind, lambda name: other if part in name else "Q8_0", tie_word_embeddings=False)
    want = logits_of(plain, "cpu")
    torch.testing.assert_close(logits_of(path, "cpu"), want, rtol=2e-4, atol=2e-4 * float(want.abs().max()))
    assert ledger_fits(loaded(path, "cpu")) < 1


@pytest.mark.parametrize("type", [type for type in BLOCK_TYPES if type != "MXFP4"])
def test_the_form_of_stacks_of_several_types_has_the_same_values(type: str) -> None:
    raw = torch.from_numpy(quantize(type, torch.randn(5, 512).numpy())).unflatten(1, (-1, BLOCK_TYPES[type][1]))
    form = Blocks(type, wide=True).kernel_format()
    assert form is not None
    out = form.empty(5, 512, "cpu")
    wide_codes_into(type, raw, out)
    torch.testing.assert_close(out.dequantized(), values_of(type, raw), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize(
    ("kind", "type", "most"),
    [
        ("llama", "Q4_0", 0.45),
        ("deepseek_v3", "Q4_0", 0.45),
        ("qwen3_moe", "Q8_0", 0.6),
        ("qwen3", "Q6_K", 0.8),
        ("qwen3_moe", "Q4_K", 0.45),
        ("llama", "Q5_K", 0.8),
        ("llama", "Q4_1", 0.5),
        ("qwen3", "Q5_0", 0.6),
        ("qwen3", "Q5_1", 0.65),
        ("llama", "Q2_K", 0.55),
        ("qwen3_moe", "Q3_K", 0.55),
        ("deepseek_v3", "IQ4_NL", 0.45),
        ("qwen3_moe", "IQ4_XS", 0.45),
        ("llama", "MXFP4", 0.45),
    ],
)
def test_kernels_multiply_the_blocks_and_the_ledger_counts_them(
    tmp_path: Path, kind: str, type: str, most: float
) -> None:
    small = {"hidden_size": 128, "intermediate_size": 128}
    wide = WIDE | {"moe_intermediate_size": 256} if BLOCK_TYPES[type][0] == 256 else small
    path, plain = write_both(tmp_path, kind, lambda name: type, **wide)
    want = logits_of(plain, "cpu")
    torch.testing.assert_close(logits_of(path, "cpu"), want, rtol=2e-4, atol=2e-4 * float(want.abs().max()))
    assert ledger_fits(loaded(path, "cpu")) < most
    assert logits_of(path, "cpu", load_format="dummy").isfinite().all()


def test_slices_are_those_of_the_whole_matrix(tmp_path: Path) -> None:
    path, plain = write_both(tmp_path, "llama", num_key_value_heads=2, hidden_size=128)
    wanted = load_file(plain / "model.safetensors")
    reader = WeightReader(path, torch.float32)
    for name in ("model.layers.1.self_attn.q_proj", "model.layers.0.self_attn.k_proj", "model.layers.0.mlp.down_proj"):
        whole = wanted[f"{name}.weight"].float()
        rows, columns = whole.shape
        for cut in (Cut(slice(5, 29)), Cut(None, slice(32, 96)), Cut(slice(0, rows // 2), slice(7, 41))):
            found = reader.linear(name, (rows, columns), cut)
            assert torch.equal(found, cut.of(whole)), (name, cut)


def test_a_biased_llama_and_a_model_in_parts(tmp_path: Path) -> None:
    path, plain = write_both(tmp_path, "llama", attention_bias=True)
    assert torch.equal(logits_of(path), logits_of(plain))
    whole = path.read_bytes()
    parts = [tmp_path / f"x-0000{number}-of-00002.gguf" for number in (1, 2)]
    split(path, parts)
    path.unlink()
    assert load_model_config(tmp_path / parts[0].name).num_layers == 2 and whole
    assert torch.equal(logits_of(parts[0]), logits_of(plain))
    parts[1].unlink()
    with pytest.raises(CheckpointError, match=r"x-00002-of-00002\.gguf of 2 parts is missing"):
        load_model_config(parts[0])


def split(path: Path, parts: list[Path]) -> None:
    from tests.models.gguf import NUMBERS

    found, data = read_container(path), path.read_bytes()
    names = {number: name for name, number in NUMBERS.items()}
    ends = sorted(info.start for info in found.tensors) + [len(data)]
    stored: dict[str, Any] = {}
    for info in found.tensors:
        stop = next(end for end in ends if end > info.start)
        stored[info.name] = (names[info.type], info.shape, data[info.start : stop])
    some = {name: value for i, (name, value) in enumerate(stored.items()) if i % 2}
    write_container(parts[0], found.metadata, some)
    write_container(parts[1], {"split.no": 1}, {name: value for name, value in stored.items() if name not in some})


def test_headers_and_metadata_are_refused_by_name(tmp_path: Path) -> None:
    path, _ = write_both(tmp_path, "llama")
    other = path.with_name("other.gguf")
    data = path.read_bytes()
    for content, message in (
        (data[:1000], "truncated"),
        (b"GGML" + data[4:], "no GGUF file"),
        (data[:4] + bytes((1, 0, 0, 0)) + data[8:], "version 1"),
        (data[:4] + bytes((0, 0, 0, 3)) + data[8:], "big-endian"),
        (data[:-200], "truncated: tensor"),
        (data.replace(b"\x05\0\0\0\0\0\0\0llama", b"\x05\0\0\0\0\0\0\0gemma"), "'gemma' is not"),
        (data.replace(b"llama.block_count", b"llama.block_zount"), r"has no llama\.block_count"),
        (data.replace(b"blk.1.ffn_up.weight", b"blk.1.ffn_upp.wight"), "ffn_upp"),
    ):  # fmt: skip
        other.write_bytes(content)
        with pytest.raises((CheckpointError, ConfigError), match=message):
            config = load_model_config(other)
            check_headers(other, read_checkpoint(other), config)
    other.unlink()
    write_container(other, {"general.architecture": "llama"}, {"token_embd.weight": ("IQ3_S", (1, 256), bytes(128))})
    with pytest.raises(CheckpointError, match="has the type IQ3_S, which is not served; served are Q4_0, Q4_1, Q5_0"):
        load_model_config(other)
    with pytest.raises(CheckpointError, match=r"several GGUF files \(model.gguf, other.gguf\)"):
        load_model_config(tmp_path)
    with pytest.raises(CheckpointError, match=r"--load-format safetensors: .* is a GGUF file"):
        read_checkpoint(path, "safetensors")


def test_a_file_is_not_quantized_again(tmp_path: Path) -> None:
    path, _ = write_both(tmp_path, "llama", lambda name: "F16")
    with pytest.raises(ConfigError, match=r"model\.gguf: is a GGUF file; quantize the model's safetensors"):
        quantize_checkpoint(path, tmp_path / "out", Target("int8"), lambda done: None)


def test_rotary_settings_of_llama_3_come_from_the_factors(tmp_path: Path) -> None:
    path, plain = write_both(tmp_path, "llama")
    assert load_model_config(path).rope == load_model_config(plain).rope
    assert gguf_name("model.layers.3.mlp.experts.7.up_proj.weight") == "blk.3.ffn_up_exps.weight"
    data = bytearray(path.read_bytes())
    info = next(info for info in read_container(path).tensors if info.name == "rope_freqs.weight")
    data[info.start : info.start + 4] = np.float32(1.7).tobytes()
    path.write_bytes(bytes(data))
    with pytest.raises(ConfigError, match="not those of Llama 3"):
        load_model_config(path)


def test_a_router_with_unknown_groups_is_refused(tmp_path: Path) -> None:
    """As in files of V3 from older converters."""
    path, _ = write_both(tmp_path, "deepseek_v3", n_routed_experts=256, n_group=8)
    path.write_bytes(path.read_bytes().replace(b"deepseek2.expert_group_count", b"deepseek2.expert_group_counx"))
    with pytest.raises(ConfigError, match=r"has no deepseek2\.expert_group_count, and the router of DeepSeek V3"):
        load_model_config(path)


@pytest.mark.skipif(
    not (find_spec("gguf") and find_spec("accelerate")),
    reason="pip install gguf accelerate: transformers reads GGUF files with them",
)
@pytest.mark.parametrize("kind", ["llama", "qwen2", "qwen3"])
def test_logits_are_those_of_transformers_reading_the_file(tmp_path: Path, kind: str) -> None:
    from transformers import AutoModelForCausalLM

    # transformers reads neither rope_freqs nor the width of Qwen3's heads
    rope: dict[str, Any] = {"llama": {"rope_scaling": None}, "qwen3": {"head_dim": 128}}.get(kind, {})
    path, plain = write_both(tmp_path, kind, **rope)
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path, gguf_file=path.name, dtype=torch.float32)
    ids = [3, 141, 59, 26, 5]
    with torch.no_grad():
        wanted: Tensor = theirs(torch.tensor([ids])).logits[0]
    torch.testing.assert_close(logits_of(path)[: len(ids)], wanted, rtol=1e-4, atol=1e-4)
    assert json.loads((plain / "config.json").read_text())["model_type"] == theirs.config.model_type
