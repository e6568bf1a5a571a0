"""The rows of a tensor that an operator by index reads or writes: the rest of the tensor is free for other streams."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from tests.simulated_cuda.memory import MEMORY
from tests.simulated_cuda.order import Extent, extent

aten = torch.ops.aten
ALONG = {
    aten.index_copy.out, aten.index_copy_.default, aten.index_select.default, aten.index_select.out,
    aten.index_fill_.int_Scalar, aten.scatter.src_out, aten.scatter_.src, aten.scatter.value_out, aten.scatter_.value,
    aten.gather.default, aten.gather.out,
}  # fmt: skip
"""Operators with (x, dim, index)."""
LISTED = {aten.index.Tensor, aten.index.Tensor_out, aten.index_put_.default, aten._index_put_impl_.default}
"""Operators with (x, indices)."""
READS = {
    aten.index_select.default, aten.index_select.out, aten.gather.default, aten.gather.out, aten.index.Tensor,
    aten.index.Tensor_out,
}  # fmt: skip


def rows_of(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Tensor, Callable[[], Extent]] | None:
    """The tensor that an operator indexes, and its bytes by the current values of the index; None: not by index, or not
    in place."""
    out = kwargs.get("out")
    if op not in ALONG | LISTED or (op not in READS and out is not None and out is not args[0]):
        return None
    x, (dim, index) = args[0], _listed(args[1]) if op in LISTED else args[1:3]
    if not (isinstance(index, Tensor) and x.is_cuda and x.dim() and x.numel()):
        return None
    return x, lambda: _extent(x, dim, index)


def _listed(indices: list[Tensor | None]) -> tuple[int, Tensor | None]:
    """The first dimension with an index of whole numbers, and the index."""
    found = ((dim, index) for dim, index in enumerate(indices) if index is not None)
    dim, index = next(found, (0, None))
    return dim, None if index is None or index.dtype == torch.bool else index


def _extent(x: Tensor, dim: int, index: Tensor) -> Extent:
    places = (MEMORY.host(index) if index.is_cuda else index).reshape(-1).numpy()
    dim, size = dim % x.dim(), x.element_size()
    places = np.unique(np.where(places < 0, places + x.shape[dim], places)).astype(np.int64) * (x.stride(dim) * size)
    for count, step in zip(x.shape[:dim], x.stride()[:dim]):
        places = (np.arange(count)[:, None] * (step * size) + places).reshape(-1)
    first = extent(x[(slice(0, 1),) * (dim + 1)])
    return Extent.of_parts(first.begin + places, first.end - first.begin)
