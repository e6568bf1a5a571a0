"""Comparisons of a model for images with transformers' model: logits of chunks, requests in an engine."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor

from moe_engine.config.args import EngineArgs
from moe_engine.models.batch import ImageRows
from moe_engine.models.families.image_text import ImageInputs
from moe_engine.models.quantized_copy.checkpoint import quantize_checkpoint
from moe_engine.models.quantized_copy.target import Target
from moe_engine.planning.prepare import prepare
from tests.engine.harness import InProcessEngine
from tests.engine.test_image_requests import COUNT, assert_equal, scripted
from tests.models import stepper
from tests.models.sparse import clear_draw
from tests.models.stepper import Chunk, Stepper
from tests.models.test_parity import assert_close
from tests.models.vision_checkpoints import GreedyOracle, Pixels

Prompt = tuple[list[int], list[int], Sequence[Pixels]]
"""Tokens, the places of the images, the images."""


def around(images: Sequence[Pixels], image_token: int, count: int = 6) -> tuple[list[int], list[int]]:
    """A prompt with text before and after each image, and the places of the images."""
    tokens, places = torch.randint(0, 250, (count,)).tolist(), []
    for image in images:
        places.append(len(tokens))
        tokens += image.placeholders(image_token) + torch.randint(0, 250, (count,)).tolist()
    return tokens, places


def clear_prompts(
    oracle: GreedyOracle, picture: Callable[[], Pixels], image_token: int, has_experts: bool = True
) -> tuple[Prompt, list[int]]:
    """A prompt with an image, and text alone: no tie between experts decides their logits."""

    def with_image() -> Prompt:
        image = picture()
        tokens, places = around([image], image_token, count=30)
        oracle.logits(tokens, [image])
        return tokens, places, [image]

    def without() -> list[int]:
        oracle.logits(text := torch.randint(0, 250, (20,)).tolist(), [])
        return text

    return clear_draw(with_image, needed=has_experts), clear_draw(without, needed=has_experts)


def check_logits(
    loaded: Stepper, path: Path, row: str, oracle: GreedyOracle, prompt: Prompt, rows: Tensor, image_token: int,
    relative: float = 1e-4, text: Sequence[int] = (), page_size: int = 1,
) -> None:  # fmt: skip
    """An image in two chunks, and text after it; then text alone, drawn without `text`. `rows`: of the image, by the
    loaded model."""
    tokens, (place,), (image,) = prompt
    model = loaded.model
    assert isinstance(model, ImageInputs)
    end_of_image = place + len(image.placeholders(image_token))
    got, cut = [], place + 4
    for begin, end in ((0, cut), (cut, len(tokens) - 1), (len(tokens) - 1, len(tokens))):
        batch = loaded.batch([Chunk(0, tokens[begin:end], decode=end == begin + 1)])
        inside = torch.tensor([i for i in range(end - begin) if place <= i + begin < end_of_image])
        if len(inside):
            own = rows[inside + begin - place]
            batch = replace(batch, images=ImageRows(inside, own, (inside + begin).expand(3, -1)))
        got.append(model.logits(model.forward(batch)))
    assert_close(torch.cat(got), oracle.logits(tokens, [image]), relative)
    text = list(text) or torch.randint(0, 250, (20,)).tolist()
    assert_close(
        stepper.load(path, row, page_size=page_size).step([Chunk(0, text, False)])[0], oracle.logits(text, []), relative
    )


def check_requests(path: Path, oracle: GreedyOracle, asked: Sequence[Prompt], status: Path, **flags: Any) -> None:
    """Tokens and log-probabilities: together, from a cached prefix, in chunks that end inside an image. `flags`: more
    of the engine."""
    common: dict[str, Any] = {"dtype": "float32", "max_total_tokens": 512, "max_running_requests": 4}
    engine, expected = InProcessEngine(path, status, **common | flags), dict[int, Any]()
    for form in ({}, {"chunked_prefill_size": 5}):
        script = []
        for i, (tokens, places, images) in enumerate(asked):
            script += [scripted(f"{name}{i}", tokens, images, places, arrives=at) for name, at in (("a", i), ("b", 30))]
        answers = engine.run(script, **form)
        for i, (tokens, _, images) in enumerate(asked):
            if i not in expected:
                expected[i] = oracle.greedy(tokens, list(images), COUNT, answers[f"a{i}"].token_ids)
            assert_equal(answers[f"a{i}"], expected[i])
            assert_equal(answers[f"b{i}"], expected[i])
    engine.close()
    alone = prepare(EngineArgs.from_kwargs(model_path=str(path), language_model_only=True, max_total_tokens=64))
    assert alone.model.vision is None


def check_quantized_tower(source: Path, target: Path, image: Pixels, modules: Sequence[str]) -> None:
    """A copy in block FP8 keeps the `modules` of images as they are, and its config.json says so."""
    quantize_checkpoint(source, target, Target("fp8", 32), lambda _: None)
    named = [name for name in load_file(target / "model.safetensors") if name.endswith("_scale_inv")]
    assert named and not any(module in name for name in named for module in modules)
    section = json.loads((target / "config.json").read_text())["quantization_config"]
    assert set(modules) <= set(section["modules_to_not_convert"])
    rows = [stepper.load(path, "cpu").model.encode(image.values, image.grid) for path in (source, target)]
    assert torch.equal(*rows)
