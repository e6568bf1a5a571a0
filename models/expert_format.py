"""The form in which a model's checkpoint stores its routed experts. Imports no torch."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from moe_engine.models.config import ModelConfig
from moe_engine.models.formats.block_fp8 import BlockFP8Format
from moe_engine.models.formats.fp4_experts import FP4ExpertsFormat
from moe_engine.models.formats.fused_experts import FusedExpertsFormat
from moe_engine.models.formats.schemes import SchemeFormat
from moe_engine.models.tensors import expert_names

if TYPE_CHECKING:
    from moe_engine.kernels.quantization.codes import GroupCodes


def experts_format(config: ModelConfig) -> GroupCodes | None:
    """The form of codes in which kernels may multiply the experts of all layers; None: other forms, or several."""
    format, found = config.weight_format, None
    if isinstance(format, FusedExpertsFormat | FP4ExpertsFormat):
        found = format.kernel_format(next(_one_expert_of_each_layer(config), ""))
    elif isinstance(format, SchemeFormat):
        stored = {format.scheme_of(prefix) for prefix in _one_expert_of_each_layer(config)} - {None}
        schemes: list[Any] = list(stored)
        found = schemes[0].kernel_format() if len(schemes) == 1 and schemes[0].coded else None
    form: Any = found
    return form


def width_group(config: ModelConfig, keeps_blocks: bool = False) -> int:
    """Columns of experts that ranks of tensor parallelism do not split; 1: any. keeps_blocks: the kernels multiply
    block FP8 as stored."""
    form, format = experts_format(config), config.weight_format
    if form is None and keeps_blocks and isinstance(format, BlockFP8Format) and format.has_kernel_formats:
        return format.block[1]
    if form is None:
        return 1
    return 2 * form.group if form.nvfp4 else form.group * (form.factors or 1) or 1


def _one_expert_of_each_layer(config: ModelConfig) -> Iterator[str]:
    """Names of its matrices, those of MTP layers included."""
    names, layers = expert_names(config), [i for i, is_moe in enumerate(config.moe_layers) if is_moe]
    if config.is_mtp_moe:
        layers += range(config.num_layers, config.num_layers + config.num_nextn_predict_layers)
    for layer in layers:
        for matrix in (names.gate, names.up, names.down):
            yield f"model.layers.{layer}.{names.block}.experts.0.{matrix}"
