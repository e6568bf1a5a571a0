"""`moe-engine serve` with images of Llama 4: the official client of OpenAI, against transformers' chat template, prompt
and model."""

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
from tests.models.llama4_images import PATCH_TOKEN, SIDE, TilePixels, make_llama4
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

    def prompt(self, content: list[dict[str, Any]], images: list[TilePixels]) -> list[int]:
        """The ids of a user's turn as transformers' processor writes them."""
        from transformers import AutoTokenizer
        from transformers.models.llama4.processing_llama4 import Llama4Processor

        tokenizer = AutoTokenizer.from_pretrained(self.made.path)
        messages = [{"role": "user", "content": content}]
        text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        parts = text.split("<|image|>")
        for i, image in enumerate(images):
            shape = image.grid[1] // SIDE, image.grid[2] // SIDE
            parts[i] += Llama4Processor._prompt_split_image(None, shape, SIDE**2 // 4)
        ids: list[int] = tokenizer("".join(parts), add_special_tokens=False)["input_ids"]
        assert ids.count(PATCH_TOKEN) == sum(len(image.values) // 4 for image in images)
        return ids


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Iterator[Served]:
    request.getfixturevalue("forked_processes")
    folder = tmp_path_factory.mktemp("model")
    made = make_llama4(folder / "checkpoint", random.randrange(1 << 30), attention_chunk_size=40)
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
    theirs = [{"type": "image"} if part["type"] == "image_url" else part for part in content]
    ids = served.prompt(theirs, images)
    wanted = served.made.greedy(ids, list(images), COUNT)
    check_chat(served.url, content, len(ids), wanted)


def test_a_written_out_prompt_is_refused(served: Served) -> None:
    """Placeholders are one a picture; tokens of patches are added by the server."""
    picture = random_picture(10, 9, 1)
    body = {"text": "<|image|><|patch|>", "image_data": data_address(picture), "sampling_params": {"max_new_tokens": 1}}
    answer = httpx.post(served.url + "/generate", json=body, timeout=180)
    assert answer.status_code == 400 and f"token {PATCH_TOKEN}" in answer.text
