"""`nvshmem`, low latency between nodes: torch's shuffles over NVSHMEM, whose sizes never leave the device.

A rank sorts its (token, choice) rows by expert; `all_to_all_vdev_2d` fetches each rank's rows for this rank's experts
and orders them by expert; `all_to_all_vdev_2d_offset` fetches the results back, into the order of sending. Both begin
with a barrier of all ranks and end without one: a rank's input may be read by peers until all have entered the next
shuffle. The two shuffles of a slot alternate, so a buffer is rewritten only after that.
Source: torch/csrc/distributed/c10d/symm_mem/nvshmem_extension.cu (torch 2.11 to 2.13).
Legend: T tokens, K experts per token, M max tokens of a rank, P = M * K, R ranks, E experts over all ranks, El of a
rank, D hidden.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from moe_engine.kernels.experts.protocol import ExpertBatch
from moe_engine.kernels.permutation.protocol import Permutation
from moe_engine.kernels.quantization.protocol import UNQUANTIZED, Activation, ActivationFormat
from moe_engine.kernels.symm_mem.triton_copy import copy_rows
from moe_engine.parallel.collectives import Group
from moe_engine.parallel.dispatch.buffers import RecordBuffer, Slots
from moe_engine.parallel.dispatch.payload import RecordFormat, decode, encode, write_parts
from moe_engine.parallel.dispatch.protocol import NUM_LIVE, Dispatcher, DispatchShape, Tokens
from moe_engine.parallel.dispatch.symm_mem.availability import MAX_NVSHMEM_LOCAL, MAX_NVSHMEM_RANKS


def why_not(shape: DispatchShape) -> str | None:
    """The reason why the shuffles do not support these sizes, or None."""
    if shape.num_ranks > MAX_NVSHMEM_RANKS:
        return f"{shape.num_ranks} ranks; at most {MAX_NVSHMEM_RANKS}"
    if shape.num_local > MAX_NVSHMEM_LOCAL:
        return f"{shape.num_local} experts per rank; at most {MAX_NVSHMEM_LOCAL}"
    if shape.hidden * shape.dtype.itemsize % 16:
        return f"hidden {shape.hidden}: rows must be a multiple of 16 bytes"
    return None


class Shuffles:
    """torch's operations; sets NVSHMEM as the process's symmetric memory backend. Shuffled tensors come from `empty`;
    all are collective, shuffles are asynchronous.

    Args:
        process_group: torch's process group of all ranks of the world: the kernels interpret a rank as its world
            rank.
    """

    def __init__(self, process_group: Any) -> None:
        import torch.distributed._symmetric_memory as symmetric

        if not symmetric.is_nvshmem_available():
            raise ValueError("nvshmem is unavailable: torch finds no libnvshmem_host.so.3 (package nvidia-nvshmem)")
        symmetric.set_backend("NVSHMEM")
        self._symmetric = symmetric
        self._process_group = process_group
        self._name = process_group.group_name

    def empty(self, num_bytes: int, device: torch.device) -> Tensor:
        """uint8 [num_bytes] readable by every rank."""
        made = self._symmetric.empty(num_bytes, dtype=torch.uint8, device=device)
        self._symmetric.rendezvous(made, self._process_group)  # the shuffles do it lazily, but not under capture
        return made

    def all_to_all_vdev_2d(self, rows: Tensor, out: Tensor, splits: Tensor, out_splits_offsets: Tensor) -> None:
        """rows [., W] sorted by expert, splits int64 [E] of them -> out [., W] by expert, then by rank.

        out_splits_offsets int64 [2, El * R]: rows from each rank for each expert, and their starts. An expert without
        rows occupies one row, which is not written.
        """
        torch.ops.symm_mem.all_to_all_vdev_2d(rows, out, splits, out_splits_offsets, self._name)

    def all_to_all_vdev_2d_offset(
        self, rows: Tensor, out: Tensor, splits_offsets: Tensor, out_splits_offsets: Tensor
    ) -> None:
        """rows [., W] at offsets [El, R] -> out [., W] by rank, then by expert, contiguous."""
        torch.ops.symm_mem.all_to_all_vdev_2d_offset(rows, out, splits_offsets, out_splits_offsets, self._name)


@dataclass(frozen=True)
class SlotBuffers:
    """Peer-readable buffers of one slot. `results` reuses the memory of `arrived`, which is consumed by then."""

    sent: Tensor  # uint8 [P, record]
    splits: Tensor  # int64 [E]
    arrived: Tensor  # uint8 [R * P + El, record]
    arrived_splits: Tensor  # int64 [2, El * R]
    results: Tensor  # [R * P + El, D]
    returned: Tensor  # [P, D]
    returned_splits: Tensor  # int64 [2, E]


@dataclass(frozen=True)
class NvshmemHandle:
    slot: int
    positions: Tensor  # int32 [T, K] row of `returned`, -1: not sent
    end: Tensor  # int32 [1] rows in use


class NvshmemDispatcher(Dispatcher):
    """`Dispatcher`: grouped rows in buffers for the worst case, offsets and counts on the device.

    Raises:
        ValueError: the shuffles do not support these sizes.
    """

    def __init__(self, group: Group, shape: DispatchShape, shuffles: Shuffles, permutation: Permutation) -> None:
        reason = why_not(shape)
        if reason:
            raise ValueError(f"nvshmem does not support this model: {reason}")
        self._shape = shape
        self.takes_rows = shape.fp8
        self._shuffles = shuffles
        self._format = replace(RecordFormat.of(shape), top_k=0)  # choices are not sent: weights are applied here
        self._permutation = permutation
        self._packed = RecordBuffer(self._format, group.device)
        self._slots = Slots()
        self._buffers = [self._make_buffers(group.device) for _ in range(NUM_LIVE)]

    def _make_buffers(self, device: torch.device) -> SlotBuffers:
        shape, width = self._shape, self._format.num_bytes
        pairs = shape.max_tokens * shape.top_k
        room = shape.num_ranks * pairs + shape.num_local  # even with repeated experts in a token
        row = shape.hidden * shape.dtype.itemsize

        def longs(*sizes: int) -> Tensor:
            return self._shuffles.empty(8 * torch.Size(sizes).numel(), device).view(torch.int64).view(sizes)

        both = self._shuffles.empty(room * max(width, row), device)
        returned = self._shuffles.empty(pairs * row, device)
        return SlotBuffers(
            sent=self._shuffles.empty(pairs * width, device).view(pairs, width),
            splits=longs(shape.num_experts),
            arrived=both[: room * width].view(room, width),
            arrived_splits=longs(2, shape.num_experts),
            results=both[: room * row].view(shape.dtype).view(room, shape.hidden),
            returned=returned.view(shape.dtype).view(pairs, shape.hidden),
            returned_splits=longs(2, shape.num_experts),
        )

    def dispatch(
        self, x: Activation, topk_ids: Tensor, topk_weights: Tensor, format: ActivationFormat = UNQUANTIZED
    ) -> tuple[ExpertBatch, NvshmemHandle]:
        shape = self._shape
        if len(x) > shape.max_tokens:
            raise ValueError(f"{len(x)} tokens in one dispatch; this dispatcher was made for {shape.max_tokens}")
        slot = self._slots.take()
        buffers = self._buffers[slot]
        tokens = encode(x, topk_ids, topk_weights, shape.fp8, format)
        positions = self._sort(tokens, buffers)
        self._shuffles.all_to_all_vdev_2d(buffers.sent, buffers.arrived, buffers.splits, buffers.arrived_splits)

        splits, starts = buffers.arrived_splits.view(2, shape.num_local, shape.num_ranks)
        counts = splits.sum(1)
        ends = starts[-1:, 0] + counts[-1:].clamp_min(1)
        offsets = torch.cat((starts[:, 0], ends)).to(torch.int32)
        arrived = self._format.view(buffers.arrived)
        rows, scales = arrived.data, arrived.scales
        if not format.rows:
            rows, scales = decode(arrived, shape.dtype), None
        batch = ExpertBatch(
            "grouped", rows, offsets=offsets, counts=counts.to(torch.int32), scales=scales, dtype=shape.dtype
        )
        return batch, NvshmemHandle(slot, positions, offsets[-1:])

    def _sort(self, tokens: Tokens, buffers: SlotBuffers) -> Tensor:
        """Fills the send buffer: rows by expert, then by token; returns their positions."""
        offsets, positions = self._permutation.group(tokens.ids, self._shape.num_experts)
        torch.sub(offsets[1:], offsets[:-1], out=buffers.splits)
        records, parts = self._packed.take(len(tokens.ids))
        nothing = tokens.ids[:, :0]
        write_parts(replace(tokens, ids=nothing, weights=nothing), parts)
        self._permutation.permute(records, positions, buffers.sent)
        return positions

    def combine(self, rows: Tensor, topk_weights: Tensor, handle: NvshmemHandle) -> Tensor:
        if len(topk_weights) != len(handle.positions):
            raise ValueError(f"{len(handle.positions)} tokens were dispatched, weights are of {len(topk_weights)}")
        self._slots.release(handle.slot)
        buffers = self._buffers[handle.slot]
        copy_rows(rows.contiguous(), buffers.results, handle.end)
        self._shuffles.all_to_all_vdev_2d_offset(
            buffers.results, buffers.returned, buffers.arrived_splits, buffers.returned_splits
        )
        return self._permutation.combine(buffers.returned, handle.positions, topk_weights)
