"""Loading MTP layers: tensors read, memory held, errors of missing layers."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from moe_engine.errors import CheckpointError, ConfigError
from moe_engine.models import sizes
from moe_engine.models.checkpoint_files import read_checkpoint
from moe_engine.models.config_file import load_model_config
from moe_engine.models.loader import LoadOptions, load_mtp
from tests.models import stepper
from tests.models.checkpoints import make_checkpoint
from tests.models.test_loader import edited
from tests.models.test_mtp import Drafter

EH_PROJ = "model.layers.3.eh_proj.weight"
COPIES = ("model.layers.3.embed_tokens.weight", "model.layers.3.shared_head.head.weight")


@pytest.mark.parametrize("kind", ["qwen3_next", "ernie4_5_moe", "hy_v3"])
def test_names_of_a_part_of_the_tensors(tmp_path: Path, kind: str) -> None:
    """A folder with the MTP layer alone, as weight updates send it: its names do not become those of layer 0."""
    whole = make_checkpoint(kind, tmp_path, num_mtp_layers=1, tokenizer=False)
    count = load_model_config(whole).num_layers
    first = f"model.layers.{count}."
    wanted = {name for name in read_checkpoint(whole) if name.startswith(first)}
    main = (*(f"model.layers.{i}." for i in range(count)), "model.embed", "model.norm", "lm_head")
    part = edited(whole, lambda tensors: [tensors.pop(name) for name in list(tensors) if name.startswith(main)])
    found = set(read_checkpoint(part, num_layers=count))
    assert found == (wanted - {f"{first}shared_head.norm.weight"} if kind == "ernie4_5_moe" else wanted)


@pytest.mark.parametrize("num_mtp_layers", [1, 2])
def test_weight_bytes_is_what_is_held_beyond_the_model(tmp_path: Path, num_mtp_layers: int) -> None:
    drafter = Drafter(make_checkpoint("deepseek_v3", tmp_path, num_mtp_layers=num_mtp_layers))
    config = drafter.config
    assert drafter.mtp.weight_bytes == sizes.weight_bytes(config, 4, include_mtp=True) - sizes.weight_bytes(config, 4)


def test_the_copies_of_embedding_and_head_are_not_read(tmp_path: Path) -> None:
    """The copies may have any values, or be absent: the model's embedding and head are used."""
    tokens = list(range(30))
    want = Drafter(make_checkpoint("deepseek_v3", tmp_path, num_mtp_layers=1)).step(tokens, 0, 29)
    path = edited(tmp_path, lambda t: t.update({name: torch.full_like(t[name], float("nan")) for name in COPIES}))
    assert torch.equal(Drafter(path).step(tokens, 0, 29), want)
    path = edited(tmp_path, lambda t: [t.pop(name) for name in COPIES])
    assert torch.equal(Drafter(path).step(tokens, 0, 29), want)


def test_missing_and_leftover_tensors(tmp_path: Path) -> None:
    path = make_checkpoint("deepseek_v3", tmp_path, num_mtp_layers=1)
    edited(path, lambda t: t.update({"model.layers.3.extra.weight": torch.ones(2)}))
    with pytest.raises(CheckpointError, match=r"model\.layers\.3\.extra\.weight"):
        Drafter(path)
    edited(path, lambda t: t.update({EH_PROJ: t[EH_PROJ].T.contiguous()}))
    with pytest.raises(CheckpointError, match=r"eh_proj.*\[128, 64\].*\[64, 128\]"):
        Drafter(path)


def test_more_layers_counted_than_there_are(tmp_path: Path) -> None:
    path = make_checkpoint("deepseek_v3", tmp_path, num_mtp_layers=1)
    config = json.loads((path / "config.json").read_text()) | {"num_nextn_predict_layers": 2}
    (path / "config.json").write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match=r"model\.layers\.4\.enorm\.weight.*missing"):
        Drafter(path)


@pytest.mark.parametrize("kind", ["deepseek_v3", "llama"])
def test_models_without_mtp_layers(tmp_path: Path, kind: str) -> None:
    main = stepper.load(make_checkpoint(kind, tmp_path))
    with pytest.raises(ConfigError, match="num_nextn_predict_layers 0"):
        load_mtp(tmp_path, main.config, main.model, LoadOptions("float32"))


def test_progress_bar_counts_the_bytes_of_the_layers(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    main = stepper.load(make_checkpoint("deepseek_v3", tmp_path, num_mtp_layers=1))
    load_mtp(tmp_path, main.config, main.model, LoadOptions("float32", progress=True))
    shown = capsys.readouterr().err
    tensors = load_file(tmp_path / "model.safetensors")
    mtp = {name: t for name, t in tensors.items() if name.startswith("model.layers.3.") and name not in COPIES}
    size = sum(t.numel() * t.element_size() for t in mtp.values()) / 1024
    assert "100%" in shown and f"{size:.0f}k/{size:.0f}k" in shown


def test_dummy_weights(tmp_path: Path) -> None:
    path = make_checkpoint("deepseek_v3", tmp_path, num_mtp_layers=2)
    (path / "model.safetensors").unlink()
    first, second = (Drafter(path, load_format="dummy").step(list(range(50)), 0, 49) for _ in range(2))
    assert torch.isfinite(first).all() and first.std() > 0.1
    assert torch.equal(first, second)
