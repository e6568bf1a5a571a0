"""FP4 weights (e2m1), two numbers a byte, the first in the low bits: NVFP4 and MXFP4. Imports no torch.

Legend: N rows, K columns of a matrix.

NVFP4: `prefix.weight` (ModelOpt) or `prefix.weight_packed` (compressed-tensors) uint8 [N, K / 2]; `weight_scale` e4m3
[N, K / 16]; a scale of the matrix: `weight_scale_2`, a factor, or `weight_global_scale`, a divisor. MXFP4:
`weight_packed`, `weight_scale` uint8 [N, K / 32], e8m0. Kernels take scales in bfloat16: exact for MXFP4, and as
exact as weights dequantized to bfloat16 for NVFP4, whose scales are float32 in a float32 model; with the scale of the
matrix kernels of a GPU get the stored e4m3 back. Sources: OCP Microscaling specification 1.0; ModelOpt;
compressed-tensors.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import TYPE_CHECKING, ClassVar, Self

from moe_engine.kernels.weight_forms import FOUR_BITS, WeightForm
from moe_engine.models.checkpoint.cut import Cut
from moe_engine.models.formats.integers import SCALES, consume, read_scales
from moe_engine.models.formats.protocol import Shape, StoredTensor, StoredTensors
from moe_engine.models.formats.schemes import Scheme

if TYPE_CHECKING:
    from torch import Tensor

    from moe_engine.kernels.quantization.codes import GroupCodes
    from moe_engine.kernels.quantization.protocol import QuantizedWeight

_ONE = ((), (1, 1))
_UNUSED = (".input_scale", ".input_global_scale", ".k_scale", ".v_scale")


@dataclass(frozen=True)
class FP4(Scheme):
    """A `Scheme`.

    Attributes:
        group: 16 for NVFP4, 32 for MXFP4.
        codes: end of the name of the tensor of codes.
        scale: end of the name of the tensor of scales.
        whole: end of the name of the scale of a matrix; empty: there is none.
        divides: the scale of a matrix divides.
        scale_dtype: of the scales of a kernel's weights.
    """

    group: int
    codes: str = "weight_packed"
    whole: str = ""
    divides: bool = False
    scale_dtype: str = "bfloat16"
    scale: str = "weight_scale"

    form: ClassVar[WeightForm] = FOUR_BITS

    @property
    def extras(self) -> tuple[str, ...]:
        return (".weight_scale", ".weight_scale_2", ".weight_global_scale", *_UNUSED)

    def stored(self, prefix: str, names: Collection[str]) -> bool:
        return f"{prefix}.{self.codes}" in names and f"{prefix}.{self.scale}" in names

    def tensors(self, prefix: str, shape: Shape, names: Collection[str]) -> tuple[StoredTensor, ...]:
        n, k = shape
        scales = ("F8_E4M3",) if self.group == 16 else ("U8", "F8_E8M0")
        found = [
            StoredTensor(f"{prefix}.{self.codes}", (n, -(-k // 2)), ("U8", "I8")),
            StoredTensor(f"{prefix}.{self.scale}", (n, -(-k // self.group)), scales),
        ]
        if self.whole:
            found.append(StoredTensor(f"{prefix}.{self.whole}", (1,), SCALES, _ONE))
        unused = (prefix + end for end in _UNUSED if prefix + end in names)
        return (*found, *(StoredTensor(name, (1,), SCALES, _ONE) for name in unused))

    def bytes_per_element(self, shape: Shape) -> Fraction:
        return Fraction(1, 2) + Fraction(4 if self.scale_dtype == "float32" else 2, self.group)

    def of_dtype(self, dtype: str) -> Self:
        return replace(self, scale_dtype=dtype) if dtype == "float32" and self.whole else self

    def kernel_format(self) -> GroupCodes:
        from moe_engine.kernels.quantization.codes import FP4 as VALUES
        from moe_engine.kernels.quantization.codes import GroupCodes

        return GroupCodes(4, self.group, scales=self.scale_dtype, values=VALUES)

    def keeps(self, source: StoredTensors, prefix: str, shape: Shape, cut: Cut) -> bool:
        return self.kernel_format().takes(cut.shape(shape)[1]) and cut.keeps_whole(shape, (1, self.group))

    def load(self, source: StoredTensors, prefix: str, shape: Shape, cut: Cut, out: Tensor | QuantizedWeight) -> None:
        import torch

        from moe_engine.kernels.quantization.codes import CodedWeight
        from moe_engine.models.formats.codes import cover

        codes, scale, *rest = self.tensors(prefix, shape, source.names)
        columns, within = cover(cut.cols, shape[1], 2)
        with source.open(codes, Cut(cut.rows, columns)) as stored:
            part = stored.view(torch.uint8)
            values = torch.stack((part & 15, part >> 4), -1).flatten(1)[:, within]
        first, last, _ = (cut.cols or slice(None)).indices(shape[1])
        scales = _floats(read_scales(source, scale, Cut(cut.rows)))
        if self.whole:
            factor = read_scales(source, rest.pop(0)).float().reshape(())
            factor = factor.reciprocal() if self.divides else factor
            scales = scales * factor
        consume(source, *rest)
        if isinstance(out, CodedWeight):
            if out.whole is not None:
                out.whole.copy_(factor)
            out.codes.copy_(values)
            out.scales.copy_(scales[:, first // self.group : -(-last // self.group)])
            return
        table = torch.tensor(self.kernel_format().table())
        groups = torch.arange(first, last) // self.group
        out.copy_(table[values.int()].mul_(scales.index_select(1, groups)))  # type: ignore[union-attr]  # a Tensor


def _floats(scales: Tensor) -> Tensor:
    """float32; uint8 is e8m0."""
    import torch

    if scales.dtype == torch.uint8:
        return torch.exp2(scales.float() - 127)
    return scales.float()


NVFP4 = FP4(16, "weight", "weight_scale_2")
NVFP4_COMPRESSED = FP4(16, "weight_packed", "weight_global_scale", divides=True)
MXFP4_COMPRESSED = FP4(32)
