"""Factors of query heads by position, scale * ln(position + 1) + bias (Mistral Large 4), in torch.

Legend: T tokens, H heads, N channels of a query.
"""

from __future__ import annotations

from typing import Protocol

from torch import Tensor
from torch.nn.functional import pad


class ScaleHeads(Protocol):
    def __call__(self, q: Tensor, positions: Tensor, scale: Tensor, bias: Tensor, zeros: int = 0) -> Tensor:
        """q [T, H, N], rows may be strided; positions [T] int64; scale and bias [H] float32 -> q times the factor of
        its token and head, with `zeros` channels after it: [T, H, N + zeros], new memory. In float32, rounded once."""


def scale_heads(q: Tensor, positions: Tensor, scale: Tensor, bias: Tensor, zeros: int = 0) -> Tensor:
    """`ScaleHeads`."""
    factors = (positions + 1).float().log().unsqueeze(1) * scale + bias  # [T, H]
    scaled = (q.float() * factors.unsqueeze(2)).to(q.dtype)
    return pad(scaled, (0, zeros)) if zeros else scaled  # `pad` by nothing copies
