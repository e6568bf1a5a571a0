"""Valid rows of an expert batch whose groups have gaps: activation and quantization work on these rows only.

Legend: G groups (experts), C capacity, M rows, K channels, I width of an MLP.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from moe_engine.kernels.quantization.protocol import QuantizedRows, empty_columns
from moe_engine.kernels.quantization.reference import as_exponents, quantize_rows, silu_mul


@dataclass(frozen=True)
class RowGroups:
    """The valid rows of each group, known on the device only.

    Attributes:
        sizes: int32 [G]. Padded groups [G, C]: number of rows. Aligned groups [M]: end of the rows (DeepGEMM's psum
            layout, DeepEP's `psum_num_recv_tokens_per_expert`).
        alignment: 0: padded groups; else a group starts at the next multiple of it after the end of the previous group.
    """

    sizes: Tensor
    alignment: int = 0

    @property
    def starts(self) -> Tensor:
        """First row of each aligned group, int32 [G]."""
        before = F.pad(self.sizes[:-1], (1, 0))
        return before.add(self.alignment - 1).div(self.alignment, rounding_mode="floor").mul(self.alignment)

    @property
    def counts(self) -> Tensor:
        """Rows of each group, int32 [G]."""
        return self.sizes - self.starts if self.alignment else self.sizes


def empty_rows(x: Tensor, width: int, exponents: bool) -> QuantizedRows:
    """Uninitialized rows of `width` channels in the layout of x. Scales are column-major in each padded group, the
    order in which DeepGEMM's masked products read them."""
    *groups, count = x.shape[:-1]
    return QuantizedRows.empty(count, width, x.device, tuple(groups), exponents)


def empty_exponents(scales: Tensor) -> Tensor:
    """Uninitialized exponents of scales [.., K / 128], in the order of `empty_rows`."""
    *padded, rows, blocks = scales.shape
    return empty_columns(rows, -(-blocks // 4), scales.device, tuple(padded), torch.int32)


def pack_scales(scales: Tensor, groups: RowGroups) -> Tensor:
    """scales [G, C, K / 128] or [M, K / 128] float32, powers of two in the valid rows -> their exponents, four in each
    int32, in the order of `empty_rows`; other rows are unspecified."""
    return empty_exponents(scales).copy_(as_exponents(scales))


def quantize_groups(x: Tensor, groups: RowGroups, power_of_two: bool = False, exponents: bool = False) -> QuantizedRows:
    """x [G, C, K] or [M, K] -> its valid rows quantized, in the same layout; other rows are unspecified."""
    rows = quantize_rows(x.flatten(0, -2), power_of_two, exponents)
    out = empty_rows(x, x.shape[-1], exponents)
    out.data.copy_(rows.data.view_as(out.data))
    out.scales.copy_(rows.scales.reshape(out.scales.shape))
    return out


def silu_mul_quantize_groups(
    gate_up: Tensor, groups: RowGroups, power_of_two: bool = False, exponents: bool = False, limit: float = 0.0,
    weights: Tensor | None = None,
) -> QuantizedRows:  # fmt: skip
    """gate_up [G, C, 2I] or [M, 2I], gate first -> silu(gate) * up of its valid rows, quantized. limit: as in
    `Ops.silu_and_mul`. weights: float32 [M], factors of aligned rows."""
    return quantize_groups(_weighted_silu_mul(gate_up, limit, weights), groups, power_of_two, exponents)


def silu_mul_groups(gate_up: Tensor, groups: RowGroups, limit: float = 0.0, weights: Tensor | None = None) -> Tensor:
    """The same, unquantized: [G, C, I] or [M, I]."""
    return _weighted_silu_mul(gate_up, limit, weights).to(gate_up.dtype)


def _weighted_silu_mul(gate_up: Tensor, limit: float, weights: Tensor | None) -> Tensor:
    active = silu_mul(gate_up, limit)
    return active if weights is None else active * weights.unsqueeze(1)


def scale_groups(rows: Tensor, weights: Tensor, groups: RowGroups) -> Tensor:
    """rows [M, K] *= weights float32 [M], in place, at least for the valid rows. Returns rows."""
    return rows.mul_(weights.unsqueeze(1))
