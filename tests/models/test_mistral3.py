"""Mistral's models with images against transformers: tower, logits, requests in an engine; config and pixels."""

from __future__ import annotations

import json
import random
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from moe_engine import Engine
from moe_engine.config.args import EngineArgs
from moe_engine.errors import ConfigError
from moe_engine.media.image_process import load_processor
from moe_engine.models.batch import ImageRows
from moe_engine.models.checkpoint_files import read_checkpoint
from moe_engine.models.config_file import load_model_config
from moe_engine.models.header_check import check_headers
from moe_engine.models.image_text import ImageInputs
from moe_engine.planning.prepare import prepare
from tests.engine.harness import InProcessEngine
from tests.engine.test_image_requests import COUNT, assert_equal, scripted
from tests.models import stepper
from tests.models.mistral3_checkpoints import BREAK, END, IMAGE, MERGE, PATCH, TEXTS, Made, RowPixels, make_mistral3
from tests.models.parity_families import address
from tests.models.rows import all_rows
from tests.models.stepper import Chunk
from tests.models.test_parity import assert_close
from tests.models.vision_checkpoints import random_picture


def picture(rows: int, columns: int) -> RowPixels:
    """Of rows x columns tokens, patches by row."""
    grid = (1, MERGE * rows, MERGE * columns)
    return RowPixels(grid, torch.randn(grid[1] * grid[2], 3 * PATCH**2))


def around(images: list[RowPixels], count: int = 6) -> tuple[list[int], list[int]]:
    """A prompt with text before and behind each image, and the places of the images."""
    tokens, places = torch.randint(0, 250, (count,)).tolist(), []
    for image in images:
        places.append(len(tokens))
        tokens += image.placeholders(IMAGE) + torch.randint(0, 250, (count,)).tolist()
    return tokens, places


@pytest.fixture(scope="module", params=TEXTS)
def made(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Made:
    """A random checkpoint, and transformers' model."""
    other = request.param == "mistral4"
    seed = random.randrange(2**31)
    return make_mistral3(tmp_path_factory.mktemp("made"), seed, request.param, other, "gelu" if other else "silu")


@pytest.mark.parametrize("row", all_rows())
def test_logits_equal_transformers(made: Made, row: str) -> None:
    """An image in two chunks, and text behind it; then text alone."""
    image = picture(3, 5)
    tokens, (place,) = around([image], count=30)
    loaded = stepper.load(made.path, row)
    model = loaded.model
    assert isinstance(model, ImageInputs)
    rows = model.encode(image.values, image.grid)
    placeholders = torch.tensor(image.placeholders(IMAGE))
    got, cut = [], place + 4
    for begin, end in ((0, cut), (cut, len(tokens) - 1), (len(tokens) - 1, len(tokens))):
        batch = loaded.batch([Chunk(0, tokens[begin:end], decode=end == begin + 1)])
        inside = torch.tensor([i for i in range(end - begin) if place <= i + begin < place + len(placeholders)])
        if len(inside):
            own = rows[inside + begin - place]
            batch = replace(batch, images=ImageRows(inside, own, (inside + begin).expand(3, -1)))
        got.append(model.logits(model.forward(batch)))
    assert_close(torch.cat(got), made.logits(tokens, [image]))
    text = torch.randint(0, 250, (20,)).tolist()
    assert_close(stepper.load(made.path, row).step([Chunk(0, text, False)])[0], made.logits(text, []))


def test_requests(made: Made, tmp_path: Path) -> None:
    """Tokens and log-probabilities: together, from a cached prefix, in chunks that end inside an image."""
    first, second = picture(2, 3), picture(4, 1)
    asked = [(*around(images), images) for images in ([first], [first, second], [])]
    flags = {"dtype": "float32", "max_total_tokens": 512, "max_running_requests": 4}
    engine = InProcessEngine(made.path, tmp_path / "status", **flags)
    for form in ({}, {"chunked_prefill_size": 5}):
        script = []
        for i, (tokens, places, images) in enumerate(asked):
            script += [scripted(f"{name}{i}", tokens, images, places, arrives=at) for name, at in (("a", i), ("b", 30))]
        answers = engine.run(script, **form)
        for i, (tokens, _, images) in enumerate(asked):
            expected = made.greedy(tokens, images, COUNT)
            assert_equal(answers[f"a{i}"], expected)
            assert_equal(answers[f"b{i}"], expected)
    engine.close()
    alone = prepare(EngineArgs.from_kwargs(model_path=str(made.path), language_model_only=True, max_total_tokens=64))
    assert alone.model.vision is None


@pytest.mark.parametrize("whole_file", [False, True])
def test_pixels(made: Made, tmp_path: Path, whole_file: bool) -> None:
    """The patches of transformers' processor, with settings in either file."""
    image_module = pytest.importorskip("PIL.Image", reason="images need pillow: pip install '.[vision]'")
    from transformers.models.pixtral.image_processing_pil_pixtral import PixtralImageProcessorPil

    settings = json.loads((made.path / "preprocessor_config.json").read_text())
    name = "processor_config.json" if whole_file else "preprocessor_config.json"
    (tmp_path / name).write_text(json.dumps({"image_processor": settings} if whole_file else settings))
    (tmp_path / "config.json").write_text((made.path / "config.json").read_text())
    own = load_processor(str(tmp_path))
    config = prepare(EngineArgs.from_kwargs(model_path=str(made.path), max_total_tokens=64))
    assert config.model.vision is not None and config.model.vision.max_patches == own.max_patches == 256
    theirs = PixtralImageProcessorPil(size={"longest_edge": 64}, patch_size=PATCH * MERGE)
    for width, height in ((1, 1), (64, 64), (200, 31), (33, 500), (7, 64), *([random.randint(2, 300)] * 2,)):
        values = np.random.default_rng(width).integers(0, 256, (height, width, 3), dtype=np.uint8)
        image = image_module.fromarray(values)
        found, want = own([image]), theirs(images=[image], return_tensors="pt")["pixel_values"]
        patches = torch.nn.functional.unfold(want, PATCH, stride=PATCH)[0].T
        grid = found["image_grid_thw"][0].tolist()
        assert grid == [1, want.shape[2] // PATCH, want.shape[3] // PATCH]
        assert grid[1] * grid[2] <= own.max_patches
        assert np.allclose(found["pixel_values"], patches, atol=1e-5)
    assert own.within(32 * 32).longest == 32


def test_config(made: Made, tmp_path: Path) -> None:
    """Ids of the row ends come from the tokenizer; unsupported projectors are refused."""
    config, files = load_model_config(made.path), read_checkpoint(made.path)
    check_headers(made.path, files, config)
    assert config.vision is not None and config.vision.row_ends == (BREAK, END)
    assert config.vision.num_tokens((1, 6, 10)) == picture(3, 5).num_tokens
    raw = json.loads((made.path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(raw))
    listed = {"12": {"content": "[IMG_BREAK]"}, "14": {"content": "[IMG_END]"}}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"added_tokens_decoder": listed}))
    read = load_model_config(tmp_path).vision
    assert read is not None and read.row_ends == (12, 14) and read.image_token == IMAGE
    (tmp_path / "tokenizer_config.json").unlink()
    read = load_model_config(tmp_path).vision
    assert read is not None and read.row_ends == (IMAGE + 2, IMAGE + 3)
    (tmp_path / "config.json").write_text(json.dumps(raw | {"vision_feature_layer": -2}))
    with pytest.raises(ConfigError, match="vision_feature_layer"):
        load_model_config(tmp_path)


def test_weights_are_replaced(tmp_path: Path) -> None:
    """While serving: tower, text model and the embeddings behind an image's rows."""
    first, second = (make_mistral3(tmp_path / str(seed), seed) for seed in (1, 2))
    picture = address(random_picture(50, 30, 3))
    asked = {"input_ids": [5, 6, IMAGE, 9], "image_data": [picture], "sampling_params": {"temperature": 0}}
    with Engine(str(second.path), dtype="float32", max_total_tokens=512) as engine:
        want = engine.generate(**asked)["output_ids"]
    with Engine(str(first.path), dtype="float32", max_total_tokens=512) as engine:
        assert engine.generate(**asked)["output_ids"] != want
        done, message = engine.update_weights_from_disk(str(second.path))
        assert done, message
        assert engine.generate(**asked)["output_ids"] == want
        row = engine.get_weights_by_name("model.embed_tokens.weight", truncate_size=1)
        assert np.allclose(row, second.model.get_input_embeddings().weight[:1].detach())
