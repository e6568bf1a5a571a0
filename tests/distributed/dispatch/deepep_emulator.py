"""An emulator of DeepEP by its documentation, over gloo: both generations. It refuses the calls that the library
refuses.

Every rank shares all its data and takes its own part: slow, and independent of the tested code. Memory that the
library leaves uninitialized is NaN. Contracts: deep_ep/buffers/legacy.py and elastic.py, utils/comm.py and
utils/envs.py, csrc/kernels/backend/nccl.cu, csrc/kernels/legacy/internode.cu. `Machine` is the emulated environment.
"""

from __future__ import annotations

import os
import random
from dataclasses import dataclass
from types import ModuleType, SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from tests.kernels.vendors import library_calls
from tests.kernels.vendors.contract import must

PRESETS = (2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 144, 160)
NVLINK_RANKS = 8
"""Normal mode with more ranks uses the RDMA part of the buffer."""
LOW_LATENCY_HIDDEN = (2048, 2560, 3072, 4096, 5120, 6144, 7168, 8192)
FP8 = torch.float8_e4m3fn
topk_idx_t = torch.int64
_random = random.Random(0)


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
        backend = group._get_backend(torch.device("cuda"))
        must(backend._comm_ptr() != 0, "null NCCL communicator: segmentation fault")
        self.group = getattr(group, "gloo", group)
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
        allow_nvlink_for_low_latency_mode=True, allow_mnnvl=False, use_fabric=None, explicitly_destroy=False,
        enable_shrink=False, comm=None,
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
        dispatch_wait_recv_cost_stats=None, x_global_scale=None, use_fp8=True, round_scale=False, use_ue8m0=False,
        use_nvfp4=False, async_finish=False, return_recv_hook=False,
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
        return_recv_hook=False, out=None, combine_wait_recv_cost_stats=None, overlap=False, src_signals=None,
        src_signal_expect_value=0,
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
    """The fields of the library's handle, in the forms of one host."""

    do_expand: bool
    num_experts: int
    expert_alignment: int
    num_max_tokens_per_rank: int
    num_sms: int
    topk_idx: Tensor
    num_expanded_tokens: int
    num_recv_tokens_per_expert_list: list[int]
    psum_num_recv_tokens_per_scaleup_rank: Tensor
    psum_num_recv_tokens_per_expert: Tensor
    num_unaligned_recv_tokens_per_expert: Tensor
    recv_src_metadata: Tensor


@dataclass(frozen=True)
class Exchange:
    """Arguments of a dispatch or combine; `agreed` ones must be equal on all ranks."""

    num_experts: int
    max_tokens: int
    num_sms: int
    alignment: int = 1
    cpu_sync: bool = False
    columns: bool = False
    copies: bool = False

    @property
    def agreed(self) -> tuple[int, ...]:
        return self.num_experts, self.max_tokens, self.num_sms


class ElasticBuffer:
    """Second generation, 2.0 and 2.1, in the expanded form, with all ranks on NVLink."""

    num_made = 0

    def __init__(
        self, group, num_bytes=None, num_cpu_bytes=0, num_max_tokens_per_rank=0, hidden=0, num_topk=0,
        use_fp8_dispatch=False, deterministic=False, allow_hybrid_mode=True, allow_multiple_reduction=True,
        prefer_overlap_with_compute=True, sl_idx=3, num_allocated_qps=0, num_cpu_timeout_secs=300,
        num_gpu_timeout_secs=100, explicitly_destroy=False,
    ):  # fmt: skip
        must(not library_calls.recording(), "a buffer is made outside of captures")
        self.ranks = Ranks(group)
        if group.size() > 1 and os.environ.get("EP_DISABLE_GIN", "0") == "0" and not MACHINE.gin:
            raise RuntimeError("Assertion failed: (... != NCCL_GIN_TYPE_NONE and NCCL GIN is unavailable.)")
        must(num_gpu_timeout_secs >= MACHINE.seconds, "the GPU's time limit is shorter than that of the collectives")
        must(num_max_tokens_per_rank > 0 and hidden > 0, "num_max_tokens_per_rank > 0 and hidden > 0")
        type(self).num_made += 1
        self.num_rdma_ranks = MACHINE.num_nodes
        self.num_max_tokens_per_rank = num_max_tokens_per_rank
        self._hidden, self._top_k, self._fp8 = hidden, num_topk, use_fp8_dispatch

    def get_theoretical_num_sms(
        self, num_experts, num_topk, num_scaleout_topk=0, rdma_gbs=0, nvlink_gbs=0, sm_read_gbs=200, sm_write_gbs=50
    ):  # fmt: skip
        """The bandwidths and their divisions; the traffic is simplified."""
        must(num_experts % self.ranks.size == 0, "num_experts % num_groups == 0")
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
        must(do_expand and not do_zero_padding, "only the expanded form is emulated")
        must(handle is previous_event is previous_event_before_epilogue is None, "handles and events are not emulated")
        must(not async_with_compute_stream and not allocate_on_comm_stream, "events are not emulated")
        m = self.num_max_tokens_per_rank if num_max_tokens_per_rank is None else num_max_tokens_per_rank
        num_sms = num_sms or self.get_theoretical_num_sms(num_experts, topk_idx.shape[1])
        alignment = 1 if expert_alignment is None else expert_alignment
        sync = True if do_cpu_sync is None else do_cpu_sync
        if sync:
            library_calls.wait("DeepEP's counts")
        call = Exchange(num_experts, m, num_sms, alignment, sync, use_tma_aligned_col_major_sf, do_handle_copy)
        data, scales = x if isinstance(x, tuple) else (x, None)
        rows, row_scales, row_weights, copied, of_ranks, ends, counts, sources, on_host = elastic_dispatch(
            self, data, scales, topk_idx, topk_weights, call
        )
        handle = EPHandle(
            do_expand, num_experts, alignment, m, num_sms, topk_idx if copied is None else copied, len(rows), on_host,
            of_ranks, ends, counts, sources,
        )  # fmt: skip
        return (rows if row_scales is None else (rows, row_scales)), None, row_weights, handle, object()

    def combine(
        self, x, handle, topk_weights=None, bias=None, num_sms=0, num_qps=0, previous_event=None,
        previous_event_before_epilogue=None, async_with_compute_stream=False, allocate_on_comm_stream=False,
    ):  # fmt: skip
        must(topk_weights is None and bias is None, "weights of rows and biases are not emulated")
        must(previous_event is previous_event_before_epilogue is None, "events are not emulated")
        must(not async_with_compute_stream and not allocate_on_comm_stream, "events are not emulated")
        must(len(x) == handle.num_expanded_tokens, "combine of other rows than dispatched")
        call = Exchange(handle.num_experts, handle.num_max_tokens_per_rank, num_sms or handle.num_sms)
        out = elastic_combine(
            self, x, handle.recv_src_metadata, handle.topk_idx, handle.psum_num_recv_tokens_per_scaleup_rank, call
        )
        return out, None, object()

    def check(
        self, data: Tensor, scales: Tensor | None, topk_idx: Tensor, topk_weights: Tensor, call: Exchange
    ) -> None:
        """The asserts of a dispatch, and the sizes of the buffer."""
        check_x(data if scales is None else (data, scales))
        must(self._fp8 == (scales is not None), f"a buffer with use_fp8_dispatch={self._fp8} is given {data.dtype}")
        count, top_k = topk_idx.shape
        most = self.num_max_tokens_per_rank
        must(len(data) == count <= call.max_tokens <= most, f"{count} tokens, M {call.max_tokens}, buffer {most}")
        must(data.shape[1] == self._hidden and top_k <= self._top_k, "sizes beyond the buffer's")
        must(data.shape[1] * data.element_size() % 32 == 0, "rows must be a multiple of 32 bytes")
        must(data.data_ptr() % 16 == 0, "rows must start at 16 bytes")
        must(top_k <= 32 and call.num_experts <= 2048, "too many choices or experts")
        must(call.num_experts % self.ranks.size == 0, "num_experts % num_ranks == 0")
        must(call.num_sms > 0 and call.alignment > 0, f"{call}")
        must(topk_weights.dtype == torch.float32 and topk_weights.is_contiguous(), "weights contiguous float32")
        must(topk_weights.shape == topk_idx.shape, f"weights {list(topk_weights.shape)}")
        check_choices(topk_idx, call.num_experts)


@library_calls.launched
def elastic_dispatch(
    buffer: ElasticBuffer, data: Tensor, scales: Tensor | None, topk_idx: Tensor, topk_weights: Tensor, call: Exchange
) -> tuple[Any, ...]:
    """Rows, their scales and weights, the copied choices, and the tensors of the handle. Like the library's, which
    counts with atomics, rows of an expert and tokens of a rank arrive in any order."""
    buffer.check(data, scales, topk_idx, topk_weights, call)
    ranks, (_, top_k) = buffer.ranks, topk_idx.shape
    local = call.num_experts // ranks.size
    everyone = ranks.share((call.agreed, pack(data, scales), topk_idx, topk_weights))
    must(len({agreed for agreed, *_ in everyone}) == 1, "ranks disagree on the number of experts, M or num_sms")
    tokens = [
        (sender, token)
        for sender, (_, _, ids, _) in enumerate(everyone)
        for token in _shuffled((ids // local == ranks.rank).any(1).nonzero().flatten().tolist())
    ]
    counts = sum(
        (torch.bincount(ids[ids // local == ranks.rank] % local, minlength=local) for _, _, ids, _ in everyone)
    )
    aligned = -(-counts // call.alignment) * call.alignment
    num_tokens, num_rows = len(tokens), int(aligned.sum())
    if not call.cpu_sync:
        num_tokens = ranks.size * call.max_tokens
        worst = num_tokens * min(top_k, local) + (call.alignment - 1) * local
        num_rows = -(-worst // call.alignment) * call.alignment
    rows = torch.full((num_rows, data.shape[1]), float("nan")).to(data.dtype)
    row_scales = None if scales is None else _scales_of_rows(num_rows, scales, call.columns)
    row_weights = torch.full((num_rows,), float("nan"))
    sources = torch.full((num_tokens, top_k + 2), -1, dtype=torch.int32)
    ends = torch.cat((torch.zeros(1, dtype=torch.int64), aligned.cumsum(0)))  # starts, counted up to the ends
    for number in _shuffled(range(len(tokens))):
        sender, token = tokens[number]
        _, (their_data, their_scales), ids, weights = everyone[sender]
        mine = (ids[token] // local == ranks.rank).tolist()
        sources[number, 0] = sender * call.max_tokens + token
        sources[number, 1] = sender * top_k + mine.index(True)
        for k in range(top_k):
            if mine[k]:
                place = ends[ids[token, k] % local].item()
                ends[ids[token, k] % local] += 1
                rows[place] = their_data[token].view(data.dtype)
                row_weights[place] = weights[token, k]
                sources[number, 2 + k] = place
                if row_scales is not None:
                    row_scales[place] = their_scales[token]
    senders = torch.tensor([sender for sender, _ in tokens], dtype=torch.int64)
    of_ranks = torch.bincount(senders, minlength=ranks.size).cumsum(0).to(torch.int32)
    copied = topk_idx.clone() if call.copies else None
    on_host = aligned.tolist() if call.cpu_sync else []
    handle = of_ranks, ends.to(torch.int32)[:local], counts.to(torch.int32), sources, on_host
    return rows, row_scales, row_weights, copied, *handle


@library_calls.launched
def elastic_combine(
    buffer: ElasticBuffer, x: Tensor, sources: Tensor, topk_idx: Tensor, of_ranks: Tensor, call: Exchange
) -> Tensor:
    """A rank sums its rows of a token, and the token's rank sums these sums; each sum is rounded to bfloat16."""
    ranks, top_k = buffer.ranks, topk_idx.shape[1]
    must(x.dtype == torch.bfloat16 and x.is_contiguous(), "combine takes contiguous bfloat16")
    must(x.dim() == 2 and x.shape[1] % 256 == 0, "combine needs hidden % 256 == 0")
    must(x.data_ptr() % 16 == 0, "rows must start at 16 bytes")
    must(topk_idx.dtype == torch.int64 and topk_idx.is_contiguous(), "topk_idx must be contiguous topk_idx_t")
    count = int(of_ranks[-1]) if len(sources) == call.max_tokens * ranks.size else len(sources)
    sent: list[list[tuple[int, Tensor]]] = [[] for _ in range(ranks.size)]
    for token, sender, *places in sources[:count].tolist():
        own = [place for place in places if place >= 0]
        sent[sender // top_k].append((token % call.max_tokens, _sum(x[own])))
    everyone = ranks.share((call.agreed, sent))
    must(len({agreed for agreed, _ in everyone}) == 1, "ranks disagree on the number of experts, M or num_sms")
    parts: list[list[Tensor]] = [[] for _ in topk_idx]
    for _, of_rank in everyone:
        for token, row in of_rank[ranks.rank]:
            parts[token].append(row)
    out = torch.zeros(len(topk_idx), x.shape[1], dtype=torch.bfloat16)
    for token, rows in enumerate(parts):
        if rows:
            out[token] = _sum(torch.stack(rows))
    return out


def _shuffled(items: Any) -> list[Any]:
    return _random.sample(list(items), len(items))


def _sum(rows: Tensor) -> Tensor:
    return rows.float().sum(0).to(torch.bfloat16)


def _scales_of_rows(num_rows: int, scales: Tensor, columns: bool) -> Tensor:
    """Undefined scales in the dtype of `scales` [T, S]; column-major, columns begin at 16 bytes."""
    num = scales.shape[1]
    if not columns:
        return torch.full((num_rows, num), float("nan"))
    return torch.full((num, -(-num_rows // 4) * 4), float("nan"))[:, :num_rows].t()


def module(*classes: type) -> ModuleType:
    """A `deep_ep` with these classes."""
    made: Any = SimpleNamespace(__name__="deep_ep", topk_idx_t=topk_idx_t)
    for cls in classes:
        setattr(made, cls.__name__, cls)
    return made
