"""Models for images and text against transformers: positions of three axes, vision towers, logits."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from moe_engine.models.batch import ImageRows
from moe_engine.models.config_file import load_model_config
from moe_engine.models.families.image_text import ImageTextModel
from moe_engine.models.vision.positions import axis_positions
from tests.models import stepper
from tests.models.rows import all_rows
from tests.models.test_parity import assert_close
from tests.models.vision_checkpoints import (
    GLM,
    IMAGE,
    KINDS,
    MERGE,
    Oracle,
    make_checkpoint,
    random_pixels,
    with_images,
)


@pytest.fixture(
    scope="module", params=[*KINDS, *GLM, "qwen2_vl", pytest.param("qwen3_vl", marks=pytest.mark.exhaustive)]
)
def path(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(request.param, tmp_path_factory.mktemp(request.param), seed=random.randrange(1000))


@pytest.mark.parametrize("row", all_rows())
def test_logits(path: Path, row: str) -> None:
    """A prompt with two images, in chunks that end inside an image, and a token after it."""
    generator = torch.Generator().manual_seed(random.randrange(2**31))
    first, second = random_pixels(5, 3, generator), random_pixels(1, 4, generator)
    ids, images, places = with_images([[1, 2, 3, 4], first, [5, 6], second, [7, 8, 9]])
    oracle = Oracle(path)
    expected = oracle.logits(ids, images)
    config = load_model_config(path)
    vision = config.vision
    assert vision is not None
    loaded = stepper.load(path, row, max_positions=256, max_image_tokens=len(ids))
    model = loaded.model
    assert isinstance(model, ImageTextModel)
    rows = [model.encode(image.values, image.grid) for image in images]
    tower = oracle.model.model.visual
    for image, own in zip(images, rows):
        with torch.no_grad():
            found = tower(image.values, grid_thw=torch.tensor([image.grid]))
        assert_close(own[:, : vision.out_width], found.pooler_output)
    axes, shift = axis_positions(len(ids), list(zip(places, (image.grid for image in images))), MERGE)
    tokens = torch.tensor(ids)
    image_rows = torch.zeros(len(ids), vision.row_width)
    image_rows[tokens == IMAGE] = torch.cat(rows)
    logits = []
    for begin, end in ((0, 9), (9, 10), (10, len(ids) - 1), (len(ids) - 1, len(ids))):
        batch = loaded.batch([stepper.Chunk(0, ids[begin:end], decode=end == begin + 1)])
        inside = (tokens[begin:end] == IMAGE).nonzero().flatten()
        places_ = torch.from_numpy(axes[:, begin:end])
        batch = replace(batch, positions=places_.amax(0))
        if len(inside):
            batch = replace(batch, images=ImageRows(inside, image_rows[begin:end][inside], places_[:, inside]))
        logits.append(model.logits(model.forward(batch)))
    assert_close(torch.cat(logits), expected)
    assert int(axes[0, -1]) == len(ids) - 1 + shift


def test_positions(path: Path) -> None:
    """Against transformers' own for random prompts, an image at the start and neighboring images among them."""
    model = Oracle(path).model.model
    rng = np.random.default_rng(random.randrange(2**31))
    for _ in range(10):
        grids, places, ids = [], [], [7] * int(rng.integers(0, 3))
        for _ in range(int(rng.integers(1, 4))):
            grid = (1, int(rng.integers(1, 6)) * MERGE, int(rng.integers(1, 6)) * MERGE)
            places.append(len(ids) + 1)
            ids += [3, *[IMAGE] * (grid[1] * grid[2] // MERGE**2), 4] + [7] * int(rng.integers(0, 3))
            grids.append(grid)
        tokens = torch.tensor([ids])
        expected, delta = model.get_rope_index(
            tokens, mm_token_type_ids=(tokens == IMAGE).int(), image_grid_thw=torch.tensor(grids)
        )
        found, shift = axis_positions(len(ids), list(zip(places, grids)), MERGE)
        assert np.array_equal(found, expected[:, 0].numpy())
        assert shift == int(delta)
