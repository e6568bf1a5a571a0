"""The table of quantized formats, and the choice of a format. Imports no torch.

The format of a model comes from `quantization_config`; on a device whose kernels do not multiply it, it is dequantized.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from moe_engine.models.config_fields import Fields
from moe_engine.models.formats.auto_round import AutoRound
from moe_engine.models.formats.awq import AWQFormat
from moe_engine.models.formats.bitsandbytes import BitsAndBytes
from moe_engine.models.formats.block_fp8 import BlockFP8Format, has_scales
from moe_engine.models.formats.compressed_tensors import CompressedTensors, RowInt8
from moe_engine.models.formats.float8_checkpoints import MXFP8, FP8Format, ModelOpt, RowFP8
from moe_engine.models.formats.fp4_experts import FP4ExpertsFormat
from moe_engine.models.formats.fused_experts import FusedExpertsFormat
from moe_engine.models.formats.gguf import GGUFFormat
from moe_engine.models.formats.gptq import GPTQFormat
from moe_engine.models.formats.plain import PLAIN
from moe_engine.models.formats.protocol import FAMILIES, WeightFormat
from moe_engine.models.formats.schemes import SchemeFormat, has_four_bits

if TYPE_CHECKING:
    from moe_engine.kernels.backends import KernelPlan

FORMATS: dict[str, type[Any]] = {
    "fp8": FP8Format,
    "fbgemm_fp8": RowFP8,
    "w8a8_fp8": RowFP8,
    "mxfp8": MXFP8,
    "modelopt": ModelOpt,
    "compressed-tensors": CompressedTensors,
    "awq": AWQFormat,
    "gptq": GPTQFormat,
    "auto-round": AutoRound,
    "w8a8_int8": RowInt8,
    "bitsandbytes": BitsAndBytes,
    "gguf": GGUFFormat,
}
"""Formats by `quant_method`: classes with `parse(section of config.json)`, which returns a `WeightFormat`,
`hint(dtype)`, and `checkpoint`, the name in messages."""


def parse_format(fields: Fields) -> WeightFormat:
    """The format that config.json names. Raises ConfigError for unsupported methods."""
    section = fields.section("quantization_config") or fields.section("compression_config")
    if section is None:
        return PLAIN
    method = section.text("quant_method")
    if method not in FORMATS:
        section.fail("quant_method", f"{method!r} is not supported; use a checkpoint in {supported_checkpoints()}")
    found: WeightFormat = FORMATS[method].parse(section)
    dtype = fields.raw.get("dtype") or fields.raw.get("torch_dtype")
    return found.of_dtype(dtype) if isinstance(found, SchemeFormat) and isinstance(dtype, str) else found


def format_in_files(declared: WeightFormat, names: Collection[str]) -> WeightFormat:
    """The format of the files: block FP8 also if config.json does not name it but weights have scales."""
    return BlockFP8Format() if declared == PLAIN and has_scales(names) else declared


def kept_format(
    declared: WeightFormat,
    device: str,
    coded: frozenset[str] = frozenset(),
    blocks: frozenset[str] = FAMILIES,
    four_bits: frozenset[str] = frozenset(),
    fp8_rows: frozenset[str] = frozenset(),
) -> WeightFormat:
    """The format in which a device holds the weights: `PLAIN` if they are dequantized.

    Args:
        coded: kernel families whose rows multiply weights of 4 and 8 bits.
        blocks: kernel families whose rows on a GPU multiply block FP8.
        four_bits: kernel families whose rows multiply weights of `GroupCodes.four_bits`.
        fp8_rows: kernel families whose rows on a GPU multiply FP8 with a scale per row.
    """
    if isinstance(declared, SchemeFormat):
        if four_bits - coded and has_four_bits(declared):
            return replace(declared, kept=four_bits, on_gpu=True)
        kept = declared.kept_by(device, coded, blocks, fp8_rows)
        return declared.held_by(kept) if kept else PLAIN
    if isinstance(declared, FP4ExpertsFormat):
        held = declared.held_on(device, coded, blocks, four_bits)
        return held if held.kept else PLAIN
    if isinstance(declared, BlockFP8Format):
        return declared.held_by(blocks) if declared.kept_on(device) and blocks else PLAIN
    if isinstance(declared, FusedExpertsFormat):
        if not declared.has_kernel_formats or "experts" not in coded | four_bits:
            return PLAIN
        return replace(declared, scale_bytes=2 if "experts" in coded else 1)
    return declared if declared.kept_on(device) else PLAIN


def format_of_kernels(declared: WeightFormat, device: str, kernels: KernelPlan) -> WeightFormat:
    """The format in which the kernels of a launch hold the weights."""
    return kept_format(declared, device, kernels.codes, kernels.blocks, kernels.four_bits, kernels.fp8_rows)


def hint_for(dtype: str) -> str:
    """A parenthesis that explains an unexpected dtype, or nothing."""
    found = next((hint for known in FORMATS.values() if (hint := known.hint(dtype))), None)
    return f" ({found})" if found else ""


def supported_checkpoints() -> str:
    """Names of the supported checkpoints, as part of a message."""
    *names, last = _checkpoints()
    return f"{', '.join(names)} or {last}"


def _checkpoints() -> list[str]:
    return list(dict.fromkeys(("bf16", *(known.checkpoint for known in FORMATS.values()))))
