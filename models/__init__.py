"""Models: configs, the registry of architectures, weight loading, layers and the model classes. Imports no torch."""

from moe_engine.models.activation_dtype import activation_dtype
from moe_engine.models.config import ModelConfig
from moe_engine.models.config_file import load_model_config
from moe_engine.models.registry import register

__all__ = ["ModelConfig", "activation_dtype", "load_model_config", "register"]
