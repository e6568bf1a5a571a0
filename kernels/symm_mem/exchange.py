"""Dispatch and combine through symmetric memory: the launches of a rank.

Legend: T tokens, K experts per token, M max tokens of a rank, El experts of a rank, R ranks, C rows per expert,
D hidden.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import triton
from torch import Tensor

from moe_engine.kernels.quantization.protocol import (
    BLOCK,
    FP8,
    UNQUANTIZED,
    Activation,
    ActivationFormat,
    QuantizedActivation,
    QuantizedRows,
)
from moe_engine.kernels.symm_mem.regions import RETURNED, SENT, Regions
from moe_engine.kernels.symm_mem.tiles import TILES
from moe_engine.kernels.symm_mem.triton_combine import (
    combine_send_constants,
    combine_send_kernel,
    sum_constants,
    sum_kernel,
)
from moe_engine.kernels.symm_mem.triton_dispatch import receive_constants, receive_kernel, send_constants, send_kernel
from moe_engine.kernels.triton.grid_barrier import COOPERATIVE, resident_programs

STATE_WORDS = 16
"""Per slot: the epoch, a ticket of send and of combine_send, a barrier of receive and of sum; slots in separate cache
lines."""


@dataclass(frozen=True)
class Arrival:
    """Result of a dispatch, valid until the next dispatch of its slot.

    Attributes:
        rows: [El, C, D], the first counts[e] of expert e: in the activation dtype, or e4m3 with scales.
        scales: float32 [El, C, D / 128], column-major per expert if the experts read them so; or None.
        counts: int32 [El].
    """

    rows: Tensor
    scales: Tensor | None
    counts: Tensor


class SymmMemExchange:
    """The launches of one rank. Collective: all ranks make the same calls in the same order.

    Args:
        regions: layout of every slot; the same on all ranks.
        memory: uint8, `regions.num_bytes(num_slots)` zeroed bytes, accessible to all ranks.
        addresses: this rank's addresses of every rank's memory, its own included.
        lost: int32 [R], initially zero, written by the device and read by the host without waiting: timed-out ranks.
        limit_s: timeout of a kernel's wait for other ranks.
    """

    def __init__(
        self, regions: Regions, num_slots: int, rank: int, memory: Tensor, addresses: Sequence[int], lost: Tensor,
        limit_s: float, dtype: torch.dtype,
    ) -> None:  # fmt: skip
        self._regions = regions
        self._rank = rank
        self._memory = memory  # kept alive: kernels hold only its address
        self._lost = lost
        self._limit_ns = int(limit_s * 1e9)
        device = memory.device
        self._slots = [regions.slot(number) for number in range(num_slots)]
        self._dtype, self._programs = dtype, resident_programs(device)
        self._peers = torch.tensor(list(addresses), dtype=torch.int64, device=device)
        self._state = torch.zeros(num_slots, STATE_WORDS, dtype=torch.int64, device=device)
        self._failed = torch.zeros(1, dtype=torch.int64, device=device)

        def words(*shape: int) -> list[Tensor]:
            return [torch.zeros(*shape, dtype=torch.int32, device=device) for _ in self._slots]

        self._targets = words(regions.max_tokens, regions.num_ranks)
        self._positions = words(regions.capacity, regions.top_k)
        self._counts = words(regions.num_local)
        self._partial = words(self._programs, triton.next_power_of_2(regions.num_local))
        self._arrivals: list[dict[tuple[bool, bool], Arrival]] = [{} for _ in self._slots]
        """Batches by (rows stay FP8, their scales are column-major)."""

    def _arrival(self, number: int, rows: bool, columns: bool) -> Arrival:
        """Memory of a slot's batch, allocated by the first dispatch with this format: before a graph is captured."""
        found = self._arrivals[number].get((rows, columns))
        if found is None:
            regions, memory = self._regions, self._memory
            shape = (regions.num_local, regions.capacity, regions.hidden)
            scales, blocks = None, regions.hidden // BLOCK
            if rows and columns:
                padded = memory.new_empty(regions.num_local, blocks, self._scale_stride, dtype=torch.float32)
                scales = padded[..., : regions.capacity].transpose(1, 2)
            elif rows:
                scales = memory.new_empty(*shape[:2], blocks, dtype=torch.float32)
            batch = memory.new_empty(shape, dtype=FP8 if rows else self._dtype)
            found = self._arrivals[number][rows, columns] = Arrival(batch, scales, self._counts[number])
        return found

    @property
    def _scale_stride(self) -> int:
        return -(-self._regions.capacity // 4) * 4

    def lost_ranks(self) -> list[int]:
        """Ranks that a kernel timed out on, as far as visible to the host."""
        return self._lost.nonzero().flatten().tolist()

    def dispatch(
        self, x: Activation, ids: Tensor, weights: Tensor, number: int, format: ActivationFormat = UNQUANTIZED
    ) -> Arrival:
        """Dispatches x [T, D] to experts ids int32 [T, K] with weights float32 [T, K], through slot `number`.

        Args:
            x: may be quantized if dispatch is FP8.
            format: the experts' activation format: sets the FP8 scales; FP8 rows are dequantized unless it has `rows`.
        """
        self.send(x, ids, weights, number, format.power_of_two)
        return self.receive(number, widen=not format.rows, columns=format.rows and format.column_scales)

    def combine(self, rows: Tensor, num_tokens: int, number: int) -> Tensor:
        """rows [El, C, D], the experts' results -> the weighted sums [T, D] of this rank's T tokens, in rows' dtype."""
        self.combine_send(rows, number)
        return self.sum(num_tokens, rows.dtype, number)

    # -- the same in single launches

    def send(self, x: Activation, ids: Tensor, weights: Tensor, number: int, power_of_two: bool = False) -> None:
        """Sends rows, choices and weights, and begins the slot's next epoch. Does not wait."""
        regions, slot = self._regions, self._slots[number]
        ids, weights = ids.contiguous(), weights.float().contiguous()
        data, scales, stride = x if isinstance(x, QuantizedActivation) else x.contiguous(), None, 0
        if isinstance(x, QuantizedActivation):
            data, scales, stride = x.rows.data.view(torch.uint8), x.rows.scales, x.rows.scale_stride
        constants = send_constants(
            regions.top_k, regions.hidden, regions.num_local, regions.num_ranks, regions.fp8, power_of_two,
            scales is not None,
        )  # fmt: skip
        send_kernel[(max(len(ids), 1),)](
            data, scales, ids, weights, self._targets[number], self._peers, self._state[number], self._failed, stride,
            len(ids), self._rank, regions.max_tokens, slot.sizes, slot.ids, slot.weights, slot.rows, slot.scales,
            slot.flags[SENT], **constants, num_warps=TILES.row_warps,
        )  # fmt: skip

    def receive(self, number: int, widen: bool = True, columns: bool = False) -> Arrival:
        """Waits for the tokens of all ranks. `widen`: dequantizes FP8 rows. `columns`: column-major scales."""
        regions, slot = self._regions, self._slots[number]
        stays = regions.fp8 and not widen
        arrival = self._arrival(number, stays, stays and columns)
        constants = receive_constants(
            regions.top_k, regions.hidden, regions.num_local, regions.num_ranks, regions.fp8, regions.fp8 and widen,
            stays and columns,
        )  # fmt: skip
        rows = arrival.rows.view(torch.uint8) if stays else arrival.rows
        receive_kernel[(min(self._programs, regions.capacity),)](
            self._peers, self._state[number], self._failed, self._lost, self._partial[number], self._positions[number],
            arrival.counts, rows, arrival.scales, self._rank, regions.max_tokens, self._scale_stride, self._limit_ns,
            slot.sizes, slot.ids, slot.rows, slot.scales, slot.flags[SENT], **constants, num_warps=TILES.row_warps,
            **COOPERATIVE,
        )  # fmt: skip
        return arrival

    def combine_send(self, rows: Tensor, number: int) -> None:
        """Sends each token's weighted sum over this rank's experts. Does not wait."""
        regions, slot = self._regions, self._slots[number]
        combine_send_kernel[(min(TILES.return_programs, regions.capacity),)](
            rows.contiguous(), self._positions[number], self._peers, self._state[number], self._failed, self._rank,
            regions.max_tokens, slot.sizes, slot.weights, slot.returned, slot.flags[RETURNED],
            **combine_send_constants(regions.top_k, regions.hidden, regions.num_ranks), num_warps=TILES.row_warps,
        )  # fmt: skip

    def sum(self, num_tokens: int, dtype: torch.dtype, number: int) -> Tensor:
        """Sums over the ranks, after waiting for all of them."""
        out = torch.empty(num_tokens, self._regions.hidden, dtype=dtype, device=self._memory.device)
        self._sum(number, num_tokens, None, None, None, out, None, 0.0, None)
        return out

    def sum_rms_norm(
        self, format: ActivationFormat, other: Tensor | None, residual: Tensor, weight: Tensor, eps: float, number: int
    ) -> Activation:
        """residual [T, D] += `sum` (+ other), in place; its RMSNorm in `format`. In the dtype of the rows, contiguous.

        Raises:
            ValueError: residual is not contiguous.
        """
        if not residual.is_contiguous():
            raise ValueError("sum_rms_norm needs a contiguous residual")
        count, hidden = residual.shape
        other = None if other is None else other.contiguous()
        normed = torch.empty_like(residual) if format.unquantized else None
        rows = None
        if format.rows:
            rows = QuantizedRows.empty(count, hidden, residual.device, exponents=format.exponents)
        self._sum(number, count, other, residual, weight, normed, rows, eps, format)
        if rows is not None:
            return QuantizedActivation(rows, normed, residual.dtype)
        assert normed is not None
        return normed

    def _sum(
        self, number: int, num_tokens: int, other: Tensor | None, residual: Tensor | None, weight: Tensor | None,
        out: Tensor | None, rows: QuantizedRows | None, eps: float, format: ActivationFormat | None,
    ) -> None:  # fmt: skip
        regions, slot = self._regions, self._slots[number]
        data, scales, stride = (None, None, 0) if rows is None else (rows.data, rows.scales, rows.scale_stride)
        sum_kernel[(min(self._programs, max(num_tokens, 1)),)](
            self._targets[number], other, residual, weight, out, data, scales, self._peers, self._state[number],
            self._failed, self._lost, num_tokens, stride, self._rank, regions.max_tokens, eps, self._limit_ns,
            slot.returned, slot.flags[RETURNED],
            **sum_constants(regions.hidden, regions.num_ranks, other is not None, format), num_warps=TILES.row_warps,
            **COOPERATIVE,
        )  # fmt: skip
