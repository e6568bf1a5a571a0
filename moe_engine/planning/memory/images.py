"""Models with a vision tower: the largest image, memory of the tower's results and of its largest run."""

from __future__ import annotations

import dataclasses
from pathlib import Path

from moe_engine.config.args import EngineArgs
from moe_engine.errors import ConfigError
from moe_engine.models.config import ModelConfig
from moe_engine.models.config_sections.fields import Fields
from moe_engine.models.config_sections.vision import GATED_PROJECTORS, VisionConfig
from moe_engine.models.vision.own_processors import PROCESSOR_FILE, own_processor, processor_fields
from moe_engine.planning.flags.image_flags import pixel_bounds
from moe_engine.planning.memory.ledger import LedgerRow
from moe_engine.planning.memory.sizing_input import SizingInput

DEFAULT_TOKENS = 1280
"""Tokens of the largest image if the processor's file has no limit: the processor's default."""
ANGLE_COPIES = 3
"""Copies of an image's rotary table: in the processor's order, in the order of windows, and a row for a part of it."""


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
    if vision.sees_whole:
        _check_whole_images(vision, args)
    fields = Fields(processor_fields(folder), str(folder / PROCESSOR_FILE))
    bounds = pixel_bounds(args)
    most = bounds.get("max_pixels")
    if (processor := own_processor(folder)) is not None:
        if "min_pixels" in bounds:
            raise ConfigError(
                "--mm-process-config image: min_pixels: this model's image processor takes no lower bound"
            )
        largest = processor.within(most).max_patches
        return dataclasses.replace(model, vision=dataclasses.replace(vision, max_patches=largest))
    token = (vision.patch_size * vision.merge) ** 2
    size = fields.section("size")
    declared = None if size is None else size.integer("longest_edge", None) or size.integer("max_pixels", None)
    pixels = most or declared or fields.integer("max_pixels", None) or DEFAULT_TOKENS * token
    patches = pixels // vision.patch_size**2
    return dataclasses.replace(model, vision=dataclasses.replace(vision, max_patches=patches))


def _check_whole_images(vision: VisionConfig, args: EngineArgs) -> None:
    """Raises ConfigError for flags that would cut an image whose tokens attend to later ones."""
    tokens, chunk = (vision.side // vision.merge) ** 2, args.memory.chunked_prefill_size
    reason = "the tokens of an image attend to all of the image, so no chunk of a prompt may end inside it"
    alone = "or serve the text alone with --language-model-only"
    if chunk is not None and 0 < chunk < tokens:
        raise ConfigError(f"--chunked-prefill-size {chunk}: {reason}; give at least {tokens}, {alone}")
    if args.memory.page_size not in (None, 1):
        raise ConfigError(f"--page-size {args.memory.page_size}: {reason}, nor on a page alone; leave it out, {alone}")
    if args.scheduling.enable_mixed_chunk:
        raise ConfigError(f"--enable-mixed-chunk: {reason}, nor be shortened by decodes; leave it out, {alone}")


def image_rows(given: SizingInput) -> list[LedgerRow]:
    """Ledger rows of one rank: kept results, and the run of the largest image."""
    vision = given.model.vision
    if vision is None:
        return []
    patches = largest_image(vision, given.limits.context_len)
    tokens = vision.most_tokens(patches)
    step = given.limits.num_tokens * vision.row_width * given.dtype_bytes
    if given.divides_images:  # the exchanged results of the step's images, the first and last of which are cut
        step += (given.limits.num_tokens + 2 * tokens) * vision.row_width * given.dtype_bytes
    table = given.limits.num_tokens * given.model.rope.width * 4
    if vision.sees_whole:  # the slots that each token sees in layers with windows, and the numbers they are read by
        table += given.limits.num_tokens * (max(filter(None, given.model.windows), default=0) + tokens) * (4 + 8)
    kept = LedgerRow("image results", given.image_cache_bytes, "of the vision tower, --vlm-cache-size-mb")
    detail = f"an image of {tokens} tokens, and the image tokens of a step"
    run = encoder_bytes(vision, patches, given.dtype_bytes) + step + table
    return [kept, LedgerRow("vision tower", run, detail)]


def largest_image(vision: VisionConfig, context_len: int) -> int:
    """Patches of the largest image: that of the processor, or one that fills a context."""
    return min(vision.max_patches, context_len * vision.merge**2)


def encoder_bytes(vision: VisionConfig, patches: int, dtype_bytes: int) -> int:
    """Peak memory of the tower for an image: pixels, residual stream and normed input, and the larger of attention
    (queries, keys, values, their copies, the result), MLP (gate, up and their product), and a projector of patches, or
    one with a gate of tokens."""
    attention, mlp = 7 * vision.num_heads * vision.head_dim, 3 * vision.intermediate + vision.width
    projector = 2 * vision.projector_width + vision.out_width if vision.projector_width else 0
    if vision.tower in GATED_PROJECTORS:
        projector = (3 * vision.projector_width + vision.out_width) // vision.merge**2
    row = dtype_bytes * (2 * vision.width + max(attention, mlp, projector)) + (4 + dtype_bytes) * vision.patch_width
    return patches * (row + 4 * ANGLE_COPIES * vision.head_dim)
