"""GLM-5.3-Flash with images against transformers: tower, logits, requests in an engine with and without drafts, pixels,
names and config."""

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
from moe_engine.models.checkpoint_files import read_checkpoint
from moe_engine.models.config_file import load_model_config
from moe_engine.models.families.glm5_next import Glm5NextModel
from moe_engine.models.header_check import check_headers
from moe_engine.planning.prepare import prepare
from tests.models import stepper
from tests.models.glm5_next_images import PROCESSOR, make_glm, picture
from tests.models.image_parity import around, check_logits, check_requests
from tests.models.rows import all_rows
from tests.models.test_parity import assert_close
from tests.models.vision_checkpoints import IMAGE, MERGE, PATCH, VIDEO, Made


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Made:
    """A random checkpoint with an MTP layer, and transformers' model."""
    return make_glm(tmp_path_factory.mktemp("glm"), random.randrange(2**31), num_mtp_layers=1)


@pytest.mark.parametrize("row", all_rows())
def test_logits_equal_transformers(made: Made, row: str) -> None:
    image = picture(3, 5)
    loaded = stepper.load(made.path, row, page_size=4)
    assert isinstance(loaded.model, Glm5NextModel)
    rows = loaded.model.encode(image.values, image.grid)
    with torch.no_grad():
        found = made.model.model.get_image_features(image.values, torch.tensor([image.grid]), return_dict=True)
    assert_close(rows, found.pooler_output[0])
    prompt = (*around([image], IMAGE, count=20), [image])
    check_logits(loaded, made.path, row, made, prompt, rows, IMAGE, page_size=4)


@pytest.mark.parametrize(
    "vision", [{"hidden_size": 32, "num_heads": 1, "swiglu_limit": 0.3}, {"depth": 3, "attention_bias": False}]
)
def test_towers(vision: dict[str, Any], tmp_path: Path) -> None:
    """Other heads, a clamp that matters; products without biases. A video's two frames attend apart."""
    made, grid = make_glm(tmp_path, random.randrange(2**31), vision), (2, 4, 6)
    values = torch.randn(48, 3 * 2 * PATCH**2)
    model = stepper.load(made.path, "cpu", page_size=4).model
    assert isinstance(model, Glm5NextModel)
    with torch.no_grad():
        found = made.model.model.get_image_features(values, torch.tensor([grid]), return_dict=True)
    assert_close(model.encode(values, grid), found.pooler_output[0])
    check_headers(made.path, read_checkpoint(made.path), load_model_config(made.path))


@pytest.mark.parametrize("drafts", [False, True])
def test_requests(made: Made, drafts: bool, tmp_path: Path) -> None:
    """Beyond the selected pools too; two images of a size are two prefixes."""
    first, second, same = picture(2, 3), picture(4, 1), picture(2, 3)
    asked = [(*around(images, IMAGE, 20), images) for images in ([first], [first, second], [same], [])]
    tokens, places, _ = asked[0]
    asked[2] = (tokens, places, [same])
    flags: dict[str, Any] = {"speculative_algorithm": "NEXTN"} if drafts else {}
    check_requests(made.path, made, asked, tmp_path / "status", **flags)


def test_pixels(made: Made) -> None:
    """transformers' processor, also with fewer tokens; the largest image is the planner's."""
    image_module = pytest.importorskip("PIL.Image", reason="images need pillow: pip install -e '.[vision]'")
    from transformers.models.glm5_next.image_processing_pil_glm5_next import Glm5NextImageProcessorPil

    args: dict[str, Any] = {"model_path": str(made.path), "max_total_tokens": 64}
    vision = prepare(EngineArgs.from_kwargs(**args)).model.vision
    assert vision is not None and vision.max_patches == 30 * MERGE**2 and vision.video_token == VIDEO
    height, width = random.randint(10, 300), random.randint(10, 300)
    values = np.random.default_rng(random.randrange(1000)).integers(0, 256, (height, width, 3), dtype=np.uint8)
    image, cell = image_module.fromarray(values), (PATCH * MERGE) ** 2
    for most in (30, 12):
        settings = {name: value for name, value in PROCESSOR.items() if name != "image_processor_type"}
        want = Glm5NextImageProcessorPil(**settings | {"max_image_tokens": most})([image], return_tensors="np")
        got = load_processor(str(made.path), max_pixels=most * cell)([image], return_tensors="np")
        assert np.array_equal(got["image_grid_thw"], want["image_grid_thw"])
        assert np.array_equal(got["pixel_values"], want["pixel_values"])
        assert len(got["pixel_values"]) <= most * MERGE**2


@pytest.mark.parametrize(
    ("vision", "message"),
    [
        ({"hidden_act": "gelu"}, "hidden_act 'gelu' is not supported"),
        ({"num_heads": 7}, "num_heads 7 does not divide hidden_size"),
        ({"out_hidden_size": 60}, "out_hidden_size 60 is not hidden_size 64"),
    ],
)
def test_refused_towers(made: Made, vision: dict[str, Any], message: str, tmp_path: Path) -> None:
    raw = json.loads((made.path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(raw | {"vision_config": raw["vision_config"] | vision}))
    with pytest.raises(ConfigError, match=message):
        load_model_config(tmp_path)
