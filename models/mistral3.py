"""Text models of `Mistral3ForConditionalGeneration`: Mistral Small 3.1, Ministral 3, Mistral Small 4."""

from __future__ import annotations

from typing import Any

from moe_engine.models.config import ModelConfig
from moe_engine.models.deepseek import DeepseekModel
from moe_engine.models.dense import DenseModel


def text_model(config: ModelConfig, *args: Any, **options: Any) -> DeepseekModel | DenseModel:
    """The model of the config's attention; arguments as those of the classes."""
    return (DeepseekModel if config.attention.kind == "mla" else DenseModel)(config, *args, **options)
