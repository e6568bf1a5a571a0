"""`moe-engine serve` with Gemma 3 and its tower: chats with images by the official client, against transformers'
processor and model."""

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
from tests.models.gemma3_images import END, IMAGE, NAMES, START, TOKENS, FixedPixels, make_gemma3
from tests.models.vision_checkpoints import Made, random_picture

pytestmark = pytest.mark.usefixtures("forked_processes")


@dataclass
class Served:
    url: str
    made: Made
    processor: Any

    def pixels(self, picture: Any) -> FixedPixels:
        found = self.processor(images=[picture])
        return FixedPixels(tuple(found["image_grid_thw"][0].tolist()), torch.from_numpy(found["pixel_values"]))

    def prompt(self, text: str) -> list[int]:
        """The ids of a text as transformers' processor writes them: a placeholder stands for the whole sequence."""
        from transformers import AutoTokenizer

        whole = f"\n\n{NAMES[START]}{NAMES[IMAGE] * TOKENS}{NAMES[END]}\n\n"
        tokenizer = AutoTokenizer.from_pretrained(self.made.path)
        ids: list[int] = tokenizer(text.replace(NAMES[START], whole), add_special_tokens=False)["input_ids"]
        assert ids.count(IMAGE) == TOKENS * text.count(NAMES[START])
        return ids


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Iterator[Served]:
    request.getfixturevalue("forked_processes")
    folder = tmp_path_factory.mktemp("model")
    made = make_gemma3(folder / "checkpoint", random.randrange(1 << 30))
    flags = ["--dtype", "float32", "--max-total-tokens", "2048", "--cpu-threads", "1", "--chunked-prefill-size", "24"]
    with ServerProcess(folder, "--model-path", str(made.path), *flags) as server:
        yield Served(server.url, made, load_processor(str(made.path)))


@pytest.mark.parametrize("count", [1, 3])
def test_chat(served: Served, count: int) -> None:
    """Tokens and log-probabilities in chunks that do not cut images; again as a cached prefix."""
    pictures = [random_picture(random.randint(5, 90), random.randint(5, 90), seed) for seed in range(count)]
    content: list[Any] = [{"type": "image_url", "image_url": {"url": data_address(picture)}} for picture in pictures]
    content.insert(1, {"type": "text", "text": "and"})
    text = "".join("and" if part["type"] == "text" else NAMES[START] for part in content)
    ids = served.prompt(f"[user]\n{text}[assistant]")
    wanted = served.made.greedy(ids, [served.pixels(picture) for picture in pictures], COUNT)
    check_chat(served.url, content, len(ids), wanted)


def test_texts(served: Served) -> None:
    """/generate takes a placeholder, or the sequence as it is written out; other counts of images are refused."""
    picture = random_picture(30, 40, random.randrange(1000))
    sampling = {"temperature": 0, "max_new_tokens": COUNT, "ignore_eos": True}

    def generate(text: str) -> httpx.Response:
        body = {"text": text, "image_data": data_address(picture), "sampling_params": sampling}
        return httpx.post(served.url + "/generate", json=body, timeout=180)

    written = f"a\n\n{NAMES[START]}{NAMES[IMAGE]}{NAMES[END]}\n\nb"
    first, second = (generate(text).json() for text in (f"a{NAMES[START]}b", written))
    expected = served.made.greedy(served.prompt(f"a{NAMES[START]}b"), [served.pixels(picture)], COUNT)
    assert first["output_ids"] == second["output_ids"]
    assert first["output_ids"][: len(expected)] == [token for token, _ in expected]
    assert generate("no image").status_code == 400
