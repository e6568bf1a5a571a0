"""Dispatch and combine through symmetric memory: the launches of a rank.

Legend: T tokens, K experts per token, M max tokens of a rank, El experts of a rank, R ranks, C rows per expert,
D hidden.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

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
)
from moe_engine.kernels.symm_mem.regions import COUNTED, RETURNED, SENT, Regions, Slot
from moe_engine.kernels.symm_mem.tiles import TILES
from moe_engine.kernels.symm_mem.triton_combine import (
    combine_send_constants,
    combine_send_kernel,
    sum_constants,
    sum_kernel,
)
from moe_engine.kernels.symm_mem.triton_dispatch import (
    notify_constants,
    notify_kernel,
    receive_constants,
    receive_kernel,
    send_constants,
    send_kernel,
)

STATE_WORDS = 16  # per slot: the epoch, and a ticket per kernel that raises flags; slots in separate cache lines


@dataclass(frozen=True)
class Arrival:
    """Result of a dispatch, valid until the next dispatch of its slot.

    Attributes:
        rows: [El, C, D] in the activation dtype, the first counts[e] of expert e; empty if FP8 rows are passed on
            quantized.
        sent: the rows as dispatched, e4m3 [El, C, D], and their scales float32 [El, C, D / 128], column-major per
            expert if the experts read them so; None without FP8.
        counts: int32 [El].
        positions: int32 [M * K]: row index of each of this rank's pairs at its expert, -1: not sent.
    """

    rows: Tensor
    sent: tuple[Tensor, Tensor] | None
    counts: Tensor
    positions: Tensor


class SymmMemExchange:
    """The launches of one rank. Collective: all ranks make the same calls in the same order.

    Args:
        regions: of every slot; the same on all ranks.
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
        self._peers = torch.tensor(list(addresses), dtype=torch.int64, device=device)
        self._state = torch.zeros(num_slots, STATE_WORDS, dtype=torch.int64, device=device)
        self._numbers = [torch.empty(regions.max_pairs, dtype=torch.int32, device=device) for _ in self._slots]
        self._failed = torch.zeros(1, dtype=torch.int64, device=device)
        self._arrivals = [self._make_arrival(slot, dtype) for slot in self._slots]
        self._columns: list[Tensor | None] = [None for _ in self._slots]

    def _make_arrival(self, slot: Slot, dtype: torch.dtype) -> Arrival:
        regions, device = self._regions, self._memory.device
        shape = (regions.num_local, regions.capacity, regions.hidden)

        def part(begin: int, size: tuple[int, ...], kind: torch.dtype) -> Tensor:
            return self._memory[begin : begin + torch.Size(size).numel() * kind.itemsize].view(kind).view(size)

        sent = None
        if regions.fp8:
            rows = torch.empty(0, dtype=dtype, device=device)  # allocated on demand
            sent = part(slot.rows, shape, FP8), part(slot.scales, (*shape[:2], shape[2] // BLOCK), torch.float32)
        else:
            rows = part(slot.rows, shape, dtype)
        counts = torch.zeros(regions.num_local, dtype=torch.int32, device=device)
        return Arrival(rows, sent, counts, torch.full((regions.max_pairs,), -1, dtype=torch.int32, device=device))

    def lost_ranks(self) -> list[int]:
        """Ranks that a kernel timed out on, as far as visible to the host."""
        return self._lost.nonzero().flatten().tolist()

    def dispatch(self, x: Activation, ids: Tensor, number: int, format: ActivationFormat = UNQUANTIZED) -> Arrival:
        """Dispatches x [T, D] to experts ids int32 [T, K], through slot `number`.

        Args:
            x: may be quantized if dispatch is FP8.
            format: the experts' activation format: sets the FP8 scales; FP8 rows are dequantized unless it has `rows`.
        """
        ids = ids.contiguous()
        self.notify(ids, number)
        self.send(x if isinstance(x, QuantizedActivation) else x.contiguous(), ids, number, format.power_of_two)
        return self.receive(number, widen=not format.rows, columns=format.rows and format.column_scales)

    def combine(self, rows: Tensor, weights: Tensor, number: int) -> Tensor:
        """rows [El, C, D], the experts' results, and weights float32 [T, K] -> [T, D] in rows' dtype."""
        self.combine_send(rows.contiguous(), number)
        return self.sum(weights.float().contiguous(), rows.dtype, number)

    # -- the same in single launches; tensors contiguous

    def notify(self, ids: Tensor, number: int) -> None:
        """Sends this rank's row counts and begins the slot's next epoch. Does not wait."""
        regions, slot, ranks = self._regions, self._slots[number], self._regions.num_ranks
        notify_kernel[(ranks,)](
            ids, self._peers, self._state[number], self._numbers[number], ids.numel(), self._rank, slot.counts,
            slot.flags[COUNTED], **notify_constants(regions.num_local, ranks),
            num_warps=TILES.notify_warps,
        )  # fmt: skip

    def send(self, x: Activation, ids: Tensor, number: int, power_of_two: bool = False) -> None:
        """Dispatches rows, after waiting for the counts of all ranks."""
        regions, slot = self._regions, self._slots[number]
        data, scales, stride = x, None, 0
        if isinstance(x, QuantizedActivation):
            data, scales, stride = x.rows.data.view(torch.uint8), x.rows.scales, x.rows.scale_stride
        constants = send_constants(
            ids.shape[1], regions.hidden, regions.num_local, regions.num_ranks, regions.fp8, power_of_two,
            scales is not None,
        )  # fmt: skip
        send_kernel[(max(ids.numel(), 1),)](
            data, scales, ids, self._numbers[number], self._arrivals[number].positions, self._peers,
            self._state[number], self._failed, self._lost, stride, ids.numel(), self._rank, regions.capacity,
            regions.max_pairs, self._limit_ns, slot.counts, slot.flags[COUNTED], slot.flags[SENT], slot.origins,
            slot.rows, slot.scales, **constants, num_warps=TILES.row_warps,
        )  # fmt: skip

    def receive(self, number: int, widen: bool = True, columns: bool = False) -> Arrival:
        """Waits for the rows of all ranks. `widen`: dequantizes FP8 rows. `columns`: transposes their scales."""
        regions, slot, arrival = self._regions, self._slots[number], self._arrivals[number]
        widens = regions.fp8 and widen
        if widens and not arrival.rows.numel():
            assert arrival.sent is not None
            arrival = replace(arrival, rows=arrival.rows.new_empty(arrival.sent[0].shape))
            self._arrivals[number] = arrival
        transposes, scales = regions.fp8 and columns, None
        if transposes:
            assert arrival.sent is not None
            scales = self._columns[number]
            if scales is None:
                blocks = regions.hidden // BLOCK
                scales = self._memory.new_empty(
                    regions.num_local, blocks, -(-regions.capacity // 4) * 4, dtype=torch.float32
                )
                self._columns[number] = scales
            by_row = scales[..., : regions.capacity].transpose(1, 2)
            arrival = replace(arrival, sent=(arrival.sent[0], by_row))
        constants = receive_constants(regions.hidden, regions.num_local, regions.num_ranks, widens, transposes)
        receive_kernel[(regions.num_local, TILES.receive_parts if widens or transposes else 1)](
            self._peers, self._state[number], self._failed, self._lost, arrival.counts, arrival.rows, scales,
            self._rank, regions.capacity, -(-regions.capacity // 4) * 4, self._limit_ns, slot.counts,
            slot.flags[SENT], slot.rows, slot.scales, **constants, num_warps=TILES.row_warps,
        )  # fmt: skip
        return arrival

    def combine_send(self, rows: Tensor, number: int) -> None:
        """Sends the experts' results to the tokens' ranks. Does not wait."""
        regions, slot = self._regions, self._slots[number]
        combine_send_kernel[(regions.num_local, TILES.return_parts)](
            rows, self._arrivals[number].counts, self._peers, self._state[number], self._failed, self._rank,
            regions.capacity, regions.max_pairs, slot.origins, slot.returned, slot.flags[RETURNED],
            **combine_send_constants(regions.hidden, regions.num_ranks), num_warps=TILES.row_warps,
        )  # fmt: skip

    def sum(self, weights: Tensor, dtype: torch.dtype, number: int) -> Tensor:
        """Weighted sum, after waiting for the results of all ranks."""
        regions, slot, (num_tokens, top_k) = self._regions, self._slots[number], weights.shape
        out = torch.empty(num_tokens, regions.hidden, dtype=dtype, device=weights.device)
        sum_kernel[(max(num_tokens, 1), triton.cdiv(regions.hidden, TILES.sum_cols))](
            self._arrivals[number].positions, weights, out, self._peers, self._state[number], self._failed, self._lost,
            num_tokens, self._rank, self._limit_ns, slot.returned, slot.flags[RETURNED],
            **sum_constants(top_k, regions.hidden, regions.num_ranks), num_warps=TILES.sum_warps,
        )  # fmt: skip
        return out
