"""FP8 and FP4 checkpoints that are described by other tools: fbgemm, ModelOpt, SGLang's ``w8a8_fp8``, vLLM's ``fp8``.

Imports no torch.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import combinations
from typing import Any

from moe_engine.models.config_sections.fields import Fields
from moe_engine.models.formats.block_fp8 import BlockFP8Format
from moe_engine.models.formats.float8 import Float8, MatrixFloat8
from moe_engine.models.formats.float8_blocks import MX_BLOCK, MXFP8, BlockFloat8
from moe_engine.models.formats.fp4 import NVFP4
from moe_engine.models.formats.module_rules import Modules, name_list, named_modules
from moe_engine.models.formats.plain import PLAIN
from moe_engine.models.formats.protocol import WeightFormat
from moe_engine.models.formats.schemes import Scheme, SchemeFormat, every_linear

_SCHEMES: dict[str, Scheme] = {
    "FP8": MatrixFloat8(),
    "FP8_PER_CHANNEL_PER_TOKEN": Float8(),
    "NVFP4": NVFP4,
    "W4A16_NVFP4": NVFP4,
    "MXFP8": BlockFloat8(MXFP8),
    "FP8_PB_WO": BlockFloat8(),
}
"""By ModelOpt's names; FP8_PB_WO has blocks of 128 x 128. Activations are not quantized to static scales."""


def parse_fp8(section: Fields) -> WeightFormat:
    """``fp8``: blocks; or, without `weight_block_size`, a scale per matrix if activation scales are static or layers
    are left out. Raises ConfigError for settings that are not supported."""
    scheme = section.choice("activation_scheme", "dynamic", "static", "dynamic")
    whole = scheme == "static" or section.has("ignored_layers")
    if section.has("weight_block_size") or not whole:
        return BlockFP8Format.parse(section)
    return SchemeFormat("fp8", every_linear(MatrixFloat8()), _left_out(section))


def parse_row_fp8(section: Fields) -> SchemeFormat:
    """``fbgemm_fp8`` and ``w8a8_fp8``: a scale per row."""
    return SchemeFormat(section.text("quant_method"), every_linear(Float8()), _left_out(section))


def parse_mxfp8(section: Fields) -> BlockFP8Format:
    """``mxfp8``: a power of two for 32 columns of a row. Raises ConfigError for settings that are not supported."""
    block = section.raw.get("weight_block_size")
    if block not in (None, list(MX_BLOCK)):
        section.fail("weight_block_size", f"must be {list(MX_BLOCK)} for mxfp8, found {block!r}")
    return replace(BlockFP8Format.parse(section), block=MX_BLOCK, scale_format="ue8m0")


def parse_modelopt(section: Fields) -> WeightFormat:
    """``modelopt``, and hf_quant_config.json. Raises ConfigError for settings that are not supported."""
    if section.raw.get("quant_algo") is None and section.raw.get("kv_cache_quant_algo"):
        return PLAIN  # only the KV cache was calibrated
    algorithm = section.text("quant_algo")
    if algorithm == "MXFP8":
        return replace(MXFP8, plain=_left_out(section))
    if algorithm == "MIXED_PRECISION":
        return _mixed(section)
    return SchemeFormat("modelopt", every_linear(_scheme(section, algorithm)), _left_out(section))


def _scheme(section: Fields, algorithm: str) -> Scheme:
    if algorithm not in _SCHEMES:
        section.fail("quant_algo", f"{algorithm!r} is not supported; served are {', '.join(_SCHEMES)}")
    if _SCHEMES[algorithm] == NVFP4 and section.integer("group_size", 16) != 16:
        section.fail("group_size", "must be 16")
    return _SCHEMES[algorithm]


def _mixed(section: Fields) -> SchemeFormat:
    """Every quantized module by its name; the others are plain."""
    layers: Any = section.raw.get("quantized_layers")
    if not isinstance(layers, dict) or not all(isinstance(each, dict) for each in layers.values()):
        section.fail("quantized_layers", "must be an object with an object for each module")
    modules: dict[Scheme, list[str]] = {}
    for name, each in layers.items():
        fields = Fields(each, section.source, f"quantization_config.quantized_layers.{name}.")
        modules.setdefault(_scheme(fields, fields.text("quant_algo")), []).append(name)
    rules = tuple((Modules(named=named_modules(names)), scheme) for scheme, names in modules.items())
    several = (one.named & other.named for (one, _), (other, _) in combinations(rules, 2))
    if shared := sorted(name for names in several for name in names):
        section.fail("quantized_layers", f"stores experts of {shared[0]} in different ways, which is not supported")
    return SchemeFormat("modelopt", rules)


def _left_out(section: Fields) -> Modules:
    names = name_list(section, "ignore", "exclude_modules", "ignored_layers", "modules_to_not_convert")
    return Modules(parts=("lm_head", *names))
