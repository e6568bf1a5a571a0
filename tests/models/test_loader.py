"""Loading: errors of a checkpoint name file, tensor, expected and actual value."""

from __future__ import annotations

import json
import os
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from moe_engine.errors import CheckpointError, ConfigError
from moe_engine.models import sizes
from moe_engine.models.checkpoint import safetensors_file
from moe_engine.models.checkpoint.cut import Cut
from moe_engine.models.checkpoint.safetensors_file import SafetensorsFile
from moe_engine.models.checkpoint.tensor_header import WeightFile
from moe_engine.models.checkpoint_files import INDEX_FILE, read_checkpoint
from moe_engine.models.config_file import load_model_config
from moe_engine.models.dummy_weights import DummyReader
from moe_engine.models.loader import LoadOptions, load_model
from moe_engine.models.weights import WeightReader
from tests.models import stepper
from tests.models.checkpoints import make_checkpoint, write_tensors
from tests.models.fp8 import dequantize_fp8, quantize_fp8
from tests.models.stepper import Chunk

Tensors = dict[str, Tensor]


def edited(path: Path, edit: Callable[[Tensors], object]) -> Path:
    tensors = load_file(path / "model.safetensors")
    edit(tensors)
    save_file(tensors, path / "model.safetensors")
    return path


def fails(path: Path, *words: str) -> None:
    with pytest.raises(CheckpointError) as caught:
        stepper.load(path)
    for word in words:
        assert word in str(caught.value), f"{word!r} not in: {caught.value}"


GATE = "model.layers.1.mlp.gate.weight"
O_PROJ = "model.layers.0.self_attn.o_proj.weight"


def test_missing_tensor(tmp_path: Path) -> None:
    fails(edited(make_checkpoint("deepseek_v3", tmp_path), lambda t: t.pop(GATE)), GATE, "missing", "[16, 64]")


def test_leftover_tensor(tmp_path: Path) -> None:
    path = edited(make_checkpoint("deepseek_v3", tmp_path), lambda t: t.update({"model.extra.weight": torch.ones(2)}))
    fails(path, "model.extra.weight", "belong to no layer", "model.safetensors")


def test_wrong_shape(tmp_path: Path) -> None:
    path = edited(make_checkpoint("deepseek_v3", tmp_path), lambda t: t.update({O_PROJ: torch.ones(64, 50)}))
    fails(path, O_PROJ, "[64, 50]", "[64, 48]", "model.safetensors")


def test_wrong_dtype(tmp_path: Path) -> None:
    path = edited(make_checkpoint("llama", tmp_path), lambda t: t.update({O_PROJ: t[O_PROJ].to(torch.int8)}))
    fails(path, O_PROJ, "I8", "BF16")


def test_fp8_without_scale(tmp_path: Path) -> None:
    path = make_checkpoint("deepseek_v3", tmp_path, fp8=True)
    fails(edited(path, lambda t: t.pop(O_PROJ + "_scale_inv")), O_PROJ, "F8_E4M3", "weight_scale_inv")


def test_fp8_scale_of_wrong_grid(tmp_path: Path) -> None:
    path = make_checkpoint("deepseek_v3", tmp_path, fp8=True)
    name = O_PROJ + "_scale_inv"
    fails(edited(path, lambda t: t.update({name: torch.ones(2, 1)})), name, "[2, 1]", "[1, 1]")


def test_truncated_file(tmp_path: Path) -> None:
    path = make_checkpoint("llama", tmp_path)
    file = path / "model.safetensors"
    content = file.read_bytes()
    file.write_bytes(content[:-1000])
    fails(path, "model.safetensors", "truncated", str(len(content) - 1000))
    file.write_bytes(content[:5])
    fails(path, "model.safetensors", "truncated")
    file.write_bytes((1 << 20).to_bytes(8, "little") + b"{" * (1 << 20))
    fails(path, "broken safetensors header")


def test_file_truncated_while_it_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = make_checkpoint("deepseek_v3", tmp_path, fp8=True)
    file = path / "model.safetensors"
    size, opened = file.stat().st_size, SafetensorsFile.__init__

    def open_and_truncate(self: SafetensorsFile, found: WeightFile, *more: Any) -> None:
        opened(self, found, *more)
        os.truncate(file, size // 3)

    monkeypatch.setattr(SafetensorsFile, "__init__", open_and_truncate)
    fails(path, "model.safetensors: truncated while it was read: tensor model.", f"the file has {size // 3}")


def test_reads_of_slices(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for part in ("PART_BYTES", "DIRECT_BYTES"):
        monkeypatch.setattr(safetensors_file, part, 1 << 15)  # several parts
    rng = random.Random(random.getrandbits(32))
    tensors = {
        "odd": torch.randint(0, 255, (3,), dtype=torch.uint8),  # the other tensors are not aligned
        "wide": torch.randn(5, 9000).to(torch.bfloat16),
        "tall": torch.randn(700, 40),
        "vector": torch.randn(33),
        "scalar": torch.tensor(2.5),
        "empty": torch.empty(0, 4),
    }
    save_file(tensors, tmp_path / "model.safetensors")
    (file,) = {found.path: found for found in read_checkpoint(tmp_path).values()}.values()
    opened = SafetensorsFile(file)
    for name, tensor in tensors.items():
        ends = [sorted(rng.sample(range(size + 1), 2)) if size > 1 else [0, size] for size in tensor.shape]
        cuts = [slice(*pair) for pair in ends]
        wanted = [
            Cut(),
            *(Cut(*cuts[:i]) for i in range(1, len(cuts) + 1)),
            *([Cut(None, cuts[1])] if len(cuts) > 1 else []),
        ]
        for cut in wanted:
            part = cut.of(tensor)
            assert torch.equal(opened.read(name, cut), part), (name, cut)
            other = torch.empty(part.shape, dtype=torch.float64)
            opened.read_into(name, cut, other)
            assert torch.equal(other, part.double()), (name, cut)


def test_no_files_and_absent_shards(tmp_path: Path) -> None:
    path = make_checkpoint("llama", tmp_path, max_shard_bytes=100_000)
    shard = path / "model-00002-of-00006.safetensors"
    assert shard.is_file()
    content = shard.read_bytes()
    shard.unlink()
    fails(path, INDEX_FILE, shard.name, "download")
    shard.write_bytes(content)
    index = json.loads((path / INDEX_FILE).read_text())
    index["weight_map"]["model.norm.weight"] = index["weight_map"]["lm_head.weight"]
    (path / INDEX_FILE).write_text(json.dumps(index))
    fails(path, "model.norm.weight", index["weight_map"]["lm_head.weight"])
    (path / INDEX_FILE).write_text("[]")
    fails(path, INDEX_FILE, "broken index")
    for file in path.glob("*.safetensors*"):
        file.unlink()
    fails(path, "no *.safetensors", "dummy")


def test_shards_equal_one_file(tmp_path: Path) -> None:
    one = stepper.load(make_checkpoint("deepseek_v3", tmp_path / "one"))
    many = stepper.load(make_checkpoint("deepseek_v3", tmp_path / "many", max_shard_bytes=50_000))
    chunk = [Chunk(0, [1, 2, 3], False)]
    assert torch.equal(one.step(chunk)[0], many.step(chunk)[0])


def test_mtp_and_rotary_tensors_are_passed_over(tmp_path: Path) -> None:
    plain = stepper.load(make_checkpoint("deepseek_v3", tmp_path / "plain"))
    path = make_checkpoint("deepseek_v3", tmp_path / "mtp", num_mtp_layers=2)
    edited(path, lambda t: t.update({"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(4)}))
    with_mtp = stepper.load(path)
    assert with_mtp.config.num_nextn_predict_layers == 2
    chunk = [Chunk(0, [1, 2, 3], False)]
    assert torch.equal(plain.step(chunk)[0], with_mtp.step(chunk)[0])


def test_more_layers_than_config_says(tmp_path: Path) -> None:
    """A layer that config.json does not count is not used as an MTP layer: the answers would be those of another
    model."""
    path = make_checkpoint("llama", tmp_path)
    config = json.loads((path / "config.json").read_text()) | {"num_hidden_layers": 2}
    (path / "config.json").write_text(json.dumps(config))
    fails(path, "model.layers.2.", "belong to no layer", "config.json")


def test_layers_cut_by_an_override(tmp_path: Path) -> None:
    """An override with fewer layers than in config.json is valid: the first layers compute as in the whole model."""

    def logits(path: Path, overrides: dict[str, int] | None = None) -> Tensor:
        config = load_model_config(path, overrides)
        backends = stepper.make_backends(config)
        model = load_model(path, config, LoadOptions("float32"), backends)
        assert len(model.layers) == 2  # type: ignore[attr-defined]
        return stepper.Stepper(model, config, backends).step([Chunk(0, [1, 2, 3], False)])[0]

    whole = make_checkpoint("deepseek_v3", tmp_path / "whole", num_mtp_layers=1)
    cut = make_checkpoint("deepseek_v3", tmp_path / "cut")
    edited(cut, lambda t: [t.pop(name) for name in list(t) if name.startswith("model.layers.2.")])
    fields = json.loads((cut / "config.json").read_text()) | {"num_hidden_layers": 2}
    (cut / "config.json").write_text(json.dumps(fields))
    assert torch.equal(logits(whole, {"num_hidden_layers": 2}), logits(cut))


def test_tied_head_in_the_file_is_passed_over(tmp_path: Path) -> None:
    path = make_checkpoint("qwen2", tmp_path)
    edited(path, lambda t: t.update({"lm_head.weight": t["model.embed_tokens.weight"].clone()}))
    stepper.load(path)


@pytest.mark.parametrize("scale_dtype", ["float32", "e8m0", "uint8"])
def test_slices_of_a_quantized_weight(tmp_path: Path, scale_dtype: str) -> None:
    weight = torch.randn(300, 200, generator=torch.Generator().manual_seed(0))
    tensors = quantize_fp8({"x_proj.weight": weight}, scale_dtype)
    write_tensors(tmp_path, tensors)
    want = dequantize_fp8(tensors)["x_proj.weight"]
    for rows, cols in ((None, None), (slice(100, 290), None), (None, slice(64, 200)), (slice(130, 131), slice(5, 129))):
        reader = WeightReader(tmp_path, torch.float32)
        got = reader.linear("x_proj", (300, 200), Cut(rows, cols))
        assert torch.equal(got, want[rows or slice(None), cols or slice(None)])
        reader.finish()


def test_progress_bar_counts_bytes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = make_checkpoint("llama", tmp_path)
    config = load_model_config(path)
    load_model(path, config, LoadOptions(progress=True), stepper.make_backends(config))
    assert "Loading weights: 100%" in capsys.readouterr().err
    load_model(path, config, LoadOptions(), stepper.make_backends(config))
    assert capsys.readouterr().err == ""


def test_weight_bytes_is_what_is_held(tmp_path: Path) -> None:
    for kind in ("deepseek_v3", "deepseek_v2_lite", "llama", "qwen2", "qwen3_moe"):
        loaded = stepper.load(make_checkpoint(kind, tmp_path / kind))
        assert loaded.model.weight_bytes == sizes.weight_bytes(loaded.config, 4)  # type: ignore[attr-defined]


def test_dummy_weights(tmp_path: Path) -> None:
    path = make_checkpoint("deepseek_v3", tmp_path, num_hidden_layers=8, hidden_size=96)
    for file in path.glob("*.safetensors"):
        file.unlink()
    first, second = (stepper.load(path, load_format="dummy") for _ in range(2))
    tokens = [Chunk(0, list(range(50)), False)]
    logits = first.step(tokens)[0]
    assert torch.isfinite(logits).all() and 0.1 < logits.std() < 10
    assert torch.equal(logits, second.step(tokens)[0])


def test_dummy_reader_slices_and_seeds() -> None:
    reader = DummyReader(torch.bfloat16, seed=1)
    weight = reader.tensor("a.weight", (40, 30), Cut(slice(10, 20), slice(0, 5)))
    assert weight.shape == (10, 5) and weight.dtype == torch.bfloat16
    assert not torch.equal(weight, DummyReader(torch.bfloat16, seed=2).tensor("a.weight", (10, 5)))
    assert torch.equal(reader.tensor("norm.weight", (8,), dtype=torch.float32), torch.ones(8))
    large = reader.tensor("b.weight", (1500, 1000))
    assert large.float().std() == pytest.approx(1000**-0.5, rel=0.02)


def test_unknown_format_and_dtype(tmp_path: Path) -> None:
    path = make_checkpoint("llama", tmp_path)
    config = load_model_config(path)
    with pytest.raises(ConfigError, match="--load-format"):
        load_model(path, config, LoadOptions(load_format="npz"), stepper.make_backends(config))
    with pytest.raises(ConfigError, match="--dtype"):
        load_model(path, config, LoadOptions("int4"), stepper.make_backends(config))
