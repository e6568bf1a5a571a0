"""Writes by index in a random order: of several values for one place a GPU keeps any, the CPU the last one."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

aten = torch.ops.aten
_random = torch.Generator().manual_seed(0)


def compute(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """An operator over host memory."""
    if op in (aten.index_copy.out, aten.index_copy_.default, aten.index_copy.default):
        x, dim, index, source = args
        order = _order(index.numel())
        args = x, dim, index.reshape(-1)[order], source.index_select(dim, order) if source.dim() else source
    elif op in (aten.scatter.src_out, aten.scatter_.src, aten.scatter.src):
        x, dim, index, source = args
        if index.dim() and index.numel():
            order = _order(index.shape[dim])
            source = source[tuple(map(slice, index.shape))]
            args = x, dim, index.index_select(dim, order), source.index_select(dim, order)
    elif op in (aten._index_put_impl_.default, aten.index_put_.default, aten.index_put.default):
        x, indices, values, *rest = args
        if not any(rest) and not kwargs.get("accumulate") and _are_rows(indices, values):
            order = _order(len(values))
            args = x, [index[order] for index in indices], values[order], *rest
    return op(*args, **kwargs)


def _are_rows(indices: list[Tensor | None], values: Tensor) -> bool:
    """Whether each index has one place for each row of the values."""
    return values.dim() > 0 and all(
        index is not None and index.dim() == 1 and index.dtype != torch.bool and len(index) == len(values)
        for index in indices
    )


def _order(count: int) -> Tensor:
    return torch.randperm(count, generator=_random)
