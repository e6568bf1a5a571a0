"""Stand-ins for vendor libraries on a simulated device: results of the right shapes, and the cost of each call.

Signatures are those used by the engine's adapters; `install` makes the modules importable. Legend: M rows,
N out-features, K in-features, G groups (experts), R ranks, H heads.
"""

from __future__ import annotations

import importlib.machinery
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from benchmarks.step_costs.blackwell import FlashInfer
from benchmarks.step_costs.cost import Cost
from benchmarks.step_costs.costs import memory_of, size
from benchmarks.step_costs.elastic import elastic_buffer
from benchmarks.step_costs.hardware import Announcement, Hardware
from benchmarks.step_costs.mega_moe import MegaMoe
from benchmarks.step_costs.recorder import Recorder

ALIGNMENT = 128
"""Alignment of DeepGEMM's groups in rows, if nothing else is asked for."""
TILE = 64
"""Rows of the smaller tile of Hopper's masked products, for at most so many expected rows (sm90.hpp; Blackwell's have
the alignment)."""
QUERY_ROWS, MOST_SPLITS = 64, 128
"""FlashAttention 3: rows of a query block, with all heads of a KV head together."""
FP8 = torch.float8_e4m3fn


class Libraries:
    """All stand-ins of a process.

    Args:
        recorder: gets the cost of each call.
        num_nodes: nodes of the expert-parallel group; target_ranks: number of its ranks that a token may choose.
    """

    def __init__(self, recorder: Recorder, hardware: Hardware, num_nodes: int, target_ranks: float) -> None:
        self._recorder, self._hardware, self._num_nodes = recorder, hardware, num_nodes
        self._target_ranks = target_ranks
        self._blackwell = hardware.facts.capability[0] == 10
        self._alignment = ALIGNMENT

    def install(self, fp8_kv: Path | None = None, elastic: Path | None = None) -> None:
        """DeepGEMM and DeepEP's first generation; FlashAttention 3 on Hopper, FlashInfer on Blackwell. fp8_kv: FlashMLA
        in sgl_kernel's build too, with a file in this folder. elastic: DeepEP's second generation too, likewise."""
        modules = {"deep_gemm": self.deep_gemm(), "deep_ep": self.deep_ep()}
        if self._blackwell:
            modules["flashinfer"] = FlashInfer(self).module()
        else:
            modules["flash_attn_interface"] = self.flash_attention()
        if fp8_kv:
            modules |= {"sgl_kernel": SimpleNamespace(), "sgl_kernel.flash_mla": self.flash_mla()}
        for name, module in modules.items():
            found = ModuleType(name)
            found.__spec__ = importlib.machinery.ModuleSpec(name, None, is_package=name in ("deep_ep", "sgl_kernel"))
            if name == "sgl_kernel":  # submodules are searched as files
                assert fp8_kv is not None
                (fp8_kv / "flash_mla.py").touch()
                found.__spec__.submodule_search_locations = [str(fp8_kv)]
            if name == "deep_ep" and elastic is not None:
                (elastic / "buffers").mkdir()
                found.__spec__.submodule_search_locations = [str(elastic)]
                module.ElasticBuffer = elastic_buffer(self, self._hardware, self._num_nodes, self._target_ranks)
            found.__dict__.update(vars(module))
            sys.modules[name] = found

    def call(self, name: str, cost: Cost, dependent: bool = False, announces: Announcement = Announcement.NONE) -> None:
        """One call, on the current stream; dependent: its kernel is launched so; announces: it announces the next."""
        from tests.simulated_cuda.operators import Launch

        self._recorder.library(Launch(name), name, cost, dependent, announces)

    # -- DeepGEMM

    def deep_gemm(self) -> Any:
        return SimpleNamespace(
            fp8_gemm_nt=self._dense,
            m_grouped_fp8_gemm_nt_contiguous=self._contiguous,
            m_grouped_fp8_gemm_nt_masked=self._masked,
            m_grouped_bf16_gemm_nt_contiguous=self._contiguous,
            m_grouped_bf16_gemm_nt_masked=self._masked,
            transform_sf_into_required_layout=_packed,
            set_pdl=lambda enabled: None,
            fp8_fp4_mqa_logits=None,  # of prompts, which no case with an indexer has
            get_mk_alignment_for_contiguous_layout=lambda: self._alignment,
            set_mk_alignment_for_contiguous_layout=self._align,
            **vars(MegaMoe(self, self._hardware)),
        )

    def _dense(self, a: Any, b: Any, d: Tensor) -> None:
        self._transpose(a)
        self.call("fp8_gemm_nt", dense_cost(a, b, d), True)

    def _contiguous(self, a: Any, b: Any, d: Tensor, grouped_layout: Tensor, use_psum_layout: bool = False) -> None:
        self._transpose(a)
        cost = grouped_cost(a, b, d, self._recorder.setting.routing, self._alignment)
        self.call("m_grouped_gemm_nt_contiguous", cost, True)

    def _align(self, rows: int) -> None:
        self._alignment = rows

    def _masked(self, a: Any, b: Any, d: Tensor, masked_m: Tensor, expected_m: int) -> None:
        self._transpose(a)
        tile = TILE if expected_m <= TILE and not self._blackwell else ALIGNMENT
        cost = grouped_cost(a, b, d, self._recorder.setting.routing, tile)
        self.call("m_grouped_gemm_nt_masked", cost, True)

    def _transpose(self, a: Any) -> None:
        """A kernel of the library transposes all row-major scales; on Blackwell it packs all that are not integers."""
        if isinstance(a, Tensor):
            return
        if self._blackwell and a[1].dtype == torch.float32:
            self.call("pack_fp32_into_ue8m0", Cost(size(a[1]), size(a[1]) / 4), True)
        elif not self._blackwell and a[1].shape[-2] > 1 and a[1].stride(-2) != 1:
            self.call("transpose_fp32", Cost(size(a[1]), size(a[1])), True)

    # -- FlashAttention 3

    def flash_attention(self) -> Any:
        return SimpleNamespace(
            flash_attn_with_kvcache=self._paged, flash_attn_varlen_func=self._varlen,
            get_scheduler_metadata=self._schedule,
        )  # fmt: skip

    def _schedule(self, batch: int, *sizes: Any, cu_seqlens_q: Tensor, **options: Any) -> Tensor:
        self.call("prepare_varlen", Cost(4 * batch + size(cu_seqlens_q), 16 * batch))
        return torch.empty(4 * batch + 1, dtype=torch.int32, device=cu_seqlens_q.device)

    def _paged(
        self, q: Tensor, k_cache: Tensor, v_cache: Tensor, *, cache_seqlens: Tensor, page_table: Tensor,
        cu_seqlens_q: Tensor, max_seqlen_q: int, causal: bool, num_splits: int = 0, qv: Tensor | None = None,
        softmax_scale: float | None = None, return_softmax_lse: bool = False, window_size: Any = (-1, -1),
        scheduler_metadata: Tensor | None = None,
    ) -> Any:  # fmt: skip
        out = q.new_empty(*q.shape[:2], v_cache.shape[-1])
        lse = torch.empty(q.shape[1], len(q), device=q.device)
        longest = page_table.shape[1] * k_cache.shape[1]  # of selected tokens fewer than the context
        context = min(self._recorder.setting.context + max_seqlen_q - 1, longest)
        if scheduler_metadata is None:
            self.call("prepare_varlen", Cost(size(cache_seqlens, cu_seqlens_q), 4 * len(cache_seqlens)))
        # with splits each program announces the combine when it has no further tile, before it stores its last one
        announces = Announcement.NONE if num_splits == 1 else Announcement.LATE
        cost = paged_cost(q, qv, k_cache, v_cache, out, len(page_table), context)
        self.call("flash_attn_with_kvcache", cost, announces=announces)
        blocks = len(page_table) * -(-max_seqlen_q * q.shape[1] // (QUERY_ROWS * k_cache.shape[2]))
        splits = min(splits_of(blocks, self._hardware["multiprocessors"]), num_splits or MOST_SPLITS)
        if num_splits != 1:  # launched with dynamic splits of any number
            cost = Cost(splits * out.numel() * 4 * (splits > 1), size(out) * (splits > 1))
            self.call("flash_attn_combine", cost, dependent=True)
        elif scheduler_metadata is not None:
            self.call("zero_semaphore", Cost(0, 4))
        return (out, lse, None, None) if return_softmax_lse else out

    def _varlen(
        self, q: Tensor, k: Tensor, v: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, max_seqlen_q: int,
        max_seqlen_k: int, softmax_scale: float | None = None, causal: bool = False, return_attn_probs: bool = False,
    ) -> Any:  # fmt: skip
        out = q.new_empty(*q.shape[:2], v.shape[-1])
        self.call("prepare_varlen", Cost(size(cu_seqlens_q), 4))
        self.call("flash_attn_varlen", varlen_cost(q, k, v, out, len(cu_seqlens_q) - 1, causal))
        return (out, torch.empty(q.shape[1], len(q), device=q.device)) if return_attn_probs else out

    # -- FlashMLA's dense FP8 kernel

    def flash_mla(self) -> Any:
        return SimpleNamespace(
            get_mla_metadata=self._partition, flash_mla_with_kvcache=self._latent, flash_mla_sparse_fwd=None
        )

    def _partition(
        self, cache_seqlens: Tensor | None = None, num_q_tokens_per_head_k: int = 1, num_heads_k: int = 1,
        is_fp8_kvcache: bool = False,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        assert cache_seqlens is not None and is_fp8_kvcache, "only the dense FP8 kernel is counted"
        parts = max(1, self._hardware["multiprocessors"] // -(-num_q_tokens_per_head_k // QUERY_ROWS))
        made = cache_seqlens.new_empty(parts, 8), cache_seqlens.new_empty(len(cache_seqlens) + 1)
        self.call("get_mla_metadata", Cost(size(cache_seqlens), size(*made)))
        return made

    def _latent(
        self, q: Tensor, k_cache: Tensor, block_table: Tensor, cache_seqlens: Tensor, head_dim_v: int,
        tile_scheduler_metadata: Tensor, num_splits: Tensor, softmax_scale: float, causal: bool, descale_q: Tensor,
        descale_k: Tensor,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        """The kernel and its sum of parts; at most a part of each request and partition is stored, in float32."""
        out = torch.empty(*q.shape[:3], head_dim_v, dtype=torch.bfloat16, device=q.device)
        lse = torch.empty(len(q), q.shape[2], q.shape[1], device=q.device)
        flat, context = q.flatten(0, 1), self._recorder.setting.context + q.shape[1] - 1
        cost = paged_cost(flat, None, k_cache, k_cache[..., :0], out, len(q), context)
        flops = cost.total_flops * (1 + head_dim_v / q.shape[3])
        split = len(q) < len(tile_scheduler_metadata)
        parts = 4 * (len(q) + len(tile_scheduler_metadata)) * q.shape[1] * q.shape[2] * head_dim_v * split
        self.call("flash_mla_fp8", Cost(cost.read, size(out) * (not split) + parts, {"fp8": flops}))
        self.call("flash_mla_combine", Cost(parts, size(out) * split))
        return out, lse

    # -- DeepEP

    def deep_ep(self) -> Any:
        libraries, hardware = self, self._hardware

        class Buffer:
            """The first generation, of one rank of R."""

            num_sms = 20

            def __init__(self, group: Any, *args: Any, **options: Any) -> None:
                self._size = group.size()

            @staticmethod
            def get_dispatch_config(num_ranks: int) -> Any:
                return _SizeHints()

            get_combine_config = get_dispatch_config

            @staticmethod
            def get_low_latency_rdma_size_hint(tokens: int, hidden: int, ranks: int, experts: int) -> int:
                return 4 * experts * tokens * (2 * hidden + 16)

            def clean_low_latency_buffer(self, tokens: int, hidden: int, experts: int) -> None:
                libraries.call("clean_low_latency_buffer", Cost(launches=1))

            def low_latency_dispatch(
                self, x: Tensor, topk_idx: Tensor, num_max_dispatch_tokens_per_rank: int, num_experts: int,
                use_fp8: bool = True, round_scale: bool = False,
            ) -> Any:  # fmt: skip
                local, rows = num_experts // self._size, self._size * num_max_dispatch_tokens_per_rank
                hidden = x.shape[1]
                row_bytes = hidden + hidden // 128 * 4 if use_fp8 else 2 * hidden
                cost = message_cost(
                    hardware, "low_latency", "dispatch", topk_idx.numel(), row_bytes, self._size, libraries._num_nodes
                )
                libraries.call("low_latency_dispatch", cost)
                data = x.new_empty(local, rows, hidden, dtype=FP8 if use_fp8 else x.dtype)
                counts = torch.empty(local, dtype=torch.int32, device=x.device)
                if not use_fp8:
                    return data, counts, None, None, None
                scales = torch.empty(local, hidden // 128, rows, device=x.device).transpose(1, 2)
                return (data, scales), counts, None, None, None

            def low_latency_combine(
                self, x: Tensor, topk_idx: Tensor, topk_weights: Tensor, handle: Any
            ) -> tuple[Tensor, Any, Any]:
                hidden = x.shape[-1]
                cost = message_cost(
                    hardware, "low_latency", "combine", topk_idx.numel(), 2 * hidden, self._size, libraries._num_nodes
                )
                libraries.call("low_latency_combine", cost)
                return x.new_empty(len(topk_idx), hidden), None, None

            def get_dispatch_layout(self, topk_idx: Tensor, num_experts: int) -> Any:
                libraries.call("get_dispatch_layout", Cost(size(topk_idx), len(topk_idx) * self._size))
                device = topk_idx.device
                per_rank = torch.empty(self._size, dtype=torch.int32, device=device)
                per_expert = torch.empty(num_experts, dtype=torch.int32, device=device)
                in_rank = torch.empty(len(topk_idx), self._size, dtype=torch.bool, device=device)
                return per_rank, per_rank if libraries._num_nodes > 1 else None, per_expert, in_rank, None

            def dispatch(self, x: Any, *, topk_idx: Tensor, topk_weights: Tensor, **layout: Any) -> Any:
                """The host waits for the counts."""
                from tests.simulated_cuda import streams

                data, scales = x if isinstance(x, tuple) else (x, None)
                row_bytes = data.shape[1] * data.element_size() + (0 if scales is None else 4 * scales.shape[1])
                tokens, targets = len(data), targets_of(topk_idx.shape[1], libraries._target_ranks)
                received = round(tokens * targets)
                libraries.call("notify_dispatch", Cost(link_us=20.0))
                streams.note_wait("DeepEP's counts")
                cost = message_cost(
                    hardware, "normal", "dispatch", received, row_bytes, self._size, libraries._num_nodes, tokens
                )
                libraries.call("dispatch", cost)
                out = data.new_empty(received, data.shape[1])
                ids = topk_idx.new_empty(received, topk_idx.shape[1])
                weights = topk_weights.new_empty(received, topk_idx.shape[1])
                rows = out if scales is None else (out, scales.new_empty(received, scales.shape[1]))
                return rows, ids, weights, libraries._recorder.setting.routing.each, tokens, None

            def combine(self, x: Tensor, handle: int) -> Any:
                row_bytes = 2 * x.shape[1]
                libraries.call("notify_combine", Cost(link_us=5.0))
                cost = message_cost(
                    hardware, "normal", "combine", len(x), row_bytes, self._size, libraries._num_nodes, handle
                )
                libraries.call("combine", cost)
                return x.new_empty(handle, x.shape[1]), None, None

        return SimpleNamespace(Buffer=Buffer, topk_idx_t=torch.int64)


class _SizeHints:
    def get_nvl_buffer_size_hint(self, hidden_bytes: int, num_ranks: int) -> int:
        return 1 << 20

    get_rdma_buffer_size_hint = get_nvl_buffer_size_hint


def _packed(scales: Tensor, mn: int, k: int, *args: Any, **options: Any) -> Tensor:
    """Four exponents in each int32, contiguous along rows or channels."""
    columns = -(-k // 512)
    return torch.empty(columns, -(-mn // 4) * 4, dtype=torch.int32, device=scales.device)[:, :mn].T


# -- costs


def _data(x: Any) -> Tensor:
    return x if isinstance(x, Tensor) else x[0]


def _operand(x: Any) -> int:
    return size(x) if isinstance(x, Tensor) else size(*x)


def _dtype(x: Tensor) -> str:
    return "fp8" if x.dtype == FP8 else "bf16"


def dense_cost(a: Any, b: Any, d: Tensor) -> Cost:
    """d [M, N] = a [M, K] @ b [N, K].T."""
    x = _data(a)
    flops = {_dtype(x): 2.0 * x.shape[0] * x.shape[1] * d.shape[1]}
    return Cost(_operand(a) + _operand(b), size(d), flops, weights=memory_of(_data(b)))


def grouped_cost(a: Any, b: Any, d: Tensor, routing: Any, tile: int) -> Cost:
    """Weights of experts with a row. Tiles of `tile` rows, and no part of one, are read, multiplied and written
    (sm90_fp8_gemm_1d2d.cuh: one request of the tensor memory accelerator for each)."""
    x, weight = _data(a), _data(b)
    groups, n, k = weight.shape
    if groups > 1:  # the adapter's test of a build has one group
        routing.check_slots(groups)
    rows = routing.rows_in_tiles(tile)
    per_row = k * x.element_size() + (0 if isinstance(a, Tensor) else 4 * a[1].shape[-1])
    read = routing.touched / groups * _operand(b) + rows * per_row
    return Cost(read, rows * n * d.element_size(), {_dtype(x): 2.0 * rows * n * k})


def paged_cost(
    q: Tensor, qv: Tensor | None, k_cache: Tensor, v_cache: Tensor, out: Tensor, requests: int, context: int
) -> Cost:
    """With `qv` (MLA) keys are [rotary | latent] and values the latent: one record of the cache a token."""
    heads, values = k_cache.shape[2], v_cache.shape[-1]
    keys = q.shape[-1] + (0 if qv is None else qv.shape[-1])
    record = heads * (keys if qv is not None else keys + values) * k_cache.element_size()
    flops = 2.0 * q.shape[0] * q.shape[1] * context * (keys + values)
    return Cost(size(q, qv) + requests * context * record, size(out), {"bf16": flops})


def varlen_cost(q: Tensor, k: Tensor, v: Tensor, out: Tensor, requests: int, causal: bool) -> Cost:
    """Requests of equal lengths."""
    own, keys = len(q) / requests, len(k) / requests
    pairs = requests * (own * (keys - own) + own * (own + 1) / 2 if causal else own * keys)
    flops = 2.0 * q.shape[1] * pairs * (q.shape[-1] + v.shape[-1])
    return Cost(size(q, k, v), size(out), {"bf16": flops})


def splits_of(blocks: int, multiprocessors: int) -> int:
    """Number of splits of a context in FlashAttention if query blocks do not fill the device
    (`num_splits_heuristic` in hopper/heuristics.h: no split from 80 % on)."""
    return 1 if blocks >= 0.8 * multiprocessors else max(1, multiprocessors // blocks)


def targets_of(top_k: int, ranks: float) -> float:
    """Expected number of ranks of a token's experts, under uniform routing."""
    return ranks * (1 - (1 - 1 / ranks) ** top_k)


def message_cost(
    hardware: Hardware, mode: str, operation: str, copies: float, row_bytes: int, ranks: int, nodes: int,
    tokens: int | None = None,
) -> Cost:  # fmt: skip
    """Rows sent to other ranks: `copies` in total, of which a share of 1 / ranks stays local. Over the network normal
    mode sends a token once to each other node (`tokens`)."""
    per_node = ranks // nodes
    nvlink = copies * row_bytes * (per_node - 1) / ranks
    network = 0.0
    if nodes > 1:
        network = (copies * (1 - per_node / ranks) if tokens is None else tokens * (nodes - 1)) * row_bytes
    table = hardware["deepep"][mode]
    inside = table["node"]
    near = inside[f"{operation}_us"] + nvlink / inside[f"{operation}_bytes_per_s"] * 1e6
    far = 0.0
    if nodes > 1:
        far = table["network"][f"{operation}_us"] + network / table["network"][f"{operation}_bytes_per_s"] * 1e6
    moved = nvlink + network
    return Cost(moved, moved, nvlink=nvlink, network=network, link_us=max(near, far))
