"""Chunks of models whose image tokens attend to later ones do not end inside an image."""

from __future__ import annotations

import math
import random
from types import SimpleNamespace
from typing import Any

import pytest

from moe_engine.errors import ConfigError
from moe_engine.scheduler.admission import Admission
from moe_engine.scheduler.config import SchedulerConfig

IMAGES = [SimpleNamespace(start=10, stop=26), SimpleNamespace(start=30, stop=46)]


def cut(
    start: int, count: int, room: float = math.inf, left: int = 60, images: Any = IMAGES, whole: bool = True
) -> int:
    admission = object.__new__(Admission)
    admission._config = SimpleNamespace(whole_images=whole)  # type: ignore[assignment]
    request: Any = SimpleNamespace(images=images)
    return admission._with_whole_images(request, start, count, left, room)


@pytest.mark.parametrize(
    ("start", "count", "room", "expected"),
    [
        (0, 9, math.inf, 9), (0, 10, math.inf, 10), (0, 11, math.inf, 10), (0, 25, math.inf, 10),
        (0, 26, math.inf, 26), (0, 29, math.inf, 29), (0, 40, math.inf, 30), (0, 46, math.inf, 46),
        (10, 8, math.inf, 16), (10, 8, 16, 16), (10, 8, 15, 0), (10, 0, math.inf, 16), (10, 0, 0, 0),
        (0, 0, math.inf, 0),
        (12, 5, math.inf, 14),  # behind a cached part of the image
        (26, 10, math.inf, 4),
    ],
)  # fmt: skip
def test_ends_of_chunks(start: int, count: int, room: float, expected: int) -> None:
    assert cut(start, count, room) == expected


def test_random_prompts_end() -> None:
    """Chunk after chunk reaches the end of the prompt, and no chunk but the last ends inside an image."""
    for _ in range(50):
        images, place = [], random.randrange(5)
        for _ in range(random.randint(1, 4)):
            images.append(SimpleNamespace(start=place, stop=place + random.randint(1, 20)))
            place = images[-1].stop + random.randrange(8)
        size, done = random.randint(1, 25), 0
        while done < place:
            left = place - done
            done += (count := cut(done, min(size, left), left=left, images=images))
            assert count > 0
            assert done == place or not any(image.start < done < image.stop for image in images)


def test_other_models_are_cut_anywhere() -> None:
    assert cut(0, 11, whole=False) == 11 and cut(0, 11, left=11) == 11


def test_pages_that_would_cut_images_are_refused() -> None:
    SchedulerConfig(num_slots=64, context_len=32, whole_images=True)
    with pytest.raises(ConfigError, match="--page-size is 16, but the tokens of an image"):
        SchedulerConfig(num_slots=64, context_len=32, page_size=16, whole_images=True)
