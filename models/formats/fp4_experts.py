"""Block FP8 with routed experts in MXFP4, as DeepSeek V4 is published. Imports no torch.

A matrix [N, K] of an expert is `weight` int8 [N, K / 2], two e2m1 numbers a byte, the first in the low bits, and
`scale` e8m0 [N, K / 32]; other matrices are those of `block_fp8`, whose scales have the same name.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, fields, replace
from fractions import Fraction
from typing import TYPE_CHECKING

from moe_engine.kernels.weight_forms import CODES, FOUR_BITS, FP8_BLOCKS, Multiplied, families
from moe_engine.models.checkpoint.cut import Cut
from moe_engine.models.formats.block_fp8 import KERNEL_BLOCK, BlockFP8Format
from moe_engine.models.formats.fp4 import FP4
from moe_engine.models.formats.plain import PLAIN
from moe_engine.models.formats.protocol import Shape, StoredTensor, StoredTensors, WeightFormat, family_of

if TYPE_CHECKING:
    from torch import Tensor

    from moe_engine.kernels.quantization.protocol import KernelFormat, QuantizedWeight

_EXPERTS = FP4(32, "weight", scale="scale")


@dataclass(frozen=True)
class FP4ExpertsFormat(BlockFP8Format):
    """`WeightFormat`.

    Attributes:
        on_gpu: experts are in the memory of kernels of a GPU, for the memory ledger.
    """

    on_gpu: bool = False

    @property
    def in_blocks(self) -> frozenset[str]:
        return self.kept - {"experts"}

    def held_by(self, multiplied: Multiplied) -> WeightFormat:
        linear = families(multiplied, FP8_BLOCKS) & {"linear"} if self.block == KERNEL_BLOCK else frozenset[str]()
        kept = linear | (families(multiplied, FOUR_BITS) & {"experts"})
        return replace(self, kept=kept, on_gpu="experts" not in families(multiplied, CODES)) if kept else PLAIN

    def tensors(self, prefix: str, shape: Shape, names: Collection[str]) -> tuple[StoredTensor, ...]:
        if _is_fp4(prefix, names):
            return _EXPERTS.tensors(prefix, shape, names)
        return super().tensors(prefix, shape, names)

    def bytes_per_element(self, prefix: str, shape: Shape, dtype_bytes: int) -> Fraction:
        form = _EXPERTS.kernel_format()
        if family_of(prefix) == "linear":
            return super().bytes_per_element(prefix, shape, dtype_bytes)
        if "experts" not in self.kept or not form.takes(shape[-1]):
            return Fraction(dtype_bytes)
        return form.bytes_on_gpu() if self.on_gpu else _EXPERTS.bytes_per_element(shape)

    def kernel_format(self, prefix: str) -> KernelFormat | None:
        if family_of(prefix) == "experts":
            return _EXPERTS.kernel_format()
        return super().kernel_format(prefix)

    @property
    def has_kernel_formats(self) -> bool:
        return True

    def keeps(self, source: StoredTensors, prefix: str, shape: Shape, cut: Cut) -> bool:
        if _is_fp4(prefix, source.names):
            return _EXPERTS.keeps(source, prefix, shape, cut)
        return super().keeps(source, prefix, shape, cut)

    def load(self, source: StoredTensors, prefix: str, shape: Shape, cut: Cut, out: Tensor | QuantizedWeight) -> None:
        if _is_fp4(prefix, source.names):
            _EXPERTS.load(source, prefix, shape, cut, out)
        else:
            super().load(source, prefix, shape, cut, out)


def with_fp4_experts(format: WeightFormat) -> WeightFormat:
    """Block FP8 whose experts are in MXFP4; other formats are unchanged."""
    if not isinstance(format, BlockFP8Format):
        return format
    return FP4ExpertsFormat(**{field.name: getattr(format, field.name) for field in fields(format)})


def _is_fp4(prefix: str, names: Collection[str]) -> bool:
    return family_of(prefix) == "experts" and f"{prefix}.scale" in names
