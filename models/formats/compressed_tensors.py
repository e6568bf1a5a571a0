"""``quant_method: compressed-tensors``: the schemes of its config groups. Imports no torch.

Source: compressed-tensors, quantization/quant_config; llm-compressor and Kimi K2 write such checkpoints.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from moe_engine.models.config_sections.fields import Fields
from moe_engine.models.formats.block_fp8 import BlockFP8Format
from moe_engine.models.formats.compressed_ints import ByteInts, PackedInts
from moe_engine.models.formats.float8 import Float8, MatrixFloat8
from moe_engine.models.formats.float8_blocks import MX_BLOCK, MXFP8, BlockFloat8
from moe_engine.models.formats.fp4 import MXFP4_COMPRESSED, NVFP4_COMPRESSED
from moe_engine.models.formats.integers import parse_bits, parse_group
from moe_engine.models.formats.module_rules import Modules, check_patterns, name_list
from moe_engine.models.formats.plain import PLAIN
from moe_engine.models.formats.protocol import WeightFormat
from moe_engine.models.formats.schemes import Scheme, SchemeFormat

_PACKED = ("pack-quantized",)
_BYTES = ("int-quantized", "naive-quantized")
_FP4 = {"nvfp4-pack-quantized": NVFP4_COMPRESSED, "mxfp4-pack-quantized": MXFP4_COMPRESSED}
_MX8 = "mxfp8-quantized"
_FLOATS = ("float-quantized", "naive-quantized")
_ORDERS = {"group": True, "dynamic": True, "weight": False, "static": False}
"""By `actorder`: whether columns of a group are not adjacent."""


def parse_compressed_tensors(section: Fields) -> WeightFormat:
    """Raises ConfigError for settings that are not supported."""
    groups: Any = section.raw.get("config_groups")
    if groups in ({}, None) and section.raw.get("kv_cache_scheme"):
        return PLAIN  # only the KV cache was calibrated
    if not isinstance(groups, dict) or not groups:
        section.fail("config_groups", f"must be an object with at least one group, found {groups!r}")
    sparsity = section.section("sparsity_config")
    if sparsity is not None and sparsity.text("format", "dense") != "dense":
        section.fail("sparsity_config.format", f"{sparsity.text('format')!r} is not supported; served is dense")
    _check_transforms(section)
    rules: list[tuple[Modules, Scheme]] = []
    for name, group in groups.items():
        if not isinstance(group, dict):
            section.fail(f"config_groups.{name}", f"must be an object, found {group!r}")
        fields = Fields(group, section.source, f"quantization_config.config_groups.{name}.")
        targets = name_list(fields, "targets")
        check_patterns(fields, "targets", targets)
        rules.append((Modules(targets), _scheme(section, fields)))
    ignored = name_list(section, "ignore")
    check_patterns(section, "ignore", ignored)
    first = rules[0][1]
    if isinstance(first, BlockFloat8) and all(scheme == first for _, scheme in rules):
        return replace(first.blocks, plain=Modules(ignored))
    return SchemeFormat("compressed-tensors", tuple(rules), Modules(ignored))


def _check_transforms(section: Fields) -> None:
    """Raises ConfigError for rotations of activations; those of weights are part of the stored weights."""
    transforms = section.section("transform_config")
    groups: Any = (transforms.raw.get("config_groups") if transforms is not None else None) or {}
    for name, group in groups.items() if isinstance(groups, dict) else ():
        places = [each.get("location") for each in group.get("apply") or () if isinstance(each, dict)]
        if any(not str(place).startswith("weight_") for place in places):
            section.fail(f"transform_config.config_groups.{name}", "rotates activations, which is not supported")


def _scheme(section: Fields, group: Fields) -> Scheme:
    weights = group.section("weights")
    if weights is None:
        group.fail("weights", "is missing: quantized activations alone are not supported")
    form = group.text("format", None) or section.text("format", "dense")
    kind, strategy = weights.text("type", "int"), weights.text("strategy", None)
    if strategy is None:
        strategy = "group" if weights.has("group_size") else "tensor"
    if kind == "float" and form == _MX8 and weights.integer("num_bits") == 8:
        if weights.integer("group_size", MX_BLOCK[1]) != MX_BLOCK[1]:
            weights.fail("group_size", f"must be {MX_BLOCK[1]} in {_MX8}")
        return BlockFloat8(MXFP8)
    if strategy == "block":
        return _block(form, weights, section)
    if kind == "float" and form in _FLOATS and weights.integer("num_bits") == 8:
        if strategy not in ("tensor", "channel"):
            weights.fail("strategy", f"{strategy!r} is not supported for FP8; served are tensor, channel and block")
        return MatrixFloat8() if strategy == "tensor" else Float8()
    if kind == "float" and form in _FP4 and weights.integer("num_bits") == 4:
        scheme = _FP4[form]
        if weights.raw.get("group_size") not in (None, scheme.group):
            weights.fail("group_size", f"must be {scheme.group} in {form}")
        return scheme
    if kind != "int" or form not in (*_PACKED, *_BYTES):
        section.fail("format", f"{form!r} with {kind} weights is not supported; served are {_served()}")
    if strategy not in ("group", "channel", "tensor") or (strategy == "tensor" and form in _PACKED):
        weights.fail("strategy", f"{strategy!r} is not supported; served are group and channel")
    bits, size = parse_bits(weights, "num_bits"), parse_group(weights) if strategy == "group" else 0
    if strategy == "group" and size == 0:
        weights.fail("group_size", "is missing")
    symmetric = weights.flag("symmetric", True)
    if form in _PACKED:
        return PackedInts(bits, size, symmetric, _act_order(weights))
    if bits != 8:
        weights.fail("num_bits", f"is {bits}; format {form} is served with 8")
    return ByteInts(8, size, symmetric)


def _act_order(weights: Fields) -> bool:
    """Whether a tensor has the group of each column; ``static`` is ``weight`` and ``dynamic`` is ``group``."""
    order: Any = weights.raw.get("actorder")
    if order is None or isinstance(order, bool):
        return bool(order)
    if str(order).lower() not in _ORDERS:
        weights.fail("actorder", f"{order!r} is not supported; served are {', '.join(_ORDERS)}")
    return _ORDERS[str(order).lower()]


def _block(form: str, weights: Fields, section: Fields) -> BlockFloat8:
    """Matrices with a grid of scales each."""
    if weights.text("type", "int") != "float" or form not in _FLOATS or weights.integer("num_bits") != 8:
        weights.fail("strategy", "'block' is supported for FP8 in float-quantized only")
    size = Fields({"weight_block_size": weights.raw.get("block_structure")}, section.source)
    return BlockFloat8(BlockFP8Format.parse(size))


def _served() -> str:
    return (
        "int weights in pack-quantized or int-quantized, float weights of 8 bits in float-quantized or "
        "mxfp8-quantized and of 4 bits in nvfp4-pack-quantized or mxfp4-pack-quantized"
    )


def parse_row_int8(section: Fields) -> SchemeFormat:
    """``quant_method: w8a8_int8`` (SGLang): int8 with a scale per row."""
    skipped = Modules(("lm_head",), name_list(section, "ignore", "modules_to_not_convert"))
    return SchemeFormat("w8a8_int8", ((Modules(("Linear",)), ByteInts(8, 0, True)),), skipped)
