"""Requests with images on several ranks: tokens and log-probabilities of transformers."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from moe_engine import Engine
from moe_engine.media.images import Images, Picture
from moe_engine.media.settings import ImageSource
from moe_engine.types.image_tokens import image_key
from tests.models.vision_checkpoints import END, IMAGE, START, Oracle, make_checkpoint, random_pixels, with_images

pytestmark = pytest.mark.usefixtures("forked_processes")

COUNT = 4


@pytest.mark.parametrize(
    ("kind", "flags"),
    [
        # every rank keeps its rows of the residual stream, to which deepstack adds
        (
            "qwen3_vl_moe",
            {"tp_size": 2, "ep_size": 2, "moe_a2a_backend": "all_to_all", "enable_two_batch_overlap": True}
            | {"mm_enable_dp_encoder": True},
        ),
        pytest.param(
            "qwen3_vl_moe",
            {"tp_size": 2, "ep_size": 2, "moe_a2a_backend": "all_to_all"},
            marks=pytest.mark.exhaustive,
        ),
        pytest.param("qwen3_vl_moe", {"tp_size": 2, "attn_dp_size": 2}, marks=pytest.mark.exhaustive),
        pytest.param("qwen3_vl_moe", {"dp_size": 2}, marks=pytest.mark.exhaustive),
        pytest.param("qwen2_5_vl", {"tp_size": 2}, marks=pytest.mark.exhaustive),
        ("glm4v", {"tp_size": 2}),
        pytest.param("glm4v_moe", {"tp_size": 2, "ep_size": 2}, marks=pytest.mark.exhaustive),
    ],
)
def test_equal_to_transformers(
    kind: str, flags: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = make_checkpoint(kind, tmp_path, random.randrange(1000))
    generator = torch.Generator().manual_seed(random.randrange(2**31))
    pixels = [random_pixels(rows, columns, generator) for rows, columns in ((3, 2), (2, 4))]

    async def load(images: Images, sources: Sequence[ImageSource]) -> list[Picture]:
        chosen = [pixels[int(source.text)] for source in sources]
        data = [one.values.numpy().tobytes() for one in chosen]
        return [Picture(image_key(d, one.grid), one.grid, d) for d, one in zip(data, chosen)]

    monkeypatch.setattr(Images, "load", load)
    place = [START, IMAGE, END]
    texts = [[random.randrange(250) for _ in range(length)] for length in (6, 3, 11)]
    asked = [([*texts[0], *place, *texts[1]], ["0"]), ([*place, *texts[1], *place], ["1", "0"]), (texts[2], [])]
    oracle = Oracle(path)
    options = {"dtype": "float32", "max_total_tokens": 512, "skip_tokenizer_init": True, "cpu_threads": 1}
    request: Any = {
        "sampling_params": {"temperature": 0, "max_new_tokens": COUNT, "ignore_eos": True}, "return_logprob": True
    }  # fmt: skip

    async def both(engine: Engine) -> list[Any]:
        every = [engine.async_generate(input_ids=ids, image_data=names, **request) for ids, names in asked]
        return list(await asyncio.gather(*every))

    with Engine(str(path), **options, chunked_prefill_size=9, **flags) as engine:
        answers = asyncio.run(both(engine))
    parts: list[list[Any]] = [[texts[0], pixels[0], texts[1]], [pixels[1], texts[1], pixels[0]], [texts[2]]]
    for answer, own in zip(answers, parts):
        ids, images, _ = with_images(own)
        expected = oracle.greedy(ids, images, COUNT, answer["output_ids"])
        assert answer["output_ids"][: len(expected)] == [token for token, _ in expected]
        found = [entry[0] for entry in answer["meta_info"]["output_token_logprobs"][: len(expected)]]
        assert np.allclose(found, [logprob for _, logprob in expected], atol=2e-4)
