"""Requests with images through scheduler and worker: tokens and log-probabilities of transformers; cached prefixes by
content; chunks, retraction, the limit of encoder results."""

from __future__ import annotations

import dataclasses
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from moe_engine.types.image_tokens import FIRST_KEY, ImageTokens, image_key, keyed_ids
from tests.engine.harness import Answer, InProcessEngine, Scripted
from tests.models.vision_checkpoints import KINDS, Oracle, Pixels, make_checkpoint, random_pixels, with_images

COUNT = 6


def scripted(
    rid: str, ids: list[int], images: list[Pixels], places: list[int], count: int = COUNT, **more: object
) -> Scripted:
    tokens = []
    for image, place in zip(images, places):
        data = image.values.numpy().tobytes()
        tokens.append(ImageTokens(place, image.num_tokens, image_key(data, image.grid), image.grid, data))
    fields = {"images": tokens}
    sampling = {"temperature": 0.0, "ignore_eos": True}
    request = Scripted(rid, keyed_ids(ids, tokens), count, logprob=True, more=fields, **more)  # type: ignore[arg-type]
    return dataclasses.replace(request, sampling=sampling)


def assert_equal(answer: Answer, expected: list[tuple[int, float]], count: int = COUNT) -> None:
    assert len(answer.token_ids) == count
    assert answer.token_ids[: len(expected)] == [token for token, _ in expected]
    found = [entry.logprob for entry in answer.logprobs[: len(expected)]]
    assert np.allclose(found, [logprob for _, logprob in expected], atol=2e-4), (found, expected)


@pytest.fixture(scope="module", params=KINDS)
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(request.param, tmp_path_factory.mktemp(request.param), random.randrange(1000))


@pytest.fixture(scope="module")
def oracle(checkpoint: Path) -> Oracle:
    return Oracle(checkpoint)


@pytest.fixture(scope="module")
def engine(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> InProcessEngine:
    flags = {"dtype": "float32", "max_total_tokens": 1024, "max_running_requests": 4, "vlm_cache_size_mb": 1}
    return InProcessEngine(checkpoint, tmp_path_factory.mktemp("status") / "status", **flags)


def prompts(generator: torch.Generator) -> list[tuple[list[int], list[Pixels], list[int]]]:
    """One of text alone; two with the same image after the same text; one with another image of that size; one with
    two images."""
    first, other = random_pixels(3, 4, generator), random_pixels(3, 4, generator)
    small = random_pixels(1, 2, generator)
    text = [[random.randrange(250) for _ in range(length)] for length in (9, 4, 7, 5)]
    return [
        with_images([text[0] + text[2]]),
        with_images([text[1], first, text[2]]),
        with_images([text[1], first, text[3]]),
        with_images([text[1], other, text[2]]),
        with_images([first, text[3], small, text[1]]),
    ]


def test_equal_to_transformers(engine: InProcessEngine, oracle: Oracle) -> None:
    """Together, again with a cached prefix, in chunks that end inside images, without overlap, and retracted."""
    asked = prompts(torch.Generator().manual_seed(random.randrange(2**31)))
    expected: list[list[tuple[int, float]]] = []
    forms: list[dict[str, object]] = [
        {},
        {"chunked_prefill_size": 7},
        {"chunked_prefill_size": 5, "enable_mixed_chunk": True, "disable_radix_cache": True},
        {"num_slots": 60},
        {"overlap": False},
    ]
    for form in forms:
        script = [scripted(f"r{i}", *one, arrives=2 * i) for i, one in enumerate(asked)]
        script += [scripted(f"again{i}", *one, arrives=40) for i, one in enumerate(asked)]
        answers = engine.run(script, **form)  # type: ignore[arg-type]
        expected = expected or [
            oracle.greedy(ids, images, COUNT, answers[f"r{i}"].token_ids) for i, (ids, images, _) in enumerate(asked)
        ]
        for i, wanted in enumerate(expected):
            assert_equal(answers[f"r{i}"], wanted)
            assert_equal(answers[f"again{i}"], wanted)
    tight = {"num_slots": 60, "schedule_conservativeness": 0.0, "max_consecutive_prefills": 32}  # prompts first
    assert sum(answer.retractions for answer in engine.run(script, **tight).values())


def test_images_share_prefixes_by_content(engine: InProcessEngine) -> None:
    asked = prompts(torch.Generator().manual_seed(random.randrange(2**31)))
    script = [scripted(f"r{i}", *asked[i], arrives=30 * i) for i in range(1, 4)]
    answers = engine.run(script)
    image = asked[1][1][0].num_tokens
    same, other = answers["r2"].cached_tokens, answers["r3"].cached_tokens
    text = 4 + 1  # and the token before the image
    assert same >= text + image + 1
    assert other == text


def test_encoder_results_are_kept_up_to_a_limit(engine: InProcessEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    encoder = engine.worker.runner.forward.images
    assert encoder is not None
    generator = torch.Generator().manual_seed(random.randrange(2**31))
    image = random_pixels(2, 2, generator)
    encoder.forget()
    model: Any = encoder._model
    encode, encoded = model.encode, []
    monkeypatch.setattr(model, "encode", lambda *args: encoded.append(args) or encode(*args))
    script = [scripted(f"r{i}", *with_images([[i], image, [1]]), arrives=10 * i) for i in range(3)]
    engine.run(script)
    assert len(encoded) == 1  # other text before it: the prefix is not cached, the image is
    assert encoder.num_bytes == 4 * 64 * 4 * (encoder._known[next(iter(encoder._known))].shape[1] // 64)
    small, encoder._max_bytes = encoder._max_bytes, 100
    try:
        engine.run([scripted("x", *with_images([[9], image, [1]]), arrives=0)], chunked_prefill_size=2)
        assert encoder.num_bytes == 0
    finally:
        encoder._max_bytes = small


def test_ids_of_image_tokens() -> None:
    """Outside the vocabulary, by content and place in the image; text stays."""
    ids = [1, 2, *[5] * 6, 3]
    one, two = (ImageTokens(2, 6, image_key(bytes([i] * 8), (1, 4, 6)), (1, 4, 6)) for i in range(2))
    first, second = keyed_ids(ids, [one]), keyed_ids(ids, [two])
    assert first[:2] == ids[:2] and first[8:] == ids[8:]
    assert all(FIRST_KEY <= token < 2**31 for token in first[2:8])
    assert len({*first[2:8], *second[2:8]}) == 12
    assert keyed_ids(ids, [one]) == first
    assert image_key(b"1" * 8, (1, 4, 6)) != image_key(b"1" * 8, (1, 6, 4))
