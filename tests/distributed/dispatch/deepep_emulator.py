"""An emulator of DeepEP by its documentation, over gloo: both generations. It refuses the calls that the library
refuses.

Every rank shares all its data and takes its own part: slow, and independent of the tested code. Memory that the
library leaves uninitialized is NaN. Contracts: deep_ep/buffers/legacy.py and elastic.py, utils/comm.py and
utils/envs.py, csrc/kernels/backend/nccl.cu, csrc/kernels/legacy/internode.cu. `Machine` is the emulated environment.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from types import ModuleType, SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from tests.kernels.vendors.contract import must

PRESETS = (2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 144, 160)
NVLINK_RANKS = 8
"""Normal mode with more ranks uses the RDMA part of the buffer."""
LOW_LATENCY_HIDDEN = (2048, 2560, 3072, 4096, 5120, 6144, 7168, 8192)
FP8 = torch.float8_e4m3fn


def check_x(x: Any) -> tuple[Tensor, Tensor | None]:
    data, scales = x if isinstance(x, tuple) else (x, None)
    must(data.dim() == 2 and data.is_contiguous(), "x must be contiguous [T, H]")
    if scales is None:
        must(data.dtype == torch.bfloat16, f"x must be bfloat16, is {data.dtype}")
        return data, None
    must(data.dtype == FP8, f"x with scales must be e4m3, is {data.dtype}")
    must(scales.shape == (len(data), data.shape[1] // 128), f"scales of shape {tuple(scales.shape)}")
    must(scales.element_size() == 4, "scales must be 4 bytes wide")
    return data, scales


def check_choices(topk_idx: Tensor, num_experts: int) -> None:
    must(topk_idx.dtype == torch.int64 and topk_idx.is_contiguous(), "topk_idx must be contiguous topk_idx_t")
    must(bool(((topk_idx >= -1) & (topk_idx < num_experts)).all()), "expert id out of range")
    for row in topk_idx.tolist():
        named = [expert for expert in row if expert >= 0]
        must(len(named) == len(set(named)), f"experts of a token must be distinct: {row}")


@dataclass
class Machine:
    """The environment that the library detects. `seconds`: time limit of the collectives."""

    gin: bool = False
    num_nodes: int = 1
    ibstat: bool = False
    nvidia_smi: bool = True
    seconds: int = 20


MACHINE = Machine()


class NcclGroup:
    """torch's group over gloo, with a communicator as NCCL has it: one per device, after the first collective."""

    def __init__(self, group: Any, device: Any = None) -> None:
        self.gloo = group
        self.current_device: Any = device
        self._of_device: set[Any] = set()

    def size(self) -> int:
        return self.gloo.size()

    def rank(self) -> int:
        return self.gloo.rank()

    def allreduce(self, tensors: list[Tensor], *options: Any) -> Any:
        self._of_device.add(self.current_device)
        return self.gloo.allreduce(tensors, *options)

    def _get_backend(self, device: torch.device) -> NcclGroup:
        return self

    def _comm_ptr(self) -> int:
        return 0x10 if self.current_device in self._of_device else 0


class Ranks:
    """Parts of the process group that both generations need."""

    def __init__(self, group: Any) -> None:
        must(isinstance(group, NcclGroup) and group._comm_ptr() != 0, "null NCCL communicator: segmentation fault")
        self.group = group.gloo
        self.size, self.rank = group.size(), group.rank()

    def share(self, value: Any) -> list[Any]:
        everyone: list[Any] = [None] * self.size
        dist.all_gather_object(everyone, value, group=self.group)
        return everyone

    def agree(self, what: str, value: Any) -> None:
        must(len(set(self.share(value))) == 1, f"ranks disagree on {what}")


def pack(data: Tensor, scales: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """A picklable form: float8 as bytes."""
    return (data.view(torch.uint8) if data.dtype == FP8 else data), scales


class SizeHints:
    """`Config` of the first generation."""

    def get_nvl_buffer_size_hint(self, hidden_bytes: int, num_ranks: int) -> int:
        return hidden_bytes * num_ranks * 10 + 77  # not rounded: the caller must round

    def get_rdma_buffer_size_hint(self, hidden_bytes: int, num_ranks: int) -> int:
        return 0 if num_ranks <= 8 else hidden_bytes * num_ranks


class Buffer:
    """First generation."""

    num_sms = 20

    def __init__(
        self, group, num_nvl_bytes=0, num_rdma_bytes=0, low_latency_mode=False, num_qps_per_rank=24,
        allow_nvlink_for_low_latency_mode=True, allow_mnnvl=False, explicitly_destroy=False, enable_shrink=False,
        comm=None,
    ):  # fmt: skip
        self._ranks = Ranks(group)
        must(num_nvl_bytes % 128 == 0 and num_rdma_bytes % 128 == 0, "buffer sizes must be multiples of 128")
        must(num_rdma_bytes == 0 or low_latency_mode or group.size() > 8, "RDMA buffer without need")
        self.check_queues(group.size(), num_qps_per_rank)
        self._nvl_bytes, self._rdma_bytes = num_nvl_bytes, num_rdma_bytes
        self._low_latency, self._num_qps = low_latency_mode, num_qps_per_rank
        self._dirty = False
        self._live: list[int] = []
        self._calls = 0

    @classmethod
    def check_queues(cls, num_ranks: int, num_qps: int) -> None:
        """`num_rc_per_pe` of the normal kernels between hosts."""
        fits = num_qps == cls.num_sms // 2 or num_qps >= cls.num_sms
        must(num_ranks <= 8 or fits, f"num_rc_per_pe {num_qps} for {cls.num_sms} multiprocessors")

    @staticmethod
    def get_dispatch_config(num_ranks):
        must(num_ranks in PRESETS, f"no preset for {num_ranks} ranks")
        return SizeHints()

    get_combine_config = get_dispatch_config

    @staticmethod
    def get_low_latency_rdma_size_hint(num_max_dispatch_tokens_per_rank, hidden, num_ranks, num_experts):
        m, scale = num_max_dispatch_tokens_per_rank, 4 * hidden // 128
        sent, back = 16 + max(2 * hidden, hidden + scale), scale + 2 * hidden
        both = 2 * max(m * sent, num_experts * m * back) + 2 * max(num_experts * m * sent, num_experts * m * back)
        return (both + 2 * (-(-4 * num_experts // 128) * 128)) // 128 * 128 + 128

    def get_dispatch_layout(
        self, topk_idx, num_experts, previous_event=None, async_finish=False, allocate_on_comm_stream=False
    ):
        check_choices(topk_idx, num_experts)
        must(num_experts % self._ranks.size == 0, "experts must divide by ranks")
        local = num_experts // self._ranks.size
        in_rank = torch.zeros(len(topk_idx), self._ranks.size, dtype=torch.bool)
        per_expert = torch.zeros(num_experts, dtype=torch.int32)
        for token, row in enumerate(topk_idx.tolist()):
            for expert in row:
                if expert >= 0:
                    in_rank[token, expert // local] = True
                    per_expert[expert] += 1
        return in_rank.sum(0).to(torch.int32), None, per_expert, in_rank, object()

    def dispatch(
        self, x, handle=None, num_tokens_per_rank=None, num_tokens_per_rdma_rank=None, is_token_in_rank=None,
        num_tokens_per_expert=None, topk_idx=None, topk_weights=None, expert_alignment=1, num_worst_tokens=0,
        config=None, previous_event=None, async_finish=False, allocate_on_comm_stream=False,
    ):  # fmt: skip
        data, scales = check_x(x)
        must(data.shape[1] * data.element_size() % 16 == 0, "rows must be a multiple of 16 bytes")
        must(self._nvl_bytes >= data.shape[1] * data.element_size(), "NVLink buffer too small")
        num_experts = len(num_tokens_per_expert)
        per_rank, _, per_expert, in_rank, _ = self.get_dispatch_layout(topk_idx, num_experts)
        must(bool((per_rank == num_tokens_per_rank).all()), "num_tokens_per_rank is not the layout's")
        must(bool((per_expert == num_tokens_per_expert).all()), "num_tokens_per_expert is not the layout's")
        must(bool((in_rank == is_token_in_rank).all()), "is_token_in_rank is not the layout's")
        must(
            topk_weights.dtype == torch.float32 and topk_weights.shape == topk_idx.shape, "topk_weights float32 [T, K]"
        )
        self._dirty = self._ranks.size > NVLINK_RANKS
        everyone = self._ranks.share((pack(data, scales), topk_idx, topk_weights, in_rank))
        local, rank = num_experts // self._ranks.size, self._ranks.rank
        rows, row_scales, ids, weights = [], [], [], []
        for (their_data, their_scales), their_ids, their_weights, their_mask in everyone:
            mask = their_mask[:, rank]
            rows.append(their_data[mask])
            if their_scales is not None:
                row_scales.append(their_scales[mask])
            shifted = their_ids[mask] - rank * local
            ids.append(torch.where((shifted >= 0) & (shifted < local), shifted, -1))
            weights.append(their_weights[mask])
        received = torch.cat(rows).view(data.dtype)
        recv_ids = torch.cat(ids)
        counts = [-(-int((recv_ids == e).sum()) // expert_alignment) * expert_alignment for e in range(local)]
        handle = ("normal", [len(part) for part in rows], [mask for _, _, _, mask in everyone])
        out = received if scales is None else (received, torch.cat(row_scales))
        return out, recv_ids, torch.cat(weights), counts, handle, object()

    def combine(
        self, x, handle, topk_weights=None, bias=None, config=None, previous_event=None, async_finish=False,
        allocate_on_comm_stream=False,
    ):  # fmt: skip
        _, sizes, masks = handle
        must(x.dtype == torch.bfloat16 and x.is_contiguous(), "combine takes contiguous bfloat16")
        must(len(x) == sum(sizes), f"combine of {len(x)} rows; {sum(sizes)} were dispatched")
        rank, mine = self._ranks.rank, masks[self._ranks.rank]
        out = torch.zeros(len(mine), x.shape[1])
        for source, parts in enumerate(self._ranks.share(x.split(sizes))):
            out[mine[:, source]] += parts[rank].float()
        return out.to(torch.bfloat16), None, object()

    def clean_low_latency_buffer(self, num_max_dispatch_tokens_per_rank, hidden, num_experts):
        must(not self._live, "cleaned under a live result")
        self._dirty = False

    def low_latency_dispatch(
        self, x, topk_idx, num_max_dispatch_tokens_per_rank, num_experts, cumulative_local_expert_recv_stats=None,
        dispatch_wait_recv_cost_stats=None, use_fp8=True, round_scale=False, use_ue8m0=False, async_finish=False,
        return_recv_hook=False,
    ):  # fmt: skip
        data, scales = check_x(x)
        m, hidden, size = num_max_dispatch_tokens_per_rank, data.shape[1], self._ranks.size
        must(scales is None, "low latency quantizes by itself")
        must(self._low_latency, "the buffer was not made with low_latency_mode")
        must(not self._dirty, "normal mode ran before: clean_low_latency_buffer first")
        must(len(data) <= m, f"{len(data)} tokens, at most {m}")
        must(hidden in LOW_LATENCY_HIDDEN, f"hidden {hidden}")
        must(not use_fp8 or hidden % 512 == 0, "FP8 needs hidden % 512 == 0")
        must(topk_idx.shape[1] <= 11, "at most 11 choices")
        must(size * m % 4 == 0, "R * M % 4")
        must(2 * (m + 1) <= 1024, "NVSHMEM_QP_DEPTH")
        must(self._num_qps >= num_experts // size, "fewer queue pairs than local experts")
        needed = self.get_low_latency_rdma_size_hint(m, hidden, size, num_experts)
        must(self._rdma_bytes >= needed, f"RDMA buffer of {self._rdma_bytes}, {needed} needed")
        must(len(self._live) < 2, "a third low-latency result while two are alive")
        check_choices(topk_idx, num_experts)
        self._ranks.agree("num_max_dispatch_tokens_per_rank", m)
        local, rank = num_experts // size, self._ranks.rank
        rows = torch.full((local, size * m, hidden), float("nan"), dtype=torch.bfloat16)
        counts = torch.zeros(local, dtype=torch.int32)
        source = torch.full((local, size * m), -1, dtype=torch.int32)
        for sender, (their_data, their_ids) in enumerate(self._ranks.share((data, topk_idx))):
            for token, row in enumerate(their_ids.tolist()):
                for expert in row:
                    if expert >= 0 and expert // local == rank:
                        e = expert % local
                        rows[e, counts[e]] = their_data[token]
                        source[e, counts[e]] = sender * m + token
                        counts[e] += 1
        self._calls += 1
        self._live.append(self._calls)
        handle = (source, counts.clone(), m, hidden, num_experts, self._calls, topk_idx.clone())
        if not use_fp8:
            return rows, counts, handle, object(), None
        blocks = rows.float().unflatten(2, (-1, 128))
        row_scales = blocks.abs().amax(3).clamp_min(1e-4) / 448
        quantized = (blocks / row_scales.unsqueeze(3)).to(FP8).flatten(2)
        column_major = row_scales.transpose(1, 2).contiguous().transpose(1, 2)
        return (quantized, column_major), counts, handle, object(), None

    def low_latency_combine(
        self, x, topk_idx, topk_weights, handle, use_logfmt=False, zero_copy=False, async_finish=False,
        return_recv_hook=False, out=None, combine_wait_recv_cost_stats=None,
    ):  # fmt: skip
        source, counts, m, hidden, num_experts, call, ids = handle
        must(call in self._live, "combine of a result that is no longer alive")
        self._live.remove(call)
        must(x.dtype == torch.bfloat16 and x.is_contiguous(), "combine takes contiguous bfloat16")
        must(tuple(x.shape) == (*source.shape, hidden), f"combine of shape {tuple(x.shape)}")
        must(topk_weights.dtype == torch.float32 and topk_weights.shape == topk_idx.shape, "weights float32 [T, K]")
        must(bool((topk_idx == ids).all()), "other choices than dispatched")
        rank, local = self._ranks.rank, num_experts // self._ranks.size
        result = torch.zeros(len(topk_idx), hidden)
        for owner, (rows, origin, their_counts) in enumerate(self._ranks.share((x, source, counts))):
            for e in range(local):
                for place in range(int(their_counts[e])):
                    sender, token = divmod(int(origin[e, place]), m)
                    if sender == rank:
                        k = topk_idx[token].tolist().index(owner * local + e)
                        result[token] += topk_weights[token, k] * rows[e, place].float()
        return result.to(torch.bfloat16), object(), None


@dataclass
class EPHandle:
    do_expand: bool
    num_experts: int
    expert_alignment: int
    num_max_tokens_per_rank: int
    topk_idx: Tensor
    psum_num_recv_tokens_per_expert: Tensor
    num_recv_tokens_per_expert_list: list[int]
    num_expanded_tokens: int
    origins: list[tuple[int, int, int]] = field(default_factory=list)  # row, sender, token


class ElasticBuffer:
    """Second generation, 2.0 and 2.1."""

    num_made = 0

    def __init__(
        self, group, num_bytes=None, num_cpu_bytes=0, num_max_tokens_per_rank=0, hidden=0, num_topk=0,
        use_fp8_dispatch=False, deterministic=False, allow_hybrid_mode=True, allow_multiple_reduction=True,
        prefer_overlap_with_compute=True, sl_idx=3, num_allocated_qps=0, num_cpu_timeout_secs=300,
        num_gpu_timeout_secs=100, explicitly_destroy=False,
    ):  # fmt: skip
        self._ranks = Ranks(group)
        if group.size() > 1 and os.environ.get("EP_DISABLE_GIN", "0") == "0" and not MACHINE.gin:
            raise RuntimeError("Assertion failed: (... != NCCL_GIN_TYPE_NONE and NCCL GIN is unavailable.)")
        must(num_gpu_timeout_secs >= MACHINE.seconds, "the GPU's time limit is shorter than that of the collectives")
        type(self).num_made += 1
        self.num_rdma_ranks = MACHINE.num_nodes
        max_tokens, top_k, fp8 = num_max_tokens_per_rank, num_topk, use_fp8_dispatch
        self._max_tokens, self._hidden, self._top_k, self._fp8 = max_tokens, hidden, top_k, fp8

    def _dispatch(self, x, topk_idx, topk_weights, num_experts, m, alignment, do_cpu_sync, do_expand, columns, copies):
        data, scales = check_x(x)
        size, rank = self._ranks.size, self._ranks.rank
        must(do_expand, "only the expanded form is emulated")
        must(self._fp8 or scales is None, "FP8 in a buffer made without use_fp8_dispatch")
        must(len(data) <= m <= self._max_tokens, f"{len(data)} tokens, M {m}, buffer {self._max_tokens}")
        must(data.shape[1] == self._hidden and topk_idx.shape[1] <= self._top_k, "sizes beyond the buffer's")
        must(data.shape[1] * data.element_size() % 32 == 0, "rows must be a multiple of 32 bytes")
        must(topk_idx.shape[1] <= 32 and num_experts <= 2048 and num_experts % size == 0, "too many choices or experts")
        must(topk_weights.dtype == torch.float32, "weights float32")
        check_choices(topk_idx, num_experts)
        self._ranks.agree("num_max_tokens_per_rank", m)
        local = num_experts // size
        groups: list[list[tuple[int, int, float]]] = [[] for _ in range(local)]
        everyone = self._ranks.share((pack(data, scales), topk_idx, topk_weights))
        for sender, (_, ids, weights) in enumerate(everyone):
            for token, row in enumerate(ids.tolist()):
                for k, expert in enumerate(row):
                    if expert >= 0 and expert // local == rank:
                        groups[expert % local].append((sender, token, float(weights[token, k])))
        aligned = [-(-len(group) // alignment) * alignment for group in groups]
        num_rows = sum(aligned)
        if not do_cpu_sync:
            worst = size * m * min(topk_idx.shape[1], local) + (alignment - 1) * local
            num_rows = -(-worst // alignment) * alignment
        rows = torch.full((num_rows, self._hidden), float("nan")).to(data.dtype)
        row_scales = None if scales is None else torch.full((num_rows, scales.shape[1]), float("nan"))
        row_weights = torch.full((num_rows,), float("nan"))
        origins, ends, start = [], [], 0
        for group, span in zip(groups, aligned):
            for place, (sender, token, weight) in enumerate(group, start):
                (their_data, their_scales), _, _ = everyone[sender]
                rows[place] = their_data.view(data.dtype)[token]
                if row_scales is not None:
                    row_scales[place] = their_scales[token]
                row_weights[place] = weight
                origins.append((place, sender, token))
            ends.append(start + len(group))
            start += span
        if row_scales is not None and columns:
            apart = torch.full((row_scales.shape[1], -(-num_rows // 4) * 4), float("nan"))
            row_scales = apart[:, :num_rows].t().copy_(row_scales)
        handle = EPHandle(
            True, num_experts, alignment, m, topk_idx.clone() if copies else topk_idx,
            torch.tensor(ends, dtype=torch.int32),
            aligned if do_cpu_sync else [], num_rows, origins,
        )  # fmt: skip
        return (rows if row_scales is None else (rows, row_scales)), None, row_weights, handle, object()

    def _combine(self, x, handle, topk_weights):
        must(x.dtype == torch.bfloat16 and x.is_contiguous(), "combine takes contiguous bfloat16")
        must(tuple(x.shape) == (handle.num_expanded_tokens, self._hidden), "combine of other rows than dispatched")
        must(self._hidden % 256 == 0, "combine needs hidden % 256 == 0")
        must(topk_weights is None, "weights in the expanded form")
        out = torch.zeros(len(handle.topk_idx), self._hidden)
        for rows, origins in self._ranks.share((x, handle.origins)):
            for place, sender, token in origins:
                if sender == self._ranks.rank:
                    out[token] += rows[place].float()
        return out.to(torch.bfloat16), None, object()

    def get_theoretical_num_sms(
        self, num_experts, num_topk, num_scaleout_topk=0, rdma_gbs=0, nvlink_gbs=0, sm_read_gbs=200, sm_write_gbs=50
    ):  # fmt: skip
        """The bandwidths and their divisions; the traffic is simplified."""
        rdma_gbs = rdma_gbs or (50.0 if MACHINE.ibstat else 0.0)
        nvlink_gbs = nvlink_gbs or (400.0 if MACHINE.nvidia_smi else 0.0)
        if self.num_rdma_ranks > 1 and 1 / rdma_gbs > 1 / nvlink_gbs:
            return max(4, int(rdma_gbs / 4))
        return max(4, int(nvlink_gbs / 20))

    def dispatch(
        self, x, topk_idx=None, topk_weights=None, cumulative_local_expert_recv_stats=None, num_experts=None,
        num_max_tokens_per_rank=None, expert_alignment=None, num_sms=0, num_qps=0, previous_event=None,
        previous_event_before_epilogue=None, async_with_compute_stream=False, allocate_on_comm_stream=False,
        handle=None, do_handle_copy=True, do_cpu_sync=None, do_expand=False, do_zero_padding=False,
        use_tma_aligned_col_major_sf=False,
    ):  # fmt: skip
        num_sms = num_sms or self.get_theoretical_num_sms(num_experts, topk_idx.shape[1])
        self._ranks.agree("num_sms", num_sms)
        sync = do_cpu_sync is not False
        alignment = expert_alignment or 1
        m = num_max_tokens_per_rank
        return self._dispatch(
            x,
            topk_idx,
            topk_weights,
            num_experts,
            m,
            alignment,
            sync,
            do_expand,
            use_tma_aligned_col_major_sf,
            do_handle_copy,
        )

    def combine(
        self, x, handle, topk_weights=None, bias=None, num_sms=0, num_qps=0, previous_event=None,
        previous_event_before_epilogue=None, async_with_compute_stream=False, allocate_on_comm_stream=False,
    ):  # fmt: skip
        return self._combine(x, handle, topk_weights)


def module(*classes: type) -> ModuleType:
    """A `deep_ep` with these classes."""
    made: Any = SimpleNamespace(__name__="deep_ep", topk_idx_t=torch.int64)
    for cls in classes:
        setattr(made, cls.__name__, cls)
    return made
