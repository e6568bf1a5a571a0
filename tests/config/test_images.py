"""Launches of models with a vision tower: refused flags, rows of the ledger, the language model alone, headers."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

from moe_engine.config.args import EngineArgs
from moe_engine.errors import CheckpointError, ConfigError
from moe_engine.planning.prepare import prepare
from tests.models.vision_checkpoints import TOKEN_PIXELS, make_checkpoint


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint("qwen3_vl_moe", tmp_path_factory.mktemp("model"), random.randrange(1000))


def launch(path: Path, **flags: Any) -> Any:
    return prepare(EngineArgs.from_kwargs(**{"model_path": str(path), "max_total_tokens": 512} | flags))


def test_memory(path: Path) -> None:
    config = launch(path, vlm_cache_size_mb=7)
    assert config.ledger.bytes_of("image results") == 7 << 20
    assert config.model.vision is not None and config.model.vision.max_patches == 60 * TOKEN_PIXELS**2 // 14**2
    alone = launch(path, language_model_only=True)
    assert alone.model.vision is None and alone.ledger.bytes_of("vision tower") == 0
    tower = sum(t.numel() for name, t in load_file(path / "model.safetensors").items() if "visual." in name)
    assert config.ledger.bytes_of("weights") - alone.ledger.bytes_of("weights") == 4 * tower
    halves = launch(path, tp_size=2)  # every rank has the whole tower
    assert halves.ledger.bytes_of("weights") > 4 * tower
    assert config.ledger.bytes_of("vision tower") == halves.ledger.bytes_of("vision tower") > 0
    divided = launch(path, tp_size=2, mm_enable_dp_encoder=True)
    assert divided.ledger.bytes_of("vision tower") > halves.ledger.bytes_of("vision tower")


def test_largest_image(path: Path, tmp_path: Path) -> None:
    """By the processor's file or --mm-process-config; at most a context."""
    bounded = launch(path, mm_process_config=json.dumps({"image": {"max_pixels": 20 * TOKEN_PIXELS**2}}))
    assert bounded.model.vision.max_patches == 80
    rows = [launch(path, context_length=length).ledger.bytes_of("vision tower") for length in (16, 64, 512)]
    assert rows[0] < rows[1] <= rows[2]


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ({"mm_process_config": '{"image": {"size": 3}}'}, "image: 'size' is not supported; supported: min_pixels, max"),
        ({"mm_process_config": '{"image": {"max_pixels": "many"}}'}, "max_pixels must be a whole number"),
        (
            {"mm_process_config": '{"image": {"max_pixels": 1, "min_pixels": 2}}'},
            "min_pixels 2 is more than max",
        ),
        ({"mm_process_config": '{"video": {"fps": 2}}'}, "video input is not supported"),
        ({"max_media_megapixels": 0}, "--max-media-megapixels 0: must be more than 0"),
        ({"vlm_cache_size_mb": -1}, "--vlm-cache-size-mb -1: must be 0 or more"),
        ({"max_media_mb": 0}, "--max-media-mb 0: must be more than 0"),
        ({"allowed_local_media_path": "/absent/folder"}, "--allowed-local-media-path /absent/folder: is not a folder"),
        ({"limit_mm_data_per_request": '{"image": -1}'}, "must be a whole number of 0 or more"),
        ({"limit_mm_data_per_request": '{"video": 1}'}, "video input is not supported"),
        ({"limit_mm_data_per_request": '{"picture": 1}'}, "'picture' is not a kind of data"),
    ],
)
def test_refused_flags(path: Path, flags: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError) as caught:
        launch(path, **flags)
    assert words in str(caught.value)


@pytest.mark.parametrize(
    ("section", "value", "words"),
    [
        ("deepstack_visual_indexes", [2, 0], "must ascend"),
        ("num_position_embeddings", 17, "is no square"),
        ("out_hidden_size", 32, "is not hidden_size 64"),
        ("hidden_act", "relu", "'relu' is not supported"),
    ],
)
def test_wrong_towers(path: Path, tmp_path: Path, section: str, value: Any, words: str) -> None:
    config = json.loads((path / "config.json").read_text())
    config["vision_config"][section] = value
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ConfigError) as caught:
        launch(tmp_path, load_format="dummy")
    assert words in str(caught.value) and "vision_config" in str(caught.value)


def test_headers(path: Path, tmp_path: Path) -> None:
    """A tensor of the tower that is missing or has another shape is found before weights are read."""
    tensors = load_file(path / "model.safetensors")
    name = "model.visual.blocks.1.attn.qkv.weight"
    del tensors["model.visual.pos_embed.weight"]
    tensors[name] = tensors[name][:5].contiguous()
    save_file(tensors, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text((path / "config.json").read_text())
    with pytest.raises(CheckpointError) as caught:
        launch(tmp_path)
    assert "visual.pos_embed.weight" in str(caught.value) and "visual.blocks.1.attn.qkv.weight" in str(caught.value)
