"""`moe-engine serve` with Command A Vision's architecture: chats with images of several tiles by the official client,
against transformers' model."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import httpx
import pytest
import torch

pytest.importorskip("PIL", reason="images need pillow: pip install -e '.[vision]'")

from moe_engine.media.image_process import load_processor
from tests.e2e.server_process import ServerProcess
from tests.e2e.test_images import COUNT, check_chat, data_address
from tests.models.cohere2_images import END, IMAGE, START, TilePixels, make_cohere2
from tests.models.vision_checkpoints import Made, random_picture

pytestmark = pytest.mark.usefixtures("forked_processes")

SIDES = [(10, 9), (30, 8), (12, 40), (47, 33)]
"""Of the images in pixels: one tile, two in a row, three in a column, a row and column of several."""


@dataclass
class Served:
    url: str
    made: Made
    processor: Any

    def pixels(self, picture: Any) -> TilePixels:
        found = self.processor(images=[picture])
        return TilePixels(tuple(found["image_grid_thw"][0].tolist()), torch.from_numpy(found["pixel_values"]))

    def tokenize(self, text: str) -> list[int]:
        body = {"prompt": text, "add_special_tokens": False}
        found: list[int] = httpx.post(self.url + "/tokenize", json=body).json()["tokens"]
        return found


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Iterator[Served]:
    request.getfixturevalue("forked_processes")
    folder = tmp_path_factory.mktemp("model")
    made = make_cohere2(folder / "checkpoint", random.randrange(1 << 30))
    flags = ["--dtype", "float32", "--max-total-tokens", "2048", "--cpu-threads", "1", "--chunked-prefill-size", "32"]
    with ServerProcess(folder, "--model-path", str(made.path), *flags) as server:
        yield Served(server.url, made, load_processor(str(made.path)))


@pytest.mark.parametrize("sides", [SIDES[:1], SIDES[1:3], SIDES[3:]])
def test_chat(served: Served, sides: list[tuple[int, int]]) -> None:
    """Tokens and log-probabilities in chunks of a prompt; again as a cached prefix."""
    pictures = [random_picture(*size, random.randrange(1000)) for size in sides]
    images = [served.pixels(picture) for picture in pictures]
    content: list[Any] = [{"type": "image_url", "image_url": {"url": data_address(picture)}} for picture in pictures]
    content.insert(1, {"type": "text", "text": "and"})
    ids, parts = served.tokenize("[user]"), list(images)
    for part in content:
        image = parts.pop(0) if part["type"] == "image_url" else None
        ids += served.tokenize("and") if image is None else [START, *image.placeholders(IMAGE), END]
    ids += served.tokenize("[assistant]")
    check_chat(served.url, content, len(ids), served.made.greedy(ids, list(images), COUNT))
