"""Sums of chosen rows against float64, for every function that computes them."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor


def check_row_sums(
    sums: Callable[[Tensor, Tensor, Tensor | None], Tensor], dtype: torch.dtype, hidden: int, top_k: int, weighted: bool
) -> None:
    """Sums are rounded once, weights (in non-adjacent rows) are not rounded to the rows' dtype, and rows that no token
    names are never read."""
    generator = torch.Generator().manual_seed(3)
    rows = torch.randn(20, hidden, generator=generator).to(dtype)
    positions = torch.randint(-1, 19, (30, top_k), generator=generator, dtype=torch.int32)
    positions[4] = -1
    rows[19] = float("nan")
    weights = torch.rand(30, top_k + 2, generator=generator)[:, :top_k] if weighted else None
    exact = torch.zeros(30, hidden, dtype=torch.float64)
    size = torch.zeros_like(exact)
    for n in range(30):
        for s, row in enumerate(positions[n].tolist()):
            if row >= 0:
                term = rows[row].double() * (1.0 if weights is None else float(weights[n, s]))
                exact[n] += term
                size[n] += term.abs()
    found = sums(rows, positions, weights)
    assert found.dtype == dtype
    half_step = torch.finfo(dtype).eps / 2
    assert bool(((found.double() - exact).abs() <= exact.abs() * half_step * 1.01 + size * 2e-5 + 1e-7).all())
