"""Qwen3.8-Flash-Next with images against transformers: tower, logits of chunks that end within an image and within a
pool, requests in an engine with and without drafts, positions of pools."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from moe_engine.models.batch import ImageRows, PoolStarts
from moe_engine.models.families.qwen4_exp import Qwen4ExpModel
from moe_engine.models.vision.positions import axis_positions
from moe_engine.types import NewRow
from moe_engine.types.image_tokens import ImageTokens
from moe_engine.worker.batch.row_images import RowImages
from tests.engine.harness import InProcessEngine
from tests.engine.test_image_requests import assert_equal, scripted
from tests.examples import examples
from tests.models import sparse, stepper
from tests.models.image_parity import Prompt, check_requests
from tests.models.qwen4_exp_images import make_qwen4
from tests.models.qwen4_exp_mtp import MTPOracle
from tests.models.rows import all_rows
from tests.models.stepper import Chunk, Stepper
from tests.models.test_parity import assert_close
from tests.models.vision_checkpoints import IMAGE, MERGE, Oracle, Pixels, random_pixels, with_images

Made = tuple[Path, Oracle]
POOL, LONG = 4, 16


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Made:
    path = make_qwen4(tmp_path_factory.mktemp("qwen4"), random.randrange(2**31))
    return path, Oracle(path)


def picture(rows: int, columns: int) -> Pixels:
    return random_pixels(rows, columns, torch.Generator().manual_seed(random.randrange(2**31)))


def clear_prompt(oracle: Oracle, images: Sequence[Pixels], counts: Sequence[int]) -> Prompt:
    """Text of `counts` tokens around the images, with clear selections of pools and experts for the prompt."""

    def draw() -> Prompt:
        text = [torch.randint(0, 250, (count,)).tolist() for count in counts]
        parts = [part for pair in zip(text, images) for part in pair]
        ids, found, places = with_images([*parts, text[-1]])
        oracle.logits(ids, found)
        return ids, places, found

    return sparse.clear_draw(draw, 2e-6)


def step(loaded: Stepper, ids: list[int], axes: Tensor, rows: Tensor, begin: int, end: int, decode: bool) -> Tensor:
    """Logits of the next tokens [begin, end) of a prompt at positions `axes` [3, L]; `rows` [L, D]: of image tokens."""
    batch = loaded.batch([Chunk(0, ids[begin:end], decode)])
    places, own = torch.arange(begin, end), axes[:, begin:end]
    starts = PoolStarts(places, axes[:, places // POOL * POOL].T)
    inside = (torch.tensor(ids[begin:end]) == IMAGE).nonzero().flatten()
    batch = replace(batch, positions=own[0].clone(), pool_starts=starts)
    if len(inside):
        batch = replace(batch, images=ImageRows(inside, rows[begin:end][inside], own[:, inside]))
    return loaded.model.logits(loaded.model.forward(batch))


@pytest.mark.parametrize("row", all_rows())
def test_logits_equal_transformers(made: Made, row: str) -> None:
    """Two images; chunks and decodes that complete pools whose first token is in an image, and in an earlier step."""
    path, oracle = made
    ids, _, images = clear_prompt(oracle, [picture(3, 5), picture(4, 2)], (5, 18, 30))
    loaded = stepper.load(path, row, page_size=POOL, max_positions=256, max_image_tokens=len(ids))
    model, tower = loaded.model, oracle.model.model.visual
    assert isinstance(model, Qwen4ExpModel)
    rows = torch.zeros(len(ids), 64)
    with torch.no_grad():
        found = [tower(image.values, grid_thw=torch.tensor([image.grid])).pooler_output for image in images]
    encoded = [model.encode(image.values, image.grid) for image in images]
    for own, want in zip(encoded, found):
        assert_close(own, want)
    rows[torch.tensor(ids) == IMAGE] = torch.cat(encoded)
    kinds, grids = (torch.tensor([ids]) == IMAGE).int(), torch.tensor([image.grid for image in images])
    axes, _ = oracle.model.model.get_rope_index(torch.tensor([ids]), mm_token_type_ids=kinds, image_grid_thw=grids)
    ends = [9, 10, 23, *range(24, 28), 41, 60, *range(61, len(ids) + 1)]
    got = [
        step(loaded, ids, axes[:, 0], rows, begin, end, decode=end - begin == 1) for begin, end in zip([0, *ends], ends)
    ]
    assert_close(torch.cat(got), oracle.logits(ids, images))
    with pytest.raises(ValueError, match="needs pool_starts"):
        batch = stepper.load(path, row, page_size=POOL, max_image_tokens=4).batch([Chunk(0, ids[:4], False)])
        model.forward(replace(batch, images=ImageRows(torch.tensor([1]), rows[:1], axes[:, 0, :1])))


@pytest.mark.parametrize("drafts", [False, True])
def test_requests(made: Made, drafts: bool, tmp_path: Path) -> None:
    """Within the budget and beyond it; prompts that end with an image; two images of a size are two prefixes."""
    path, oracle = made
    first, second, same = picture(2, 3), picture(4, 1), picture(2, 3)
    asked = [clear_prompt(oracle, [first], (20, 9)), clear_prompt(oracle, [first, second], (20, 6, 0))]
    tokens, places, _ = asked[0]
    asked += [(tokens, places, [same]), clear_prompt(oracle, [], (25,))]
    flags: dict[str, Any] = {"speculative_algorithm": "NGRAM", "speculative_num_steps": 2} if drafts else {}
    check_requests(path, oracle, asked, tmp_path / "status", **flags)


def test_drafts_of_the_mtp_layer(tmp_path: Path) -> None:
    """As many are accepted as by transformers' layer: pools that begin in an image, or in another step, and end in the
    answer; the layer reads rows of images."""
    path = make_qwen4(tmp_path / "model", random.randrange(2**31), agreeing=True, num_mtp_layers=1)
    oracle, mtp = Oracle(path), MTPOracle(path, tmp_path / "layer")
    flags: dict[str, Any] = {"dtype": "float32", "max_total_tokens": 512, "max_running_requests": 1, "page_size": POOL}
    flags |= {"speculative_algorithm": "NEXTN", "speculative_num_steps": 1, "speculative_eagle_topk": 1}
    flags |= {"speculative_num_draft_tokens": 2}
    engine = InProcessEngine(path, tmp_path / "status", **flags)
    proposed = accepted = 0
    for number, counts in enumerate(((18, 7), (3, 15, 2), (21, 1))):
        ids, places, images = clear_prompt(oracle, [picture(2, 3), picture(4, 2)][: len(counts) - 1], counts)
        form: dict[str, Any] = {"chunked_prefill_size": 10} if number else {}
        answer = engine.run([scripted("own", ids, images, places, LONG)], **form)["own"]
        assert_equal(answer, oracle.greedy(ids, images, LONG, answer.token_ids), LONG)
        text, stats = ids + answer.token_ids, engine.scheduler.stats().speculation
        assert stats is not None
        streams, embedding = mtp.streams(text[:-1], images)
        embedding = torch.cat((embedding[1:], mtp.embedding(text[-1:])))
        _, read = mtp.layer(embedding, streams, mtp.axes(text[:-1], images))
        drafts, at, right = (read @ mtp.head.T).argmax(1).tolist(), len(ids), 0
        while at + 1 < len(text):  # text[at] is the last known token
            is_right = drafts[at - 1] == text[at + 1]
            right, at = right + is_right, at + 1 + is_right
        assert abs(sum(stats.accepted) - right) <= 1  # the last token may end a step with a draft
        proposed, accepted = proposed + sum(stats.proposed), accepted + sum(stats.accepted)
    engine.close()
    assert 3 <= accepted < proposed


def test_retracted_requests(made: Made, tmp_path: Path) -> None:
    """Pools are completed again, by prompts with their answers."""
    path, oracle = made
    asked = [clear_prompt(oracle, [picture(3, 4)], (6 + i, i)) for i in range(4)]
    flags: dict[str, Any] = {"dtype": "float32", "max_total_tokens": 512, "max_running_requests": 4, "page_size": POOL}
    engine = InProcessEngine(path, tmp_path / "status", **flags)
    script = [scripted(f"r{i}", ids, list(images), places, LONG) for i, (ids, places, images) in enumerate(asked)]
    tight: dict[str, Any] = {"num_slots": 72, "schedule_conservativeness": 0.0, "max_consecutive_prefills": 32}
    answers = engine.run(script, **tight)
    engine.close()
    assert sum(answer.retractions for answer in answers.values())
    for i, (ids, _, images) in enumerate(asked):
        answer = answers[f"r{i}"]
        assert_equal(answer, oracle.greedy(ids, list(images), LONG, answer.token_ids), LONG)


def test_positions_of_pools() -> None:
    """Of random prompts in random steps, and of the tokens after them."""
    vision: Any = SimpleNamespace(merge=MERGE, image_token=IMAGE)
    rng = random.Random(random.getrandbits(32))
    for _ in range(examples(40)):
        pool, texts, rows = rng.choice((2, 3, 4, 8)), dict[int, tuple[int, np.ndarray]](), rng.sample(range(4), 3)
        images = RowImages(4, vision, has_axes=True, keeps=rng.random() < 0.5, pool=pool)
        for row in rows:
            length, spans, made = rng.randint(1, 4), list[tuple[int, tuple[int, int, int]]](), list[ImageTokens]()
            for i in range(rng.randint(0, 3)):
                grid = (1, MERGE * rng.randint(1, 4), MERGE * rng.randint(1, 3))
                spans.append((length, grid))
                made.append(ImageTokens(length, grid[1] * grid[2] // MERGE**2, bytes([row, i]), grid, b"p"))
                length = made[-1].stop + rng.randint(0, 3)
            whole, _ = axis_positions(length + 20, spans, MERGE)
            new = NewRow(row, f"r{row}", [1] * length, length, [], None, 0, frozenset())  # type: ignore[arg-type]
            images.enter(replace(new, images=tuple(made)))
            texts[row] = length, whole
        done = dict.fromkeys(rows, 0)
        while any(done[row] < texts[row][0] + 12 for row in rows):
            counts = {row: rng.randint(1, 9) for row in rows if done[row] < texts[row][0]}
            counts = {row: min(count, texts[row][0] - done[row]) for row, count in counts.items()}
            counts |= {row: 1 for row in rows if row not in counts}
            owner = np.repeat(list(counts), list(counts.values()))
            places = np.concatenate([np.arange(done[row], done[row] + count) for row, count in counts.items()])
            got = images.pool_starts(owner, places)
            want = [texts[row][1][:, place // pool * pool] for row, place in zip(owner, places)]
            assert np.array_equal(got, np.array(want))
            images.place(owner, places)
            done = {row: min(done[row] + count, texts[row][0] + 12) for row, count in counts.items()}
