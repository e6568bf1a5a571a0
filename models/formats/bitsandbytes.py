"""bitsandbytes: 4-bit codes (nf4, fp4) with a scale per block of the flattened matrix, and int8 with a scale per row.

Dequantized while loading. 4 bits: `prefix.weight` uint8 [N K / 2, 1], the first number in the high bits;
`weight.absmax`, `weight.quant_map`, and for double quantization `weight.nested_absmax` and `weight.nested_quant_map`;
`weight.quant_state.bitsandbytes__TYPE`, JSON as bytes. 8 bits: `prefix.weight` int8, `prefix.SCB`. Imports no torch.
Source: bitsandbytes, functional.QuantState.
"""

from __future__ import annotations

import json
from collections.abc import Collection
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from moe_engine.errors import CheckpointError
from moe_engine.models.checkpoint.cut import Cut
from moe_engine.models.config_sections.fields import Fields
from moe_engine.models.formats.integers import read_scales
from moe_engine.models.formats.module_rules import Modules, name_list
from moe_engine.models.formats.protocol import Shape, StoredTensor, StoredTensors
from moe_engine.models.formats.schemes import Scheme, SchemeFormat, every_linear

if TYPE_CHECKING:
    from torch import Tensor

    from moe_engine.kernels.quantization.protocol import QuantizedWeight

_TYPES = ("nf4", "fp4")
_STATE = ".weight.quant_state.bitsandbytes__"


@dataclass(frozen=True)
class FourBits(Scheme):
    """
    Attributes:
        kind: ``nf4`` or ``fp4``.
        block: numbers with a common scale.
        nested: scales are quantized too.
    """

    kind: str
    block: int
    nested: bool

    @property
    def extras(self) -> tuple[str, ...]:
        ends = (".absmax", ".quant_map", ".nested_absmax", ".nested_quant_map")
        return (*(f".weight{end}" for end in ends), f"{_STATE}{self.kind}")

    def stored(self, prefix: str, names: Collection[str]) -> bool:
        return f"{prefix}.weight.absmax" in names

    def tensors(self, prefix: str, shape: Shape, names: Collection[str]) -> tuple[StoredTensor, ...]:
        size = shape[0] * shape[1]
        blocks, weight = -(-size // self.block), f"{prefix}.weight"
        found = [
            StoredTensor(weight, (-(-size // 2), 1), ("U8",), ((1, -(-size // 2)),)),
            StoredTensor(f"{weight}.absmax", (blocks,), ("U8",) if self.nested else ("F32",)),
            StoredTensor(f"{weight}.quant_map", (16,), ("F32",)),
        ]
        if self.nested:
            found.append(StoredTensor(f"{weight}.nested_absmax", (-(-blocks // 256),), ("F32",)))
            found.append(StoredTensor(f"{weight}.nested_quant_map", (256,), ("F32",)))
        state = StoredTensor(f"{prefix}{_STATE}{self.kind}", (0,), ("U8",), any_shape=True)
        return *found, state

    def load(self, source: StoredTensors, prefix: str, shape: Shape, cut: Cut, out: Tensor | QuantizedWeight) -> None:
        import torch

        weight, absmax, table, *nested, state = self.tensors(prefix, shape, source.names)
        with source.open(state) as raw:
            offset = self._offset(state.name, bytes(raw.numpy().tobytes()), shape)
        scales = read_scales(source, absmax)
        if nested:
            outer, values = (read_scales(source, tensor) for tensor in nested)
            scales = values[scales.int()].mul_(outer.repeat_interleave(256)[: len(scales)]).add_(offset)
        with source.open(weight) as packed:
            flat = packed.reshape(-1)
            codes = torch.stack((flat >> 4, flat & 15), -1).view(-1)[: shape[0] * shape[1]]
        values = read_scales(source, table)[codes.int()]
        values.mul_(scales.repeat_interleave(self.block)[: len(values)])
        out.copy_(cut.of(values.view(*shape)))  # type: ignore[union-attr]  # a Tensor

    def _offset(self, name: str, raw: bytes, shape: Shape) -> float:
        """Checks the state; returns the mean to which nested scales are relative."""
        try:
            state: dict[str, Any] = json.loads(raw)
            found = (state["blocksize"], tuple(state["shape"]), state.get("nested_blocksize", 256))
            offset = float(state.get("nested_offset", 0.0))
        except (ValueError, KeyError, TypeError) as error:
            raise CheckpointError(f"{name}: no state of bitsandbytes ({error!r})") from None
        if found != (self.block, tuple(shape), 256):
            raise CheckpointError(
                f"{name}: blocks of {found[0]}, shape {list(found[1])}, nested blocks of {found[2]}; served are "
                f"{self.block}, {list(shape)}, 256"
            )
        return offset


@dataclass(frozen=True)
class EightBits(Scheme):
    """int8: value = element * SCB / 127."""

    extras: ClassVar[tuple[str, ...]] = (".SCB", ".weight_format")

    def stored(self, prefix: str, names: Collection[str]) -> bool:
        return f"{prefix}.SCB" in names

    def tensors(self, prefix: str, shape: Shape, names: Collection[str]) -> tuple[StoredTensor, ...]:
        found = [StoredTensor(f"{prefix}.weight", shape, ("I8",)), StoredTensor(f"{prefix}.SCB", shape[:1], ("F32",))]
        if f"{prefix}.weight_format" in names:
            found.append(StoredTensor(f"{prefix}.weight_format", (), ("U8",), ((1,),)))
        return tuple(found)

    def load(self, source: StoredTensors, prefix: str, shape: Shape, cut: Cut, out: Tensor | QuantizedWeight) -> None:
        weight, scale, *form = self.tensors(prefix, shape, source.names)
        scales = read_scales(source, scale, Cut(cut.rows)).div_(127).unsqueeze(1)
        for tensor in form:
            if int(read_scales(source, tensor)):
                raise CheckpointError(f"{tensor.name}: int8 weights in a layout of a GPU; save the checkpoint again")
        with source.open(weight, cut) as part:
            out.copy_(part.float().mul_(scales))  # type: ignore[union-attr]  # a Tensor


def parse_bitsandbytes(section: Fields) -> SchemeFormat:
    """``quant_method: bitsandbytes``. Raises ConfigError for settings that are not supported."""
    scheme: Scheme
    if section.flag("load_in_4bit"):
        kind = section.choice("bnb_4bit_quant_type", "fp4", *_TYPES)
        if section.text("bnb_4bit_quant_storage", "uint8") != "uint8":
            section.fail("bnb_4bit_quant_storage", "must be uint8")
        block = section.integer("bnb_4bit_blocksize", 64)
        scheme = FourBits(kind, block, section.flag("bnb_4bit_use_double_quant"))
    else:
        scheme = EightBits()
    skipped = Modules(parts=("lm_head", *name_list(section, "llm_int8_skip_modules")))
    return SchemeFormat("bitsandbytes", every_linear(scheme), skipped)
