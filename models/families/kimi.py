"""Kimi K2.5: DeepSeek V3's text model (Kimi K2) with images."""

from __future__ import annotations

from moe_engine.models.families.deepseek import DeepseekModel
from moe_engine.models.families.image_text import ImageInputs


class KimiModel(ImageInputs, DeepseekModel):
    """`Model` for images and text; image tokens have the positions of their places."""
