"""Mistral's models with images against transformers: tower, logits, requests in an engine; config and pixels."""

from __future__ import annotations

import json
import random
from pathlib import Path

import numpy as np
import pytest
import torch

from moe_engine import Engine
from moe_engine.config.args import EngineArgs
from moe_engine.errors import ConfigError
from moe_engine.media.image_process import load_processor
from moe_engine.models.checkpoint_files import read_checkpoint
from moe_engine.models.config_file import load_model_config
from moe_engine.models.families.image_text import ImageInputs
from moe_engine.models.header_check import check_headers
from moe_engine.planning.prepare import prepare
from tests.models import stepper
from tests.models.checkpoints import LARGE4
from tests.models.image_parity import around, check_logits, check_requests, clear_prompts
from tests.models.mistral3_checkpoints import (
    BREAK,
    END,
    IMAGE,
    PATCH,
    TEXTS,
    PatchPixels,
    RowPixels,
    make_mistral3,
    make_pixtral,
)
from tests.models.parity_families import address
from tests.models.rows import all_rows
from tests.models.vision_checkpoints import Made, random_picture


def picture(made: Made, rows: int, columns: int) -> RowPixels:
    """Of rows x columns tokens, patches by row."""
    kind = RowPixels if "spatial_merge_size" in json.loads((made.path / "config.json").read_text()) else PatchPixels
    grid = (1, kind.merge * rows, kind.merge * columns)
    return kind(grid, torch.randn(grid[1] * grid[2], 3 * PATCH**2))


@pytest.fixture(scope="module", params=(*TEXTS, "pixtral"))
def made(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Made:
    """A random checkpoint, and transformers' model."""
    other = request.param in ("mistral4", LARGE4)
    folder, seed = tmp_path_factory.mktemp("made"), random.randrange(2**31)
    if request.param == "pixtral":
        return make_pixtral(folder, seed)
    return make_mistral3(folder, seed, request.param, other, "gelu" if other else "silu")


@pytest.mark.parametrize("row", all_rows())
def test_logits_equal_transformers(made: Made, row: str) -> None:
    loaded = stepper.load(made.path, row)
    assert isinstance(loaded.model, ImageInputs)
    prompt, text = clear_prompts(made, lambda: picture(made, 3, 5), IMAGE, loaded.model.config.is_moe)
    (image,) = prompt[2]
    rows = loaded.model.encode(image.values, image.grid)
    check_logits(loaded, made.path, row, made, prompt, rows, IMAGE, text=text)


def test_requests(made: Made, tmp_path: Path) -> None:
    first, second = picture(made, 2, 3), picture(made, 4, 1)
    asked = [(*around(images, IMAGE), images) for images in ([first], [first, second], [])]
    check_requests(made.path, made, asked, tmp_path / "status")


@pytest.mark.parametrize("whole_file", [False, True])
def test_pixels(made: Made, tmp_path: Path, whole_file: bool) -> None:
    """The patches of transformers' processor, with settings in either file."""
    image_module = pytest.importorskip("PIL.Image", reason="images need pillow: pip install -e '.[vision]'")
    from transformers.models.pixtral.image_processing_pil_pixtral import PixtralImageProcessorPil

    settings = json.loads((made.path / "preprocessor_config.json").read_text())
    name = "processor_config.json" if whole_file else "preprocessor_config.json"
    (tmp_path / name).write_text(json.dumps({"image_processor": settings} if whole_file else settings))
    (tmp_path / "config.json").write_text((made.path / "config.json").read_text())
    own = load_processor(str(tmp_path))
    config = prepare(EngineArgs.from_kwargs(model_path=str(made.path), max_total_tokens=64))
    assert config.model.vision is not None and config.model.vision.max_patches == own.max_patches == 256
    theirs = PixtralImageProcessorPil(size={"longest_edge": 64}, patch_size=PATCH * own.merge)
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
    image = picture(made, 3, 5)
    assert config.vision.num_tokens(image.grid) == image.num_tokens
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


def test_config_of_llava(tmp_path: Path) -> None:
    """Fields that it leaves out; with another tower the text model is served alone."""
    made = make_pixtral(tmp_path / "made", 1)
    raw = json.loads((made.path / "config.json").read_text())
    for change, message in (
        ({"vision_feature_select_strategy": "default"}, "'default' is not supported; supported: full"),
        ({"text_config": raw["text_config"] | {"model_type": "gemma"}}, "text_config.model_type 'gemma' is not"),
    ):
        (tmp_path / "config.json").write_text(json.dumps(raw | change))
        with pytest.raises(ConfigError, match=message):
            load_model_config(tmp_path)
    kept = {key: value for key, value in raw.items() if key != "multimodal_projector_bias"}
    (tmp_path / "config.json").write_text(json.dumps(kept))
    vision = load_model_config(tmp_path).vision
    assert vision is not None and vision.projector_bias and vision.merge == 1
    (tmp_path / "config.json").write_text(json.dumps(raw | {"vision_config": {"model_type": "clip_vision_model"}}))
    assert load_model_config(tmp_path).vision is None


@pytest.mark.usefixtures("forked_processes")
def test_weights_are_replaced(tmp_path: Path) -> None:
    """While serving: tower, text model and the embeddings after an image's rows."""
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
