"""All-reduce of rows through symmetric memory: the launches of a rank.

Legend: T rows, D hidden.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from moe_engine.kernels.quantization.protocol import ActivationFormat, QuantizedActivation, QuantizedRows
from moe_engine.kernels.symm_mem.all_reduce_layout import PROGRAMS, Arenas
from moe_engine.kernels.symm_mem.triton_all_reduce import (
    constants_of,
    form_constants,
    one_shot_kernel,
    two_shot_kernel,
    warps_of,
)


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
        self._launch(x, None, None, out, None, 0.0, form_constants(False, False, True, False))
        return out

    def add_rms_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> Tensor:
        """`Ops.add_rms_norm` of the sum of x over the ranks."""
        out = torch.empty_like(residual)
        self._launch(x.contiguous(), residual, weight, out, None, eps, form_constants(True, False, True, False))
        return out

    def add_rms_norm_quantized(
        self, format: ActivationFormat, x: Tensor, residual: Tensor, weight: Tensor, eps: float
    ) -> QuantizedActivation:
        """`QuantizedNorms.add_rms_norm` of the sum of x over the ranks."""
        out = torch.empty_like(residual) if format.unquantized else None
        rows = QuantizedRows.empty(len(x), self._arenas.width, x.device, exponents=format.exponents)
        form = form_constants(True, True, format.unquantized, format.power_of_two)
        self._launch(x.contiguous(), residual, weight, out, rows, eps, form)
        return QuantizedActivation(rows, out, x.dtype)

    def _launch(
        self, x: Tensor, residual: Tensor | None, weight: Tensor | None, out: Tensor | None,
        rows: QuantizedRows | None, eps: float, form: dict[str, bool],
    ) -> None:  # fmt: skip
        """residual and out are contiguous."""
        count = len(x)
        if not count:
            return
        one_shot = self._arenas.is_one_shot(count)
        units = count if one_shot else -(-count // self._arenas.num_ranks)
        kernel = one_shot_kernel if one_shot else two_shot_kernel
        data, scales, stride = (None, None, 0) if rows is None else (rows.data, rows.scales, rows.scale_stride)
        kernel[(min(units, PROGRAMS),)](
            x, residual, weight, out, data, scales, self._peers, self._epochs, self._failed, self._lost,
            count, stride, self._rank, eps, self._limit_ns, **self._constants[one_shot], **form,
            num_warps=self._warps,
        )  # fmt: skip
