"""Ranks that divide the images of a step (--mm-enable-dp-encoder): each image is encoded once, results are those of one
rank."""

from __future__ import annotations

import random
import threading
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from moe_engine.types.image_tokens import ImageTokens, image_key
from moe_engine.worker.batch.row_images import StepImages
from moe_engine.worker.device_stream import DeviceStream
from moe_engine.worker.image_encoder import ImageEncoder, divide
from tests.examples import examples

WIDTH, PATCH = 6, 4
VISION: Any = SimpleNamespace(
    row_width=WIDTH, patch_width=PATCH, sees_whole=False, num_tokens=lambda grid: grid[1] * grid[2] // 4
)
HOST = DeviceStream("cpu")


class Model:
    config = SimpleNamespace(vision=VISION)
    embedding = SimpleNamespace(weight=torch.zeros(1, dtype=torch.bfloat16))
    num_encoded = 0

    def encode(self, pixels: Tensor, grid: tuple[int, int, int]) -> Tensor:
        self.num_encoded += 1
        return pixels.view(-1, 4 * PATCH)[:, :WIDTH].to(torch.bfloat16)


class Ranks:
    """A group of threads."""

    def __init__(self, size: int) -> None:
        self.size, self.barrier, self.tables = size, threading.Barrier(size, timeout=240), [torch.empty(0)] * size

    def group(self, rank: int) -> Any:
        return SimpleNamespace(rank=rank, size=self.size, all_reduce=lambda x: self._sum(rank, x))

    def _sum(self, rank: int, x: Tensor) -> Tensor:
        self.tables[rank] = x
        self.barrier.wait()
        total = torch.stack(self.tables).sum(0)
        self.barrier.wait()
        return total


def image(rng: random.Random) -> ImageTokens:
    grid = (1, 2 * rng.randint(1, 4), 2 * rng.randint(1, 4))
    data = np.random.default_rng(rng.randrange(2**31)).standard_normal((grid[1] * grid[2], PATCH), np.float32).tobytes()
    return ImageTokens(0, VISION.num_tokens(grid), image_key(data, grid), grid, data)


def step(images: list[ImageTokens], rng: random.Random) -> StepImages:
    parts = [(one, np.sort(np.array(rng.sample(range(one.count), rng.randint(1, one.count))))) for one in images]
    count = sum(len(own) for _, own in parts)
    return StepImages(np.arange(count), np.zeros((3, count), np.int64), parts)


def run(encoder: ImageEncoder, steps: list[StepImages]) -> list[Tensor]:
    return [encoder.rows(one).rows for one in steps]


def test_ranks_divide_images() -> None:
    rng = random.Random(random.getrandbits(32))
    for _ in range(examples(10)):
        size = rng.randint(2, 4)
        known = [image(rng) for _ in range(6)]
        first = step(known, rng)  # no rank knows an image: each is encoded once
        steps = [first] + [step(rng.choices(known, k=rng.randint(1, 5)), rng) for _ in range(4)]
        limit = rng.choice((0, 200, 10000))
        model: Any = Model()
        alone = ImageEncoder(model, limit, HOST)
        models: list[Any] = [Model() for _ in range(size)]
        expected = run(alone, steps)
        ranks = Ranks(size)
        encoders = [ImageEncoder(own, limit, HOST, ranks.group(rank)) for rank, own in enumerate(models)]
        with ThreadPoolExecutor(size) as pool:
            found = list(pool.map(run, encoders, [steps] * size))
        for rows in found:
            assert len(rows) == len(steps) and all(map(torch.equal, rows, expected))
        together = sum(own.num_encoded for own in models)
        assert model.num_encoded <= together <= len(known) + size * (model.num_encoded - len(known))


def test_shares_are_even() -> None:
    rng = random.Random(random.getrandbits(32))
    for _ in range(examples(50)):
        sizes, ranks = [rng.randint(1, 100) for _ in range(rng.randint(1, 12))], rng.randint(1, 4)
        owners = divide(sizes, ranks)
        loads = [sum(size for size, owner in zip(sizes, owners) if owner == rank) for rank in range(ranks)]
        assert max(loads) - min(loads) <= max(sizes)
