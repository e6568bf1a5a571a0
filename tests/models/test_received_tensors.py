"""Tensors that a trainer sends under the names of a checkpoint are read as those of the checkpoint's files."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from moe_engine.models.checkpoint.cut import Cut
from moe_engine.models.checkpoint.safetensors_file import SafetensorsFile
from moe_engine.models.checkpoint_files import read_checkpoint
from moe_engine.models.config_file import load_model_config
from moe_engine.models.received_tensors import ReceivedTensors
from tests.models.checkpoints import make_checkpoint
from tests.models.format_checks import write_pair
from tests.models.quantized import quantize, section

FAMILIES = {
    "deepseek_v3": False, "qwen3_next": True, "qwen3_5": True, "phi3": True, "nemotron_h": True, "kimi_linear": False,
    "gpt_oss": False, "longcat_flash": True,
}  # fmt: skip
"""By kind: whether the model's names differ from those of the files."""


def check(path: Path) -> bool:
    """Compares the tensors with those of the files; whether their names differ from those in the files."""
    layers = load_model_config(path).num_layers
    files = read_checkpoint(path, num_layers=layers)
    opened = {file.path: SafetensorsFile(file) for file in files.values()}
    stored = {name: tensor for each in opened for name, tensor in load_file(each).items()}
    received = ReceivedTensors("a trainer", stored, layers)
    assert received.entries.keys() == files.keys()
    for name, file in files.items():
        shape = received.entries[name].shape
        cuts = [Cut(), *[Cut(slice(1, 3))] * bool(shape), *[Cut(slice(0, 1), slice(1, 3))] * (len(shape) == 2)]
        for cut in cuts:
            found, expected = received.read(name, cut), opened[file.path].read(name, cut)
            assert found.dtype == expected.dtype and torch.equal(found, expected), name
    return received.entries.keys() != stored.keys()


@pytest.mark.parametrize("kind", FAMILIES)
def test_names_and_parts_are_those_of_files(tmp_path: Path, kind: str) -> None:
    has_mtp = kind in ("deepseek_v3", "qwen3_next", "qwen3_5")
    path = make_checkpoint(kind, tmp_path, 1, num_mtp_layers=int(has_mtp), tokenizer=False)
    assert check(path) == FAMILIES[kind]


@pytest.mark.parametrize("layout", ["awq", "gptq"])
def test_parts_are_columns_of_transposed_matrices(tmp_path: Path, layout: str) -> None:
    path = make_checkpoint("phi3", tmp_path / "model", 1, tokenizer=False)
    options = {"layout": layout, "symmetric": False}
    stored, plain = quantize(load_file(path / "model.safetensors"), **options)
    path, _ = write_pair(path, stored, plain, {"quantization_config": section(**options)})
    assert check(path)
