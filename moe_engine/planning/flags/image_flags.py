"""Values of the flags of images."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from moe_engine.config.args import EngineArgs

BOUNDS = ("min_pixels", "max_pixels")


def pixel_bounds(args: EngineArgs) -> dict[str, int]:
    """`min_pixels` and `max_pixels` of --mm-process-config; those that it has."""
    bounds = json.loads(args.multimodal.mm_process_config).get("image")
    given = bounds if isinstance(bounds, dict) else {}
    return {name: given[name] for name in BOUNDS if isinstance(given.get(name), int) and given[name] > 0}


def max_images(args: EngineArgs) -> int:
    """Max images of a request."""
    most: int = json.loads(args.multimodal.limit_mm_data_per_request).get("image", 16)
    return most


def image_problems(args: EngineArgs) -> Iterator[str]:
    """Wrong values of the flags of images."""
    flags = args.multimodal
    for name in ("media_fetch_timeout", "max_media_mb", "max_media_megapixels"):
        if getattr(flags, name) <= 0:
            yield f"--{name.replace('_', '-')} {getattr(flags, name):g}: must be more than 0"
    if flags.vlm_cache_size_mb < 0:
        yield f"--vlm-cache-size-mb {flags.vlm_cache_size_mb}: must be 0 or more"
    yield from _wrong_bounds(json.loads(flags.mm_process_config))
    root = flags.allowed_local_media_path
    if root is not None and not Path(root).is_dir():
        yield f"--allowed-local-media-path {root}: is not a folder"
    limits: dict[str, Any] = json.loads(flags.limit_mm_data_per_request)
    for kind, most in limits.items():
        name = f"--limit-mm-data-per-request: {kind!r}"
        if kind not in ("image", "video", "audio"):
            yield f"{name} is not a kind of data; known: image"
        elif not isinstance(most, int) or isinstance(most, bool) or most < 0:
            yield f"{name} must be a whole number of 0 or more, found {most!r}"
        elif kind != "image" and most:
            yield f"{name} {most}: {kind} input is not supported; give 0 or leave it out"


def _wrong_bounds(given: dict[str, Any]) -> Iterator[str]:
    name = "--mm-process-config"
    for kind, fields in given.items():
        if kind not in ("image", "video", "audio") or not isinstance(fields, dict):
            yield f"{name}: {kind!r} must be image, with an object of settings"
        elif kind != "image" and fields:
            yield f"{name} {kind}: {kind} input is not supported; leave it out"
        for field, value in fields.items() if kind == "image" and isinstance(fields, dict) else ():
            if field not in BOUNDS:
                yield f"{name} image: {field!r} is not supported; supported: {', '.join(BOUNDS)}"
            elif not isinstance(value, int) or isinstance(value, bool) or value < 1:
                yield f"{name} image: {field} must be a whole number of at least 1, found {value!r}"
    image = given.get("image")
    if isinstance(image, dict) and len(image) == 2 and image.get("min_pixels", 0) > image.get("max_pixels", 0):
        yield f"{name} image: min_pixels {image['min_pixels']} is more than max_pixels {image['max_pixels']}"
