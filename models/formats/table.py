"""The table of quantized formats, and the choice of a format. Imports no torch.

The format of a model comes from `quantization_config`.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import NamedTuple

from moe_engine.models.checkpoint.tensor_header import WeightFile
from moe_engine.models.config_sections.fields import Fields
from moe_engine.models.formats.auto_round import parse_auto_round
from moe_engine.models.formats.awq import parse_awq
from moe_engine.models.formats.bitsandbytes import parse_bitsandbytes
from moe_engine.models.formats.block_fp8 import FP8, BlockFP8Format, has_scales
from moe_engine.models.formats.compressed_tensors import parse_compressed_tensors, parse_row_int8
from moe_engine.models.formats.float8_checkpoints import parse_fp8, parse_modelopt, parse_mxfp8, parse_row_fp8
from moe_engine.models.formats.fused_experts import FUSED, FusedExpertsFormat
from moe_engine.models.formats.gguf import GGUFFormat
from moe_engine.models.formats.gptq import parse_gptq
from moe_engine.models.formats.plain import PLAIN
from moe_engine.models.formats.protocol import Shape, WeightFormat
from moe_engine.models.formats.schemes import SchemeFormat


class Method(NamedTuple):
    """A `quant_method`. `parse`: of the section of config.json; `checkpoint`: the name in messages."""

    checkpoint: str
    parse: Callable[[Fields], WeightFormat]


FORMATS: dict[str, Method] = {
    "fp8": Method("block-FP8", parse_fp8),
    "fbgemm_fp8": Method("fbgemm_fp8", parse_row_fp8),
    "w8a8_fp8": Method("fbgemm_fp8", parse_row_fp8),
    "mxfp8": Method("MXFP8", parse_mxfp8),
    "modelopt": Method("ModelOpt", parse_modelopt),
    "compressed-tensors": Method("compressed-tensors", parse_compressed_tensors),
    "awq": Method("AWQ", parse_awq),
    "gptq": Method("GPTQ", parse_gptq),
    "auto-round": Method("AutoRound", parse_auto_round),
    "w8a8_int8": Method("w8a8_int8", parse_row_int8),
    "bitsandbytes": Method("bitsandbytes", parse_bitsandbytes),
    "gguf": Method("GGUF", GGUFFormat.parse),
}
"""By `quant_method`."""
HINTS = {
    **dict.fromkeys(FP8, "block FP8 needs a weight_scale_inv with it"),
    "I8": "int8 weights need a weight_scale each",
}
"""What a tensor of a dtype lacks, if it was expected to be plain."""


def parse_format(fields: Fields) -> WeightFormat:
    """The format that config.json names. Raises ConfigError for unsupported methods."""
    section = fields.section("quantization_config") or fields.section("compression_config")
    if section is None:
        return PLAIN
    by_tool = section.has("quant_algo") and not section.has("quant_method")  # ModelOpt up to 0.31
    method = "modelopt" if by_tool else section.text("quant_method")
    if method not in FORMATS:
        section.fail("quant_method", f"{method!r} is not supported; use a checkpoint in {supported_checkpoints()}")
    found = FORMATS[method].parse(section)
    dtype = fields.raw.get("dtype") or fields.raw.get("torch_dtype")
    return found.of_dtype(dtype) if isinstance(found, SchemeFormat) and isinstance(dtype, str) else found


def format_in_files(
    declared: WeightFormat, names: Collection[str], shape_of: Callable[[str], Shape] | None = None
) -> WeightFormat:
    """The format of the files, also if config.json does not name it: block FP8 if weights have scales; experts in
    common tensors [E, 2I, D] and [E, D, I], which transformers writes without the published names.

    Args:
        shape_of: of a tensor; None: experts in common tensors are not looked for.
    """
    if declared != PLAIN:
        return declared
    if has_scales(names):
        return BlockFP8Format()
    fused = None if shape_of is None else next((name for name in names if name.endswith(FUSED)), None)
    if fused is None or shape_of is None:
        return declared
    return FusedExpertsFormat(shape_of(fused)[0], alternating=False, transposed=False, optional=True)


def format_in_headers(declared: WeightFormat, files: Mapping[str, WeightFile]) -> WeightFormat:
    """`format_in_files` of files by tensor."""
    return format_in_files(declared, files, lambda name: files[name].tensors[name].shape)


def hint_for(dtype: str) -> str:
    """A parenthesis that explains an unexpected dtype, or nothing."""
    return f" ({HINTS[dtype]})" if dtype in HINTS else ""


def supported_checkpoints() -> str:
    """Names of the supported checkpoints, as part of a message."""
    *names, last = dict.fromkeys(("bf16", *(known.checkpoint for known in FORMATS.values())))
    return f"{', '.join(names)} or {last}"
