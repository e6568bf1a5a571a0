"""Phi-3 and Phi-4: matrices that are joined by rows in the files. `test_parity.py` compares logits."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from moe_engine.errors import CheckpointError, ConfigError
from moe_engine.models.checkpoint import joined_rows, safetensors_file
from moe_engine.models.checkpoint.cut import Cut
from moe_engine.models.checkpoint.safetensors_file import SafetensorsFile
from moe_engine.models.checkpoint.safetensors_header import read_header
from moe_engine.models.checkpoint.tensor_header import WeightFile
from moe_engine.models.checkpoint_files import read_checkpoint
from moe_engine.models.config_file import load_model_config
from moe_engine.models.header_check import check_headers
from moe_engine.models.weights import WeightReader
from tests.models.checkpoints import make_checkpoint
from tests.models.format_checks import logits_of, write_pair
from tests.models.quantized import is_quantized, quantize, section
from tests.models.quantized_floats import FLOATS, quantize_floats

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


QUANTIZED: dict[str, Any] = {
    "compressed int4": {"layout": "pack-quantized"},
    "compressed int4, zeros": {"layout": "pack-quantized", "symmetric": False, "group": 16},
    "compressed int8": {"layout": "int-quantized", "bits": 8, "group": 0},
    "w8a8_int8": {"layout": "w8a8_int8", "bits": 8, "group": 0},
    "awq": {"layout": "awq", "symmetric": False},
    "gptq": {"layout": "gptq"},
    "gptq, zeros": {"layout": "gptq", "symmetric": False, "group": 0},
    "gptq, act-order": {"layout": "gptq", "shuffled": True, "symmetric": False},
    "gptq_v2, int8": {"layout": "gptq", "bits": 8, "v2": True},
}


@pytest.mark.parametrize("name", [*QUANTIZED, "compressed fp8, rows", "compressed fp8, matrix", "nvfp4"])
def test_quantized_matrices(tmp_path: Path, name: str) -> None:
    """Numbers and scales of rows are cut, what belongs to a whole matrix is common to its parts."""
    path = make_checkpoint("phi3", tmp_path / "model", tokenizer=False)
    tensors = load_file(path / "model.safetensors")
    if (options := QUANTIZED.get(name)) is not None:
        (stored, plain), config = quantize(tensors, **options), section(**options)
    else:
        (stored, plain), config = quantize_floats(tensors, name), FLOATS[name][1]
    joined = f"{LAYER}self_attn.qkv_proj."
    assert len([key for key in stored if key.startswith(joined)]) > 1
    path, other = write_pair(path, stored, plain, {"quantization_config": config})
    check_headers(path, read_checkpoint(path), load_model_config(path))
    for row in ("torch", "cpu"):
        want = logits_of(other, row)
        torch.testing.assert_close(logits_of(path, row), want, rtol=1e-3, atol=1e-3 * float(want.abs().max()))


@pytest.mark.parametrize("kept", ["self_attn.qkv_proj", "self_attn.o_proj", "mlp.gate_up_proj"])
@pytest.mark.parametrize("layout", ["awq", "gptq"])
def test_plain_matrices_beside_columns(tmp_path: Path, layout: str, kept: str) -> None:
    """The rows of q are known from a plain output too; a joined matrix may be plain itself."""
    path, options = make_checkpoint("phi3", tmp_path / "model", tokenizer=False), QUANTIZED[layout]
    tensors = load_file(path / "model.safetensors")
    stored, plain = quantize(tensors, **options, chosen=lambda name: is_quantized(name) and kept not in name)
    config = section(**options) | {"modules_to_not_convert": [kept]}
    path, other = write_pair(path, stored, plain, {"quantization_config": config})
    check_headers(path, read_checkpoint(path), load_model_config(path))
    want = logits_of(other, "cpu")
    torch.testing.assert_close(logits_of(path, "cpu"), want, rtol=1e-3, atol=1e-3 * float(want.abs().max()))


def test_columns_are_read_in_parts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of adjacent rows together, of distant rows one by one, up to the last byte of the file; slices of them."""
    words = torch.randint(-(2**31), 2**31 - 1, (40, 24), dtype=torch.int32)
    save_file({"whole": words}, tmp_path / "file")
    whole = read_header(tmp_path / "file")["whole"]
    for gap in (1, 1 << 13):
        monkeypatch.setattr(safetensors_file, "_GAP_BYTES", gap)
        monkeypatch.setattr(safetensors_file, "PART_BYTES", random.choice((96, 1000, 1 << 22)))
        for first, count in ((0, 9), (9, 11), (20, 4)):
            part = joined_rows._columns(whole, 8 * first, 8 * count, 8 * 24)
            assert part.shape == (40, count) and part.num_bytes == 160 * count and part.stop <= whole.stop
            file, want = SafetensorsFile(WeightFile(tmp_path / "file", {"part": part})), words[:, first : first + count]
            assert torch.equal(file.read("part"), want)
            cut = Cut(slice(random.randrange(20), 39), slice(1, 3))
            assert torch.equal(file.read("part", cut), cut.of(want))


def test_blocks_across_matrices_are_refused(tmp_path: Path) -> None:
    """Scales of blocks of 128 rows, of which q has half a block."""
    path = make_checkpoint("phi3", tmp_path / "model", tokenizer=False)
    stored, _ = quantize_floats(load_file(path / "model.safetensors"), "compressed fp8, blocks")
    path, _ = write_pair(path, stored, stored, {"quantization_config": FLOATS["compressed fp8, blocks"][1]})
    config = load_model_config(path)
    with pytest.raises(CheckpointError, match="has shape"):
        check_headers(path, read_checkpoint(path), config)


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
        (
            {"quantization_config": {"quant_method": "bitsandbytes"}},
            "quant_method is not supported with joined matrices",
        ),
        ({"attention_bias": True}, "attention_bias True is not supported"),
    ):
        with pytest.raises(ConfigError, match=message):
            load_model_config(path, fields)
