"""Draft extends over images: an MTP layer reads rows of the tower as if they were tokens of the vocabulary, at
positions of three axes; the image tokens of a step are found by place."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from moe_engine.models.batch import ForwardBatch, ImageRows
from moe_engine.types import NewRow
from moe_engine.types.image_tokens import ImageTokens
from moe_engine.worker.batch.row_images import RowImages
from tests.examples import examples
from tests.models.test_mtp import Drafter
from tests.models.vision_checkpoints import IMAGE, make_checkpoint

COUNT = 9
UNUSED = 240
"""Ids from here on are in no text of these tests."""


def written(drafter: Drafter, batch: ForwardBatch, next_ids: Tensor, hidden: Tensor) -> list[Tensor]:
    """The MTP layer's keys and values of a batch."""
    drafter.mtp.remember(0, next_ids, hidden, batch)
    return [part[batch.slots].clone() for part in batch.kv[drafter.config.num_layers]]


def test_mtp_layer_reads_rows_and_axes(tmp_path: Path) -> None:
    """The oracle has the rows in its embedding, and the axes as plain positions."""
    path = make_checkpoint("qwen3_5", tmp_path, random.randrange(1000), num_mtp_layers=1)
    drafter = Drafter(path, max_positions=64, max_image_tokens=8)
    generator = torch.Generator().manual_seed(random.randrange(2**31))
    size = drafter.config.hidden_size
    batch = drafter.batch(torch.randint(0, 200, (COUNT,), generator=generator).tolist())
    hidden, rows = (torch.randn(count, size, generator=generator) for count in (COUNT, 4))
    at = torch.tensor([2, 3, 5, 8])
    ids = torch.randint(0, 200, (COUNT,), generator=generator)
    places = torch.randint(0, 60, (3,), generator=generator)  # of the tokens 3, 4 and 6 themselves
    own = torch.tensor([3, 4, 6])
    seen = replace(
        batch,
        images=ImageRows(own, rows[:0], places.expand(3, -1)),
        next_images=ImageRows(at, rows, torch.zeros(3, 4, dtype=torch.int64)),
    )
    found = written(drafter, seen, ids.index_fill(0, at, IMAGE), hidden)
    plain = replace(batch, positions=batch.positions.index_copy(0, own, places))
    drafter.main.model.embedding.weight[UNUSED : UNUSED + 4] = rows
    expected = written(drafter, plain, ids.index_copy(0, at, torch.arange(UNUSED, UNUSED + 4)), hidden)
    assert all(torch.equal(a, b) for a, b in zip(found, expected))
    drafter.main.model.embedding.weight[UNUSED : UNUSED + 4] = 0
    other = written(drafter, plain, ids.index_copy(0, at, torch.arange(UNUSED, UNUSED + 4)), hidden)
    assert not any(torch.equal(a, b) for a, b in zip(found, other))


def test_image_tokens_of_runs_are_found_by_place() -> None:
    rng = random.Random(random.getrandbits(32))
    vision: Any = SimpleNamespace(merge=2, image_token=IMAGE)
    for _ in range(examples(40)):
        images = RowImages(4, vision, has_axes=rng.random() < 0.5, keeps=True)
        content: dict[int, list[tuple[bytes, int] | None]] = {}
        num_rows = rng.randint(1, 3)
        for entry, row in enumerate((*range(num_rows), *range(rng.randint(0, num_rows)))):  # some rows are used again
            tokens: list[tuple[bytes, int] | None] = []
            made = []
            for i in range(rng.randint(0, 3)):
                tokens += [None] * rng.randint(0, 3)
                grid = (1, 2 * rng.randint(1, 3), 2 * rng.randint(1, 2))
                count, key = grid[1] * grid[2] // 4, bytes([entry, i])
                made.append(ImageTokens(len(tokens), count, key, grid, b"p" if rng.random() < 0.7 else b""))
                tokens += [(key, j) for j in range(count)]
            tokens += [None] * rng.randint(1, 3)
            content[row] = tokens
            new = NewRow(row, f"r{row}", [1] * len(tokens), len(tokens), [], None, 0, frozenset())  # type: ignore[arg-type]
            images.enter(replace(new, images=tuple(made)))
        rows = rng.sample(sorted(content), rng.randint(1, len(content)))
        starts = [rng.randint(0, len(content[row])) for row in rows]
        counts = [rng.randint(1, 6) for _ in rows]
        offsets = np.cumsum([0, *counts[:-1]])
        wanted = {
            (offset + j, *content[row][start + j])  # type: ignore[misc]
            for row, start, count, offset in zip(rows, starts, counts, offsets.tolist())
            for j in range(count)
            if start + j < len(content[row]) and content[row][start + j] is not None
        }
        step = images.find(*(np.array(values) for values in (rows, starts, counts, offsets)), lambda image: True)
        if step is None:
            assert not wanted
            continue
        found = [(image.key, j) for image, own in step.parts for j in own.tolist()]
        assert {(token, *one) for token, one in zip(step.tokens.tolist(), found)} == wanted
        with_pixels = images.find(
            *(np.array(values) for values in (rows, starts, counts, offsets)), lambda image: bool(image.pixels)
        )
        kept = [] if with_pixels is None else [image for image, _ in with_pixels.parts]
        assert kept == [image for image, _ in step.parts if image.pixels]
