"""`moe-engine serve` with GLM-4.5V's architecture: chats with images by the official client, against transformers'
processor and model; videos are refused."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

pytest.importorskip("PIL", reason="images need pillow: pip install -e '.[vision]'")

from tests.e2e.server_process import ServerProcess
from tests.e2e.test_images import COUNT, Served, check_chat, data_address
from tests.models.vision_checkpoints import END, IMAGE, NAMES, START, Oracle, make_checkpoint, random_picture

pytestmark = pytest.mark.usefixtures("forked_processes")


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Iterator[Served]:
    from transformers.models.glm4v.image_processing_pil_glm4v import Glm4vImageProcessorPil

    request.getfixturevalue("forked_processes")
    folder = tmp_path_factory.mktemp("model")
    path = make_checkpoint("glm4v_moe", folder / "checkpoint", random.randrange(1 << 30))
    flags = ["--dtype", "float32", "--max-total-tokens", "1024", "--cpu-threads", "1", "--chunked-prefill-size", "16"]
    with ServerProcess(folder, "--model-path", str(path), *flags) as server:
        yield Served(server, Oracle(path), Glm4vImageProcessorPil.from_pretrained(path), Path())


def test_chat(served: Served) -> None:
    """Two images in chunks of a prompt; again as a cached prefix."""
    pictures = [random_picture(random.randint(20, 150), random.randint(20, 150), seed) for seed in range(2)]
    content: list[Any] = [{"type": "image_url", "image_url": {"url": data_address(picture)}} for picture in pictures]
    content.insert(1, {"type": "text", "text": "and"})
    place = f"{NAMES[START]}{NAMES[IMAGE]}{NAMES[END]}"
    ids, images = served.prompt(f"[user]{place}and{place}[assistant]", pictures)
    check_chat(served.server.url, content, len(ids), served.oracle.greedy(ids, images, COUNT))


def test_videos_are_refused(served: Served) -> None:
    part = {"type": "video_url", "video_url": {"url": "data:video/mp4;base64,AAAA"}}
    body = {"model": "default", "messages": [{"role": "user", "content": [part]}]}
    answer = httpx.post(served.server.url + "/v1/chat/completions", json=body, timeout=60)
    assert answer.status_code == 400 and "video" in answer.text
