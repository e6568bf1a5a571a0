"""All-reduce of rows through symmetric memory: the launches of a rank.

Legend: T rows, D hidden.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from moe_engine.kernels.permutation.protocol import ExpertRows
from moe_engine.kernels.quantization.protocol import Activation, ActivationFormat, QuantizedActivation, QuantizedRows
from moe_engine.kernels.symm_mem.all_reduce_layout import PROGRAMS, Arenas
from moe_engine.kernels.symm_mem.triton_all_reduce import (
    constants_of,
    form_constants,
    one_shot_kernel,
    rows_constants,
    two_shot_kernel,
    warps_of,
)
from moe_engine.kernels.triton.launch import row_stride, with_contiguous_rows


class SymmMemAllReduce:
    """The launches of one rank, without host synchronization. Collective: all ranks make the same calls in the same
    order, on one stream.

    Args:
        memory: uint8, `arenas.num_bytes` zeroed bytes, accessible to all ranks.
        addresses: this rank's addresses of every rank's memory, its own included.
        lost: int32 [R], initially zero, written by the device and read by the host without waiting: timed-out ranks.
        limit_s: timeout of a kernel's wait for other ranks.
    """

    def __init__(
        self, arenas: Arenas, rank: int, memory: Tensor, addresses: Sequence[int], lost: Tensor, limit_s: float
    ) -> None:
        self._arenas = arenas
        self._rank = rank
        self._memory = memory  # kept alive: kernels hold only its address
        self._lost = lost
        self._limit_ns = int(limit_s * 1e9)
        self._peers = torch.tensor(list(addresses), dtype=torch.int64, device=memory.device)
        self._epochs = torch.zeros(2, PROGRAMS, dtype=torch.int64, device=memory.device)
        self._failed = torch.zeros(1, dtype=torch.int64, device=memory.device)
        self._constants = {one_shot: constants_of(arenas, one_shot) for one_shot in (True, False)}
        self._warps = warps_of(arenas.width)

    def lost_ranks(self) -> list[int]:
        """Ranks that a kernel timed out on, as far as visible to the host."""
        return self._lost.nonzero().flatten().tolist()

    def sum(self, x: Tensor) -> Tensor:
        """x [T, D] -> the sum over the ranks, new memory."""
        x = x.contiguous()
        out = torch.empty_like(x)
        self._launch(x, len(x), None, None, out, None, 0.0, form_constants(False, False, True, False))
        return out

    def sums_rows(self, num_tokens: int) -> bool:
        """Whether `add_rms_norm` takes experts' rows: a one-shot launch sums each row in a program of its own, and a
        two-shot launch would sum several one after the other."""
        return self._arenas.is_one_shot(num_tokens)

    def add_rms_norm(
        self, format: ActivationFormat, x: Tensor | ExpertRows, residual: Tensor, weight: Tensor, eps: float
    ) -> Activation:
        """`Ops.add_rms_norm` or `QuantizedNorms.add_rms_norm` of the sum of x over the ranks; of experts' rows if it
        `sums_rows`."""
        count, width = residual.shape
        out = torch.empty_like(residual) if format.unquantized else None
        rows = QuantizedRows.empty(count, width, residual.device, exponents=format.exponents) if format.rows else None
        form = form_constants(True, format.rows, format.unquantized, format.power_of_two)
        self._launch(x, count, residual, weight, out, rows, eps, form)
        if rows is not None:
            return QuantizedActivation(rows, out, residual.dtype)
        assert out is not None
        return out

    def _launch(
        self, x: Tensor | ExpertRows, count: int, residual: Tensor | None, weight: Tensor | None, out: Tensor | None,
        rows: QuantizedRows | None, eps: float, form: dict[str, bool],
    ) -> None:  # fmt: skip
        """residual and out are contiguous."""
        if not count:
            return
        one_shot = self._arenas.is_one_shot(count)
        inputs, more = _inputs(x) if one_shot else ((x.contiguous(),), {})  # type: ignore[union-attr]
        units = count if one_shot else -(-count // self._arenas.num_ranks)
        kernel = one_shot_kernel if one_shot else two_shot_kernel
        data, scales, stride = (None, None, 0) if rows is None else (rows.data, rows.scales, rows.scale_stride)
        kernel[(min(units, PROGRAMS),)](
            *inputs, residual, weight, out, data, scales, self._peers, self._epochs, self._failed, self._lost,
            count, stride, self._rank, eps, self._limit_ns, **self._constants[one_shot], **form, **more,
            num_warps=self._warps,
        )  # fmt: skip


def _inputs(x: Tensor | ExpertRows) -> tuple[tuple[Tensor | None, ...], dict[str, Any]]:
    """The first arguments of a one-shot launch, and their constants."""
    if isinstance(x, Tensor):
        return (x.contiguous(), None, None, None), rows_constants()
    weights = with_contiguous_rows(x.weights)
    add = None if x.add is None else x.add.contiguous()
    more = rows_constants(x.positions.shape[1], row_stride(weights), add is not None)
    return (x.rows, x.positions, weights, add), more
