"""`moe-engine quantize`: the loaders read written checkpoints; interrupted commands continue."""

from __future__ import annotations

import errno
import json
import os
import random
import re
import resource
from collections.abc import Callable
from functools import cache
from importlib.util import find_spec
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from moe_engine.cli.main import main
from moe_engine.errors import CheckpointError, ConfigError
from moe_engine.models.checkpoint_files import read_checkpoint
from moe_engine.models.config_file import load_model_config
from moe_engine.models.header_check import check_headers
from moe_engine.models.quantized_copy.checkpoint import quantize_checkpoint
from moe_engine.models.quantized_copy.target import Target
from moe_engine.models.weights import WeightReader
from tests.models import kimi_checkpoints, mistral3_checkpoints, vision_checkpoints
from tests.models.checkpoints import make_checkpoint
from tests.models.format_checks import logits_of, step_logits
from tests.models.fp8 import dequantize_fp8
from tests.models.mxfp4 import mxfp4_copy
from tests.models.stepper import load
from tests.models.v4_checkpoints import make_v4

SIZES = {"hidden_size": 128, "intermediate_size": 128, "moe_intermediate_size": 128}
WIDE = {**SIZES, "q_lora_rank": 128, "kv_lora_rank": 120, "qk_nope_head_dim": 24, "v_head_dim": 32}
"""Whole blocks of 128 x 128 in all matrices but `kv_b_proj`."""


def quiet(_: int) -> None: ...


@pytest.mark.parametrize("format", ["fp8", "int8", "int4"])
def test_written_checkpoints_are_served(tmp_path: Path, format: str) -> None:
    source = make_checkpoint("deepseek_v3", tmp_path / "in", seed=3, num_mtp_layers=1, max_shard_bytes=200_000, **WIDE)
    output = tmp_path / "out"
    seen: list[int] = []
    quantize_checkpoint(source, output, Target(format, 32), seen.append)
    config, files = load_model_config(output), read_checkpoint(output)
    check_headers(output, files, config, include_mtp=True)
    names = {"fp8": "weight_scale_inv", "int8": "weight_packed", "int4": "weight_packed"}
    assert f"model.layers.1.mlp.experts.3.down_proj.{names[format]}" in files and "lm_head.weight" in files
    assert (output / "tokenizer.json").is_file() and not (output / "quantize.json").exists()
    assert sum(seen) == sum(file.tensors[name].num_bytes for name, file in read_checkpoint(source).items())
    exact = logits_of(source)
    assert float((logits_of(output) - exact).norm() / exact.norm()) < (0.2 if format == "int8" else 1.0)
    with pytest.raises(ConfigError, match="is quantized already"):
        quantize_checkpoint(output, tmp_path / "again", Target("fp8"), quiet)


@pytest.mark.parametrize("format", ["int8", "int4"])
def test_compressors_of_deepseek_v4_are_not_quantized(tmp_path: Path, format: str) -> None:
    source, output = make_v4(tmp_path / "in", 3, tokenizer=False), tmp_path / "out"
    left_out = quantize_checkpoint(source, output, Target(format, 32), quiet)
    plain, copy = (load_file(folder / "model.safetensors") for folder in (source, output))
    compressors = {name for name in plain if ".compressor." in name}
    assert {"layers.1.attn.compressor.wkv.weight", "layers.2.attn.indexer.compressor.wgate.weight"} <= compressors
    assert all(torch.equal(plain[name], copy[name]) for name in compressors)
    assert "layers.2.attn.wq_b.weight_packed" in copy and not any("compressor" in name for name in left_out)
    exact, logits = (step_logits(load(folder, page_size=8)) for folder in (source, output))
    assert float((logits - exact).norm() / exact.norm()) < (0.2 if format == "int8" else 1.0)


def test_an_interrupted_call_continues(tmp_path: Path) -> None:
    source = make_checkpoint("llama", tmp_path / "in", seed=3, max_shard_bytes=60_000)
    output, calls = tmp_path / "out", 0

    def stop(_: int) -> None:
        nonlocal calls
        calls += 1
        if calls > 12:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        quantize_checkpoint(source, output, Target("int8"), stop)
    done = {file.name: file.stat().st_mtime_ns for file in output.glob("*.safetensors")}
    assert done and not (output / "config.json").exists()
    (output / "tokenizer.json").unlink()  # as if the interruption had come earlier
    (output / ".tmpW2xs1P").write_bytes(b"half a file")  # as a process leaves it that is killed while it writes
    with pytest.raises(ConfigError, match="is not empty"):
        quantize_checkpoint(source, output, Target("int4", 32), quiet)
    quantize_checkpoint(source, output, Target("int8"), quiet)
    assert {name: (output / name).stat().st_mtime_ns for name in done} == done
    assert not list(output.glob(".*"))
    assert (output / "tokenizer.json").is_file()
    check_headers(output, read_checkpoint(output), load_model_config(output))


def test_a_write_that_fails_is_one_line_and_can_be_repeated(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A limit of the file size stands for a full disk."""
    source = make_checkpoint("llama", tmp_path / "in", seed=3)
    command = ["quantize", "--model-path", str(source), "--output", str(tmp_path / "out"), "--format", "int8"]
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, before[1]))
    try:
        assert main(command) == 2
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    (line,) = capsys.readouterr().err.strip().splitlines()
    assert f"error: --output {tmp_path}/out: cannot be written (" in line
    assert not list((tmp_path / "out").glob("*.part"))
    assert main(command) == 0
    check_headers(tmp_path / "out", read_checkpoint(tmp_path / "out"), load_model_config(tmp_path / "out"))


def test_a_disk_that_is_full_from_the_beginning(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The settings of the call, which a repeated call reads, are written as a whole or not at all."""
    source, output = make_checkpoint("llama", tmp_path / "in", tokenizer=False), tmp_path / "out"
    really = Path.write_text

    def full(path: Path, text: str) -> int:
        really(path, "")
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr(Path, "write_text", full)
        with pytest.raises(OSError, match="No space left"):
            quantize_checkpoint(source, output, Target("int8"), quiet)
    quantize_checkpoint(source, output, Target("int8"), quiet)
    assert (output / "config.json").is_file()


def test_sources_that_cannot_be_quantized(tmp_path: Path) -> None:
    source = make_checkpoint("llama", tmp_path / "in", seed=3, hidden_size=48, intermediate_size=80)
    with pytest.raises(ConfigError, match="no projection has whole groups of 128 columns; use a smaller --group-size"):
        quantize_checkpoint(source, tmp_path / "out", Target("int4"), quiet)
    with pytest.raises(ConfigError, match="no projection has whole blocks of 128 x 128; use --format int8"):
        quantize_checkpoint(source, tmp_path / "out", Target("fp8"), quiet)
    tensors = load_file(source / "model.safetensors")
    name = "model.layers.1.mlp.down_proj.weight"
    for change, message in (
        ({name: tensors[name].int()}, "has dtype I32"),
        ({"model.layers.0.extra.weight": torch.ones(2)}, "belongs to no layer"),
    ):
        save_file(tensors | change, source / "model.safetensors")
        with pytest.raises(CheckpointError, match=message):
            quantize_checkpoint(source, tmp_path / "out", Target("int8"), quiet)
    assert not (tmp_path / "out").exists()


def test_a_checkpoint_of_torch_files(tmp_path: Path) -> None:
    source = make_checkpoint("llama", tmp_path / "in", seed=3)
    torch.save(load_file(source / "model.safetensors"), source / "pytorch_model.bin")
    (source / "model.safetensors").unlink()
    quantize_checkpoint(source, tmp_path / "out", Target("int8"), quiet)
    assert not list((tmp_path / "out").glob("*.bin"))
    check_headers(tmp_path / "out", read_checkpoint(tmp_path / "out"), load_model_config(tmp_path / "out"))


def test_packed_words_are_those_of_compressed_tensors(tmp_path: Path) -> None:
    """Compared with the library's functions, if it is installed."""
    library = pytest.importorskip("compressed_tensors.compressors")
    source = make_checkpoint("llama", tmp_path / "in", seed=3)
    quantize_checkpoint(source, tmp_path / "out", Target("int4", 32), quiet)
    stored, plain = (load_file(tmp_path / name / "model.safetensors") for name in ("out", "in"))
    name = "model.layers.0.mlp.up_proj"
    shape = torch.Size(stored[f"{name}.weight_shape"].tolist())
    codes = library.unpack_from_int32(stored[f"{name}.weight_packed"], 4, shape)
    values = codes.float() * stored[f"{name}.weight_scale"].float().repeat_interleave(32, 1)
    weight = plain[f"{name}.weight"].float()
    assert float((values - weight).norm() / weight.norm()) < 0.15


TEXT = ("deepseek_v32", "hunyuan_v1_moe", "qwen3_next", "ernie4_5_moe")
IMAGES = ("qwen2_5_vl", "qwen3_5", "kimi_k25", "pixtral")


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], tuple[Path, torch.nn.Module]]:
    """Makes the checkpoint of a kind and transformers' model of it, each once."""

    @cache
    def make(kind: str) -> tuple[Path, torch.nn.Module]:
        source = tmp_path_factory.mktemp(kind)
        if kind in TEXT:
            make_checkpoint(kind, source, 3, num_mtp_layers=int(kind != "hunyuan_v1_moe"), **SIZES)
        elif kind == "kimi_k25":
            kimi_checkpoints.make_kimi(source, 3, **WIDE)
        elif kind == "pixtral":
            mistral3_checkpoints.make_pixtral(source, 3, **SIZES)
        else:
            heads = {"num_attention_heads": 8} if kind == "qwen2_5_vl" else {}
            vision_checkpoints.make_checkpoint(kind, source, 3, num_mtp_layers=int(kind == "qwen3_5"), **SIZES, **heads)
        return source, _on_meta(source)

    return make


@pytest.mark.parametrize("format", ["fp8", "int4"])
@pytest.mark.parametrize("kind", [*TEXT, *IMAGES])
@pytest.mark.each_value
def test_names_are_those_of_the_source(made: Any, tmp_path: Path, kind: str, format: str) -> None:
    """MTP layers and prefixes of models for images keep their names. Each linear layer of transformers' model is either
    quantized or left out by name."""
    from transformers.quantizers.quantizers_utils import should_convert_module

    output, (source, model) = tmp_path / "out", made(kind)
    quantize_checkpoint(source, output, Target(format, 32), quiet)
    check_headers(output, read_checkpoint(output), config := load_model_config(output))
    before, after = (set(load_file(folder / "model.safetensors")) for folder in (source, output))
    ends = ("_scale_inv", "_packed", "_scale", "_shape")
    assert before == {next((name.removesuffix(end) for end in ends if name.endswith(end)), name) for name in after}
    quantized = {_of_layers(name.removesuffix(".weight")) for name in before if {name + end for end in ends} & after}
    section = json.loads((output / "config.json").read_text())["quantization_config"]
    linear = [name for name, module in model.named_modules() if isinstance(module, torch.nn.Linear)]
    assert config.vision is None or any("layers." not in name for name in linear if "lm_head" not in name)
    left_out = _left_out(model, section) if format == "fp8" else []
    for name in linear:
        if format == "fp8":
            plain = not should_convert_module(name, left_out)
        else:
            plain = any(re.match(target.removeprefix("re:"), name) for target in section["ignore"])
        assert plain != (_of_layers(name) in quantized), name


def _of_layers(name: str) -> str:
    """transformers puts other names before ``layers`` than the files have."""
    return name[max(name.find("layers."), 0) :]


def _on_meta(source: Path) -> torch.nn.Module:
    from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText

    config = AutoConfig.from_pretrained(source)
    image_text = hasattr(config, "vision_config")
    with torch.device("meta"):
        auto = AutoModelForImageTextToText if image_text else AutoModelForCausalLM
        model: torch.nn.Module = auto.from_config(config)
    return model


def _left_out(model: torch.nn.Module, section: dict[str, Any]) -> list[str]:
    """The modules that the FP8 section leaves out, by transformers' names."""
    from transformers.quantizers.quantizer_finegrained_fp8 import FineGrainedFP8HfQuantizer
    from transformers.utils.quantization_config import FineGrainedFP8Config

    quantizer = FineGrainedFP8HfQuantizer(FineGrainedFP8Config(**section))
    quantizer._normalize_modules_to_not_convert(model)
    return list(quantizer.quantization_config.modules_to_not_convert)


@pytest.mark.parametrize("experts", [128, 192], ids=["whole", "partial"])
def test_fp8_has_whole_blocks_only(tmp_path: Path, experts: int) -> None:
    """transformers divides a matrix into as many equal parts as there are scales."""
    from transformers.integrations.finegrained_fp8 import Fp8Dequantize

    sizes = WIDE | {"kv_lora_rank": 100, "moe_intermediate_size": experts}
    source = make_checkpoint("deepseek_v3", tmp_path / "in", seed=3, tokenizer=False, **sizes)
    left_out = quantize_checkpoint(source, tmp_path / "out", Target("fp8"), quiet)
    stored = load_file(tmp_path / "out" / "model.safetensors")
    quantized = {name.removesuffix("_scale_inv") for name in stored if name.endswith("_scale_inv")}
    read, values = Fp8Dequantize(None), dequantize_fp8(stored)
    for name in quantized:
        assert torch.equal(read._dequantize_one(stored[name], stored[f"{name}_scale_inv"], torch.float32), values[name])
    attention = {"self_attn.q_a_proj", "self_attn.kv_a_proj_with_mqa", "self_attn.kv_b_proj"}
    whole = experts == 128
    parts = {f"mlp.{block}.{name}_proj" for block in ("experts.*", "shared_experts") for name in ("gate", "up", "down")}
    assert set(left_out) == attention | (set() if whole else parts)
    assert ("model.layers.1.mlp.experts.0.up_proj.weight" in quantized) == whole
    assert "model.layers.0.self_attn.q_b_proj.weight" in quantized
    section = json.loads((tmp_path / "out" / "config.json").read_text())["quantization_config"]
    named = section["modules_to_not_convert"]
    assert {f"model.layers.2.self_attn.{name}" for name in ("q_a_proj", "fused_qkv_a_proj")} <= set(named)
    assert ("model.layers.1.mlp.experts" in named) != whole
    assert logits_of(tmp_path / "out").isfinite().all()


def test_projections_that_engines_join_are_quantized_together(tmp_path: Path) -> None:
    source = make_checkpoint("llama", tmp_path / "in", seed=3, hidden_size=128, intermediate_size=128)  # 32 rows of k
    left_out = quantize_checkpoint(source, tmp_path / "out", Target("fp8"), quiet)
    assert set(left_out) == {"self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"}
    narrow = make_checkpoint("qwen3_moe", tmp_path / "narrow", seed=3, **SIZES | {"moe_intermediate_size": 40})
    left_out = quantize_checkpoint(narrow, tmp_path / "four", Target("int4", 32), quiet)
    assert set(left_out) == {f"mlp.experts.*.{name}_proj" for name in ("gate", "up", "down")}


@pytest.mark.parametrize("format", ["fp8", "int8"])
@pytest.mark.parametrize("kind", ["qwen3_5_moe", "qwen3_vl_moe", "mistral4"])
@pytest.mark.parametrize("width", [128, 192])
@pytest.mark.each_value
def test_experts_in_common_tensors(tmp_path: Path, kind: str, format: str, width: int) -> None:
    """With FP8 the copies of models that are published so have them in common tensors, too."""
    source, output, sizes = tmp_path / "in", tmp_path / "out", SIZES | {"moe_intermediate_size": width}
    if kind == "mistral4":
        make_checkpoint(kind, source, 3, **WIDE | sizes)
    else:
        shared = {"shared_expert_intermediate_size": 128} if kind == "qwen3_5_moe" else {}
        vision_checkpoints.make_checkpoint(kind, source, 3, **sizes, **shared)
    block = "model.layers.1.mlp" if kind == "mistral4" else "model.language_model.layers.0.mlp"
    assert f"{block}.experts.gate_up_proj" in load_file(source / "model.safetensors")
    left_out = quantize_checkpoint(source, output, Target(format), quiet)
    quantized = (format, width) != ("fp8", 192)
    assert ("mlp.experts.*.up_proj" in left_out) != quantized
    common = format == "fp8" and kind != "qwen3_5_moe"
    ending = "" if not quantized else "_scale_inv" if format == "fp8" else "_packed"
    name = f"{block}.experts.gate_up_proj" if common else f"{block}.experts.5.up_proj.weight"
    assert name + ending in load_file(output / "model.safetensors")
    check_headers(output, read_checkpoint(output), load_model_config(output))
    for expert, (part, shape) in product(
        (0, 7), {"gate": (width, 128), "up": (width, 128), "down": (128, width)}.items()
    ):
        before, after = (
            WeightReader(folder, torch.float32, format=load_model_config(folder).weight_format).linear(
                f"model.layers.{1 if kind == 'mistral4' else 0}.mlp.experts.{expert}.{part}_proj", shape
            )
            for folder in (source, output)
        )
        error = float((after - before).norm() / before.norm())
        assert (0.001 < error < 0.04) if quantized else error == 0
    assert logits_of(output).isfinite().all()


def test_gpt_oss_gets_the_form_in_which_it_is_published(tmp_path: Path) -> None:
    """Values of MXFP4 are kept, others get the nearest ones."""
    made = make_checkpoint("gpt_oss", tmp_path / "in", seed=random.randrange(1000), tokenizer=False)
    stored, plain = mxfp4_copy(made, tmp_path / "pair")
    for source, name in ((plain, "values"), (made, "weights")):
        quantize_checkpoint(source, tmp_path / name, Target("mxfp4"), quiet)
        assert torch.equal(logits_of(tmp_path / name), logits_of(stored))
    with pytest.raises(ConfigError, match="use --format mxfp4"):
        quantize_checkpoint(made, tmp_path / "no", Target("int8"), quiet)
    llama = make_checkpoint("llama", tmp_path / "llama", seed=3)
    with pytest.raises(ConfigError, match="--format mxfp4 is for gpt-oss"):
        quantize_checkpoint(llama, tmp_path / "no", Target("mxfp4"), quiet)


@pytest.mark.skipif(
    find_spec("compressed_tensors") is None, reason="pip install compressed-tensors: transformers reads it with it"
)
@pytest.mark.parametrize("kind", ["llama", "qwen3", "qwen3_5", "phi3", "glm4"])
@pytest.mark.parametrize("target", [Target("int8"), Target("int4", 32)])
def test_transformers_reads_the_copy(tmp_path: Path, kind: str, target: Target) -> None:
    from transformers import AutoModelForCausalLM

    source = make_checkpoint(kind, tmp_path / "in", seed=3, hidden_size=128, intermediate_size=256)
    quantize_checkpoint(source, tmp_path / "out", target, quiet)
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.float32)
    with torch.no_grad():
        wanted: torch.Tensor = theirs(torch.tensor([[3, 141, 59, 26, 5]])).logits[0]
    torch.testing.assert_close(logits_of(tmp_path / "out")[:5], wanted, rtol=1e-4, atol=1e-4)


@pytest.mark.skipif(find_spec("compressed_tensors") is None, reason="pip install compressed-tensors")
def test_transformers_rounds_the_routed_experts_of_the_copy(tmp_path: Path) -> None:
    """To the dtype of the scales, whatever dtype is asked for; other matrices have the exact values, as all of ours."""
    from transformers import AutoModelForCausalLM

    source = make_checkpoint("deepseek_v3", tmp_path / "in", seed=3, **WIDE)
    quantize_checkpoint(source, tmp_path / "out", Target("int4", 32), quiet)
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.float32)
    with torch.no_grad():
        model(torch.tensor([[3, 141]]))  # its first call decompresses the matrices that are not routed experts
    theirs = model.state_dict()
    format = load_model_config(tmp_path / "out").weight_format
    reader, mlp = WeightReader(tmp_path / "out", torch.float32, format=format), "model.layers.1.mlp"
    shared = reader.linear(f"{mlp}.shared_experts.down_proj", (128, 128))
    assert torch.equal(theirs[f"{mlp}.shared_experts.down_proj.weight"], shared)
    for expert in (0, 11):
        ours = [reader.linear(f"{mlp}.experts.{expert}.{name}_proj", (128, 128)) for name in ("gate", "up")]
        found = theirs[f"{mlp}.experts.gate_up_proj"][expert]
        assert torch.equal(found.float(), torch.cat(ours).bfloat16().float())


@pytest.mark.skipif(find_spec("accelerate") is None, reason="pip install accelerate: transformers reads MXFP4 with it")
def test_transformers_reads_the_copy_of_gpt_oss(tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    source = make_checkpoint("gpt_oss", tmp_path / "in", seed=random.randrange(1000), tokenizer=False)
    quantize_checkpoint(source, tmp_path / "out", Target("mxfp4"), quiet)
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.float32)
    with torch.no_grad():
        wanted: torch.Tensor = theirs(torch.tensor([[3, 141, 59, 26, 5]])).logits[0]
    torch.testing.assert_close(logits_of(tmp_path / "out")[:5], wanted, rtol=1e-4, atol=1e-4)


@pytest.mark.usefixtures("forked_processes")
def test_the_command_measures_perplexity(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = make_checkpoint("llama", tmp_path / "in", seed=3)
    text = tmp_path / "text.txt"
    text.write_text("The capital of France is Paris. " * 3)
    arguments = ["quantize", "--model-path", str(source), "--output", str(tmp_path / "out"), "--format", "int8"]
    assert main([*arguments, "--text", str(text)]) == 0
    line = capsys.readouterr().out.splitlines()[-1]
    assert line.startswith(f"perplexity of {text}: ") and "before" in line and "after" in line
    before, after = (float(line.partition(": ")[2].split()[i]) for i in (0, 2))
    assert 1 < before < 2000 and abs(after / before - 1) < 0.3
    assert json.loads((tmp_path / "out" / "config.json").read_text())["quantization_config"]["format"]


def test_a_file_is_no_output(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source, output = make_checkpoint("llama", tmp_path / "in", seed=3), tmp_path / "out"
    output.write_text("")
    assert main(["quantize", "--model-path", str(source), "--output", str(output), "--format", "int8"]) == 2
    (line,) = capsys.readouterr().err.strip().splitlines()
    assert f"error: --output {output}: cannot be written (" in line and "; name a folder " in line
