"""MiniMax-M3 with images against transformers: tower, logits, requests in an engine, pixels, names and config."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from moe_engine.config.args import EngineArgs
from moe_engine.errors import ConfigError
from moe_engine.media.image_process import load_processor
from moe_engine.media.images import Picture, place_images
from moe_engine.models.checkpoint_files import read_checkpoint
from moe_engine.models.config_file import load_model_config
from moe_engine.models.families.minimax_m3 import MiniMaxM3Model
from moe_engine.models.header_check import check_headers
from moe_engine.planning.prepare import prepare
from tests.models import stepper
from tests.models.image_parity import around, check_logits, check_quantized_tower, check_requests
from tests.models.minimax_m3_images import END, IMAGE, MERGE, PATCH, PROCESSOR, START, VIDEO, make_minimax_m3, picture
from tests.models.rows import all_rows
from tests.models.test_parity import assert_close
from tests.models.vision_checkpoints import Made


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Made:
    """A random checkpoint, and transformers' model."""
    return make_minimax_m3(tmp_path_factory.mktemp("minimax"), random.randrange(2**31))


@pytest.mark.parametrize("row", all_rows())
def test_logits_equal_transformers(made: Made, row: str) -> None:
    image = picture(3, 5)
    loaded = stepper.load(made.path, row)
    assert isinstance(loaded.model, MiniMaxM3Model)
    rows = loaded.model.encode(image.values, image.grid)
    with torch.no_grad():
        found = made.model.model.get_image_features(image.values, torch.tensor([image.grid]), return_dict=True)
    assert_close(rows, found.pooler_output[0])
    check_logits(loaded, made.path, row, made, (*around([image], IMAGE, count=30), [image]), rows, IMAGE)


@pytest.mark.parametrize("vision", [{"hidden_size": 36, "num_attention_heads": 3}, {"spatial_merge_size": 3}])
def test_towers(vision: dict[str, Any], tmp_path: Path) -> None:
    """Heads whose rotated channels are all of them; tokens of nine patches."""
    made = make_minimax_m3(tmp_path, random.randrange(2**31), vision)
    grid = (1, 6, 12)
    values = torch.randn(72, 3 * 2 * PATCH**2)
    model = stepper.load(made.path, "cpu").model
    assert isinstance(model, MiniMaxM3Model)
    with torch.no_grad():
        found = made.model.model.get_image_features(values, torch.tensor([grid]), return_dict=True)
    assert_close(model.encode(values, grid), found.pooler_output[0])


def test_requests(made: Made, tmp_path: Path) -> None:
    """Beyond the selected blocks too; two images of a size are two prefixes."""
    first, second, same = picture(2, 3), picture(4, 1), picture(2, 3)
    asked = [(*around(images, IMAGE, 20), images) for images in ([first], [first, second], [same], [])]
    tokens, places, _ = asked[0]
    asked[2] = (tokens, places, [same])
    check_requests(made.path, made, asked, tmp_path / "status")


def test_places(made: Made) -> None:
    """Tokens around an image are added, as transformers' processor does; their ids come from the tokenizer."""
    vision = load_model_config(made.path).vision
    assert vision is not None and vision.around == (START, END) and vision.video_token == VIDEO
    pictures = [Picture(1, (1, 2 * MERGE, MERGE), b""), Picture(2, (1, MERGE, MERGE), b"")]
    ids, images = place_images([5, IMAGE, 6, IMAGE], pictures, vision, "text")
    assert ids == [5, START, IMAGE, IMAGE, END, 6, START, IMAGE, END]
    assert [(image.start, image.count) for image in images] == [(2, 2), (7, 1)]


def test_pixels(made: Made) -> None:
    """transformers' processor needs torchvision, whose code is read here: its sizes and order of patches, with Pillow's
    bicubic filter."""
    image_module = pytest.importorskip("PIL.Image", reason="images need pillow: pip install -e '.[vision]'")
    found = load_processor(str(made.path))
    config = prepare(EngineArgs.from_kwargs(model_path=str(made.path), max_total_tokens=64))
    assert config.model.vision is not None and config.model.vision.max_patches == 60 * MERGE**2
    height, width = random.randint(10, 50), random.randint(10, 50)
    values = np.random.default_rng(random.randrange(1000)).integers(0, 256, (height, width, 3), dtype=np.uint8)
    got = found([image_module.fromarray(values)], return_tensors="np")
    _, rows, columns = got["image_grid_thw"][0].tolist()
    size = (columns * PATCH, rows * PATCH)
    assert 4 * 64 <= size[0] * size[1] <= 60 * 64 and not size[0] % 8 and not size[1] % 8
    scaled = np.asarray(image_module.fromarray(values).resize(size, image_module.Resampling.BICUBIC), np.float32) / 255
    mean, std = np.array([0.48145466, 0.4578275, 0.40821073]), np.array([0.26862954, 0.26130258, 0.27577711])
    whole = torch.from_numpy((scaled - mean) / std).permute(2, 0, 1).float()
    parts = whole.view(3, rows // MERGE, MERGE, PATCH, columns // MERGE, MERGE, PATCH).permute(1, 4, 2, 5, 0, 3, 6)
    want = parts.unsqueeze(5).expand(-1, -1, -1, -1, -1, 2, -1, -1).reshape(rows * columns, -1)
    assert np.allclose(got["pixel_values"], want, atol=1e-5)
    less = load_processor(str(made.path), max_pixels=20 * 64)([image_module.fromarray(values)], return_tensors="np")
    assert len(less["pixel_values"]) <= 20 * MERGE**2


def test_processor_files(made: Made, tmp_path: Path) -> None:
    """Remote code's name, absent bounds and sizes that the processor does not read: 672 x 672 pixels."""
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json", "model.safetensors"):
        (tmp_path / name).symlink_to(made.path / name)
    file, args = tmp_path / "preprocessor_config.json", {"model_path": str(tmp_path), "max_total_tokens": 2**16}
    remote = {"auto_map": {"AutoImageProcessor": "image_processor.MiniMaxM3VLImageProcessor"}}
    for fields in (
        {"size": {"height": 672, "width": 672}} | remote,
        {"image_processor_type": "MiniMaxM3VLImageProcessor"},
    ):
        file.write_text(json.dumps(fields))
        vision = prepare(EngineArgs.from_kwargs(**args)).model.vision
        assert vision is not None and vision.max_patches == 672**2 // PATCH**2
        assert load_processor(str(tmp_path)).size["shortest_edge"] == 4 * 28 * 28
    file.write_text(json.dumps(PROCESSOR | {"max_long_side_pixel": 1008}))
    with pytest.raises(ConfigError, match=r"max_long_side_pixel is not supported.*--language-model-only"):
        prepare(EngineArgs.from_kwargs(**args))


@pytest.mark.parametrize(
    ("outer", "vision", "message"),
    [
        ({"projector_hidden_act": "relu"}, {}, "projector_hidden_act 'relu' is not supported"),
        ({}, {"hidden_act": "quick_gelu"}, "hidden_act 'quick_gelu' is not supported"),
        ({}, {"num_attention_heads": 7}, "num_attention_heads 7 does not divide 40"),
        ({"multimodal_projector_bias": False}, {}, "multimodal_projector_bias False is not supported"),
    ],
)
def test_names_and_config(
    made: Made, outer: dict[str, Any], vision: dict[str, Any], message: str, tmp_path: Path
) -> None:
    raw, files = json.loads((made.path / "config.json").read_text()), read_checkpoint(made.path)
    raw["vision_config"] |= {"img_token_compression_config": {"spatial_merge_size": 2, "temporal_patch_size": 2}}
    (tmp_path / "config.json").write_text(json.dumps(raw))
    config = load_model_config(tmp_path)
    assert config.vision is not None and (config.vision.width, config.vision.projector_width) == (40, 52)
    assert config.vision.around == (IMAGE + 4, IMAGE + 5)
    check_headers(made.path, files, config)
    (tmp_path / "config.json").write_text(json.dumps(raw | outer | {"vision_config": raw["vision_config"] | vision}))
    with pytest.raises(ConfigError, match=message):
        load_model_config(tmp_path)


def test_quantized_copies_keep_the_tower(tmp_path: Path) -> None:
    sizes = {"hidden_size": 128, "intermediate_size": 128, "dense_intermediate_size": 256}
    made = make_minimax_m3(tmp_path / "in", random.randrange(2**31), **sizes)
    modules = ("vision_tower", "multi_modal_projector", "patch_merge_mlp")
    check_quantized_tower(made.path, tmp_path / "out", picture(2, 2), modules)
