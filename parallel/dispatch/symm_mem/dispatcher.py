"""`symm_mem`, low latency: Triton kernels write a token's row over plain pointers, once to each rank that has some of
its experts; that rank sums its experts' weighted results and returns one row.

Received rows are copied to their experts' rows; FP8 rows are dequantized for experts that need it. There
is no host synchronization and no size on the host, so a captured graph may hold it: epochs and counts are on the
device. A kernel's wait for a missing peer ends after the group's timeout; the host finds the late ranks in memory
shared with the device, at its next call.
Legend: T tokens, K experts per token, M max tokens of a rank, R ranks, El experts of a rank, D hidden.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from moe_engine.kernels.experts.protocol import ExpertBatch
from moe_engine.kernels.quantization.protocol import UNQUANTIZED, Activation, ActivationFormat
from moe_engine.kernels.symm_mem.exchange import SymmMemExchange
from moe_engine.kernels.symm_mem.regions import Regions
from moe_engine.parallel.collectives import Group, PeerLost
from moe_engine.parallel.dispatch.buffers import Slots
from moe_engine.parallel.dispatch.protocol import NUM_LIVE, Dispatcher, DispatchShape, NormedSum
from moe_engine.parallel.dispatch.symm_mem.availability import MAX_WIDTH
from moe_engine.parallel.dispatch.symm_mem.memory import SymmetricMemory

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
MAX_BYTES = 1 << 31  # rows and pairs have 32-bit indices


def why_not(shape: DispatchShape) -> str | None:
    """The reason why the kernels do not support these sizes, or None."""
    if shape.dtype not in DTYPES:
        return f"sends {', '.join(str(dtype).removeprefix('torch.') for dtype in DTYPES)}, not {shape.dtype}"
    if shape.hidden * shape.dtype.itemsize % 16 or (shape.fp8 and shape.hidden % 128):
        return f"hidden {shape.hidden}: rows must be a multiple of 16 bytes"
    pairs = shape.num_ranks * shape.max_tokens * max(shape.top_k, shape.num_local)
    if shape.hidden > MAX_WIDTH:
        return f"hidden {shape.hidden} is above {MAX_WIDTH}"
    if pairs >= MAX_BYTES:
        return f"{pairs} rows exceed 32-bit indices"
    return None


@dataclass(frozen=True)
class PeerHandle:
    slot: int
    num_tokens: int


class SymmMemDispatcher(Dispatcher):
    """`Dispatcher`: padded [El, R * M, D] with counts on the device.

    Args:
        memory: symmetric memory provider.

    Raises:
        ValueError: the kernels do not support these sizes, or ranks cannot access each other's memory.
    """

    norms_sums = True

    def __init__(self, group: Group, shape: DispatchShape, memory: SymmetricMemory) -> None:
        reason = why_not(shape)
        if reason:
            raise ValueError(f"symm_mem does not support this model: {reason}")
        self._group = group
        self._shape = shape
        self.takes_rows = shape.fp8
        self._slots = Slots()
        regions = Regions(
            num_ranks=shape.num_ranks,
            num_local=shape.num_local,
            max_tokens=shape.max_tokens,
            top_k=shape.top_k,
            hidden=shape.hidden,
            item_bytes=shape.dtype.itemsize,
            fp8=shape.fp8,
        )
        shared = self._shared = memory.allocate(group, regions.num_bytes(NUM_LIVE))  # kept alive for the addresses
        lost = memory.words_for_host(group.size)
        self._exchange = SymmMemExchange(
            regions, NUM_LIVE, group.rank, shared.own, shared.addresses, lost, group.timeout_s, shape.dtype
        )

    def dispatch(
        self, x: Activation, topk_ids: Tensor, topk_weights: Tensor, format: ActivationFormat = UNQUANTIZED
    ) -> tuple[ExpertBatch, PeerHandle]:
        return self.start_dispatch(x, topk_ids, topk_weights, format)()

    def start_dispatch(
        self, x: Activation, topk_ids: Tensor, topk_weights: Tensor, format: ActivationFormat = UNQUANTIZED
    ) -> Callable[[], tuple[ExpertBatch, PeerHandle]]:
        if len(x) > self._shape.max_tokens:
            raise ValueError(f"{len(x)} tokens in one dispatch; this dispatcher was made for {self._shape.max_tokens}")
        slot = self._slots.take()
        self._exchange.send(x, topk_ids.to(torch.int32), topk_weights, slot, format.power_of_two)
        return partial(self._receive, PeerHandle(slot, len(x)), format)

    def _receive(self, handle: PeerHandle, format: ActivationFormat) -> tuple[ExpertBatch, PeerHandle]:
        arrival = self._exchange.receive(
            handle.slot, widen=not format.rows, columns=format.rows and format.column_scales
        )
        self.check_peers()
        batch = ExpertBatch(
            "padded", arrival.rows, counts=arrival.counts, scales=arrival.scales, dtype=self._shape.dtype,
            mean_rows=self._shape.mean_rows(handle.num_tokens),
        )  # fmt: skip
        return batch, handle

    def combine(self, rows: Tensor, topk_weights: Tensor, handle: PeerHandle) -> Tensor:
        return self.start_combine(rows, topk_weights, handle)()

    def start_combine(self, rows: Tensor, topk_weights: Tensor, handle: PeerHandle) -> Callable[[], Tensor]:
        if len(topk_weights) != handle.num_tokens:
            raise ValueError(f"{handle.num_tokens} tokens were dispatched; there are weights for {len(topk_weights)}")
        self._exchange.combine_send(rows, handle.slot)
        return partial(self._sum, handle, rows.dtype)

    def _sum(self, handle: PeerHandle, dtype: torch.dtype) -> Tensor:
        self._slots.release(handle.slot)
        out = self._exchange.sum(handle.num_tokens, dtype, handle.slot)
        self.check_peers()
        return out

    def start_combine_norm(self, rows: Tensor, topk_weights: Tensor, handle: PeerHandle) -> NormedSum:
        self.start_combine(rows, topk_weights, handle)
        return partial(self._sum_norm, handle)

    def _sum_norm(
        self, handle: PeerHandle, format: ActivationFormat, other: Tensor | None, residual: Tensor, weight: Tensor,
        eps: float,
    ) -> Activation:  # fmt: skip
        self._slots.release(handle.slot)
        out = self._exchange.sum_rms_norm(format, other, residual, weight, eps, handle.slot)
        self.check_peers()
        return out

    def check_peers(self) -> None:
        if late := self._exchange.lost_ranks():
            raise PeerLost.late("dispatch or combine", self._group, late)
