"""`moe-engine serve` with images of DeepSeek V4.1: the official client of OpenAI, against the formulas in float64."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import httpx
import openai
import pytest
import torch

pytest.importorskip("PIL", reason="images need pillow: pip install -e '.[vision]'")

from moe_engine.media.image_process import load_processor
from tests.e2e.server_process import ServerProcess
from tests.e2e.test_images import COUNT, check_chat, data_address
from tests.models.deepseek_v41 import make_v41
from tests.models.v41_images import V41Oracle
from tests.models.v41_tower import IMAGE, VISION, DelimitedPixels
from tests.models.vision_checkpoints import NAMES, random_picture

pytestmark = pytest.mark.usefixtures("forked_processes")

PLACE = "<｜deepseek_image｜>"


@dataclass
class Served:
    url: str
    oracle: V41Oracle
    processor: Any

    def pixels(self, picture: Any) -> DelimitedPixels:
        found = self.processor(images=[picture])
        return DelimitedPixels(tuple(found["image_grid_thw"][0].tolist()), torch.from_numpy(found["pixel_values"]))

    def prompt(self, text: str, images: list[DelimitedPixels]) -> list[int]:
        """The ids of a text with the tokens of its images."""
        body = {"prompt": text, "add_special_tokens": False}
        ids, waiting = httpx.post(self.url + "/tokenize", json=body).json()["tokens"], iter(images)
        return [token for id in ids for token in (next(waiting).placeholders(IMAGE) if id == IMAGE else [id])]


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Iterator[Served]:
    request.getfixturevalue("forked_processes")
    folder = tmp_path_factory.mktemp("model")
    path = make_v41(folder / "checkpoint", random.randrange(1 << 30), vision=VISION)
    tokenizer = path / "tokenizer.json"
    tokenizer.write_text(tokenizer.read_text().replace(NAMES[IMAGE], PLACE))
    flags = ["--dtype", "float32", "--max-total-tokens", "1024", "--cpu-threads", "1"]
    flags += ["--chat-template", "deepseek-v41", "--chunked-prefill-size", "32"]
    with ServerProcess(folder, "--model-path", str(path), *flags) as server:
        yield Served(server.url, V41Oracle(path), load_processor(str(path)))


def test_chat(served: Served) -> None:
    """Tokens and log-probabilities of two images in a turn, in chunks; again as a cached prefix."""
    pictures = [random_picture(random.randint(8, 30), random.randint(8, 30), seed) for seed in range(2)]
    images = [served.pixels(picture) for picture in pictures]
    content: list[Any] = [{"type": "text", "text": "first"}]
    content += [{"type": "image_url", "image_url": {"url": data_address(picture)}} for picture in pictures]
    text = f"<｜begin▁of▁sentence｜><｜User｜>first\n\n{PLACE}\n\n{PLACE}<｜Assistant｜></think>"
    ids = served.prompt(text, images)
    wanted = served.oracle.greedy(ids, list(images), COUNT)
    check_chat(served.url, content, len(ids), wanted)


def test_what_is_refused(served: Served) -> None:
    with openai.OpenAI(base_url=served.url + "/v1", api_key="none", max_retries=0) as client:
        part = {"type": "image_url", "image_url": {"url": data_address(random_picture(9, 9, 0))}}
        for content, words in (
            (f"see {PLACE}", "the prompt has a placeholder"),
            ([part, {"type": "text", "text": PLACE}], "1 images for 2 image placeholders"),
            ([{"type": "video_url", "video_url": {"url": "data:,x"}}], "videos are not supported"),
        ):
            messages: Any = [{"role": "user", "content": content}]
            with pytest.raises(openai.BadRequestError, match=words):
                client.chat.completions.create(model="default", messages=messages)
