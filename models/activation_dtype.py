"""The dtype of activations, by config and flag. Imports no torch."""

from __future__ import annotations

from moe_engine.errors import ConfigError
from moe_engine.models.config import ModelConfig


def activation_dtype(config: ModelConfig, asked: str = "auto", device_kind: str = "cpu") -> str:
    """Name of the activation dtype: ``bfloat16``, ``float16`` or ``float32``.

    ``auto`` follows the checkpoint: bf16 and FP8 checkpoints run in bf16, fp16 in fp16, fp32 in fp32 on a CPU and in
    fp16 elsewhere (DeepSeek models in bf16: they overflow fp16). ``half`` and ``float`` are fp16 and fp32.

    Raises:
        ConfigError: for an unknown name.
    """
    names = {"half": "float16", "float": "float32", "bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}
    asked = names.get(asked, asked)
    if asked in ("bfloat16", "float16", "float32"):
        return asked
    if asked != "auto":
        raise ConfigError(f"--dtype {asked}: use auto, half, float16, bfloat16, float or float32")
    stored = config.checkpoint_dtype
    if config.weight_format.name or stored not in ("float16", "float32"):
        return "bfloat16"
    if stored == "float32" and device_kind == "cpu":
        return "float32"
    return "bfloat16" if config.attention.kind == "mla" else "float16"
