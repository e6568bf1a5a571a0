"""Gemma 3 with images: the tokens of an image attend to all tokens of the image."""

from __future__ import annotations

from typing import Any

from moe_engine.models.batch import ForwardBatch
from moe_engine.models.families.image_text import ImageTextModel
from moe_engine.models.layers.attention.image_spans import span_inputs


class Gemma3Model(ImageTextModel):
    """`Model` for images and text; image tokens have the positions of their places."""

    def attention_args(self, batch: ForwardBatch) -> tuple[Any, ...]:
        return batch, span_inputs(batch, self.config.cache_groups, self.backends.attention)  # type: ignore[arg-type]
