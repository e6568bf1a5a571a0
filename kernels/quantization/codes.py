"""Weights of 4 or 8 bits with a scale per group of columns (`forms`), on their way from a checkpoint to a kernel.

Legend: N out-features, K in-features, G groups.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from moe_engine.kernels.quantization.forms import FP4, GroupCodes

SCALE_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass(frozen=True)
class CodedWeight:
    """A weight [N, K] on its way from a checkpoint to a kernel, which packs it.

    Attributes:
        codes: uint8 [N, K], one a byte.
        scales: [N, G] in the format's dtype.
        zeros: uint8 [N, G], or None.
    """

    codes: Tensor
    scales: Tensor
    zeros: Tensor | None
    format: GroupCodes

    @classmethod
    def empty(cls, format: GroupCodes, n: int, k: int, device: torch.device | str) -> CodedWeight:
        """Uninitialised memory for a weight [n, k]."""
        groups = k // format.group_of(k)
        return cls(
            torch.empty(n, k, dtype=torch.uint8, device=device),
            torch.empty(n, groups, dtype=SCALE_DTYPES[format.scales], device=device),
            torch.empty(n, groups, dtype=torch.uint8, device=device) if format.zeros else None,
            format,
        )

    def rows(self, start: int, stop: int) -> CodedWeight:
        """A view of rows [start, stop)."""
        zeros = None if self.zeros is None else self.zeros[start:stop]
        return CodedWeight(self.codes[start:stop], self.scales[start:stop], zeros, self.format)

    def randomize(self, deviation: float, normal: Callable[[Tensor, float], None]) -> None:
        """Values of that deviation; `normal(tensor, deviation)` fills a contiguous tensor."""
        format, noise = self.format, torch.empty(self.codes.shape, device=self.codes.device)
        spread = format.middle / 4
        normal(noise, spread)
        if format.values == FP4:
            self.codes.copy_(noise.add_(8).clamp_(0, 15).round_())
            spread = 3.0  # of the values of codes near 8: about
        else:
            self.codes.copy_(noise.add_(format.middle).clamp_(0, 2 * format.middle - 1).round_())
        self.scales.fill_(deviation / spread)
        if self.zeros is not None:
            self.zeros.fill_(format.middle)

    def dequantized(self) -> Tensor:
        """float32 [N, K]: the values by definition."""
        format, (n, k) = self.format, self.codes.shape
        if format.bits == 4:
            table = torch.tensor(format.table(), device=self.codes.device)
            values = table[self.codes.long()]
        else:
            values = self.codes.float() - (0 if format.zeros else format.middle)
        grouped = values.view(n, -1, format.group_of(k))
        if self.zeros is not None:
            grouped = grouped - self.zeros.float().unsqueeze(-1)
        return (grouped * self.scales.float().unsqueeze(-1)).view(n, k)
