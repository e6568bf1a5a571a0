"""Matrices of GGUF files: blocks of numbers along the rows. Imports no torch.

Each matrix has its own type. All have a kernel form with exactly their values: 4 bits, or 8 for Q5_0, Q5_1, Q5_K, Q6_K
and Q8_0, with a scale per 32 columns (Q2_K, Q3_K and Q6_K: 16), and offsets where a type has them. Matrices of several
types that a layer stacks have a common form of 8 bits, also with exactly their values.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Set
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property
from typing import TYPE_CHECKING

from moe_engine.kernels.weight_forms import WeightForm
from moe_engine.models.checkpoint.cut import Cut
from moe_engine.models.checkpoint.tensor_header import BLOCK_TYPES, TensorHeader
from moe_engine.models.config_sections.fields import Fields
from moe_engine.models.formats.module_rules import NONE
from moe_engine.models.formats.plain import plain_tensor
from moe_engine.models.formats.protocol import Shape, StoredTensor, StoredTensors, family_of
from moe_engine.models.formats.schemes import Scheme, SchemeFormat

if TYPE_CHECKING:
    from torch import Tensor

    from moe_engine.kernels.quantization.codes import GroupCodes
    from moe_engine.kernels.quantization.protocol import QuantizedWeight

METHOD = "gguf"
_CODES = {
    "Q4_0": (4, 32, "float16", "int", 0), "Q4_1": (4, 32, "float16", "int", 1), "Q5_0": (8, 32, "float16", "int", 0),
    "Q5_1": (8, 32, "float16", "int", 1), "Q8_0": (8, 32, "float16", "int", 0), "Q2_K": (4, 16, "float16", "int", 16),
    "Q3_K": (4, 16, "float16", "int", 16), "Q4_K": (4, 32, "float16", "int", 8), "Q5_K": (8, 32, "float16", "int", 8),
    "Q6_K": (8, 16, "float32", "int", 0), "IQ4_NL": (4, 32, "float16", "iq4", 0),
    "IQ4_XS": (4, 32, "float32", "iq4", 0), "MXFP4": (4, 32, "bfloat16", "fp4", 0),
}  # fmt: skip
"""Kernel form of a type: bits, columns of a group, dtype of the scales, which represents them exactly, values of the
codes, and the groups with a common scale and offset (`GroupCodes.factors`)."""
_WIDE = (8, 16, "float16", "int", 2)
"""The form that represents every type but MXFP4 exactly: 10 bits a number."""
_EXPERT = re.compile(r"\.experts\.\d+\.")
_MERGED = (
    re.compile(r"(.*\.self_attn)\.(?:q|k|v|q_a)_proj|(.*\.self_attn)\.kv_a_proj_with_mqa"),
    re.compile(r"(.*)\.(?:gate_proj|up_proj|w1|w3)"),
    re.compile(r"(.*\.linear_attn)\.in_proj_(?:qkv|z)"),
    re.compile(r"(.*\.linear_attn)\.in_proj_(?:b|a)"),
)
"""Projections that layers stack, those of experts too: a stack has one kernel form."""


@dataclass(frozen=True)
class Blocks(Scheme):
    """A `Scheme`: the blocks of one type.

    Attributes:
        type: a key of `BLOCK_TYPES`.
        wide: True for the common form of a stack of several types.
    """

    type: str
    wide: bool = False

    @property
    def form(self) -> WeightForm | None:
        form = self.kernel_format()
        return None if form is None else form.form

    def stored(self, prefix: str, names: Collection[str]) -> bool:
        return f"{prefix}.weight" in names

    def tensors(self, prefix: str, shape: Shape, names: Collection[str]) -> tuple[StoredTensor, ...]:
        return (plain_tensor(f"{prefix}.weight", shape),)

    def bytes_per_element(self, shape: Shape) -> Fraction | None:
        form = self.kernel_format()
        if form is None or not form.takes(shape[-1]):
            return None
        return Fraction(form.num_bytes(1, shape[-1]), shape[-1])

    def kernel_format(self) -> GroupCodes | None:
        from moe_engine.kernels.quantization.codes import GroupCodes

        if self.type not in _CODES or (self.wide and self.type == "MXFP4"):  # its powers of two exceed float16
            return None
        bits, group, scales, values, factors = _WIDE if self.wide else _CODES[self.type]
        return GroupCodes(bits, group, scales=scales, values=values, factors=factors)

    def keeps(self, source: StoredTensors, prefix: str, shape: Shape, cut: Cut) -> bool:
        form = self.kernel_format()
        if form is None or source.dtype_of(f"{prefix}.weight") != self.type:
            return False
        return form.takes(cut.shape(shape)[1]) and cut.keeps_whole(shape, (1, BLOCK_TYPES[self.type][0]))

    def load(self, source: StoredTensors, prefix: str, shape: Shape, cut: Cut, out: Tensor | QuantizedWeight) -> None:
        from moe_engine.kernels.quantization.codes import CodedWeight
        from moe_engine.models.formats.gguf_blocks import codes_into, wide_codes_into

        (stored,) = self.tensors(prefix, shape, source.names)
        if not isinstance(out, CodedWeight):
            source.read_into(stored, cut, out)  # type: ignore[arg-type]  # a Tensor
            return
        with source.open(stored, cut) as blocks:
            (wide_codes_into if self.wide else codes_into)(self.type, blocks, out)


@dataclass(frozen=True)
class GGUFFormat(SchemeFormat):
    """`WeightFormat` of a GGUF file with matrices in blocks.

    Attributes:
        types: matrix, ``*`` for all experts -> its scheme; others are not quantized.
    """

    types: tuple[tuple[str, Blocks], ...] = ()

    stores_head = True

    @staticmethod
    def parse(section: Fields) -> GGUFFormat:
        """Parses the section created by `gguf.config`."""
        types = section.raw.get("types")
        if not isinstance(types, Mapping):
            section.fail("types", "is missing; give the GGUF file itself as --model-path")
        schemes = _schemes(types)
        rules = tuple((NONE, scheme) for scheme in dict.fromkeys(schemes.values()))
        return GGUFFormat(METHOD, rules, types=tuple(sorted(schemes.items())))

    @cached_property
    def _by_name(self) -> dict[str, Blocks]:
        return dict(self.types)

    def scheme_of(self, prefix: str) -> Scheme | None:
        return self._by_name.get(_EXPERT.sub(".experts.*.", prefix))

    def _stored(self, prefix: str, names: Collection[str]) -> Scheme | None:
        return self.scheme_of(prefix)

    def bytes_per_element(self, prefix: str, shape: Shape, dtype_bytes: int) -> Fraction:
        """Kernels of a GPU take experts whose matrices have one form."""
        if self.on_gpu and family_of(prefix) == "experts":
            stem = prefix.rpartition(".")[0]
            forms = {scheme.kernel_format() for name, scheme in self.types if name.rpartition(".")[0] == stem}
            if len(forms) > 1:
                return Fraction(dtype_bytes)
        return super().bytes_per_element(prefix, shape, dtype_bytes)


def matrix_types(headers: Mapping[str, TensorHeader]) -> dict[str, str]:
    """Matrix, ``*`` for all experts -> its block type, from tensors by the hub's names. Left out are matrices that are
    dequantized: of stacks without a common form, and experts of a layer with such a stack."""
    units: dict[str, dict[str, dict[str, str]]] = {}
    for name, header in headers.items():
        if name.endswith(".weight") and len(header.shape) == 2 and "embed_tokens" not in name:
            matrix = _EXPERT.sub(".experts.*.", name.removesuffix(".weight"))
            stack, (experts, is_expert, _) = _stack_of(matrix), matrix.partition(".experts.*.")
            unit = units.setdefault(experts if is_expert else stack, {})
            unit.setdefault(stack, {})[matrix] = header.dtype
    kept = (unit for unit in units.values() if all(_has_form(set(types.values())) for types in unit.values()))
    return {name: type for unit in kept for types in unit.values() for name, type in types.items()}


def _has_form(types: Set[str]) -> bool:
    """Whether matrices of these types have a common kernel form."""
    return types <= BLOCK_TYPES.keys() and (len(types) == 1 or "MXFP4" not in types)


def _schemes(types: Mapping[str, str]) -> dict[str, Blocks]:
    """The schemes by matrix. The matrices of a stack have one form."""
    stacks: dict[str, list[str]] = {}
    for name in types:
        stacks.setdefault(_stack_of(name), []).append(name)
    found: dict[str, Blocks] = {}
    for names in stacks.values():
        several = len({_CODES.get(types[name]) for name in names}) > 1
        found |= {name: Blocks(types[name], several) for name in names}
    return found


def _stack_of(name: str) -> str:
    for number, pattern in enumerate(_MERGED):
        if match := pattern.fullmatch(name):
            return f"{next(group for group in match.groups() if group)} {number}"
    return name
