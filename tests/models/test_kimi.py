"""Kimi K2.5 against transformers: tower, logits, requests with images in an engine; names, config, pixels."""

from __future__ import annotations

import json
import math
import random
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch

from moe_engine.config.args import EngineArgs
from moe_engine.errors import CheckpointError, ConfigError
from moe_engine.media.image_process import load_processor
from moe_engine.models.checkpoint_files import read_checkpoint
from moe_engine.models.config_file import load_model_config
from moe_engine.models.families.kimi import KimiModel
from moe_engine.models.header_check import check_headers
from moe_engine.models.vision.kimi_pixels import KimiProcessor
from moe_engine.planning.prepare import prepare
from tests.models import stepper
from tests.models.image_parity import around, check_logits, check_requests
from tests.models.kimi_checkpoints import IMAGE, PATCH, make_kimi
from tests.models.rows import all_rows
from tests.models.test_parity import assert_close
from tests.models.vision_checkpoints import Made, noise_pixels

picture = partial(noise_pixels, patch_width=3 * PATCH**2)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Made:
    """A random checkpoint, and transformers' model."""
    return make_kimi(tmp_path_factory.mktemp("kimi"), random.randrange(2**31))


@pytest.mark.parametrize("row", all_rows())
def test_logits_equal_transformers(made: Made, row: str) -> None:
    image = picture(3, 5)
    loaded = stepper.load(made.path, row)
    assert isinstance(loaded.model, KimiModel)
    rows = loaded.model.encode(image.values, image.grid)
    with torch.no_grad():
        grid = torch.tensor([image.grid])
        found = made.model.model.get_image_features(image.values.view(-1, 3, PATCH, PATCH), grid, return_dict=True)
    assert_close(rows, found.pooler_output[0])
    check_logits(loaded, made.path, row, made, (*around([image], IMAGE, count=30), [image]), rows, IMAGE)


def test_requests(made: Made, tmp_path: Path) -> None:
    first, second = picture(2, 3), picture(4, 1)
    asked = [(*around(images, IMAGE), images) for images in ([first], [first, second], [])]
    check_requests(made.path, made, asked, tmp_path / "status")


def test_pixels(made: Made) -> None:
    """An image that fits keeps its pixels and is padded to whole tokens; others are resized to a number of patches."""
    image_module = pytest.importorskip("PIL.Image", reason="images need pillow: pip install -e '.[vision]'")
    own = {"media_proc_cfg": {"patch_size": 14, "merge_kernel_size": 2, "in_patch_limit": 60}}
    (made.path / "preprocessor_config.json").write_text(json.dumps(own))
    found = load_processor(str(made.path))
    config = prepare(EngineArgs.from_kwargs(model_path=str(made.path), max_total_tokens=64))
    assert config.model.vision is not None and config.model.vision.max_patches == found.max_patches
    assert KimiProcessor.of({"image_processor_type": "Qwen2VLImageProcessor"}) is None
    height, width = random.randint(30, 80), random.randint(30, 80)
    values = np.random.default_rng(random.randrange(1000)).integers(0, 256, (height, width, 3), dtype=np.uint8)
    made = found([image_module.fromarray(values)])
    grid = made["image_grid_thw"][0].tolist()
    assert grid == [1, -(-height // 28) * 2, -(-width // 28) * 2]
    padded = torch.zeros(3, grid[1] * 14, grid[2] * 14)
    padded[:, :height, :width] = torch.from_numpy(values).permute(2, 0, 1)
    patches = torch.nn.functional.unfold((padded / 127.5 - 1)[None], 14, stride=14)[0].T
    assert np.allclose(made["pixel_values"], patches, atol=1e-5)
    for width, height in ((1000, 30), (1, 1), (517, 333), (9000, 40), (200, 201)):
        (resized, whole) = replace(found, side=16).sizes(width, height)
        rows, columns = max(1.0, height // 14), max(1.0, width // 14)
        scale = min(1.0, math.sqrt(60 / (rows * columns)), 16 * 14 / height, 16 * 14 / width)
        assert resized == (max(1, int(width * scale)), max(1, int(height * scale)))
        assert all(a <= b < a + 28 and b % 28 == 0 for a, b in zip(resized, whole))
        assert whole[0] * whole[1] // 14**2 <= replace(found, side=16).max_patches


@pytest.mark.parametrize("architecture", ["KimiK25ForConditionalGeneration", "Kimi_K25ForConditionalGeneration", None])
def test_names_and_config(made: Made, tmp_path: Path, architecture: str | None) -> None:
    path = made.path
    raw = json.loads((path / "config.json").read_text())
    raw["architectures"] = [architecture or "KimiK25ForConditionalGeneration"]
    if architecture is None:  # as published: the text's own architecture
        raw["text_config"] |= {"architectures": ["DeepseekV3ForCausalLM"], "model_type": "kimi_k2"}
        raw["media_placeholder_token_id"] = raw.pop("image_token_id")
        own, names = raw["vision_config"], ("hidden_size", "num_hidden_layers", "num_attention_heads")
        own |= {f"vt_{name}": own.pop(name) for name in (*names, "intermediate_size")}
        own |= {f"init_{name}": own.pop(name) for name in ("pos_emb_height", "pos_emb_width")}
    (tmp_path / "config.json").write_text(json.dumps(raw))
    config, files = load_model_config(tmp_path), read_checkpoint(path)
    assert config.moe is not None and config.moe.scale == 2.827 and config.num_layers == 3
    assert config.vision is not None and (config.vision.width, config.vision.image_token) == (16, IMAGE)
    assert "model.layers.0.self_attn.o_proj.weight" in files and "visual.encoder.blocks.1.wqkv.weight" in files
    check_headers(path, files, config)
    del files["lm_head.weight"]
    with pytest.raises(CheckpointError, match=r"lm_head.weight .* is missing"):
        check_headers(path, files, config)


def test_other_activations_of_the_tower_are_refused(made: Made, tmp_path: Path) -> None:
    raw = json.loads((made.path / "config.json").read_text())
    raw["vision_config"]["hidden_act"] = "silu"
    (tmp_path / "config.json").write_text(json.dumps(raw))
    with pytest.raises(ConfigError, match=r"vision_config\.hidden_act 'silu' is not supported"):
        load_model_config(tmp_path)
