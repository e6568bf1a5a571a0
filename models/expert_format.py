"""The form in which a model's checkpoint stores its routed experts. Imports no torch."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from moe_engine.kernels.weight_forms import CODES, FOUR_BITS, FP8_BLOCKS, FP8_ROWS, WeightForm
from moe_engine.models.config import ModelConfig
from moe_engine.models.formats.block_fp8 import KERNEL_BLOCK, BlockFP8Format
from moe_engine.models.formats.fp4_experts import FP4ExpertsFormat
from moe_engine.models.formats.fused_experts import FusedExpertsFormat
from moe_engine.models.formats.schemes import Scheme, SchemeFormat
from moe_engine.models.tensors.model import expert_names

if TYPE_CHECKING:
    from moe_engine.kernels.quantization.codes import GroupCodes


def experts_format(config: ModelConfig) -> GroupCodes | None:
    """The form of codes in which kernels may multiply the experts of all layers; None: other forms, or several."""
    format, found = config.weight_format, None
    if isinstance(format, FusedExpertsFormat | FP4ExpertsFormat):
        found = format.kernel_format(next(_one_expert_of_each_layer(config), ""))
    else:
        schemes: list[Any] = list(_schemes(config))
        found = schemes[0].kernel_format() if len(schemes) == 1 and schemes[0].form in (CODES, FOUR_BITS) else None
    form: Any = found
    return form


def expert_form(config: ModelConfig) -> WeightForm | None:
    """The form in which kernels may multiply the experts of all layers; None: unquantized, or several."""
    format, codes = config.weight_format, experts_format(config)
    if codes is not None:
        return codes.form
    if isinstance(format, BlockFP8Format):
        return FP8_BLOCKS if format.has_kernel_formats else None
    forms = {scheme.form for scheme in _schemes(config)}
    return forms.pop() if len(forms) == 1 and forms <= {FP8_BLOCKS, FP8_ROWS} else None


def width_group(config: ModelConfig, keeps_blocks: bool = False) -> int:
    """Columns of experts that ranks of tensor parallelism do not split; 1: any. keeps_blocks: the kernels multiply
    block FP8 as stored."""
    if keeps_blocks and expert_form(config) == FP8_BLOCKS:
        return KERNEL_BLOCK[1]
    form = experts_format(config)
    if form is None:
        return 1
    return 2 * form.group if form.nvfp4 else form.group * (form.factors or 1) or 1


def _schemes(config: ModelConfig) -> frozenset[Scheme]:
    """Schemes of the quantized matrices of experts; empty for formats without schemes."""
    format = config.weight_format
    if not isinstance(format, SchemeFormat):
        return frozenset()
    if (key := "expert schemes") not in config.known_sizes:
        stored = (format.scheme_of(prefix) for prefix in _one_expert_of_each_layer(config))
        config.known_sizes[key] = frozenset(scheme for scheme in stored if scheme is not None)
    found: frozenset[Scheme] = config.known_sizes[key]
    return found


def _one_expert_of_each_layer(config: ModelConfig) -> Iterator[str]:
    """Names of its matrices, those of MTP layers included."""
    names, layers = expert_names(config), [i for i, is_moe in enumerate(config.moe_layers) if is_moe]
    if config.is_mtp_moe:
        layers += range(config.num_layers, config.num_layers + config.num_nextn_predict_layers)
    for layer in layers:
        squared = config.moe is not None and config.moe.squared
        for matrix in (names.gate, names.up, names.down)[squared:]:
            yield f"model.layers.{layer}.{names.block}.experts.0.{matrix}"
