"""The table of quantized formats, and the choice of a format. Imports no torch.

The format of a model comes from `quantization_config`.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import Any

from moe_engine.models.config_fields import Fields
from moe_engine.models.formats.auto_round import AutoRound
from moe_engine.models.formats.awq import AWQFormat
from moe_engine.models.formats.bitsandbytes import BitsAndBytes
from moe_engine.models.formats.block_fp8 import BlockFP8Format, has_scales
from moe_engine.models.formats.compressed_tensors import CompressedTensors, RowInt8
from moe_engine.models.formats.float8_checkpoints import MXFP8, FP8Format, ModelOpt, RowFP8
from moe_engine.models.formats.fused_experts import FUSED, FusedExpertsFormat
from moe_engine.models.formats.gguf import GGUFFormat
from moe_engine.models.formats.gptq import GPTQFormat
from moe_engine.models.formats.plain import PLAIN
from moe_engine.models.formats.protocol import Shape, WeightFormat
from moe_engine.models.formats.schemes import SchemeFormat
from moe_engine.models.tensor_header import WeightFile

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
    found = next((hint for known in FORMATS.values() if (hint := known.hint(dtype))), None)
    return f" ({found})" if found else ""


def supported_checkpoints() -> str:
    """Names of the supported checkpoints, as part of a message."""
    *names, last = _checkpoints()
    return f"{', '.join(names)} or {last}"


def _checkpoints() -> list[str]:
    return list(dict.fromkeys(("bf16", *(known.checkpoint for known in FORMATS.values()))))
