"""The table of quantized formats, and the choice of a format. Imports no torch.

The format of a model comes from `quantization_config`.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from moe_engine.models.config_fields import Fields
from moe_engine.models.formats.auto_round import AutoRound
from moe_engine.models.formats.awq import AWQFormat
from moe_engine.models.formats.bitsandbytes import BitsAndBytes
from moe_engine.models.formats.block_fp8 import BlockFP8Format, has_scales
from moe_engine.models.formats.compressed_tensors import CompressedTensors, RowInt8
from moe_engine.models.formats.float8_checkpoints import MXFP8, FP8Format, ModelOpt, RowFP8
from moe_engine.models.formats.gguf import GGUFFormat
from moe_engine.models.formats.gptq import GPTQFormat
from moe_engine.models.formats.plain import PLAIN
from moe_engine.models.formats.protocol import WeightFormat
from moe_engine.models.formats.schemes import SchemeFormat

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
