"""The form in which a model's checkpoint stores its routed experts. Imports no torch."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from moe_engine.models.config import ModelConfig
from moe_engine.models.formats.block_fp8 import KERNEL_BLOCK, BlockFP8Format
from moe_engine.models.formats.fp4_experts import FP4ExpertsFormat
from moe_engine.models.formats.fused_experts import FusedExpertsFormat
from moe_engine.models.formats.schemes import Scheme, SchemeFormat
from moe_engine.models.tensors import expert_names

if TYPE_CHECKING:
    from moe_engine.kernels.quantization.codes import GroupCodes


def experts_format(config: ModelConfig) -> GroupCodes | None:
    """The form of codes in which kernels may multiply the experts of all layers; None: other forms, or several."""
    format, found = config.weight_format, None
    if isinstance(format, FusedExpertsFormat | FP4ExpertsFormat):
        found = format.kernel_format(next(_one_expert_of_each_layer(config), ""))
    else:
        schemes: list[Any] = list(_schemes(config))
        found = schemes[0].kernel_format() if len(schemes) == 1 and schemes[0].coded else None
    form: Any = found
    return form


def experts_in_blocks(config: ModelConfig) -> bool:
    """True if kernels of a GPU may multiply the experts of all layers as FP8 blocks of 128 x 128."""
    format = config.weight_format
    if isinstance(format, BlockFP8Format):
        return format.has_kernel_formats and experts_format(config) is None
    schemes = _schemes(config)
    return bool(schemes) and all(scheme.blocks for scheme in schemes)


def experts_in_fp8_rows(config: ModelConfig) -> bool:
    """True if kernels of a GPU may multiply the experts of all layers as FP8 with a scale per row."""
    schemes = _schemes(config)
    return bool(schemes) and all(scheme.fp8_rows for scheme in schemes)


def width_group(config: ModelConfig, keeps_blocks: bool = False) -> int:
    """Columns of experts that ranks of tensor parallelism do not split; 1: any. keeps_blocks: the kernels multiply
    block FP8 as stored."""
    if keeps_blocks and experts_in_blocks(config):
        return KERNEL_BLOCK[1]
    form = experts_format(config)
    if form is None:
        return 1
    return 2 * form.group if form.nvfp4 else form.group * (form.factors or 1) or 1


def _schemes(config: ModelConfig) -> set[Scheme]:
    """Of the quantized matrices of experts; empty for formats without schemes."""
    format = config.weight_format
    if not isinstance(format, SchemeFormat):
        return set()
    stored = (format.scheme_of(prefix) for prefix in _one_expert_of_each_layer(config))
    return {scheme for scheme in stored if scheme is not None}


def _one_expert_of_each_layer(config: ModelConfig) -> Iterator[str]:
    """Names of its matrices, those of MTP layers included."""
    names, layers = expert_names(config), [i for i, is_moe in enumerate(config.moe_layers) if is_moe]
    if config.is_mtp_moe:
        layers += range(config.num_layers, config.num_layers + config.num_nextn_predict_layers)
    for layer in layers:
        for matrix in (names.gate, names.up, names.down):
            yield f"model.layers.{layer}.{names.block}.experts.0.{matrix}"
