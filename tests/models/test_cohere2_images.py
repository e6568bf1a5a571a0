"""Command A Vision with images against transformers: tower, logits, requests in an engine, prompts, pixels, names and
config."""

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

from moe_engine.config.args import EngineArgs
from moe_engine.errors import CheckpointError, ConfigError
from moe_engine.media.image_process import load_processor
from moe_engine.media.images import Picture, place_images
from moe_engine.models import sizes
from moe_engine.models.checkpoint_files import read_checkpoint
from moe_engine.models.config_file import load_model_config
from moe_engine.models.families.image_text import ImageTextModel
from moe_engine.models.header_check import check_headers
from moe_engine.models.vision.cohere2_pixels import Cohere2Processor
from moe_engine.planning.prepare import prepare
from tests.models import stepper
from tests.models.cohere2_images import (
    BREAK,
    END,
    IMAGE,
    MERGE,
    MOST,
    NAMES,
    PATCH,
    SIDE,
    START,
    TilePixels,
    make_cohere2,
    picture,
    tokens_of,
)
from tests.models.image_parity import around, check_logits, check_quantized_tower, check_requests
from tests.models.rows import all_rows
from tests.models.sparse import clear_draw
from tests.models.test_parity import assert_close
from tests.models.vision_checkpoints import Made

SHAPES = ((1, 1), (2, 3), (1, 2), (3, 1))


@pytest.fixture(scope="module", params=["cohere2", "cohere2_moe"])
def made(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Made:
    """A random checkpoint, and transformers' model."""
    return make_cohere2(tmp_path_factory.mktemp(request.param), random.randrange(2**31), kind=request.param)


def encoded(made: Made, image: TilePixels) -> torch.Tensor:
    """Embeddings of the patches' tokens of all tiles, by transformers."""
    with torch.no_grad():
        found: torch.Tensor = made.model.get_image_features(**made.image_inputs([], [image])).pooler_output
    return found.flatten(0, 1)


@pytest.mark.parametrize("row", all_rows())
def test_logits_equal_transformers(made: Made, row: str) -> None:
    """Among them those of the tokens after tiles, which are the text model's embeddings."""
    loaded = stepper.load(made.path, row)
    assert isinstance(loaded.model, ImageTextModel)

    def drawn() -> Any:
        image = picture(*random.choice(SHAPES))
        tokens, places = around([image], IMAGE, count=30)
        made.logits(tokens, [image])
        return tokens, places, [image]

    prompt = clear_draw(drawn, needed="moe" in made.path.name)
    (image,) = prompt[2]
    rows, ids = loaded.model.encode(image.values, image.grid), torch.tensor(image.placeholders(IMAGE))
    assert_close(rows[ids == IMAGE], encoded(made, image))
    embeddings = made.model.get_input_embeddings().weight
    assert torch.equal(rows[ids == BREAK], embeddings[ids[ids == BREAK]])
    text = clear_draw(lambda: _text(made), needed="moe" in made.path.name)
    check_logits(loaded, made.path, row, made, prompt, rows, IMAGE, text=text)


def _text(made: Made) -> list[int]:
    made.logits(tokens := torch.randint(0, 250, (20,)).tolist(), [])
    return tokens


@pytest.mark.parametrize(
    ("tower", "merge"),
    [
        ({"hidden_size": 36, "num_attention_heads": 3, "image_size": 6 * PATCH, "layer_norm_eps": 0.1}, 3),
        ({"vision_use_head": True}, 2),
        ({"num_hidden_layers": 1, "intermediate_size": 33, "alignment_intermediate_size": 34}, 4),
    ],
)
def test_towers(tower: dict[str, Any], merge: int, tmp_path: Path) -> None:
    """Other widths and sizes; a pooling head in the files, which nothing reads."""
    made = make_cohere2(tmp_path, random.randrange(2**31), tower | {"downsample_factor": merge})
    side = tower.get("image_size", SIDE * PATCH) // PATCH
    image = TilePixels((1, side, 2 * side), torch.randn(3 * side**2, 3 * PATCH**2))
    model = stepper.load(made.path, "cpu").model
    assert isinstance(model, ImageTextModel)
    ids = torch.tensor(tokens_of(image.grid, side, merge))
    assert_close(model.encode(image.values, image.grid)[ids == IMAGE], encoded(made, image))
    check_headers(made.path, read_checkpoint(made.path), load_model_config(made.path))


def test_requests(made: Made, tmp_path: Path) -> None:
    """In chunks that end inside tiles; two images of a size are two prefixes."""

    def drawn() -> Any:
        first, second, same = picture(1, 2), picture(1, 1), picture(1, 2)
        asked = [(*around(images, IMAGE, 20), images) for images in ([first], [first, second], [same], [])]
        tokens, places, _ = asked[0]
        asked[2] = (tokens, places, [same])
        for tokens, _, images in asked:
            made.logits(tokens, list(images))
        return asked

    check_requests(made.path, made, clear_draw(drawn, needed="moe" in made.path.name), tmp_path / "status")


@pytest.mark.parametrize("shape", SHAPES)
def test_places(made: Made, shape: tuple[int, int]) -> None:
    """A prompt has the tokens that transformers' processor writes; those within an image have its placeholder."""
    from transformers.models.cohere2_vision.processing_cohere2_vision import Cohere2VisionProcessor

    vision = load_model_config(made.path).vision
    assert vision is not None and vision.around == (START, END) and vision.tile_marks == (BREAK,)
    theirs, image = object.__new__(Cohere2VisionProcessor), picture(*shape)
    theirs.patch_size, theirs.boi_token, theirs.eoi_token = SIDE // MERGE, NAMES[START], NAMES[END]
    theirs.image_token, theirs.img_line_break_token = NAMES[IMAGE], NAMES[BREAK]
    text = theirs.replace_image_token({"num_patches": [len(image.values) // SIDE**2]}, 0)
    for token, name in NAMES.items():
        text = text.replace(name, f" {token}")
    want = [int(token) for token in text.split()]
    assert want == [START, *image.placeholders(IMAGE), END]
    ids, images = place_images([5, IMAGE, 6], [Picture(b"1", image.grid, b"")], vision, "text")
    assert ids == [5, START, *[IMAGE] * (len(want) - 2), END, 6]
    assert [(image.start, image.count) for image in images] == [(2, len(want) - 2)]


def test_canvases(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of many images, by transformers' function; torchvision, which its module imports, is empty."""
    for name in ("torchvision", "torchvision.transforms", "torchvision.transforms.v2"):
        if name not in sys.modules:
            monkeypatch.setitem(sys.modules, name, ModuleType(name))
    monkeypatch.setattr(sys.modules["torchvision.transforms.v2"], "functional", None, raising=False)
    theirs = import_module("transformers.models.cohere2_vision.image_processing_cohere2_vision")
    for _ in range(300):
        tile, most = random.choice((16, 28, 512)), random.choice((1, 4, 6, 12))
        width, height = (random.randint(1, random.choice((tile // 2, tile, 3 * tile, 20 * tile))) for _ in range(2))
        columns, rows = theirs.get_optimal_tiled_canvas((height, width), (tile, tile), 1, most)
        assert Cohere2Processor(4, tile, most).canvas(width, height) == (rows, columns), (width, height, tile, most)


def test_pixels(made: Made) -> None:
    """transformers' processor needs torchvision, whose code is read here: scaled to whole tiles by Pillow's filter."""
    image_module = pytest.importorskip("PIL.Image", reason="images need pillow: pip install -e '.[vision]'")
    config = prepare(EngineArgs.from_kwargs(model_path=str(made.path), max_total_tokens=64))
    assert config.model.vision is not None and config.model.vision.max_patches == (MOST + 1) * SIDE**2
    found, side = load_processor(str(made.path)), SIDE * PATCH
    values = np.random.default_rng(random.getrandbits(32)).integers(0, 256, (20, 40, 3), dtype=np.uint8)
    image = image_module.fromarray(values)
    got = found([image], return_tensors="np")
    assert got["image_grid_thw"].tolist() == [[1, 2 * SIDE, 3 * SIDE]]
    canvas, whole = (
        np.asarray(image.resize(size, image_module.Resampling.BICUBIC)) for size in ((3 * side, 2 * side), (side, side))
    )
    mean, std = (torch.tensor(own)[:, None, None] for own in (found.mean, found.std))
    for i, tile in enumerate([*(canvas[y : y + side, x : x + side] for y in (0, 16) for x in (0, 16, 32)), whole]):
        want = (torch.from_numpy(tile.copy()).permute(2, 0, 1) / 255 - mean) / std
        parts = want.view(3, SIDE, PATCH, SIDE, PATCH).permute(1, 3, 0, 2, 4).reshape(SIDE**2, -1)
        own = torch.from_numpy(got["pixel_values"][i * SIDE**2 : (i + 1) * SIDE**2])
        assert torch.allclose(own, parts, atol=1e-5), i
    less = load_processor(str(made.path), max_pixels=2 * side**2)([image], return_tensors="np")
    assert less["image_grid_thw"].tolist() == [[1, SIDE, 2 * SIDE]]


def test_headers_and_sizes(made: Made) -> None:
    """All tensors are known by the names of the files; the tower takes the memory of the ledger."""
    config, files = load_model_config(made.path), read_checkpoint(made.path)
    check_headers(made.path, files, config)
    args: dict[str, Any] = {"model_path": str(made.path), "dtype": "float32", "max_total_tokens": 64}
    whole, alone = (
        prepare(EngineArgs.from_kwargs(**args, language_model_only=alone)).ledger.bytes_of("weights")
        for alone in (False, True)
    )
    tower = sum(file.tensors[name].num_bytes for name, file in files.items() if name.startswith("visual."))
    assert whole - alone == pytest.approx(tower, rel=2e-2)
    del files["visual.post_layernorm.weight"]
    with pytest.raises(CheckpointError, match=r"post_layernorm.weight .* is missing"):
        check_headers(made.path, files, config)


def test_config(made: Made, tmp_path: Path) -> None:
    """The published sizes: 112B with a tower of 400 million parameters. A file without a tower is a text model."""
    raw = json.loads((made.path / "config.json").read_text())
    text = {
        "model_type": "cohere2", "hidden_size": 12288, "head_dim": 128, "intermediate_size": 36864,
        "num_hidden_layers": 64, "num_attention_heads": 96, "num_key_value_heads": 8, "vocab_size": 256000,
        "rope_theta": 50000, "max_position_embeddings": 131072, "logit_scale": 0.25,
    }  # fmt: skip
    tower = {"model_type": "siglip_vision_model", "hidden_size": 1152, "intermediate_size": 3072, "image_size": 512}
    tower |= {"num_hidden_layers": 27, "num_attention_heads": 12, "patch_size": 16}
    whole = {name: raw[name] for name in ("architectures", "model_type")} | {"downsample_factor": 2}
    whole |= {"text_config": text, "vision_config": tower, "alignment_intermediate_size": 36864}
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (tmp_path / name).symlink_to(made.path / name)

    def parsed(fields: dict[str, Any]) -> Any:
        (tmp_path / "config.json").write_text(json.dumps(fields))
        return load_model_config(tmp_path)

    config = parsed(whole)
    assert sizes.num_parameters(config) == pytest.approx(112e9, rel=1e-2) and config.vision.image_token == 255036
    assert config.vision.num_tokens((1, 32, 32)) == 257 and config.vision.num_tokens((1, 64, 96)) == 7 * 257
    assert config.vision.most_tokens(13 * 1024) == 13 * 257
    for other in (None, tower | {"model_type": "clip_vision_model"}):
        assert parsed(whole | {"vision_config": other}).vision is None
    for wrong, message in (
        ({"vision_config": tower | {"hidden_act": "gelu"}}, "hidden_act 'gelu' is not supported"),
        ({"vision_config": tower | {"image_size": 500}}, "image_size 500 has no whole tokens"),
        ({"vision_config": tower | {"num_attention_heads": 7}}, "num_attention_heads 7 does not divide 1152"),
        ({"alignment_intermediate_size": 35}, "alignment_intermediate_size 35 is odd"),
    ):
        with pytest.raises(ConfigError, match=message):
            parsed(whole | wrong)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (tmp_path / name).unlink()
    with pytest.raises(ConfigError, match=r"vision_config needs the tokens <\|START_OF_IMG\|>"):
        parsed(whole)


def test_tiles_of_another_size_are_refused(made: Made, tmp_path: Path) -> None:
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json", "model.safetensors"):
        (tmp_path / name).symlink_to(made.path / name)
    (tmp_path / "preprocessor_config.json").write_text(json.dumps({"size": {"height": 512, "width": 512}}))
    with pytest.raises(ConfigError, match=r"size .* is not vision_config.image_size 16"):
        prepare(EngineArgs.from_kwargs(model_path=str(tmp_path), max_total_tokens=64))


def test_quantized_copies_keep_the_tower(tmp_path: Path) -> None:
    widths = {"hidden_size": 128, "intermediate_size": 128, "num_attention_heads": 4, "head_dim": 32}
    made = make_cohere2(tmp_path / "in", random.randrange(2**31), **widths)
    modules = ("model.vision_tower", "model.multi_modal_projector")
    check_quantized_tower(made.path, tmp_path / "out", picture(1, 2), modules)
