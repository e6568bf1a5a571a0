"""Images of DeepSeek V4.1: tower, logits and requests against the formulas; sizes of images; config; prompts."""

from __future__ import annotations

import math
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from moe_engine.models.image_text import ImageInputs
from tests.models import stepper
from tests.models.deepseek_v41 import V41Reference, make_v41
from tests.models.image_parity import around, check_logits, check_requests
from tests.models.rows import all_rows
from tests.models.test_deepseek_v41 import PAGE, TIE
from tests.models.test_parity import assert_close
from tests.models.v41_tower import IMAGE, VISION, TowerReference, picture
from tests.models.vision_checkpoints import GreedyOracle, Pixels


class Oracle(GreedyOracle):
    """The formulas in float64."""

    def __init__(self, path: Path) -> None:
        self.path, self.text = path, V41Reference(path)
        tensors = {name: t.double() for name, t in load_file(path / "model.safetensors").items()}
        self._tower = TowerReference(VISION, tensors)

    def embed(self, image: Pixels) -> Tensor:
        return self._tower.embed(image.values, image.grid)

    def image_inputs(self, ids: list[int], images: list[Pixels]) -> dict[str, Any]:
        return {"images": torch.cat([self.embed(image) for image in images])}

    def logits(self, ids: list[int], images: list[Pixels]) -> Tensor:
        return self.text.logits(ids, **self.image_inputs(ids, images) if images else {}).float()

    def is_clear(self, ids: list[int], images: list[Pixels]) -> bool:
        """Whether rounding decides no selection of entries or experts."""
        self.text.margin = math.inf
        self.logits(ids, images)
        return self.text.margin > TIE


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Oracle:
    return Oracle(make_v41(tmp_path_factory.mktemp("v41"), random.randrange(2**31), vision=VISION))


def clear_prompt(made: Oracle, images: list[Pixels], count: int) -> tuple[list[int], list[int], list[Pixels]]:
    for _ in range(50):
        tokens, places = around(images, IMAGE, count)
        if made.is_clear(tokens, images):
            return tokens, places, images
    raise AssertionError("no clear draw")


@pytest.mark.parametrize("row", all_rows())
def test_logits(made: Oracle, row: str) -> None:
    """Of whole tokens and of cut ones at the edges."""
    prompt, text = clear_prompt(made, [picture(7, 11)], 30), clear_prompt(made, [], 20)[0]
    loaded, (image,) = stepper.load(made.path, row, page_size=PAGE), prompt[2]
    assert isinstance(loaded.model, ImageInputs)
    rows = loaded.model.encode(image.values, image.grid)
    assert_close(rows, made.embed(image))
    assert_close(loaded.model.encode((other := picture(3, 6)).values, other.grid), made.embed(other))
    check_logits(loaded, made.path, row, made, prompt, rows, IMAGE, text=text, page_size=PAGE)


def test_requests(made: Oracle, tmp_path: Path) -> None:
    first, second = picture(6, 9), picture(10, 1)
    asked = [clear_prompt(made, images, 6) for images in ([first], [first, second], [])]
    check_requests(made.path, made, asked, tmp_path / "status")
