"""Block FP8 as DeepSeek V3 stores and computes it: e4m3 data with one float32 scale per block of 128.

Legend: M rows, N out-features, K in-features. A weight has one scale per 128 x 128 block, an activation one per row and
128 channels; blocks at the edges are smaller. value = element * scale. Source: DeepSeek-V3 technical report
(arXiv 2412.19437), section 3.3; inference/kernel.py of its repository.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar, Protocol, Self

import torch
from torch import Tensor

from moe_engine.kernels.weight_forms import FP8_BLOCKS, FP8_ROWS, WeightForm

BLOCK = 128
FP8 = torch.float8_e4m3fn
FP8_MAX = 448.0
MIN_AMAX = 1e-4  # min amax of a block of activations: keeps the scale of an all-zero block above 0

Normal = Callable[[Tensor, float], None]
"""(tensor, deviation): fills a contiguous tensor with values of a normal distribution around 0."""


@dataclass(frozen=True)
class _ScaledFP8:
    data: Tensor
    scales: Tensor

    @property
    def num_bytes(self) -> int:
        return self.data.numel() + 4 * self.scales.numel()

    def randomize(self, deviation: float, normal: Normal) -> None:
        scale = 2.0**-7  # for all scales: values use e4m3's range without reaching its maximum, for any K
        normal(self.data, deviation / scale)
        self.scales.fill_(scale)


@dataclass(frozen=True)
class BlockWeight(_ScaledFP8):
    """W[n, k] = data[n, k] * scales[n div 128, k div 128].

    Attributes:
        data: e4m3 [N, K].
        scales: float32 [ceil(N / 128), ceil(K / 128)].
        power_of_two: activations multiplied with this weight use power-of-two scales (scale_fmt ``ue8m0``).
    """

    power_of_two: bool = False

    @classmethod
    def empty(cls, n: int, k: int, device: torch.device | str, power_of_two: bool = False) -> BlockWeight:
        """Uninitialized memory for a weight [N, K]."""
        data = torch.empty(n, k, dtype=FP8, device=device)
        return cls(data, torch.empty(num_blocks(n), num_blocks(k), device=device), power_of_two)

    def rows(self, start: int, stop: int) -> BlockWeight:
        """A view of rows [start, stop). `start` is a multiple of 128; so is `stop`, unless it is the end.

        Raises:
            ValueError: if the rows cut a block.
        """
        if start % BLOCK or (stop % BLOCK and stop != self.data.shape[0]):
            raise ValueError(f"rows {start}:{stop} of {self.data.shape[0]} cut a block of {BLOCK}")
        return BlockWeight(
            self.data[start:stop], self.scales[start // BLOCK : num_blocks(stop)], power_of_two=self.power_of_two
        )


@dataclass(frozen=True)
class RowWeight(_ScaledFP8):
    """W[n, k] = data[n, k] * scales[n].

    Attributes:
        data: e4m3 [N, K].
        scales: float32 [N].
    """

    power_of_two: ClassVar[bool] = False

    def rows(self, start: int, stop: int) -> RowWeight:
        """A view of rows [start, stop)."""
        return RowWeight(self.data[start:stop], self.scales[start:stop])


class QuantizedWeight(Protocol):
    """A weight [N, K] that kernels multiply without dequantization, in its own dataclass of tensors."""

    def rows(self, start: int, stop: int) -> Self:
        """A view of rows [start, stop). `start` is a multiple of `KernelFormat.row_block`; so is `stop`, unless it is
        the end."""

    def randomize(self, deviation: float, normal: Normal) -> None:
        """Random values of this deviation, for --load-format dummy."""


class KernelFormat(Protocol):
    """The form of quantized weights that kernels multiply: a frozen dataclass. Kernels declare the classes that they
    take in their capabilities."""

    @property
    def form(self) -> WeightForm:
        """Its name in `Row.multiplies`."""

    @property
    def row_block(self) -> int:
        """Rows of a weight that share scales."""

    def empty(self, n: int, k: int, device: torch.device | str) -> QuantizedWeight:
        """Uninitialized memory for a weight [N, K]."""


@dataclass(frozen=True)
class BlockFP8:
    """`KernelFormat` of `BlockWeight`; `power_of_two` as there."""

    power_of_two: bool = False

    form: ClassVar[WeightForm] = FP8_BLOCKS
    row_block: ClassVar[int] = BLOCK

    def empty(self, n: int, k: int, device: torch.device | str) -> BlockWeight:
        return BlockWeight.empty(n, k, device, self.power_of_two)


BLOCK_FP8 = BlockFP8()


@dataclass(frozen=True)
class RowFP8:
    """`KernelFormat` of `RowWeight`."""

    form: ClassVar[WeightForm] = FP8_ROWS
    row_block: ClassVar[int] = 1
    power_of_two: ClassVar[bool] = False

    def empty(self, n: int, k: int, device: torch.device | str) -> RowWeight:
        return RowWeight(torch.empty(n, k, dtype=FP8, device=device), torch.empty(n, device=device))


ROW_FP8 = RowFP8()


def empty_columns(
    m: int, count: int, device: torch.device | str, groups: tuple[int, ...] = (), dtype: torch.dtype = torch.float32,
    zeros: bool = False,
) -> Tensor:  # fmt: skip
    """Memory [*groups, m, count] of scales, column-major in each group; a column starts at a multiple of 16 bytes."""
    make = torch.zeros if zeros else torch.empty
    return make(*groups, count, -(-m // 4) * 4, dtype=dtype, device=device)[..., :m].transpose(-2, -1)


@dataclass(frozen=True)
class QuantizedRows:
    """x[m, k] = data[m, k] * scales[m, k div 128].

    Attributes:
        data: e4m3 [M, K], contiguous.
        scales: float32 [ceil(K / 128)] per row, column-major [M, ceil(K / 128)]: one block's scales of all rows are
            contiguous, the order in which a product reads them; each column starts at a multiple of 16 bytes.
            Or int32 [M, ceil(K / 512)], in the same order: the exponents of four scales that are powers of two, the
            first in the lowest byte (E8M0, as DeepGEMM reads them on Blackwell).

    Padded groups of rows have another leading dimension: data [G, C, K], scales [G, C, ceil(K / 128)], column-major in
    each group.
    """

    data: Tensor
    scales: Tensor

    @classmethod
    def empty(
        cls, m: int, k: int, device: torch.device | str, groups: tuple[int, ...] = (), exponents: bool = False
    ) -> QuantizedRows:
        """Uninitialized memory for rows [M, K]; for padded groups [*groups, M, K]. exponents: the form of the scales;
        those after the last block are zero, since a product multiplies them with padding."""
        blocks = num_blocks(k)
        if exponents:
            scales = empty_columns(m, -(-blocks // 4), device, groups, torch.int32, zeros=blocks % 4 > 0)
        else:
            scales = empty_columns(m, blocks, device, groups)
        return cls(torch.empty(*groups, m, k, dtype=FP8, device=device), scales)

    @property
    def exponents(self) -> bool:
        """True if the scales are stored as exponents."""
        return self.scales.dtype == torch.int32

    @property
    def scale_stride(self) -> int:
        """Elements between the scales of two consecutive blocks of a row."""
        return self.scales.stride(-1)


@dataclass(frozen=True)
class ActivationFormat:
    """Activation formats that a module reads.

    Attributes:
        unquantized: in the activation dtype.
        rows: quantized, as `QuantizedRows`.
        power_of_two: with power-of-two scales. exponents: stored as exponents.
        column_scales: experts only: scales of rows are read column-major, as in `QuantizedRows`; other strides are
            copied.
        row_alignment: experts only: more than 1 if they take `aligned` batches, whose groups start at its multiples.
    """

    unquantized: bool = True
    rows: bool = False
    power_of_two: bool = False
    column_scales: bool = False
    row_alignment: int = 1
    exponents: bool = False

    @classmethod
    def fp8(cls, power_of_two: bool, exponents: bool = False) -> ActivationFormat:
        """Quantized rows only."""
        return cls(unquantized=False, rows=True, power_of_two=power_of_two, exponents=exponents)


UNQUANTIZED = ActivationFormat()


def common_format(*parts: ActivationFormat) -> ActivationFormat:
    """A format for all consumers. Consumers with different scales get unquantized values, and quantize themselves."""
    kinds = {(part.power_of_two, part.exponents) for part in parts if part.rows}
    if len(kinds) != 1:
        return UNQUANTIZED
    power_of_two, exponents = kinds.pop()
    return ActivationFormat(any(part.unquantized for part in parts), True, power_of_two, exponents=exponents)


@dataclass(frozen=True)
class QuantizedActivation:
    """x [T, K] quantized once for all consumers, with the unquantized values for other consumers.

    Attributes:
        dtype: activation dtype, set even if the unquantized values were dropped.
    """

    rows: QuantizedRows
    unquantized: Tensor | None
    dtype: torch.dtype

    def __len__(self) -> int:
        return len(self.rows.data)

    def as_format(self, format: ActivationFormat) -> Activation:
        """Itself for a consumer of rows, else the unquantized values.

        Raises:
            ValueError: if they were not kept.
        """
        if format.rows and format.exponents == self.rows.exponents:
            return self
        if self.unquantized is None:
            raise ValueError("the unquantized values of this activation were not kept")
        return self.unquantized


@dataclass(frozen=True)
class RowsToNorm:
    """x [T, K], rows may be strided, whose RMSNorm with weight [K] a product computes in its own launch."""

    rows: Tensor
    weight: Tensor
    eps: float

    def __len__(self) -> int:
        return len(self.rows)

    @property
    def dtype(self) -> torch.dtype:
        return self.rows.dtype


Activation = Tensor | QuantizedActivation
"""An activation between the modules of a layer: [T, K]."""
ProductInput = Activation | RowsToNorm
"""What a product may read."""


def as_format(x: Activation, format: ActivationFormat) -> Activation:
    """x for one consumer; unquantized input is returned unchanged, since every FP8 product can quantize it."""
    return x.as_format(format) if isinstance(x, QuantizedActivation) else x


def unquantized(x: Activation) -> Tensor:
    """x in its dtype. Raises ValueError if the unquantized values were not kept."""
    values = as_format(x, UNQUANTIZED)
    assert isinstance(values, Tensor)
    return values


def num_blocks(length: int) -> int:
    """Blocks of 128 that cover `length`."""
    return -(-length // BLOCK)
