"""A tiny random checkpoint of GLM-5.3-Flash with its tower, tokenizer, chat template and image processor."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import torch

from tests.models.checkpoints import POOLED, make_checkpoint
from tests.models.vision_checkpoints import END, IMAGE, MERGE, PATCH, START, VIDEO, Made, add_images, noise_pixels

TOKENS = {
    "image_start_token_id": START, "image_token_id": IMAGE, "image_end_token_id": END, "video_token_id": VIDEO,
    "video_start_token_id": 280, "video_end_token_id": 281,
}  # fmt: skip
PROCESSOR = {
    "image_processor_type": "Glm5NextImageProcessor", "patch_size": PATCH, "merge_size": MERGE,
    "temporal_patch_size": 2, "min_image_tokens": 4, "max_image_tokens": 30,
}  # fmt: skip


picture = partial(noise_pixels, patch_width=3 * 2 * PATCH**2)


def make_glm(path: Path, seed: int, vision: dict[str, Any] | None = None, **text: Any) -> Made:
    """Writes the checkpoint. `vision`: fields of the tower; `text`: of the text model."""
    import transformers

    make_checkpoint(POOLED, path, seed, vision=vision or {}, **text)
    add_images(path, seed, TOKENS, PROCESSOR)
    options: dict[str, Any] = {"dtype": torch.float32, "attn_implementation": "eager"}
    return Made(path, transformers.Glm5NextForConditionalGeneration.from_pretrained(path, **options).eval())
