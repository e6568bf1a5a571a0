"""Tokens to experts and results back through memory that the ranks give to each other: what a host launches.

Legend: T tokens, K experts per token, M most tokens of a rank, El experts of a rank, R ranks, C rows for each expert,
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

STATE_WORDS = 16  # of a slot: the epoch, and a ticket for each kernel that raises flags; slots in lines of their own


@dataclass(frozen=True)
class Arrival:
    """What came of one dispatch, valid until its slot's next.

    Attributes:
        rows: [El, C, D] in the activation dtype, the first counts[e] of expert e; empty where FP8 rows are read as they
            travelled.
        sent: the same as they travelled, e4m3 [El, C, D], and their scales float32 [El, C, D / 128]; None without FP8.
        counts: int32 [El].
        positions: int32 [M * K]: where each of this rank's pairs lies among its expert's rows, -1: it was not sent.
    """

    rows: Tensor
    sent: tuple[Tensor, Tensor] | None
    counts: Tensor
    positions: Tensor


class SymmMemExchange:
    """The launches of one rank. Collective: every rank of the memory calls alike, in one order.

    Args:
        regions: of every slot; alike on all ranks.
        memory: uint8, `regions.num_bytes(num_slots)` zeroed bytes that all ranks reach.
        addresses: where this rank reaches every rank's, its own included.
        lost: int32 [R], zeros that the device writes and the host reads without waiting: ranks that did not come.
        limit_s: how long a kernel waits for them.
    """

    def __init__(
        self, regions: Regions, num_slots: int, rank: int, memory: Tensor, addresses: Sequence[int], lost: Tensor,
        limit_s: float, dtype: torch.dtype,
    ) -> None:  # fmt: skip
        self._regions = regions
        self._rank = rank
        self._memory = memory  # held: its address is all that kernels have of it
        self._lost = lost
        self._limit_ns = int(limit_s * 1e9)
        device = memory.device
        self._slots = [regions.slot(number) for number in range(num_slots)]
        self._peers = torch.tensor(list(addresses), dtype=torch.int64, device=device)
        self._state = torch.zeros(num_slots, STATE_WORDS, dtype=torch.int64, device=device)
        self._numbers = [torch.empty(regions.max_pairs, dtype=torch.int32, device=device) for _ in self._slots]
        self._failed = torch.zeros(1, dtype=torch.int64, device=device)
        self._arrivals = [self._make_arrival(slot, dtype) for slot in self._slots]

    def _make_arrival(self, slot: Slot, dtype: torch.dtype) -> Arrival:
        regions, device = self._regions, self._memory.device
        shape = (regions.num_local, regions.capacity, regions.hidden)

        def part(begin: int, size: tuple[int, ...], kind: torch.dtype) -> Tensor:
            return self._memory[begin : begin + torch.Size(size).numel() * kind.itemsize].view(kind).view(size)

        sent = None
        if regions.fp8:
            rows = torch.empty(0, dtype=dtype, device=device)  # made when somebody wants them
            sent = part(slot.rows, shape, FP8), part(slot.scales, (*shape[:2], shape[2] // BLOCK), torch.float32)
        else:
            rows = part(slot.rows, shape, dtype)
        counts = torch.zeros(regions.num_local, dtype=torch.int32, device=device)
        return Arrival(rows, sent, counts, torch.full((regions.max_pairs,), -1, dtype=torch.int32, device=device))

    def lost_ranks(self) -> list[int]:
        """Ranks that some kernel has given up, as far as the device has said so."""
        return self._lost.nonzero().flatten().tolist()

    def dispatch(self, x: Activation, ids: Tensor, number: int, format: ActivationFormat = UNQUANTIZED) -> Arrival:
        """Sends x [T, D] to the experts that ids int32 [T, K] name, through slot `number`.

        Args:
            x: may be quantised where rows travel in FP8.
            format: how experts read; FP8 rows get such scales, and are widened unless it names rows.
        """
        ids = ids.contiguous()
        self.notify(ids, number)
        self.send(x if isinstance(x, QuantizedActivation) else x.contiguous(), ids, number, format.power_of_two)
        return self.receive(number, widen=not format.rows)

    def combine(self, rows: Tensor, weights: Tensor, number: int) -> Tensor:
        """rows [El, C, D], the experts' results, and weights float32 [T, K] -> [T, D] in rows' dtype."""
        self.combine_send(rows.contiguous(), number)
        return self.sum(weights.float().contiguous(), rows.dtype, number)

    # -- the same in parts, a launch each; tensors contiguous

    def notify(self, ids: Tensor, number: int) -> None:
        """Begins the slot's next use and waits for nobody."""
        regions, slot, ranks = self._regions, self._slots[number], self._regions.num_ranks
        notify_kernel[(ranks,)](
            ids, self._peers, self._state[number], self._numbers[number], ids.numel(), self._rank, slot.counts,
            slot.flags[COUNTED], **notify_constants(regions.num_local, ranks),
            num_warps=TILES.announce_warps,
        )  # fmt: skip

    def send(self, x: Activation, ids: Tensor, number: int, power_of_two: bool = False) -> None:
        """Waits for every rank's announcement."""
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

    def receive(self, number: int, widen: bool = True) -> Arrival:
        """Waits until every rank has sent. `widen`: FP8 rows become numbers."""
        regions, slot, arrival = self._regions, self._slots[number], self._arrivals[number]
        widens = regions.fp8 and widen
        if widens and not arrival.rows.numel():
            assert arrival.sent is not None
            arrival = replace(arrival, rows=arrival.rows.new_empty(arrival.sent[0].shape))
            self._arrivals[number] = arrival
        constants = receive_constants(regions.hidden, regions.num_local, regions.num_ranks, widens)
        receive_kernel[(regions.num_local, TILES.receive_parts if widens else 1)](
            self._peers, self._state[number], self._failed, self._lost, arrival.counts, arrival.rows, self._rank,
            regions.capacity, self._limit_ns, slot.counts, slot.flags[SENT], slot.rows, slot.scales, **constants,
            num_warps=TILES.row_warps,
        )  # fmt: skip
        return arrival

    def combine_send(self, rows: Tensor, number: int) -> None:
        """Waits for nobody."""
        regions, slot = self._regions, self._slots[number]
        combine_send_kernel[(regions.num_local, TILES.return_parts)](
            rows, self._arrivals[number].counts, self._peers, self._state[number], self._failed, self._rank,
            regions.capacity, regions.max_pairs, slot.origins, slot.returned, slot.flags[RETURNED],
            **combine_send_constants(regions.hidden, regions.num_ranks), num_warps=TILES.row_warps,
        )  # fmt: skip

    def sum(self, weights: Tensor, dtype: torch.dtype, number: int) -> Tensor:
        """Waits until every rank has given back."""
        regions, slot, (num_tokens, top_k) = self._regions, self._slots[number], weights.shape
        out = torch.empty(num_tokens, regions.hidden, dtype=dtype, device=weights.device)
        sum_kernel[(max(num_tokens, 1), triton.cdiv(regions.hidden, TILES.sum_cols))](
            self._arrivals[number].positions, weights, out, self._peers, self._state[number], self._failed, self._lost,
            num_tokens, self._rank, self._limit_ns, slot.returned, slot.flags[RETURNED],
            **sum_constants(top_k, regions.hidden, regions.num_ranks), num_warps=TILES.sum_warps,
        )  # fmt: skip
        return out
