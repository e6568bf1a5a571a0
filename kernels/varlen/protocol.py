"""Attention within runs of tokens, without a cache and without a mask, for vision towers.

Legend: T tokens, H heads, Dh head width.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from torch import Tensor


class VarlenKernel(Protocol):
    name: str

    def run(self, q: Tensor, k: Tensor, v: Tensor, lens: Sequence[int], scale: float) -> Tensor:
        """q, k, v [T, H, Dh] (strided views allowed) -> [T, H, Dh] contiguous; softmax in float32.

        Args:
            lens: tokens of each run, in order, with the sum T; a token attends to all tokens of its run.
        """
