"""The custom all-reduce of a group: kernels over symmetric memory for rows up to a size, the group's own above.

Legend: T tokens, D hidden.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from moe_engine.kernels.permutation.protocol import ExpertRows
from moe_engine.kernels.permutation.triton_permute import TritonPermutation
from moe_engine.kernels.quantization.protocol import ActivationFormat
from moe_engine.kernels.symm_mem.all_reduce import SymmMemAllReduce
from moe_engine.kernels.symm_mem.all_reduce_layout import MAX_BYTES, Arenas
from moe_engine.parallel.collectives import Group, PeerLost
from moe_engine.parallel.dispatch.symm_mem.memory import SymmetricMemory

logger = logging.getLogger("moe_engine")


class CustomAllReduce:
    """Sums of rows [T, D] over the ranks of a group. Collective: all ranks make the same calls in the same order.

    Raises:
        ValueError: the ranks cannot access each other's memory.
    """

    def __init__(self, group: Group, width: int, dtype: torch.dtype, memory: SymmetricMemory) -> None:
        self._group = group
        arenas = Arenas(group.size, width, dtype.itemsize)
        shared = self._shared = memory.allocate(group, arenas.num_bytes)  # kept alive for the addresses
        self._lost = memory.words_for_host(group.size)
        self._permutation = TritonPermutation()
        self._kernels = SymmMemAllReduce(arenas, group.rank, shared.own, shared.addresses, self._lost, group.timeout_s)

    def sum(self, x: Tensor) -> Tensor:
        """x [T, D] -> the sum over the ranks, bit-identical on all ranks; may overwrite x."""
        if x.nbytes > MAX_BYTES:
            return self._group.all_reduce(x)
        return self._kernels.sum(x)

    def add_rms_norm(
        self,
        plain: Callable[[Tensor, Tensor, Tensor, float], Any],
        format: ActivationFormat,
        x: Tensor,
        residual: Tensor,
        weight: Tensor,
        eps: float,
    ) -> Any:
        """residual [T, D] += the sum of x [T, D] over the ranks, in place; returns its norm, in one launch.

        Args:
            plain: the norm of a summed x in the same format, used above the kernels' size.
            format: of the result; its rows are written if it has any.
        """
        if x.nbytes > MAX_BYTES:
            return plain(self._group.all_reduce(x), residual, weight, eps)
        return self._kernels.add_rms_norm(format, x, residual, weight, eps)

    def add_rows_rms_norm(
        self,
        plain: Callable[[Tensor, Tensor, Tensor, float], Any],
        format: ActivationFormat,
        rows: ExpertRows,
        residual: Tensor,
        weight: Tensor,
        eps: float,
    ) -> Any:
        """`add_rms_norm` of the experts' sums; few are summed by the same launch."""
        if residual.nbytes <= MAX_BYTES and self._kernels.sums_rows(len(residual)):
            return self._kernels.add_rms_norm(format, rows, residual, weight, eps)
        x = self._permutation.combine(rows.rows, rows.positions, rows.weights, rows.add)
        return self.add_rms_norm(plain, format, x, residual, weight, eps)

    def check_peers(self) -> None:
        """Raises `PeerLost` if a kernel has reported a timeout on a peer; never waits."""
        if late := self._kernels.lost_ranks():
            raise PeerLost.late("all-reduce", self._group, late)


def connect(group: Group, width: int, dtype: torch.dtype, memory: SymmetricMemory) -> CustomAllReduce | None:
    """The group's custom all-reduce, on all ranks or on none: if a rank cannot access the other ranks' memory, all use
    the group's own all-reduce. Collective."""
    try:
        return CustomAllReduce(group, width, dtype, memory)
    except ValueError as error:  # raised by all ranks
        logger.warning("no custom all-reduce, the ranks use NCCL: %s", error)
        return None
