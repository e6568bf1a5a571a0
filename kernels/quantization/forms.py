"""Forms of weights of 4 and 8 bits with a scale per group of columns. Imports no torch.

Legend: N out-features, K in-features, G groups. value = (table[code] - zero) * scale, with the table of the format's
values; 16 values for 4 bits: the integers 0 to 15, less 8 where there are no zero points.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

    from moe_engine.kernels.quantization.codes import CodedWeight

SCALE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
INTEGERS = "int"
FP4 = "fp4"
FP4_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
"""e2m1: codes 0 to 7; codes 8 to 15 are their negatives."""
MULTIPLE = 8
"""Kernels decode this many columns at once."""


@dataclass(frozen=True)
class GroupCodes:
    """`KernelFormat` of `CodedWeight`.

    Attributes:
        bits: 4 or 8.
        group: columns with a common scale; 0: all of a row.
        zeros: weights have zero points.
        scales: dtype of the scales.
        values: of 4-bit codes: ``int`` or ``fp4``.
    """

    bits: int
    group: int
    zeros: bool = False
    scales: str = "bfloat16"
    values: str = INTEGERS

    @property
    def row_block(self) -> int:
        return 1

    @property
    def middle(self) -> int:
        """The code of 0 without zero points."""
        return 1 << (self.bits - 1)

    def group_of(self, k: int) -> int:
        """Columns of a group of a weight with k columns."""
        return self.group or k

    def takes(self, k: int) -> bool:
        """True if kernels can multiply a weight with k columns in this form."""
        group = self.group_of(k)
        return k > 0 and k % group == 0 and group % MULTIPLE == 0

    def table(self) -> tuple[float, ...]:
        """Values of 4-bit codes."""
        if self.values == FP4:
            return (*FP4_VALUES, *(-value for value in FP4_VALUES))
        return tuple(float(code - (0 if self.zeros else self.middle)) for code in range(16))

    def num_bytes(self, n: int, k: int) -> int:
        """Memory of a weight [n, k] in a kernel's layout, without padding."""
        groups = k // self.group_of(k)
        size = SCALE_BYTES[self.scales] + (1 if self.zeros else 0)
        return n * (k * self.bits // 8 + groups * size)

    def empty(self, n: int, k: int, device: torch.device | str) -> CodedWeight:
        """Uninitialised memory for a weight [n, k]."""
        from moe_engine.kernels.quantization.codes import CodedWeight

        return CodedWeight.empty(self, n, k, device)
