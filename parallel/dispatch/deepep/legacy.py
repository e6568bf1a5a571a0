"""DeepEP's first generation, `Buffer`: NVLink and NVSHMEM. Signatures as of deep_ep/buffers/legacy.py.

Normal mode is an exchange (rows deduplicated by rank, sums without weights); low latency delivers padded rows and
applies the weights itself. Legend: T tokens, H hidden, K choices, E experts, R ranks, El local experts, M max tokens.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import gcd
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from moe_engine.kernels.experts.protocol import ExpertBatch
from moe_engine.kernels.quantization.protocol import UNQUANTIZED, Activation, ActivationFormat, unquantized
from moe_engine.parallel.dispatch.buffers import Slots
from moe_engine.parallel.dispatch.deepep.generation import (
    FIRST_GENERATION_TOKENS,
    LOW_LATENCY_HIDDEN,
    LOW_LATENCY_TOP_K,
    QUEUE_DEPTH,
)
from moe_engine.parallel.dispatch.payload import decode
from moe_engine.parallel.dispatch.protocol import Dispatcher, DispatchShape, Tokens

NVLINK_RANKS = 8
"""Ranks of a node; the buffer's RDMA part, which low latency needs clean, is used by normal mode across nodes only."""
PRESET_RANKS = (2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 144, 160)  # rank counts with a library configuration


def why_not_low_latency(shape: DispatchShape) -> str | None:
    """The reason why the low-latency kernels do not support these sizes, or None."""
    if shape.dtype != torch.bfloat16:
        return f"sends bfloat16 or FP8 quantized from it, not {shape.dtype}"
    if shape.hidden not in LOW_LATENCY_HIDDEN:
        return f"hidden {shape.hidden} is not among {LOW_LATENCY_HIDDEN}"
    if shape.top_k > LOW_LATENCY_TOP_K:
        return f"top-{shape.top_k} is more than {LOW_LATENCY_TOP_K}"
    if shape.max_tokens > FIRST_GENERATION_TOKENS:
        return f"{shape.max_tokens} tokens per rank; NVSHMEM's queue of {QUEUE_DEPTH} holds {FIRST_GENERATION_TOKENS}"
    return None


def rounded(shape: DispatchShape) -> DispatchShape:
    """The shape of low latency, whose kernels take multiples of four tokens over all ranks."""
    multiple = 4 // gcd(4, shape.num_ranks)
    return replace(shape, max_tokens=-(-shape.max_tokens // multiple) * multiple)


def why_not_normal(shape: DispatchShape) -> str | None:
    """The reason why the normal kernels do not support these sizes, or None."""
    if shape.dtype != torch.bfloat16:
        return f"combines bfloat16, not {shape.dtype}"
    if shape.hidden % (16 if shape.fp8 else 8):
        return f"hidden {shape.hidden}: rows must be a multiple of 16 bytes"
    if shape.num_ranks not in PRESET_RANKS:
        return f"{shape.num_ranks} ranks are not among {PRESET_RANKS}"
    return None


def num_queues(deep_ep: ModuleType, shape: DispatchShape, low_latency: bool) -> int:
    """Queue pairs for each peer: low latency needs one for each local expert, normal mode one for each of its
    multiprocessors."""
    num_sms = deep_ep.Buffer.num_sms
    return max(num_sms, shape.num_local) if low_latency else max(num_sms, 24)


def make_buffer(deep_ep: ModuleType, process_group: Any, shape: DispatchShape, low_latency: bool) -> Any:
    """A buffer large enough for both modes; created before any graph capture. `shape`: `rounded` for low latency.

    Raises:
        ValueError: the library does not support these sizes.
    """
    reason = why_not_normal(shape) or (why_not_low_latency(shape) if low_latency else None)
    if reason:
        raise ValueError(f"DeepEP's Buffer does not support this model: {reason}")
    cls = deep_ep.Buffer
    row_bytes = shape.hidden * shape.dtype.itemsize
    nvlink_bytes = rdma_bytes = 0
    for config in (cls.get_dispatch_config(shape.num_ranks), cls.get_combine_config(shape.num_ranks)):
        nvlink_bytes = max(nvlink_bytes, config.get_nvl_buffer_size_hint(row_bytes, shape.num_ranks))
        rdma_bytes = max(rdma_bytes, config.get_rdma_buffer_size_hint(row_bytes, shape.num_ranks))
    if low_latency:
        rdma_bytes = max(
            rdma_bytes,
            cls.get_low_latency_rdma_size_hint(shape.max_tokens, shape.hidden, shape.num_ranks, shape.num_experts),
        )
    return cls(
        process_group,
        num_nvl_bytes=-(-nvlink_bytes // 128) * 128,
        num_rdma_bytes=-(-rdma_bytes // 128) * 128,
        low_latency_mode=low_latency,
        num_qps_per_rank=num_queues(deep_ep, shape, low_latency),
    )


class LegacyExchange:
    """Normal mode: an `Exchange`. The host waits for the counts.

    Args:
        cleans: shape of the low-latency mode that shares the buffer; cleaned after use across nodes.
    """

    def __init__(self, deep_ep: ModuleType, buffer: Any, shape: DispatchShape, cleans: DispatchShape | None) -> None:
        self._buffer = buffer
        self._shape = shape
        self._cleans = cleans if shape.num_ranks > NVLINK_RANKS else None
        self._ids_dtype = deep_ep.topk_idx_t

    def deliver(self, tokens: Tokens, slot: int) -> tuple[Tokens, Any]:
        ids = tokens.ids.to(self._ids_dtype)
        per_rank, per_node, per_expert, in_rank, _ = self._buffer.get_dispatch_layout(ids, self._shape.num_experts)
        received, recv_ids, recv_weights, counts, handle, _ = self._buffer.dispatch(
            tokens.data if tokens.scales is None else (tokens.data, tokens.scales),
            num_tokens_per_rank=per_rank,
            num_tokens_per_rdma_rank=per_node,
            is_token_in_rank=in_rank,
            num_tokens_per_expert=per_expert,
            topk_idx=ids,
            topk_weights=tokens.weights,
        )
        data, scales = received if isinstance(received, tuple) else (received, None)
        return Tokens(data, scales, recv_ids.to(torch.int32), recv_weights, counts), handle

    def collect(self, partial: Tensor, handle: Any) -> Tensor:
        sums, _, _ = self._buffer.combine(partial, handle)
        if self._cleans is not None:
            shape = self._cleans
            self._buffer.clean_low_latency_buffer(shape.max_tokens, shape.hidden, shape.num_experts)
        return sums


@dataclass(frozen=True)
class LowLatencyHandle:
    slot: int
    topk_ids: Tensor
    topk_weights: Tensor
    lib_handle: Any


class LegacyLowLatency(Dispatcher):
    """Low-latency mode: a `Dispatcher`, padded [El, R * M, H] with counts on the device; the host never waits."""

    def __init__(self, deep_ep: ModuleType, buffer: Any, shape: DispatchShape) -> None:
        self._buffer = buffer
        self._shape = shape
        self._ids_dtype = deep_ep.topk_idx_t
        self.reads_int64 = self._ids_dtype == torch.int64
        self._slots = Slots()

    takes_rows = False  # the library quantizes itself, and does not accept quantized input

    def dispatch(
        self, x: Activation, topk_ids: Tensor, topk_weights: Tensor, format: ActivationFormat = UNQUANTIZED
    ) -> tuple[ExpertBatch, LowLatencyHandle]:
        shape, slot = self._shape, self._slots.take()
        ids = topk_ids.to(self._ids_dtype)
        received, counts, lib_handle, _, _ = self._buffer.low_latency_dispatch(
            unquantized(x), ids, shape.max_tokens, shape.num_experts, use_fp8=shape.fp8,
            round_scale=shape.fp8 and format.power_of_two,
        )  # fmt: skip
        handle = LowLatencyHandle(slot, ids, topk_weights, lib_handle)
        mean = shape.mean_rows(len(x))
        if shape.fp8 and format.rows:  # scales are in the grouped product's layout
            data, scales = received
            batch = ExpertBatch("padded", data, counts=counts, scales=scales, dtype=shape.dtype, mean_rows=mean)
            return batch, handle
        rows = self._in_activation_dtype(*received) if shape.fp8 else received
        return ExpertBatch("padded", rows, counts=counts, mean_rows=mean), handle

    def combine(self, rows: Tensor, topk_weights: Tensor, handle: LowLatencyHandle) -> Tensor:
        self._slots.release(handle.slot)
        weights = topk_weights.float()
        out, _, _ = self._buffer.low_latency_combine(rows.contiguous(), handle.topk_ids, weights, handle.lib_handle)
        return out

    def _in_activation_dtype(self, data: Tensor, scales: Tensor) -> Tensor:
        """data e4m3 [El, R * M, H], scales [El, R * M, H / 128] in the column-major strides of the GEMM."""
        none = data.new_empty(0)
        flat = Tokens(data.flatten(0, 1), scales.flatten(0, 1), none, none)
        return decode(flat, self._shape.dtype).view(data.shape)
