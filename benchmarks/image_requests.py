"""Requests with images for the serving benchmark (``--dataset-name image``), with bench_serving's options. No command.

Each prompt is text of random tokens and some images, as data addresses. They are sent to the chat endpoint and to
`/generate` of a model with a vision tower.
"""

from __future__ import annotations

import argparse
import base64
import io
import random
import re

import numpy as np

from moe_engine.tuning.datasets import BenchRequest, Vocabulary, sample_length

NAME = "image"
PRESETS = {"4k": (2160, 3840), "1080p": (1080, 1920), "720p": (720, 1280), "360p": (360, 640)}
"""Height and width in pixels."""
_SIZE = re.compile(r"(\d+)x(\d+)")
_RANGE = re.compile(r"random:(\d+)x(\d+)-(\d+)x(\d+)")
MAX_SIDE = 16384


def add_image_arguments(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("image dataset: prompts of --random-input-len tokens with images")
    group.add_argument("--image-count", type=int, default=1, help="images of a request")
    group.add_argument(
        "--image-resolution",
        default="1080p",
        help=f"{', '.join(PRESETS)}, HEIGHTxWIDTH, or random:HxW-HxW with the least and the largest sides",
    )
    group.add_argument("--random-image-count", action="store_true", help="1 to --image-count images, drawn")
    group.add_argument("--image-format", default="jpeg", choices=("jpeg", "png"))
    group.add_argument("--image-content", default="random", choices=("random", "blank"))


def image_requests(args: argparse.Namespace, vocabulary: Vocabulary) -> list[BenchRequest]:
    """The requests of the options. Raises ValueError for invalid options."""
    least, most = _sides(args.image_resolution)
    if args.image_count < 1:
        raise ValueError(f"--image-count is {args.image_count}; it must be at least 1")
    rng = random.Random(args.seed)
    found = []
    for _ in range(args.num_prompts):
        length = sample_length(args.random_input_len, args.random_range_ratio, rng)
        text = vocabulary.decode(rng.choices(vocabulary.plain_ids, k=length))
        count = rng.randint(1, args.image_count) if args.random_image_count else args.image_count
        sizes = [tuple(rng.randint(a, b) for a, b in zip(least, most, strict=True)) for _ in range(count)]
        images = tuple(
            _address(height, width, args.image_format, args.image_content, rng.getrandbits(32))
            for height, width in sizes
        )
        output_len = sample_length(args.random_output_len, args.random_range_ratio, rng)
        found.append(BenchRequest(text, len(vocabulary.encode(text)), output_len, images))
    return found


def _sides(text: str) -> tuple[tuple[int, int], tuple[int, int]]:
    """The least and the largest height and width."""
    if text in PRESETS:
        return PRESETS[text], PRESETS[text]
    if found := _SIZE.fullmatch(text):
        sides = int(found[1]), int(found[2])
        least, most = sides, sides
    elif found := _RANGE.fullmatch(text):
        least, most = (int(found[1]), int(found[2])), (int(found[3]), int(found[4]))
    else:
        raise ValueError(
            f"--image-resolution {text}: must be {', '.join(PRESETS)}, HEIGHTxWIDTH such as 1080x1920, or a range such "
            "as random:256x256-1024x1024"
        )
    for low, high in zip(least, most, strict=True):
        if not 1 <= low <= high <= MAX_SIDE:
            raise ValueError(f"--image-resolution {text}: sides must be 1 to {MAX_SIDE} and not fall")
    return least, most


def _address(height: int, width: int, form: str, content: str, seed: int) -> str:
    from PIL import Image

    pixels = np.full((height, width, 3), 255, np.uint8)
    if content == "random":
        pixels = np.random.default_rng(seed).integers(0, 256, (height, width, 3), np.uint8)
    buffer = io.BytesIO()
    Image.fromarray(pixels).save(buffer, form)
    return f"data:image/{form};base64,{base64.b64encode(buffer.getvalue()).decode()}"
