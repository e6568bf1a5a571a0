"""`symm_mem`, low latency: each row is written once, where its expert takes it, by our kernels over plain pointers.

The rows are the batch: what arrives is not copied, except FP8 rows, which are widened for experts that read numbers.
The host neither waits nor learns a size, so a captured graph may hold it: epochs and counts live on the device. Peers
that do not come end a kernel's wait after the group's timeout; the host finds their ranks in memory that both see, at
its next call.
Legend: T tokens, K experts per token, M most tokens of a rank, R ranks, El experts of a rank, D hidden.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from moe_engine.kernels.experts.protocol import ExpertBatch
from moe_engine.kernels.quantization.protocol import UNQUANTIZED, Activation, ActivationFormat
from moe_engine.kernels.symm_mem.exchange import SymmMemExchange
from moe_engine.kernels.symm_mem.regions import Regions
from moe_engine.parallel.collectives import Group, PeerLost
from moe_engine.parallel.dispatch.protocol import NUM_LIVE, DispatchShape
from moe_engine.parallel.dispatch.symm_mem.memory import SymmetricMemory
from moe_engine.parallel.dispatch.workspace import Slots

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
MAX_BYTES = 1 << 31  # rows and pairs are numbered with 32 bits


def why_not(shape: DispatchShape) -> str | None:
    """The reason why the kernels refuse these sizes, or None."""
    if shape.dtype not in DTYPES:
        return f"sends {', '.join(str(dtype).removeprefix('torch.') for dtype in DTYPES)}, not {shape.dtype}"
    if shape.hidden * shape.dtype.itemsize % 16 or (shape.fp8 and shape.hidden % 128):
        return f"hidden {shape.hidden}: rows must be a multiple of 16 bytes"
    pairs = shape.num_ranks * shape.max_tokens * max(shape.top_k, shape.num_local)
    if pairs >= MAX_BYTES:
        return f"{pairs} rows are more than 32 bits can number"
    return None


@dataclass(frozen=True)
class PeerHandle:
    slot: int
    num_tokens: int


class SymmMemDispatcher:
    """`Dispatcher`: padded [El, R * M, D] with counts on the device.

    Args:
        memory: gives each rank's bytes to the others.

    Raises:
        ValueError: the kernels cannot serve these sizes, or the ranks cannot reach each other.
    """

    def __init__(self, group: Group, shape: DispatchShape, memory: SymmetricMemory) -> None:
        reason = why_not(shape)
        if reason:
            raise ValueError(f"symm_mem cannot serve this model: {reason}")
        self._group = group
        self._shape = shape
        self.takes_rows = shape.fp8
        self._slots = Slots()
        regions = Regions(
            num_ranks=shape.num_ranks,
            num_local=shape.num_local,
            max_pairs=shape.max_tokens * shape.top_k,
            capacity=shape.num_ranks * shape.max_tokens,
            hidden=shape.hidden,
            item_bytes=shape.dtype.itemsize,
            fp8=shape.fp8,
        )
        shared = self._shared = memory.allocate(group, regions.num_bytes(NUM_LIVE))  # held: the addresses live by it
        lost = memory.words_for_host(group.size)
        self._exchange = SymmMemExchange(
            regions, NUM_LIVE, group.rank, shared.own, shared.addresses, lost, group.timeout_s, shape.dtype
        )

    def dispatch(
        self, x: Activation, topk_ids: Tensor, topk_weights: Tensor, format: ActivationFormat = UNQUANTIZED
    ) -> tuple[ExpertBatch, PeerHandle]:
        if len(x) > self._shape.max_tokens:
            raise ValueError(f"{len(x)} tokens in one dispatch; this dispatcher was made for {self._shape.max_tokens}")
        slot = self._slots.take()
        arrival = self._exchange.dispatch(x, topk_ids.to(torch.int32), slot, format)
        self.check_peers()
        rows, scales = arrival.rows, None
        if arrival.sent is not None and format.rows:
            rows, scales = arrival.sent
        batch = ExpertBatch("padded", rows, counts=arrival.counts, scales=scales, dtype=self._shape.dtype)
        return batch, PeerHandle(slot, len(x))

    def combine(self, rows: Tensor, topk_weights: Tensor, handle: PeerHandle) -> Tensor:
        if len(topk_weights) != handle.num_tokens:
            raise ValueError(f"{handle.num_tokens} tokens were dispatched; there are weights of {len(topk_weights)}")
        self._slots.give_back(handle.slot)
        out = self._exchange.combine(rows, topk_weights, handle.slot)
        self.check_peers()
        return out

    def check_peers(self) -> None:
        late = self._exchange.lost_ranks()
        if late:
            group = self._group
            raise PeerLost(
                f"exchange through symmetric memory on rank {group.rank} of {group.size}: ranks {late} did not come in "
                f"{group.timeout_s:g} s"
            )
