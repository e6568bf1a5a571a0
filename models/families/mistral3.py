"""Mistral's models with images: Pixtral 12B (`LlavaForConditionalGeneration`), Mistral Small 3.1, Ministral 3, Mistral
Small 4 (`Mistral3ForConditionalGeneration`)."""

from __future__ import annotations

from typing import Any

from moe_engine.models.config import ModelConfig
from moe_engine.models.families.deepseek import DeepseekModel
from moe_engine.models.families.dense import DenseModel
from moe_engine.models.families.image_text import ImageInputs


class Mistral3Model(ImageInputs, DenseModel):
    """`Model` for images and text; image tokens have the positions of their places."""

    has_mtp = False


class Mistral3LatentModel(ImageInputs, DeepseekModel):
    """The same on the text model of Mistral Small 4."""

    has_mtp = False


def make_model(config: ModelConfig, *args: Any, **options: Any) -> Mistral3Model | Mistral3LatentModel:
    """The model of the config's attention; arguments as those of the classes."""
    return (Mistral3LatentModel if config.attention.kind == "mla" else Mistral3Model)(config, *args, **options)
