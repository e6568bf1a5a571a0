"""Weights of 4 and 8 bits with a scale per group of columns: their form, and a weight before a kernel packs it.

Importing this imports no torch.

Legend: N out-features, K in-features, G groups. value = (table[code] - zero) * scale, with the table of the format's
values; 16 values for 4 bits, of integers 0 to 15, minus 8 without zero points and factors. With factors
value = table[code] * scale * factor - offset * factor', with a scale and an offset for several groups, and two factors
for each.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields
from fractions import Fraction
from typing import TYPE_CHECKING, ClassVar

from moe_engine.kernels.weight_forms import CODES, FOUR_BITS, WeightForm

if TYPE_CHECKING:
    import torch
    from torch import Tensor

SCALE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
INTEGERS = "int"
FP4 = "fp4"
FP4_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
"""e2m1: codes 0 to 7; codes 8 to 15 are their negatives."""
IQ4 = "iq4"
IQ4_VALUES = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)
"""Numbers of llama.cpp's IQ4_NL and IQ4_XS."""
MULTIPLE = 8
"""Kernels decode this many columns at once."""
MXFP4_GROUP = 32
"""Numbers of MXFP4 with a common scale, a power of two."""
NVFP4_GROUP = 16
"""Numbers of NVFP4 with a common scale: e4m3 times a factor of the whole matrix."""
STEP = 128
"""Columns of a step of the products on a GPU, which holds whole groups or a part of one."""


@dataclass(frozen=True)
class GroupCodes:
    """`KernelFormat` of `CodedWeight`.

    Attributes:
        bits: 4 or 8.
        group: columns with a common scale; 0: all of a row.
        zeros: weights have zero points.
        scales: dtype of the scales.
        values: kind of 4-bit codes: ``int``, ``fp4`` or ``iq4``.
        factors: groups with a common scale and offset, for forms with factors; else 0.
    """

    bits: int
    group: int
    zeros: bool = False
    scales: str = "bfloat16"
    values: str = INTEGERS
    factors: int = 0

    row_block: ClassVar[int] = 1

    @property
    def form(self) -> WeightForm:
        return FOUR_BITS if self.four_bits else CODES

    @property
    def middle(self) -> int:
        """The code of 0 without zero points."""
        return 1 << (self.bits - 1)

    def group_of(self, k: int) -> int:
        """Columns of a group of a weight with k columns."""
        return self.group or k

    @property
    def mxfp4(self) -> bool:
        """True for MXFP4: its scales are powers of two."""
        return (self.bits, self.values, self.group) == (4, FP4, MXFP4_GROUP)

    @property
    def nvfp4(self) -> bool:
        """True for NVFP4: its scales are e4m3 times a factor of the matrix, `CodedWeight.whole`."""
        return (self.bits, self.values, self.group) == (4, FP4, NVFP4_GROUP)

    @property
    def four_bits(self) -> bool:
        """True for the forms that experts on a GPU multiply: MXFP4, NVFP4, and integers of 4 bits in groups."""
        if self.bits != 4 or self.factors or self.values == IQ4:
            return False
        if self.values == FP4:
            return self.mxfp4 or self.nvfp4
        return self.group in (32, 64) or (self.group > 0 and self.group % STEP == 0)

    @property
    def exact_in_bf16(self) -> bool:
        """True for the forms whose values are exact in bfloat16, or whose codes are, with one scale for a row."""
        return self.mxfp4 or (self.bits == 8 and not (self.group or self.zeros or self.factors))

    def takes(self, k: int) -> bool:
        """True if kernels can multiply a weight with k columns in this form."""
        group = self.group_of(k)
        whole = 2 * group if self.nvfp4 else group * (self.factors or 1)
        return k > 0 and k % whole == 0 and group % MULTIPLE == 0

    def table(self) -> tuple[float, ...]:
        """Values of 4-bit codes."""
        if self.values == FP4:
            return (*FP4_VALUES, *(-value for value in FP4_VALUES))
        if self.values == IQ4:
            return tuple(map(float, IQ4_VALUES))
        return tuple(float(code - (0 if self.zeros or self.factors else self.middle)) for code in range(16))

    def num_bytes(self, n: int, k: int) -> int:
        """Memory of a weight [n, k] in a kernel's layout, without padding."""
        groups = k // self.group_of(k)
        if self.factors:
            return n * (k * self.bits // 8 + 2 * groups + 2 * groups // self.factors * SCALE_BYTES[self.scales])
        size = SCALE_BYTES[self.scales] + (1 if self.zeros else 0)
        return n * (k * self.bits // 8 + groups * size)

    def bytes_on_gpu(self) -> Fraction:
        """Memory of a number of a `four_bits` form in whole steps, with its share of the scale."""
        if self.values == FP4:
            return Fraction(1, 2) + Fraction(1, self.group)
        pair = 2 if self.zeros else 1  # the zero point is a number of the scale's dtype
        return Fraction(1, 2) + Fraction(SCALE_BYTES[self.scales] * pair, min(self.group, STEP))

    def empty(self, n: int, k: int, device: torch.device | str) -> Coded:
        """Uninitialized memory for a weight [n, k]."""
        return CodedWeight.empty(self, n, k, device)


@dataclass(frozen=True)
class CodedWeight:
    """A weight [N, K] read from a checkpoint, before a kernel packs it.

    Attributes:
        codes: uint8 [N, K], one a byte.
        scales: [N, G] in the format's dtype; with factors [N, G / factors, 2]: scale and offset.
        zeros: uint8 [N, G], or None.
        factors: uint8 [N, G, 2]: of the scale and of the offset, or None.
        whole: of NVFP4: float32 [N], the factor of a row's matrix in its scales; else None.
    """

    codes: Tensor
    scales: Tensor
    zeros: Tensor | None
    format: GroupCodes
    factors: Tensor | None = None
    whole: Tensor | None = None

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.codes.shape)

    @classmethod
    def empty(cls, format: GroupCodes, n: int, k: int, device: torch.device | str) -> CodedWeight:
        """Uninitialized memory for a weight [n, k]."""
        import torch

        groups = k // format.group_of(k)
        scales = (groups // format.factors, 2) if format.factors else (groups,)
        return cls(
            torch.empty(n, k, dtype=torch.uint8, device=device),
            torch.empty(n, *scales, dtype=getattr(torch, format.scales), device=device),
            torch.empty(n, groups, dtype=torch.uint8, device=device) if format.zeros else None,
            format,
            torch.empty(n, groups, 2, dtype=torch.uint8, device=device) if format.factors else None,
            torch.empty(n, device=device) if format.nvfp4 else None,
        )

    def rows(self, start: int, stop: int) -> CodedWeight:
        """A view of rows [start, stop)."""
        zeros = None if self.zeros is None else self.zeros[start:stop]
        factors = None if self.factors is None else self.factors[start:stop]
        whole = None if self.whole is None else self.whole[start:stop]
        return CodedWeight(self.codes[start:stop], self.scales[start:stop], zeros, self.format, factors, whole)

    def randomize(self, deviation: float, normal: Callable[[Tensor, float], None]) -> None:
        """Random values of this deviation; `normal(tensor, deviation)` fills a contiguous tensor."""
        import torch

        format, noise = self.format, torch.empty(self.codes.shape, device=self.codes.device)
        spread = format.middle / 4
        normal(noise, spread)
        if format.values == FP4:
            self.codes.copy_(noise.add_(8).clamp_(0, 15).round_())
            spread = 3.0  # of the values of codes near 8: about
        else:
            if format.values == IQ4:
                spread *= 12  # the distance of values in the middle
            self.codes.copy_(noise.add_(format.middle).clamp_(0, 2 * format.middle - 1).round_())
        self.scales.fill_(deviation / spread)
        if self.whole is not None:
            self.whole.fill_(deviation / spread)
        if self.zeros is not None:
            self.zeros.fill_(format.middle)
        if self.factors is not None:
            self.factors.fill_(1)
            self.scales[..., 1] *= format.middle if format.bits == 4 else 0

    def dequantized(self) -> Tensor:
        """float32 [N, K]: the values by definition."""
        import torch

        format, (n, k) = self.format, self.codes.shape
        if format.bits == 4:
            table = torch.tensor(format.table(), device=self.codes.device)
            values = table[self.codes.long()]
        else:
            values = self.codes.float() - (0 if format.zeros else format.middle)
        grouped = values.view(n, -1, format.group_of(k))
        if self.zeros is not None:
            grouped = grouped - self.zeros.float().unsqueeze(-1)
        if self.factors is not None:
            pairs = self.scales.float().repeat_interleave(format.factors, 1) * self.factors.float()
            return (grouped * pairs[..., :1] - pairs[..., 1:]).view(n, k)
        return (grouped * self.scales.float().unsqueeze(-1)).view(n, k)


@dataclass(frozen=True)
class PlainWeight:
    """A weight [N, K] without codes, which a kernel quantizes to `format` while it packs it.

    Attributes:
        kept: the values become those of the codes, rounded to their dtype.
    """

    values: Tensor
    format: GroupCodes
    kept: bool = False

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.values.shape)

    def rows(self, start: int, stop: int) -> PlainWeight:
        """A view of rows [start, stop)."""
        return PlainWeight(self.values[start:stop], self.format, self.kept)

    def randomize(self, deviation: float, normal: Callable[[Tensor, float], None]) -> None:
        """As of `CodedWeight`."""
        normal(self.values, deviation)


@dataclass(frozen=True)
class PlainCodes(GroupCodes):
    """`KernelFormat` of `PlainWeight`.

    Attributes:
        plain: dtype of the weights.
    """

    plain: str = "float32"

    @property
    def exact_in_bf16(self) -> bool:
        """Scales of 4 bits have `SCALE_BITS` significant bits."""
        return self.bits == 4 or super().exact_in_bf16

    @property
    def codes(self) -> GroupCodes:
        """The form for kernels that take codes."""
        return GroupCodes(**{field.name: getattr(self, field.name) for field in fields(GroupCodes)})

    def empty(self, n: int, k: int, device: torch.device | str) -> PlainWeight:
        """Uninitialized memory for a weight [n, k]."""
        import torch

        return PlainWeight(torch.empty(n, k, dtype=getattr(torch, self.plain), device=device), self)


Coded = CodedWeight | PlainWeight
"""A weight of a `GroupCodes`, as kernels take it."""
