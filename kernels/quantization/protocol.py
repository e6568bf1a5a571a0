"""Block FP8 as DeepSeek V3 stores and computes it: e4m3 numbers with one float32 scale for each block of 128.

Legend: M rows, N out-features, K in-features. A weight has a scale for each 128 x 128, an activation for each row and
128 channels; blocks at the edges are shorter. A value is number * scale. Source: DeepSeek-V3 technical report
(arXiv 2412.19437), section 3.3; inference/kernel.py of its repository.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

BLOCK = 128
FP8 = torch.float8_e4m3fn
FP8_MAX = 448.0
MIN_AMAX = 1e-4  # of a block of activations: keeps the scale of a block of zeros away from 0


@dataclass(frozen=True)
class BlockWeight:
    """W[n, k] = data[n, k] * scales[n div 128, k div 128].

    Attributes:
        data: e4m3 [N, K].
        scales: float32 [ceil(N / 128), ceil(K / 128)].
        power_of_two: activations that meet this weight get scales that are powers of two (scale_fmt ``ue8m0``).
    """

    data: Tensor
    scales: Tensor
    power_of_two: bool = False

    @property
    def num_bytes(self) -> int:
        return self.data.numel() + 4 * self.scales.numel()

    @classmethod
    def empty(cls, n: int, k: int, device: torch.device | str, power_of_two: bool = False) -> BlockWeight:
        """Uninitialised memory for a weight [N, K]."""
        data = torch.empty(n, k, dtype=FP8, device=device)
        return cls(data, torch.empty(num_blocks(n), num_blocks(k), device=device), power_of_two)

    def rows(self, start: int, stop: int) -> BlockWeight:
        """A view of rows [start, stop). `start` is a multiple of 128; so is `stop`, or it is the end.

        Raises:
            ValueError: the rows cut a block.
        """
        if start % BLOCK or (stop % BLOCK and stop != self.data.shape[0]):
            raise ValueError(f"rows {start}:{stop} of {self.data.shape[0]} cut a block of {BLOCK}")
        return BlockWeight(
            self.data[start:stop], self.scales[start // BLOCK : num_blocks(stop)], power_of_two=self.power_of_two
        )


@dataclass(frozen=True)
class QuantizedRows:
    """x[m, k] = data[m, k] * scales[m, k div 128].

    Attributes:
        data: e4m3 [M, K], contiguous.
        scales: float32 [M, ceil(K / 128)], column-major: one block's scales of all rows lie side by side, which is how
            a product reads them, and each column starts at a multiple of 16 bytes.
    """

    data: Tensor
    scales: Tensor

    @classmethod
    def empty(cls, m: int, k: int, device: torch.device | str) -> QuantizedRows:
        """Uninitialised memory for rows [M, K]."""
        columns = torch.empty(num_blocks(k), -(-m // 4) * 4, device=device)
        return cls(torch.empty(m, k, dtype=FP8, device=device), columns[:, :m].t())

    @classmethod
    def of(cls, data: Tensor, scales: Tensor) -> QuantizedRows:
        """Rows [M, K] whose scales [..., ceil(K / 128)] of M rows lie in any strides: copied, column-major."""
        rows, blocks = data.shape[0], scales.shape[-1]
        columns = torch.empty(blocks, -(-rows // 4) * 4, device=data.device)[:, :rows].t()
        columns.unflatten(0, scales.shape[:-1]).copy_(scales)
        return cls(data, columns)

    @property
    def scale_stride(self) -> int:
        """Elements from one block's scale of a row to the next block's."""
        return self.scales.stride(1)


@dataclass(frozen=True)
class ActivationFormat:
    """In which forms a part of a model reads its input.

    Attributes:
        numbers: in the activation dtype.
        rows: quantised, as `QuantizedRows`.
        power_of_two: with scales that are powers of two.
    """

    numbers: bool = True
    rows: bool = False
    power_of_two: bool = False

    @classmethod
    def fp8(cls, power_of_two: bool) -> ActivationFormat:
        """Quantised rows and nothing else."""
        return cls(numbers=False, rows=True, power_of_two=power_of_two)


UNQUANTIZED = ActivationFormat()


def common_format(*parts: ActivationFormat) -> ActivationFormat:
    """What serves all of these at once. Parts that want different scales all get numbers, and quantise themselves."""
    kinds = {part.power_of_two for part in parts if part.rows}
    if len(kinds) != 1:
        return UNQUANTIZED
    return ActivationFormat(any(part.numbers for part in parts), True, kinds.pop())


@dataclass(frozen=True)
class QuantizedActivation:
    """x [T, K] quantised once for all that read it so, with its numbers beside for those that do not.

    Attributes:
        dtype: of the numbers, also where nobody reads them.
    """

    rows: QuantizedRows
    numbers: Tensor | None
    dtype: torch.dtype

    def __len__(self) -> int:
        return len(self.rows.data)

    def as_format(self, format: ActivationFormat) -> Activation:
        """Itself for a reader of rows, else its numbers.

        Raises:
            ValueError: they were not kept.
        """
        if format.rows:
            return self
        if self.numbers is None:
            raise ValueError("an activation that was quantised alone is read as numbers")
        return self.numbers


Activation = Tensor | QuantizedActivation
"""What runs between the parts of a layer: [T, K]."""


def as_format(x: Activation, format: ActivationFormat) -> Activation:
    """x for one of its readers; numbers stay what they are, for whoever multiplies in FP8 can quantise them."""
    return x.as_format(format) if isinstance(x, QuantizedActivation) else x


def unquantized(x: Activation) -> Tensor:
    """x in its dtype. Raises ValueError where that was not kept."""
    numbers = as_format(x, UNQUANTIZED)
    assert isinstance(numbers, Tensor)
    return numbers


def num_blocks(length: int) -> int:
    """Blocks of 128 that cover `length`."""
    return -(-length // BLOCK)
