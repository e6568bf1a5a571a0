"""`benchmarks.cold_load` and `benchmarks.format_quality` without their engines."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from benchmarks import cold_load, format_quality, gguf_blocks, gguf_export
from moe_engine.config.args import EngineArgs
from moe_engine.models.checkpoint_files import read_checkpoint
from moe_engine.models.config_file import load_model_config
from moe_engine.models.formats.plain import PLAIN
from moe_engine.models.header_check import check_headers
from moe_engine.models.weights import WeightReader
from moe_engine.planning.prepare import prepare
from moe_engine.tokenizer.tokenizer import load_tokenizer
from tests.models import gguf as tests_gguf
from tests.models.checkpoints import make_checkpoint


def test_the_table_of_answers() -> None:
    base, other = [True, True, False, True], [True, False, True, False]
    head, first, second = format_quality.table({"none": base, "int8": other})
    assert head.split() == ["format", "right", "points", "differ"]
    assert first.split() == ["bf16", "75.00%", "+0.00", "0"]
    assert second.split() == ["int8", "50.00%", "-25.00", "3"]


def test_the_questions_and_the_copy(tmp_path: Path) -> None:
    examples, prompts, wanted = format_quality.questions(200)
    assert len(examples) == len(prompts) == len(wanted) > 5 and all(prompts) and all(wanted)
    path = format_quality.plain_copy(format_quality.CHECKPOINT_DIR, tmp_path)
    config = load_model_config(path)
    assert config.weight_format == PLAIN
    prepare(EngineArgs.from_kwargs(model_path=str(path), device="cpu", quantization="int4"))


@pytest.mark.parametrize("kind", ["llama", "deepseek_v3"])
def test_an_exported_file_has_the_checkpoints_values(tmp_path: Path, kind: str) -> None:
    sizes = {"kv_lora_rank": 32, "v_head_dim": 16, "q_lora_rank": 32} if kind == "deepseek_v3" else {}
    source = make_checkpoint(kind, tmp_path / "source", num_hidden_layers=2, **sizes)
    path = gguf_export.export(source, tmp_path / "model.gguf", "Q8_0")
    config = load_model_config(path)
    check_headers(path, read_checkpoint(path), config)
    assert load_tokenizer(path).encode("The capital") == load_tokenizer(source).encode("The capital")
    reader = WeightReader(path, torch.float32)
    for name, tensor in load_file(source / "model.safetensors").items():
        found, least = reader.tensor(name, tuple(tensor.shape)), tensor.abs().max() / 127 + 1e-3
        assert (found - tensor).abs().max() <= least, name
    reader.finish()


def test_rounds_of_a_cold_load(tmp_path: Path) -> None:
    path = make_checkpoint("llama", tmp_path, num_hidden_layers=1, tokenizer=False)
    config = prepare(EngineArgs.from_kwargs(model_path=str(path), device="cpu", skip_tokenizer_init=True))
    (seconds,) = cold_load.measure(config, 1)
    assert len(seconds) == 4 and min(seconds) > 0


@pytest.mark.parametrize(("kind", "small"), [("Q4_K", "Q5_0"), ("Q5_K", "Q5_1"), ("Q6_K", "Q8_0"), ("Q4_1", "Q4_1")])
def test_types_of_matrices_without_whole_blocks(kind: str, small: str) -> None:
    assert [gguf_blocks.type_for(kind, columns) for columns in (512, 96, 100)] == [kind, small, "F16"]
    weight = torch.randn(6, 512).numpy()
    values = tests_gguf.dequantize(kind, gguf_blocks.blocks_of(kind, weight))
    steps = {"Q4_K": 15, "Q5_K": 31, "Q6_K": 31, "Q4_1": 15}[kind]
    assert abs(values - weight).max() < 1.5 * abs(weight).max() * 2 / steps


def test_the_embedded_model_as_a_gguf_file(tmp_path: Path) -> None:
    path = format_quality.plain_copy(format_quality.CHECKPOINT_DIR, tmp_path)
    file = Path(format_quality.engine_flags(path, "Q5_K")["model_path"])
    dtypes = {header.dtype for found in read_checkpoint(file).values() for header in found.tensors.values()}
    assert {"Q5_K", "Q5_1", "F32"} <= dtypes
    assert format_quality.engine_flags(path, "int4") == {"model_path": str(path), "quantization": "int4"}
