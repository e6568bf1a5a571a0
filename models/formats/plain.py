"""Weights that are not quantized: `prefix.weight` in bf16, fp16, fp32 or fp64. Imports no torch."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from fractions import Fraction
from typing import TYPE_CHECKING

from moe_engine.kernels.weight_forms import Multiplied
from moe_engine.models.checkpoint.cut import Cut
from moe_engine.models.formats.protocol import Shape, StoredTensor, StoredTensors

if TYPE_CHECKING:
    from torch import Tensor

    from moe_engine.kernels.quantization.protocol import KernelFormat, QuantizedWeight

FLOATS = ("F32", "BF16", "F16", "F64")
"""Dtypes of unquantized tensors."""
INTEGERS = ("I64", "I32")
"""Dtypes of tables of numbers."""


@dataclass(frozen=True)
class PlainFormat:
    """`WeightFormat` of checkpoints without `quantization_config`."""

    @property
    def name(self) -> str:
        return ""

    def tensors(self, prefix: str, shape: Shape, names: Collection[str]) -> tuple[StoredTensor, ...]:
        return (plain_tensor(f"{prefix}.weight", shape),)

    def is_scale(self, name: str) -> bool:
        return False

    def bytes_per_element(self, prefix: str, shape: Shape, dtype_bytes: int) -> Fraction:
        return Fraction(dtype_bytes)

    def held_by(self, multiplied: Multiplied) -> PlainFormat:
        return self

    def kernel_format(self, prefix: str) -> KernelFormat | None:
        return None

    @property
    def has_kernel_formats(self) -> bool:
        return False

    def keeps(self, source: StoredTensors, prefix: str, shape: Shape, cut: Cut) -> bool:
        return False

    def load(self, source: StoredTensors, prefix: str, shape: Shape, cut: Cut, out: Tensor | QuantizedWeight) -> None:
        (stored,) = self.tensors(prefix, shape, source.names)
        source.read_into(stored, cut, out)  # type: ignore[arg-type]  # there is no kernel format


PLAIN = PlainFormat()


def plain_tensor(name: str, shape: Shape) -> StoredTensor:
    """An unquantized tensor."""
    return StoredTensor(name, shape, FLOATS, blocks=True)


def integer_tensor(name: str, shape: Shape) -> StoredTensor:
    """A table of numbers."""
    return StoredTensor(name, shape, INTEGERS)
