"""Child process that decodes images and runs the checkpoint's image processor, so that a slow or broken image affects
no other request. It imports no torch: transformers' Pillow processors compute with numpy.

Frames on standard input and output: 4 bytes of length, then msgpack. The first frame in is `ImageSetup`, the others are
encoded images. It exits when its input closes.
"""

from __future__ import annotations

import io
import resource
import sys
import warnings
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import IO, Any

import msgspec

from moe_engine.models.vision.own_processors import own_processor, qwen_settings
from moe_engine.processes.background import yield_to_steps
from moe_engine.processes.pipe_frames import read_frame, write_frame
from moe_engine.processes.stop_signals import ignore_stop_signals

MAX_MEMORY_BYTES = 8 << 30
FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF", "PPM", "ICO", "AVIF", "JPEG2000")
"""Formats that are decoded. Pillow supports others, of which some start programs (EPS: Ghostscript)."""
_TOO_LARGE = "needs too much memory; send a smaller image"


class ImageSetup(msgspec.Struct, array_like=True):
    """The checkpoint's folder, the most pixels of an image that is decoded, and bounds of the scaled image in pixels
    (None: the checkpoint's)."""

    folder: str
    max_decoded: int
    min_pixels: int | None = None
    max_pixels: int | None = None


class Processed(msgspec.Struct, array_like=True):
    """An image as the model reads it, or the reason against it."""

    problem: str | None = None
    grid: tuple[int, int, int] = (0, 0, 0)
    pixels: bytes = b""
    """float32 in native byte order, [patches, numbers of a patch]."""
    size: tuple[int, int] = (0, 0)
    """Width and height of the sent image in pixels."""


def main() -> None:
    ignore_stop_signals()
    resource.setrlimit(resource.RLIMIT_DATA, (MAX_MEMORY_BYTES, MAX_MEMORY_BYTES))
    absent: dict[str, Any] = dict.fromkeys(("torch", "torchvision"))
    sys.modules.update(absent)  # transformers would import them if they are installed
    with suppress(EOFError, BrokenPipeError):
        _work(sys.stdin.buffer, sys.stdout.buffer)


def _work(requests: IO[bytes], answers: IO[bytes]) -> None:
    setup = msgspec.msgpack.Decoder(ImageSetup).decode(read_frame(requests))
    try:
        processor = load_processor(setup.folder, setup.min_pixels, setup.max_pixels)
        process = partial(_processed, processor, setup.max_decoded)
        yield_to_steps()  # only now: its first image waits for the start
        write_frame(answers, msgspec.msgpack.encode(None))
    except Exception as error:
        write_frame(answers, msgspec.msgpack.encode(f"{type(error).__name__}: {error}"))
        return
    while True:
        write_frame(answers, msgspec.msgpack.encode(process(read_frame(requests))))


def load_processor(folder: str, min_pixels: int | None = None, max_pixels: int | None = None) -> Any:
    """The image processor of a checkpoint, in transformers' form for Pillow, or this project's. Bounds of the scaled
    image replace the checkpoint's."""
    if (own := own_processor(Path(folder))) is not None:
        return own.within(max_pixels)
    from transformers import AutoImageProcessor
    from transformers.utils import logging

    logging.set_verbosity_error()
    given = {"min_pixels": min_pixels, "max_pixels": max_pixels}
    bounds = {name: value for name, value in given.items() if value is not None}
    if (settings := qwen_settings(Path(folder))) is not None:
        from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

        return Qwen2VLImageProcessorPil(**settings, **bounds)
    return AutoImageProcessor.from_pretrained(folder, backend="pil", **bounds)


def _processed(processor: Any, max_decoded: int, data: bytes) -> Processed:
    from PIL import Image, ImageOps, UnidentifiedImageError

    less = f"; send at most {max_decoded >> 20} megapixels (--max-media-megapixels)"
    Image.MAX_IMAGE_PIXELS = max_decoded  # Pillow's own limit is twice this number, for frames inside a file
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            with Image.open(io.BytesIO(data), formats=FORMATS) as opened:
                width, height = opened.size
                if width * height > max_decoded:
                    return Processed(f"the image has {width} x {height} pixels{less}")
                image = ImageOps.exif_transpose(opened)
                keeps = getattr(processor, "reads_alpha", False) and image.has_transparency_data
                image = image.convert("RGBA" if keeps else "RGB")
    except UnidentifiedImageError:
        return Processed(f"is not an image of a known format ({', '.join(FORMATS)})")
    except Image.DecompressionBombError:
        return Processed(f"the image has too many pixels{less}")
    except MemoryError:
        return Processed(_TOO_LARGE)
    except Exception as error:  # decoders raise errors of many classes for broken files
        return Processed(f"cannot be decoded as an image ({error})")
    try:
        found = processor(images=[image], return_tensors="np")
    except ValueError as error:
        return Processed(f"cannot be processed ({error})")
    except MemoryError:
        return Processed(_TOO_LARGE)
    frames, rows, columns = (int(count) for count in found["image_grid_thw"][0])
    return Processed(None, (frames, rows, columns), found["pixel_values"].astype("float32").tobytes(), image.size)


if __name__ == "__main__":
    main()
