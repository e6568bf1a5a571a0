"""Images of unusual kinds and broken files: the pixels of transformers' loader and processor, or the reason against
them."""

from __future__ import annotations

import io
import json
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("PIL", reason="images need pillow: pip install -e '.[vision]'")

from PIL import Image

from moe_engine.media import image_process
from moe_engine.media.image_process import Processed, load_processor
from moe_engine.media.settings import MediaSettings
from tests.examples import examples

ROTATED = Image.Exif()
ROTATED[0x112] = 6  # a quarter turn


def drawn(width: int, height: int) -> Image.Image:
    numbers = np.random.default_rng(random.randrange(1 << 30))
    return Image.fromarray(numbers.integers(0, 256, (height, width, 3), dtype=np.uint8))


def encoded(picture: Image.Image, form: str = "PNG", **options: Any) -> bytes:
    out = io.BytesIO()
    picture.save(out, form, **options)
    return out.getvalue()


UNUSUAL = {
    "a pixel": lambda: encoded(drawn(1, 1)),
    "grayscale": lambda: encoded(drawn(30, 40).convert("L")),
    "grayscale of 16 bits": lambda: encoded(drawn(30, 40).convert("I;16")),
    "one bit": lambda: encoded(drawn(30, 40).convert("1")),
    "palette with alpha": lambda: encoded(drawn(40, 30).convert("P"), transparency=3),
    "alpha": lambda: encoded(drawn(30, 40).convert("RGBA")),
    "CMYK": lambda: encoded(drawn(40, 40).convert("CMYK"), "JPEG"),
    "animated": lambda: encoded(drawn(40, 40), "GIF", save_all=True, append_images=[drawn(40, 40)]),
    "rotated by EXIF": lambda: encoded(drawn(60, 30), "JPEG", exif=ROTATED),
    "WebP": lambda: encoded(drawn(40, 40), "WEBP"),
}
BROKEN = {
    "empty": (lambda: b"", "not an image of a known format"),
    "a page": (lambda: b"<html></html>", "not an image of a known format"),
    "Encapsulated PostScript": (lambda: encoded(drawn(9, 9), "EPS"), "not an image of a known format"),
    "too flat": (lambda: encoded(drawn(8000, 10)), "aspect ratio must be smaller than 200, got 800"),
    "truncated JPEG": (lambda: encoded(drawn(80, 80), "JPEG")[:1500], "image file is truncated"),
    "truncated PNG": (lambda: encoded(drawn(80, 80))[:3000], "image file is truncated"),
    "many pixels": (
        lambda: header(30000, 30000),
        "megapixels (--max-media-megapixels)",
    ),
    "more pixels than decoded": (lambda: header(8192, 8193), "8192 x 8193 pixels; send at most 64 megapixels"),
}


def header(width: int, height: int) -> bytes:
    """A small PNG that announces a large image."""
    import zlib

    data = bytearray(encoded(drawn(2, 2)))
    data[16:24] = width.to_bytes(4, "big") + height.to_bytes(4, "big")
    data[29:33] = zlib.crc32(data[12:29]).to_bytes(4, "big")
    return bytes(data)


@pytest.fixture(scope="module")
def processor(tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = tmp_path_factory.mktemp("model")
    fields = {"image_processor_type": "Qwen2VLImageProcessor", "min_pixels": 3136, "max_pixels": 12544}
    Path(folder, "preprocessor_config.json").write_text(json.dumps(fields))
    return load_processor(str(folder))


def processed(processor: Any, data: bytes) -> Processed:
    return image_process._processed(processor, MediaSettings().max_decoded_pixels, data)


@pytest.mark.parametrize("name", UNUSUAL)
def test_pixels_are_those_of_transformers(processor: Any, name: str) -> None:
    from transformers.image_utils import load_image

    data = UNUSUAL[name]()
    with Image.open(io.BytesIO(data)) as opened:
        right = processor(images=[load_image(opened)], return_tensors="np")
    found = processed(processor, data)
    assert found.problem is None and list(found.grid) == right["image_grid_thw"][0].tolist()
    assert np.array_equal(np.frombuffer(found.pixels, np.float32), right["pixel_values"].astype(np.float32).ravel())


@pytest.mark.parametrize("name", BROKEN)
def test_the_reason_against_an_image(processor: Any, name: str) -> None:
    make, words = BROKEN[name]
    assert words in (processed(processor, make()).problem or "")


@pytest.mark.parametrize("bounds", [(None, 7000), (11000, None), (3136, 6272)])
def test_bounds_replace_those_of_the_checkpoint(tmp_path: Path, bounds: tuple[int | None, int | None]) -> None:
    own = {"image_processor_type": "Qwen2VLImageProcessor", "min_pixels": 3136, "max_pixels": 12544}
    Path(tmp_path, "preprocessor_config.json").write_text(json.dumps(own))
    least, most = bounds[0] or own["min_pixels"], bounds[1] or own["max_pixels"]
    given = load_processor(str(tmp_path), *bounds)
    large, small = (processed(given, encoded(drawn(*size))).grid for size in ((500, 300), (20, 30)))
    assert large[1] * large[2] * 14**2 <= most and small[1] * small[2] * 14**2 >= least


def test_broken_files_are_answered(processor: Any, recwarn: pytest.WarningsRecorder) -> None:
    """Any bytes give an image or a reason: an error would end the process."""
    files = [encoded(drawn(20, 20), form) for form in ("PNG", "GIF", "BMP", "TIFF", "ICO", "WEBP", "PPM")]
    files += [make() for make in UNUSUAL.values()]
    for _ in range(examples(150)):
        data = bytearray(random.choice(files))
        for _ in range(random.randint(1, 8)):
            data[random.randrange(min(len(data), random.choice((40, 400, 5000))))] = random.randrange(256)
        found = processed(processor, bytes(data[: random.choice((len(data), random.randrange(len(data))))]))
        assert bool(found.problem) != bool(found.pixels)
    assert not recwarn.list
