"""Models with a vision tower: the largest image, the flags that images exclude, memory of the tower's results and of
its largest run."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Protocol

from moe_engine.config.args import EngineArgs
from moe_engine.config.disaggregation import OFF
from moe_engine.errors import ConfigError
from moe_engine.models.config import ModelConfig
from moe_engine.models.config_fields import Fields, read_json
from moe_engine.models.vision.kimi_pixels import KimiProcessor
from moe_engine.models.vision_config import VisionConfig
from moe_engine.planning.ledger import LedgerRow
from moe_engine.planning.step_limits import StepLimits

PROCESSOR_FILE = "preprocessor_config.json"
DEFAULT_TOKENS = 1280
"""Pixels of the largest image if the processor's file has no limit: the processor's default."""
ANGLE_COPIES = 3
"""Copies of an image's rotary table: in the processor's order, in the order of windows, and a row for a part of it."""


class ImageInput(Protocol):
    """The part of `SizingInput` that images depend on."""

    @property
    def model(self) -> ModelConfig: ...
    @property
    def dtype_bytes(self) -> int: ...
    @property
    def limits(self) -> StepLimits: ...
    @property
    def image_cache_bytes(self) -> int: ...


def with_images(model: ModelConfig, args: EngineArgs, folder: Path) -> ModelConfig:
    """The model with the size of its largest image, or without a tower (--language-model-only).

    Raises:
        ConfigError: a wrong preprocessor_config.json.
    """
    vision = model.vision
    if vision is None:
        return model
    if args.multimodal.language_model_only:
        return dataclasses.replace(model, vision=None)
    file = folder / PROCESSOR_FILE
    raw = read_json(file) if file.is_file() else {}
    fields = Fields(raw, str(file))
    if (processor := KimiProcessor.of(raw)) is not None:
        return dataclasses.replace(model, vision=dataclasses.replace(vision, max_patches=processor.max_patches))
    token = (vision.patch_size * vision.merge) ** 2
    size = fields.section("size")
    asked = None if size is None else size.integer("longest_edge", None) or size.integer("max_pixels", None)
    pixels = asked or fields.integer("max_pixels", None) or DEFAULT_TOKENS * token
    patches = pixels // vision.patch_size**2
    return dataclasses.replace(model, vision=dataclasses.replace(vision, max_patches=patches))


def check_images(args: EngineArgs, model: ModelConfig) -> None:
    """
    Raises:
        ConfigError: a flag that images exclude, or a wrong value of a flag of images.
    """
    for complaint in _wrong_values(args):
        raise ConfigError(complaint)
    if model.vision is not None:
        for complaint in _excluded(args):
            raise ConfigError(f"{complaint}; leave it out, or serve text alone with --language-model-only")


def _wrong_values(args: EngineArgs) -> Iterator[str]:
    flags = args.multimodal
    for name in ("media_fetch_timeout", "max_media_mb"):
        if getattr(flags, name) <= 0:
            yield f"--{name.replace('_', '-')} {getattr(flags, name):g}: must be more than 0"
    if flags.vlm_cache_size_mb < 0:
        yield f"--vlm-cache-size-mb {flags.vlm_cache_size_mb}: must be 0 or more"
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


def _excluded(args: EngineArgs) -> Iterator[str]:
    mode = args.disaggregation.disaggregation_mode
    if args.parallel.enable_two_batch_overlap:
        yield "--enable-two-batch-overlap: not available yet with images: the halves of a step share a rotary table"
    if mode != OFF:
        yield f"--disaggregation-mode {mode}: not available yet with images"


def max_images(args: EngineArgs) -> int:
    """Max images of a request."""
    most: int = json.loads(args.multimodal.limit_mm_data_per_request).get("image", 16)
    return most


def image_rows(given: ImageInput) -> list[LedgerRow]:
    """Ledger rows of one rank: kept results, and the run of the largest image."""
    vision = given.model.vision
    if vision is None:
        return []
    patches = largest_image(vision, given.limits.context_len)
    tokens = patches // vision.merge**2
    step = given.limits.num_tokens * vision.row_width * given.dtype_bytes
    table = given.limits.num_tokens * given.model.rope.width * 4
    kept = LedgerRow("image results", given.image_cache_bytes, "of the vision tower, --vlm-cache-size-mb")
    detail = f"an image of {tokens} tokens, and the image tokens of a step"
    run = encoder_bytes(vision, patches, given.dtype_bytes) + step + table
    return [kept, LedgerRow("vision tower", run, detail)]


def largest_image(vision: VisionConfig, context_len: int) -> int:
    """Patches of the largest image: that of the processor, or one that fills a context."""
    return min(vision.max_patches, context_len * vision.merge**2)


def encoder_bytes(vision: VisionConfig, patches: int, dtype_bytes: int) -> int:
    """Peak memory of the tower for an image: pixels, residual stream and normed input, and the larger of attention
    (queries, keys, values, their copies, the result) and MLP (gate, up and their product)."""
    attention, mlp = 7 * vision.width, 3 * vision.intermediate + vision.width
    row = dtype_bytes * (2 * vision.width + max(attention, mlp)) + (4 + dtype_bytes) * vision.patch_width
    return patches * (row + 4 * ANGLE_COPIES * vision.head_dim)
