"""--quantization: the format that config.json declares, or one in which plain weights are quantized while loading."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from moe_engine.config.args import EngineArgs
from moe_engine.errors import ConfigError
from moe_engine.models.config import ModelConfig
from moe_engine.models.formats.fused_experts import FusedExpertsFormat
from moe_engine.models.formats.online import online_format
from moe_engine.models.formats.plain import PLAIN

KERNEL_NAMES = {"moe_wna16": ("awq", "gptq")}
"""Values of the flag that name kernels, with the formats that they multiply."""
COPIES = ("fp8", "int8", "int4")
"""Formats of `moe-engine quantize`, which begin the names for quantizing while loading."""


def with_quantization(model: ModelConfig, args: EngineArgs) -> ModelConfig:
    """The model with the weight format of the flag.

    Raises:
        ConfigError: the checkpoint is quantized in another format, or is plain and the name is that of a checkpoint's.
    """
    names, declared = (args.model.quantization, args.model.torchao_config), model.weight_format
    if all(names):
        raise ConfigError(f"--quantization {names[0]} and --torchao-config {names[1]}: use one of them")
    asked = names[0] or names[1]
    section = (model.raw or {}).get("quantization_config")
    method = section.get("quant_method") if isinstance(section, Mapping) else None
    if not asked or asked == method or declared.name in (asked, *KERNEL_NAMES.get(asked, ())):
        return model
    if declared != PLAIN and not declared.name:
        alternating = isinstance(declared, FusedExpertsFormat) and declared.alternating  # gpt-oss
        copy = "mxfp4" if alternating else next((name for name in COPIES if asked.startswith(name)), "int8")
        raise ConfigError(
            f"--quantization {asked}: the experts of this model are in common tensors of a layer, which are not "
            f"quantized while loading; leave the flag out, or serve a copy by moe-engine quantize --format {copy}"
        )
    if declared != PLAIN:
        raise ConfigError(
            f"--quantization {asked}: {model.source} declares {declared.name} (quantization_config); leave the flag out"
        )
    online = online_format(asked)
    if online is None:
        raise ConfigError(
            f"--quantization {asked}: the weights of {model.source} are not quantized, and the name is that of a "
            "checkpoint's format; leave the flag out, or use int4, int8 or fp8 to quantize while loading"
        )
    return dataclasses.replace(model, weight_format=online.of_dtype(model.checkpoint_dtype))
