"""DeepEP's second generation, `ElasticBuffer` (2.0, 2.1): one class, and one buffer, for prefill and decode.

In its expanded form the library delivers one row per (token, local expert), sorted by expert: the `grouped` layout, or
with aligned groups DeepGEMM's, without a copy. It sums without weights, so rows are weighted before combine. Normal
mode waits for the counts; low latency returns the worst-case row count immediately and keeps the counts on the device.
Kernels of `aligned` batches apply the router weights to a narrower intermediate result.
Legend: T tokens, H hidden, K choices, El experts of a rank, R ranks, M max tokens of a rank.
"""

from __future__ import annotations

from dataclasses import dataclass
from types import ModuleType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from moe_engine.kernels.experts.protocol import ExpertBatch
from moe_engine.kernels.permutation.protocol import Permutation
from moe_engine.kernels.quantization.groups import RowGroups
from moe_engine.kernels.quantization.protocol import UNQUANTIZED, Activation, ActivationFormat
from moe_engine.parallel.collectives import Group
from moe_engine.parallel.dispatch.buffers import Slots
from moe_engine.parallel.dispatch.deepep.generation import HIDDEN_MULTIPLE
from moe_engine.parallel.dispatch.deepep.startup import adapter_gbs
from moe_engine.parallel.dispatch.payload import decode, encode_rows
from moe_engine.parallel.dispatch.protocol import Dispatcher, DispatchShape, Tokens

MAX_TOP_K, MAX_EXPERTS, MAX_LOCAL, MAX_RANKS = 32, 2048, 256, 1024
DEFAULT_GBS = 50.0
"""Assumed rate of an adapter whose rate is unknown: 400 Gb/s."""
NVLINK_GBS = 400.0
"""Assumed NVLink rate of a GPU whose rate is unknown: Hopper's, in one direction."""


def why_not(shape: DispatchShape) -> str | None:
    """The reason why the library does not support these sizes, or None."""
    if shape.dtype != torch.bfloat16:
        return f"combines bfloat16, not {shape.dtype}"
    if shape.hidden % HIDDEN_MULTIPLE:
        return f"hidden {shape.hidden} is not a multiple of {HIDDEN_MULTIPLE}"
    for name, size, most in (
        ("top-k", shape.top_k, MAX_TOP_K),
        ("experts", shape.num_experts, MAX_EXPERTS),
        ("experts of a rank", shape.num_local, MAX_LOCAL),
        ("ranks", shape.num_ranks, MAX_RANKS),
    ):
        if size > most:
            return f"{size} {name}; at most {most}"
    return None


@dataclass(frozen=True)
class ExpandedHandle:
    slot: int
    topk_weights: Tensor
    row_weights: Tensor | None  # float32 [rows]; None: the experts apply them
    groups: RowGroups
    lib_handle: Any


@dataclass(frozen=True)
class SizedBuffer:
    """A buffer of the library with the number of multiprocessors of its kernels, equal on all ranks."""

    buffer: Any
    num_sms: int


def make_memory(deep_ep: ModuleType, process_group: Any, group: Group, shape: DispatchShape) -> SizedBuffer:
    """The buffer of both modes, for the larger of their sizes; created before any graph capture. Collective.

    Raises:
        ValueError: the library does not support these sizes, or this network.
    """
    reason = why_not(shape)
    if reason:
        raise ValueError(f"DeepEP's ElasticBuffer does not support this model: {reason}")
    seconds = int(group.timeout_s)  # the library's own limit on the GPU would be shorter than that of the collectives
    try:
        buffer = deep_ep.ElasticBuffer(
            process_group,
            num_max_tokens_per_rank=shape.max_tokens,
            hidden=shape.hidden,
            num_topk=shape.top_k,
            use_fp8_dispatch=shape.fp8,
            num_cpu_timeout_secs=seconds,
            num_gpu_timeout_secs=seconds,
        )
    except RuntimeError as error:
        if "GIN" not in str(error):
            raise
        raise ValueError(
            "DeepEP between nodes needs NCCL's GIN, which this network does not offer: it needs a ConnectX-7 or later "
            "with a current OFED and nvidia.ko with PeerMappingOverride=1 or gdrcopy (NCCL_DEBUG=INFO gives NCCL's "
            "reason); use --moe-a2a-backend two_hop"
        ) from error
    return SizedBuffer(buffer, _num_sms(buffer, group, shape))


def _num_sms(buffer: Any, group: Group, shape: DispatchShape) -> int:
    """The minimum over all ranks of the library's estimate. The library divides by the adapter's rate, which is 0 if
    ``ibstat`` or the adapter is missing; the rate is therefore passed."""
    rate = 0.0
    if buffer.num_rdma_ranks > 1:
        rate = adapter_gbs() or DEFAULT_GBS
    try:
        own = buffer.get_theoretical_num_sms(shape.num_experts, shape.top_k, rdma_gbs=rate)
    except ZeroDivisionError:  # nvidia-smi reports no NVLink rate
        own = buffer.get_theoretical_num_sms(shape.num_experts, shape.top_k, rdma_gbs=rate, nvlink_gbs=NVLINK_GBS)
    return int(group.all_gather(torch.tensor([own], device=group.device)).min())


class ElasticDispatcher(Dispatcher):
    """`Dispatcher` over a buffer of the second generation, in one mode."""

    def __init__(
        self, deep_ep: ModuleType, sized: SizedBuffer, shape: DispatchShape, low_latency: bool,
        permutation: Permutation,
    ) -> None:  # fmt: skip
        self._buffer, self._num_sms = sized.buffer, sized.num_sms
        self._permutation = permutation
        self._shape = shape
        self._wait = not low_latency
        self._ids_dtype = deep_ep.topk_idx_t
        self.reads_int64 = self._ids_dtype == torch.int64
        self._slots = Slots()
        self.takes_rows = shape.fp8

    def dispatch(
        self, x: Activation, topk_ids: Tensor, topk_weights: Tensor, format: ActivationFormat = UNQUANTIZED
    ) -> tuple[ExpertBatch, ExpandedHandle]:
        slot = self._slots.take()
        rows, row_scales = encode_rows(x, self._shape.fp8, format)
        received, _, row_weights, lib_handle, _ = self._buffer.dispatch(
            rows if row_scales is None else (rows, row_scales),  # scales in any strides
            topk_idx=topk_ids.to(self._ids_dtype).contiguous(),
            topk_weights=topk_weights.float().contiguous(),
            num_experts=self._shape.num_experts,
            num_max_tokens_per_rank=self._shape.max_tokens,
            expert_alignment=format.row_alignment,
            do_cpu_sync=self._wait,
            do_handle_copy=False,  # a layer's choices do not change
            do_expand=True,
            use_tma_aligned_col_major_sf=self._shape.fp8 and format.rows and format.column_scales,
            num_sms=self._num_sms,
        )
        data, scales = received if isinstance(received, tuple) else (received, None)
        dtype = self._shape.dtype
        if not format.rows:
            data, scales = decode(Tokens(data, scales, topk_ids, topk_weights), dtype), None
        groups = RowGroups(lib_handle.psum_num_recv_tokens_per_expert, format.row_alignment)
        if groups.alignment > 1:
            batch = ExpertBatch(
                "aligned", data, scales=scales, dtype=dtype, ends=groups.sizes, alignment=groups.alignment,
                row_weights=row_weights,
            )  # fmt: skip
            row_weights = None
        else:
            batch = ExpertBatch("grouped", data, offsets=F.pad(groups.sizes, (1, 0)), scales=scales, dtype=dtype)
        return batch, ExpandedHandle(slot, topk_weights, row_weights, groups, lib_handle)

    def combine(self, rows: Tensor, topk_weights: Tensor, handle: ExpandedHandle) -> Tensor:
        if topk_weights is not handle.topk_weights:
            raise ValueError("combine needs the topk_weights passed to dispatch: they were already sent")
        self._slots.release(handle.slot)
        if handle.row_weights is not None:
            rows = self._permutation.scale_rows(rows, handle.row_weights, handle.groups)
        out, _, _ = self._buffer.combine(rows, handle.lib_handle)
        return out
