"""A tiny random checkpoint of Qwen3.8-Flash-Next with its tower, tokenizer, chat template and image processor."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tests.models.checkpoints import GATED_STREAMS, make_checkpoint
from tests.models.vision_checkpoints import END, IMAGE, MERGE, PATCH, PROCESSOR, START, VIDEO, add_images
from tests.speculation.agreeing import agreeing_checkpoint

TOKENS = {
    "vision_start_token_id": START, "image_token_id": IMAGE, "vision_end_token_id": END, "video_token_id": VIDEO,
}  # fmt: skip


def make_qwen4(path: Path, seed: int, agreeing: bool = False, tower: dict[str, Any] | None = None, **text: Any) -> Path:
    """Writes the checkpoint and returns its path. `agreeing`: as `agreeing_checkpoint`; `tower`, `text`: fields of the
    tower and of the text model."""
    vision = {"depth": 2, "patch_size": PATCH, "spatial_merge_size": MERGE} | (tower or {})
    (agreeing_checkpoint if agreeing else make_checkpoint)(GATED_STREAMS, path, seed, vision=vision, **text)
    add_images(path, seed, TOKENS, PROCESSOR)
    return path
