"""Zero experts (LongCat-Flash): experts whose result is their input. The router chooses them like others; their choices
are -1, as of experts that no rank holds.

Legend: T tokens, D hidden, K experts per token.
"""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

AddInput = Callable[[Tensor, Tensor, Tensor, Tensor | None], Tensor]
"""(x, weights, ids, add): x [T, D], weights float32 [T, K], ids [T, K] -> new memory [T, D] in x's dtype: add + x * w,
with w the sum of the weights whose id is -1, in float32. add: [T, D] in x's dtype; None: 0."""


def add_input(x: Tensor, weights: Tensor, ids: Tensor, add: Tensor | None = None) -> Tensor:
    """`AddInput` in torch, for any device."""
    of_input = weights.masked_fill(ids >= 0, 0.0).sum(1, keepdim=True)  # [T, 1]
    out = x.float() * of_input
    return (out if add is None else out + add).to(x.dtype)
