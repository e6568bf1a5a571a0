"""Qwen3.5: Qwen3-Next's text model, dense or with experts, with images."""

from __future__ import annotations

from moe_engine.models.families.image_text import ImageInputs
from moe_engine.models.families.qwen3_next import Qwen3NextModel


class Qwen35Model(ImageInputs, Qwen3NextModel):
    """`Model` for images and text; the text model's layers are those of Qwen3-Next."""
