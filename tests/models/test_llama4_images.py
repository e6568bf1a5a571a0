"""Llama 4 with images against transformers: tower, logits, requests in an engine, prompts, pixels, names and config."""

from __future__ import annotations

import json
import random
import sys
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from moe_engine.config.args import EngineArgs
from moe_engine.errors import ConfigError, InputError
from moe_engine.media.image_process import load_processor
from moe_engine.media.images import Picture, place_images
from moe_engine.models import sizes
from moe_engine.models.checkpoint_files import read_checkpoint
from moe_engine.models.config_file import load_model_config
from moe_engine.models.families.image_text import ImageTextModel
from moe_engine.models.header_check import check_headers
from moe_engine.models.vision.llama4_pixels import Llama4Processor
from moe_engine.planning.prepare import prepare
from tests.models import stepper
from tests.models.image_parity import around, check_logits, check_quantized_tower, check_requests
from tests.models.llama4_images import (
    ACROSS,
    DOWN,
    END,
    IMAGE,
    MOST,
    NAMES,
    PATCH,
    PATCH_TOKEN,
    SIDE,
    START,
    TilePixels,
    make_llama4,
    picture,
)
from tests.models.rows import all_rows
from tests.models.test_llama4 import SCOUT, TEXT
from tests.models.test_parity import assert_close
from tests.models.vision_checkpoints import Made


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Made:
    """A random checkpoint, and transformers' model."""
    return make_llama4(tmp_path_factory.mktemp("llama4"), random.randrange(2**31))


def encoded(made: Made, image: TilePixels) -> torch.Tensor:
    """Embeddings of the patches' tokens of all tiles, by transformers."""
    with torch.no_grad():
        found = made.model.get_image_features(**made.image_inputs([], [image])).last_hidden_state
        embeddings: torch.Tensor = made.model.multi_modal_projector(found).flatten(0, 1)
    return embeddings


@pytest.mark.parametrize("row", all_rows())
def test_logits_equal_transformers(made: Made, row: str) -> None:
    """Among them those of separators and of the token before the last tile, which are the text model's embeddings."""
    image = picture(*random.choice(((1, 1), (2, 3), (1, 2), (3, 1))))
    loaded = stepper.load(made.path, row)
    assert isinstance(loaded.model, ImageTextModel)
    rows, ids = loaded.model.encode(image.values, image.grid), torch.tensor(image.placeholders(IMAGE))
    assert_close(rows[ids == PATCH_TOKEN], encoded(made, image))
    embeddings = made.model.get_input_embeddings().weight
    assert torch.equal(rows[ids != PATCH_TOKEN], embeddings[ids[ids != PATCH_TOKEN]])
    check_logits(loaded, made.path, row, made, (*around([image], IMAGE, count=30), [image]), rows, IMAGE)


def test_requests(made: Made, tmp_path: Path) -> None:
    """Beyond a chunk too; two images of a size are two prefixes."""
    first, second, same = picture(1, 2), picture(1, 1), picture(1, 2)
    asked = [(*around(images, IMAGE, 20), images) for images in ([first], [first, second], [same], [])]
    tokens, places, _ = asked[0]
    asked[2] = (tokens, places, [same])
    check_requests(made.path, made, asked, tmp_path / "status")


@pytest.mark.parametrize("shape", [(1, 1), (2, 1), (1, 3), (2, 3)])
def test_places(made: Made, shape: tuple[int, int]) -> None:
    """A prompt has the tokens that transformers' processor writes; those within an image have its placeholder."""
    from transformers.models.llama4.processing_llama4 import Llama4Processor as Theirs

    vision = load_model_config(made.path).vision
    assert vision is not None and vision.around == (START, END) and vision.tile_marks == (ACROSS, DOWN, IMAGE)
    text = Theirs._prompt_split_image(None, shape, SIDE**2 // 4)
    for token, name in NAMES.items():
        text = text.replace(name, f" {token}")
    want, image = [int(token) for token in text.split()], picture(*shape)
    assert want == [START, *image.placeholders(IMAGE), END]
    ids, images = place_images([5, IMAGE, 6], [Picture(b"1", image.grid, b"")], vision, "text")
    assert ids == [5, START, *[IMAGE] * (len(want) - 2), END, 6]
    assert [(image.start, image.count) for image in images] == [(2, len(want) - 2)]
    with pytest.raises(InputError, match=f"1 images and token {PATCH_TOKEN}"):
        place_images([5, START, IMAGE, PATCH_TOKEN, END], [Picture(b"1", image.grid, b"")], vision, "text")


def their_sizes(monkeypatch: pytest.MonkeyPatch) -> Any:
    """transformers' module; torchvision, which it imports, is empty."""
    for name in ("torchvision", "torchvision.transforms", "torchvision.transforms.v2"):
        if name not in sys.modules:
            monkeypatch.setitem(sys.modules, name, ModuleType(name))
    monkeypatch.setattr(sys.modules["torchvision.transforms.v2"], "functional", None, raising=False)
    return import_module("transformers.models.llama4.image_processing_llama4")


def test_sizes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Canvas and size of many images, by transformers' functions."""
    from transformers.image_utils import SizeDict

    theirs = their_sizes(monkeypatch)
    for _ in range(200):
        tile, most, enlarges = random.choice((16, 28, 336)), random.choice((1, 4, 6, 16)), random.random() < 0.2
        width, height = (random.randint(1, random.choice((tile // 2, tile, 3 * tile, 20 * tile))) for _ in range(2))
        width = random.choice((width, width, height))
        theirs.find_supported_resolutions.cache_clear()
        canvases = theirs.find_supported_resolutions(most, SizeDict(height=tile, width=tile))
        best = theirs.get_best_fit((height, width), torch.tensor(canvases), enlarges)
        limits = best
        if not enlarges:
            limits = [min(max(length, tile), most) for length, most in zip((height, width), best)]
        scaled = theirs.get_max_res_without_distortion((height, width), limits)
        canvas, size = Llama4Processor(4, tile, most, enlarges=enlarges).sizes(width, height)
        assert [side * tile for side in canvas] == best.tolist(), (width, height, tile, most)
        assert size == (max(1, int(scaled[1])), max(1, int(scaled[0]))), (width, height, tile, most)


def test_pixels(made: Made) -> None:
    """transformers' processor needs torchvision, whose code is read here: scaled into the upper left corner of a black
    canvas, in bfloat16, with Pillow's filter."""
    image_module = pytest.importorskip("PIL.Image", reason="images need pillow: pip install -e '.[vision]'")
    config = prepare(EngineArgs.from_kwargs(model_path=str(made.path), max_total_tokens=64))
    assert config.model.vision is not None and config.model.vision.max_patches == (MOST + 1) * SIDE**2
    found, side = load_processor(str(made.path)), SIDE * PATCH
    values = np.random.default_rng(random.randrange(1000)).integers(0, 256, (20, 40, 3), dtype=np.uint8)
    image = image_module.fromarray(values)
    got = found([image], return_tensors="np")
    assert got["image_grid_thw"].tolist() == [[1, 2 * SIDE, 3 * SIDE]] and found.sizes(40, 20)[1] == (40, 20)
    canvas = np.zeros((2 * side, 3 * side, 3), np.uint8)
    canvas[:20, :40] = values
    whole = np.asarray(image.resize((side, side), image_module.Resampling.BILINEAR))
    for i, tile in enumerate([*(canvas[y : y + side, x : x + side] for y in (0, 16) for x in (0, 16, 32)), whole]):
        scaled = torch.from_numpy(tile.copy()).permute(2, 0, 1).bfloat16() * (1 / 255)
        want = ((scaled - torch.tensor(0.5).bfloat16()) / torch.tensor(0.5).bfloat16()).float()
        parts = want.view(3, SIDE, PATCH, SIDE, PATCH).permute(1, 3, 0, 2, 4).reshape(SIDE**2, -1)
        assert torch.equal(torch.from_numpy(got["pixel_values"][i * SIDE**2 : (i + 1) * SIDE**2]), parts), i
    less = load_processor(str(made.path), max_pixels=2 * side**2)([image], return_tensors="np")
    assert less["image_grid_thw"].tolist() == [[1, SIDE, 2 * SIDE]]


def test_names_and_sizes(tmp_path: Path) -> None:
    """The published tower: its fields, 2.8 % of an image's memory in marks, and headers as transformers saves them."""
    tower = {
        "model_type": "llama4_vision_model", "hidden_size": 1408, "image_size": 336, "patch_size": 14,
        "intermediate_size": 5632, "num_hidden_layers": 34, "num_attention_heads": 16, "num_channels": 3,
        "pixel_shuffle_ratio": 0.5, "projector_input_dim": 4096, "projector_output_dim": 4096, "rope_theta": 10000,
        "vision_output_dim": 4096, "vision_feature_select_strategy": "default", "multi_modal_projector_bias": False,
        "hidden_act": "gelu", "norm_eps": 1e-5, "vision_feature_layer": -1, "projector_dropout": 0.0,
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(SCOUT | {"vision_config": tower}))
    config = load_model_config(tmp_path)
    vision = config.vision
    assert vision is not None and vision.tile_marks == (200084, 200085, 200090) and vision.around == (200080, 200081)
    assert vision.image_token == 200090 and vision.num_positions == 577
    assert vision.num_tokens((1, 24, 24)) == 145 and vision.num_tokens((1, 48, 72)) == 7 * 145
    assert vision.most_tokens(17 * 576) == 17 * 145
    assert sizes.num_parameters(config) == pytest.approx(108.6e9, rel=1e-3)
    for wrong, message in (
        ({"intermediate_size": 4096}, "intermediate_size 4096 is not the width 5632 of the patches of a token"),
        ({"vision_output_dim": 7680}, "vision_output_dim 7680 is not supported; supported: 4096"),
        ({"num_attention_heads": 15}, "num_attention_heads 15 does not divide 1408"),
        ({"image_size": 340}, "image_size 340 has no whole tokens: patches of 14"),
        ({"hidden_act": "silu"}, "hidden_act 'silu' is not supported; supported: gelu"),
    ):
        (tmp_path / "config.json").write_text(json.dumps(SCOUT | {"vision_config": tower | wrong}))
        with pytest.raises(ConfigError, match=message):
            load_model_config(tmp_path)
    text = {"text_config": TEXT, "vision_config": None}
    (tmp_path / "config.json").write_text(json.dumps(SCOUT | text))
    assert load_model_config(tmp_path).vision is None


def test_checkpoint(made: Made, tmp_path: Path) -> None:
    """Each tensor is read, and belongs to one module; tiles of another size than the tower's are refused."""
    stored = load_file(made.path / "model.safetensors")
    assert {name.split(".")[0] for name in stored} == {"language_model", "multi_modal_projector", "vision_model"}
    files, config = read_checkpoint(made.path), load_model_config(made.path)
    check_headers(made.path, files, config)
    modules = [module.prefixes for module in stepper.load(made.path, "torch").model.modules()]
    own = [name for name in files if name.startswith("visual.")]
    assert len(own) == sum("language_model" not in name for name in stored)
    assert all(sum(name.startswith(prefixes) for prefixes in modules) == 1 for name in own)
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json", "model.safetensors"):
        (tmp_path / name).symlink_to(made.path / name)
    (tmp_path / "preprocessor_config.json").write_text(json.dumps({"size": {"height": 336, "width": 336}}))
    with pytest.raises(ConfigError, match=r"size .* is not vision_config.image_size 16"):
        prepare(EngineArgs.from_kwargs(model_path=str(tmp_path), max_total_tokens=64))


def test_quantized_copies_keep_the_tower(tmp_path: Path) -> None:
    sizes = {"hidden_size": 128, "intermediate_size": 128, "intermediate_size_mlp": 256}
    made = make_llama4(tmp_path / "in", random.randrange(2**31), **sizes)
    check_quantized_tower(made.path, tmp_path / "out", picture(1, 2), ("vision_model", "multi_modal_projector"))
