"""An emulator of FlashInfer 0.7 by its sources, on the CPU: flashinfer/mla/_batch_mla, prefill.py, sampling.py.

Written without the adapters' code. Plans must match the runs; pages outside all plans have arbitrary contents.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from tests.kernels.vendors.contract import (
    causal,
    check_index,
    check_shape,
    everything,
    in_window,
    must,
    poison,
    softmax_rows,
)
from tests.kernels.vendors.library_calls import launched, recording

HALF, E4M3 = (torch.bfloat16, torch.float16), torch.float8_e4m3fn
MIN_WORKSPACE = 128 << 20
PREFILL_WIDTHS = ((64, 64), (128, 128), (192, 128), (256, 256))
MAX_WORK_ITEMS = 16384


@dataclass(frozen=True)
class MLAPlanMetadata:
    qo_indptr: Tensor | None = None
    kv_indptr: Tensor | None = None
    kv_indices: Tensor | None = None
    kv_len_arr: Tensor | None = None
    cum_seq_lens_q: Tensor | None = None
    block_tables: Tensor | None = None
    seq_lens: Tensor | None = None
    max_q_len: int | None = None

    @classmethod
    def csr(cls, qo_indptr, kv_indptr, kv_indices, kv_len_arr):
        return cls(qo_indptr, kv_indptr, kv_indices, kv_len_arr)


def _starts(x: Tensor, name: str) -> list[int]:
    check_index(x, name)
    values = x.tolist()
    must(values[0] == 0 and values == sorted(values), f"{name} must start at zero and not fall: {values}")
    return values


def _workspace(buffer: Tensor) -> None:
    must(buffer.dtype == torch.uint8 and buffer.numel() >= MIN_WORKSPACE, "a workspace of 128 MiB of bytes")
    must(buffer.data_ptr() % 16 == 0, "the workspace must start at 16 bytes")


class _Lists:
    """The four lists of a plan on the device: new ones each time, or with `graph` at the addresses given. Captured runs
    read these lists, so the rest of their plan must not change."""

    def __init__(self, graph: bool, *buffers: Tensor | None) -> None:
        self.graph, self.lists, self._facts = graph, buffers, None
        for buffer in buffers if graph else ():
            must(buffer is not None, "CUDA graph mode needs all buffers")
            check_index(buffer, "a buffer")
        must(not graph or len(buffers[0]) == len(buffers[1]) == len(buffers[3]) + 1, "buffers for other batch sizes")

    def fill(self, facts: tuple[Any, ...], *lists: Tensor) -> None:
        must(not recording(), "a plan is host work: it cannot be recorded")
        if not self.graph:
            self.lists = tuple(values.clone() for values in lists)
            return
        must(self._facts in (None, facts), f"recorded with {self._facts}, planned with {facts}")
        self._facts = facts
        for place, (buffer, values) in enumerate(zip(self.lists, lists)):
            room = len(values) <= len(buffer) if place == 2 else len(values) == len(buffer)
            must(room, f"list {place} of {len(values)} for a buffer of {len(buffer)}")
            buffer[: len(values)].copy_(values)

    def read(self) -> tuple[Tensor, ...]:
        must(self.graph or not recording(), "only a wrapper in CUDA graph mode can be recorded")
        return self.lists


class BatchMLAPagedAttentionWrapper:
    made, arch = 0, 9

    def __init__(
        self, float_workspace_buffer, use_cuda_graph=False, qo_indptr=None, kv_indptr=None, kv_indices=None,
        kv_len_arr=None, backend="auto",
    ):  # fmt: skip
        _workspace(float_workspace_buffer)
        type(self).made += 1
        self._plan: Any = None
        self._lists = _Lists(use_cuda_graph, qo_indptr, kv_indptr, kv_indices, kv_len_arr)
        # on Blackwell "auto" takes kernels whose plans cannot be renewed
        self._renews = type(self).arch != 10 or backend in ("fa2", "fa3")

    def plan(
        self, qo_indptr=None, kv_indptr=None, kv_indices=None, kv_len_arr=None, num_heads=None, head_dim_ckv=None,
        head_dim_kpe=None, page_size=None, causal=None, sm_scale=None, q_data_type=None, kv_data_type=None,
        use_profiler=False, *, metadata=None, query_layout=None, kv_cache_layout=None, lse_mode="none",
        output_dtype=None, output_scale="none", scale_mode="default", skip_softmax=False, enable_pdl=None,
        use_sinks=False, cum_seq_lens_q=None, block_tables=None, seq_lens=None, max_q_len=None,
    ):  # fmt: skip
        must(metadata is not None and qo_indptr is None, "flat metadata is deprecated: pass metadata")
        must(isinstance(metadata, MLAPlanMetadata), "metadata must be an MLAPlanMetadata")
        q_starts = _starts(metadata.qo_indptr, "qo_indptr")
        kv_starts = _starts(metadata.kv_indptr, "kv_indptr")
        check_index(metadata.kv_indices, "kv_indices")
        check_index(metadata.kv_len_arr, "kv_len_arr")
        lens = metadata.kv_len_arr.tolist()
        must(len(q_starts) == len(kv_starts) == len(lens) + 1, "batch sizes of the metadata differ")
        must(len(lens) > 0, "planning requires a nonempty batch")
        must(kv_starts[-1] <= metadata.kv_indices.numel(), "kv_indices end before kv_indptr")
        pages = [b - a for a, b in itertools.pairwise(kv_starts)]
        must(pages == [-(-n // page_size) for n in lens], "page counts must equal ceil(kv_len / page_size)")
        fp8 = kv_data_type == E4M3
        must(q_data_type in HALF and (fp8 or kv_data_type == q_data_type), f"{q_data_type}, {kv_data_type}")
        if fp8:
            must(type(self).arch == 9, "FP8 kv_data_type for MLA requires Hopper")
            must(q_data_type == torch.bfloat16 and head_dim_ckv == 512 and head_dim_kpe in (0, 64), "FP8: bf16, 512+64")
            must(scale_mode in ("default", "kv-per-tensor"), "FP8 plans have scale_mode kv-per-tensor")
        else:
            must(scale_mode == "default", "only FP8 plans have scales")
        must(head_dim_ckv % 128 == 0 and head_dim_kpe % 64 == 0, f"no kernels for {head_dim_ckv}+{head_dim_kpe}")
        counts = [b - a for a, b in itertools.pairwise(q_starts)]
        tile = 128 if sum(counts) * num_heads // len(counts) > 64 else 64
        must(sum(-(-n * num_heads // tile) for n in counts) <= MAX_WORK_ITEMS, "more work items than a plan holds")
        for count, kv in zip(counts, lens) if causal and tile % num_heads else ():
            for end in range(tile, count * num_heads, tile):
                query, rest = divmod(end, num_heads)
                must(not rest or (kv - count + query) % 64 != 0, "a tile ends inside a token at a key tile's start")
        must(self._plan is None or self._renews or not self._lists.graph, "plans of this backend cannot be renewed")
        facts = (
            q_starts[-1],
            num_heads,
            head_dim_ckv,
            head_dim_kpe,
            page_size,
            causal,
            sm_scale,
            q_data_type,
            kv_data_type,
            lse_mode,
        )
        self._lists.fill(facts, metadata.qo_indptr, metadata.kv_indptr, metadata.kv_indices, metadata.kv_len_arr)
        self._plan = SimpleNamespace(
            tokens=q_starts[-1], heads=num_heads, ckv=head_dim_ckv, kpe=head_dim_kpe, page=page_size, causal=causal,
            scale=sm_scale, dtype=q_data_type, kv_dtype=kv_data_type, lse=lse_mode,
        )  # fmt: skip

    def run(
        self, q_nope=None, q_pe=None, ckv_cache=None, kpe_cache=None, out=None, lse=None, return_lse=False,
        profiler_buffer=None, kv_len=None, page_table=None, return_lse_base_on_e=False, o_scale=None, *, query=None,
        kv_cache=None, ckv_scale=None, ckv_scale_arr=None, kpe_scale=None, sinks=None,
        skip_softmax_threshold_scale_factor=None, bmm1_scale=None, bmm2_scale=None,
    ):  # fmt: skip
        p = self._plan
        must(p is not None, "run before plan")
        must(q_nope is None and query is not None, "separate tensors are deprecated: pass query and kv_cache")
        wanted = ("basee" if return_lse_base_on_e else "base2") if return_lse or return_lse_base_on_e else "none"
        must(wanted == p.lse, f"planned with LSE {p.lse}, run with {wanted}")
        check_shape(query, (p.tokens, p.heads, p.ckv + p.kpe), "query")
        must(kv_cache.dim() == 3 and kv_cache.shape[1:] == (p.page, p.ckv + p.kpe), f"kv_cache {list(kv_cache.shape)}")
        must(query.dtype == p.dtype and kv_cache.dtype == p.kv_dtype, "dtypes differ from the plan's")
        factor = 1.0
        if p.kv_dtype == E4M3:
            must((ckv_scale is None) != (ckv_scale_arr is None) and kpe_scale is not None, "FP8 runs need scales")
            must(ckv_scale == kpe_scale and 0 < ckv_scale < math.inf, "not emulated")
            factor = ckv_scale
        else:
            must(ckv_scale is ckv_scale_arr is kpe_scale is None, "scales are only valid with FP8")
        must(query.stride(-1) == 1 and kv_cache.stride(-1) == 1, "the last dimensions must be contiguous")
        check_shape(out, (*query.shape[:2], p.ckv), "out")
        must(out.dtype == p.dtype, "out differs from the planned dtype")
        sums = _mla(p, *self._lists.read(), query, kv_cache, out, factor)
        return (out, sums) if return_lse else out


@launched
def _mla(p: Any, q_starts, kv_starts, indices, lens, query, kv_cache, out, factor) -> Tensor:
    """Writes `out`; returns log-sum-exps [T, H] to base e."""
    out.fill_(math.nan)
    lse = poison(*query.shape[:2], dtype=torch.float32)
    q_starts, kv_starts = q_starts.tolist(), kv_starts.tolist()
    for i, length in enumerate(lens.tolist()):
        rows = slice(q_starts[i], q_starts[i + 1])
        pages = indices[kv_starts[i] : kv_starts[i + 1]].long()
        must(bool(((pages >= 0) & (pages < len(kv_cache))).all()), "a page number is out of range")
        keys = kv_cache[pages].flatten(0, 1)[:length, None].double() * factor
        seen = (causal if p.causal else everything)(len(query[rows]), length)
        result, sums = softmax_rows(query[rows], keys, keys[..., : p.ckv], p.scale, seen)
        out[rows], lse[rows] = result.to(out.dtype), sums.float()
    return lse


def trtllm_decode(arch: int) -> Any:
    """`mla.trtllm_batch_decode_with_kv_cache_mla` of a GPU; it may write any values to its workspace but expects them
    to be kept."""
    seen: dict[int, Tensor] = {}

    def decode(
        query, kv_cache, workspace_buffer, qk_nope_head_dim, kv_lora_rank, qk_rope_head_dim, block_tables, seq_lens,
        max_seq_len, sparse_mla_top_k=0, out=None, bmm1_scale=1.0, bmm2_scale=1.0, sinks=None, enable_pdl=None,
        backend="auto", cum_seq_lens_q=None, max_q_len=None, return_lse=False,
    ):  # fmt: skip
        must(arch == 10, "trtllm-gen has kernels for sm_100 only")
        must(backend == "trtllm-gen", "auto imports CuTeDSL and may not be captured: name the backend")
        must(not sparse_mla_top_k and sinks is None and not return_lse, "not emulated")
        must((kv_lora_rank, qk_rope_head_dim) in ((512, 64), (256, 64)), "no kernels for these widths")
        must(workspace_buffer.dtype == torch.uint8 and workspace_buffer.numel() >= MIN_WORKSPACE, "128 MiB of bytes")
        if workspace_buffer.data_ptr() not in seen:
            must(recording() or not workspace_buffer[:4096].any(), "a workspace must be zero at its first use")
            seen[workspace_buffer.data_ptr()] = workspace_buffer
        heads, width, page = query.shape[-2], query.shape[-1], kv_cache.shape[-2]
        must(not 64 < heads < 128 and heads <= 128, f"no kernels for {heads} heads")
        must(kv_cache.dim() == 3 and page in (32, 64), f"pages of 32 or 64 tokens, kv_cache is {list(kv_cache.shape)}")
        must(width == kv_cache.shape[-1] == kv_lora_rank + qk_rope_head_dim, "head widths differ")
        must(query.dtype in (torch.bfloat16, E4M3), f"results are bfloat16: no kernels for {query.dtype}")
        must(query.is_contiguous(), "contiguous queries")
        must(kv_cache.dtype == query.dtype, f"no kernels for queries in {query.dtype} and a cache in {kv_cache.dtype}")
        must(isinstance(bmm1_scale, float) and bmm2_scale == 1.0, "scales are floats in captured steps")
        check_index(block_tables, "block_tables", 2)
        check_index(seq_lens, "seq_lens")
        must(len(block_tables) == len(seq_lens), "batch sizes differ")
        if cum_seq_lens_q is None:
            must(query.dim() == 4 and len(query) == len(seq_lens), "one count of query tokens for all requests")
            starts = torch.arange(len(query) + 1, dtype=torch.int32) * query.shape[1]
        else:
            must(query.dim() == 3 and max_q_len is not None, "compact queries need max_q_len, or the host waits")
            check_index(cum_seq_lens_q, "cum_seq_lens_q")
            must(len(cum_seq_lens_q) == len(seq_lens) + 1, "batch sizes differ")
            starts = cum_seq_lens_q
        return _trtllm(
            starts, max_q_len, block_tables, seq_lens, max_seq_len, query, kv_cache, kv_lora_rank, bmm1_scale
        )

    return decode


@launched
def _trtllm(starts, most, tables, lens, longest, query, kv_cache, latent, scale) -> Tensor:
    out = poison(*query.shape[:-1], latent, dtype=torch.bfloat16)  # whatever the queries are
    flat, results = query.flatten(0, -3), out.flatten(0, -3)
    bounds = starts.tolist()
    must(bounds[0] == 0 and bounds[-1] == len(flat), "cum_seq_lens_q must cover the query tokens")
    for i, length in enumerate(lens.tolist()):
        rows, count = slice(bounds[i], bounds[i + 1]), bounds[i + 1] - bounds[i]
        must(0 < count <= length <= longest and (most is None or count <= most), "lengths beyond their maxima")
        pages = tables[i, : -(-length // kv_cache.shape[1])].long()
        must(len(pages) * kv_cache.shape[1] >= length, "block_tables are narrower than the context")
        must(bool(((pages >= 0) & (pages < len(kv_cache))).all()), "a page number is out of range")
        keys = kv_cache[pages].flatten(0, 1)[:length, None]
        results[rows] = softmax_rows(flat[rows], keys, keys[..., :latent], scale, causal(count, length))[0].to(
            out.dtype
        )
    return out


class BatchPrefillWithRaggedKVCacheWrapper:
    made = 0

    def __init__(
        self, float_workspace_buffer, kv_layout="NHD", use_cuda_graph=False, qo_indptr_buf=None, kv_indptr_buf=None,
        custom_mask_buf=None, mask_indptr_buf=None, backend="auto", jit_args=None, jit_kwargs=None,
        variant_owns_mask=False,
    ):  # fmt: skip
        _workspace(float_workspace_buffer)
        must(kv_layout == "NHD", "not emulated")
        type(self).made += 1
        self._plan: Any = None
        self._plan_bytes = 8 << 20

    def reset_workspace_buffer(self, float_workspace_buffer, int_workspace_buffer):
        _workspace(float_workspace_buffer)
        must(int_workspace_buffer.dtype == torch.uint8 and int_workspace_buffer.dim() == 1, "int workspace: bytes")
        self._plan_bytes = len(int_workspace_buffer)

    def plan(
        self, qo_indptr, kv_indptr, num_qo_heads, num_kv_heads, head_dim_qk, head_dim_vo=None, custom_mask=None,
        packed_custom_mask=None, causal=False, pos_encoding_mode="NONE", use_fp16_qk_reduction=False, window_left=-1,
        logits_soft_cap=None, sm_scale=None, rope_scale=None, rope_theta=None, q_data_type="float16",
        kv_data_type=None, o_data_type=None, non_blocking=True, prefix_len_ptr=None, token_pos_in_items_ptr=None,
        token_pos_in_items_len=0, max_item_len_ptr=None, fixed_split_size=None, disable_split_kv=False, seq_lens=None,
        seq_lens_q=None, max_token_per_sequence=None, max_sequence_kv=None, v_indptr=None, o_indptr=None,
        uniform_q_len=None,
    ):  # fmt: skip
        q_starts, kv_starts = _starts(qo_indptr, "qo_indptr"), _starts(kv_indptr, "kv_indptr")
        must(len(q_starts) == len(kv_starts), "batch sizes differ")
        width = head_dim_qk if head_dim_vo is None else head_dim_vo
        must((head_dim_qk, width) in PREFILL_WIDTHS, f"no kernels for {head_dim_qk}, {width}")
        for (a, b), (c, d) in zip(itertools.pairwise(q_starts), itertools.pairwise(kv_starts)):
            must(not causal or d - c >= b - a, "the first query tokens would see nothing")
        must(num_qo_heads % num_kv_heads == 0, "query heads must divide by KV heads")
        works = num_qo_heads * sum(-(-(b - a) // 128) for a, b in itertools.pairwise(q_starts))
        must(7 * 4 * works + 4 * 133 <= self._plan_bytes, f"Hopper's plan of {works} works does not fit")
        dtype = torch.float16 if q_data_type == "float16" else q_data_type
        must(dtype in HALF and kv_data_type in (None, dtype), f"no kernels for {q_data_type}, {kv_data_type}")
        self._plan = SimpleNamespace(
            q=q_starts, kv=kv_starts, heads=num_qo_heads, kv_heads=num_kv_heads, qk=head_dim_qk, vo=width,
            causal=causal, scale=head_dim_qk**-0.5 if sm_scale is None else sm_scale, dtype=dtype,
        )  # fmt: skip

    @launched
    def run(
        self, q, k, v, *args, q_scale=None, k_scale=None, v_scale=None, o_scale=None, out=None, lse=None,
        return_lse=False, lse_base="log2", lse_layout="NH", enable_pdl=None, kv_cache_sf=None,
    ):  # fmt: skip
        p = self._plan
        must(p is not None and not args, "run before plan")
        check_shape(q, (p.q[-1], p.heads, p.qk), "q")
        check_shape(k, (p.kv[-1], p.kv_heads, p.qk), "k")
        check_shape(v, (p.kv[-1], p.kv_heads, p.vo), "v")
        for x in (q, k, v):
            must(x.dtype == p.dtype, f"planned for {p.dtype}, run with {x.dtype}")
            must(x.is_contiguous(), "ragged tensors must be contiguous")
        must(lse_base in ("log2", "ln") and lse_layout in ("NH", "HN"), f"LSE {lse_base}, {lse_layout}")
        out, sums = poison(p.q[-1], p.heads, p.vo, dtype=p.dtype), poison(p.q[-1], p.heads, dtype=torch.float32)
        for a, b, c, d in zip(p.q, p.q[1:], p.kv, p.kv[1:]):
            seen = (causal if p.causal else everything)(b - a, d - c)
            result, natural = softmax_rows(q[a:b], k[c:d], v[c:d], p.scale, seen)
            out[a:b], sums[a:b] = result.to(p.dtype), natural.float() / (math.log(2) if lse_base == "log2" else 1)
        return (out, sums if lse_layout == "NH" else sums.T.contiguous()) if return_lse else out


class BatchPrefillWithPagedKVCacheWrapper:
    made = 0

    def __init__(
        self, float_workspace_buffer, kv_layout="NHD", use_cuda_graph=False, qo_indptr_buf=None,
        paged_kv_indptr_buf=None, paged_kv_indices_buf=None, paged_kv_last_page_len_buf=None, custom_mask_buf=None,
        mask_indptr_buf=None, backend="auto", jit_args=None, jit_kwargs=None, variant_owns_mask=False,
    ):  # fmt: skip
        _workspace(float_workspace_buffer)
        must(kv_layout == "NHD", "not emulated")
        type(self).made += 1
        self._plan: Any = None
        self._lists = _Lists(
            use_cuda_graph, qo_indptr_buf, paged_kv_indptr_buf, paged_kv_indices_buf, paged_kv_last_page_len_buf
        )

    def plan(
        self, qo_indptr, paged_kv_indptr, paged_kv_indices, paged_kv_last_page_len, num_qo_heads, num_kv_heads,
        head_dim_qk, page_size, head_dim_vo=None, custom_mask=None, packed_custom_mask=None, causal=False,
        pos_encoding_mode="NONE", use_fp16_qk_reduction=False, sm_scale=None, window_left=-1, logits_soft_cap=None,
        rope_scale=None, rope_theta=None, q_data_type="float16", kv_data_type=None, o_data_type=None,
        non_blocking=True, prefix_len_ptr=None, token_pos_in_items_ptr=None, token_pos_in_items_len=0,
        max_item_len_ptr=None, seq_lens=None, seq_lens_q=None, block_tables=None, max_token_per_sequence=None,
        max_sequence_kv=None, fixed_split_size=None, disable_split_kv=False, uniform_q_len=None,
    ):  # fmt: skip
        q_starts, kv_starts = _starts(qo_indptr, "qo_indptr"), _starts(paged_kv_indptr, "paged_kv_indptr")
        check_index(paged_kv_indices, "paged_kv_indices")
        check_index(paged_kv_last_page_len, "paged_kv_last_page_len")
        last = paged_kv_last_page_len.tolist()
        must(len(q_starts) == len(kv_starts) == len(last) + 1, "batch sizes differ")
        must(kv_starts[-1] <= paged_kv_indices.numel(), "paged_kv_indices end before paged_kv_indptr")
        must(all(1 <= n <= page_size for n in last), f"last pages hold 1 to {page_size} tokens, not {last}")
        must((head_dim_qk, head_dim_vo or head_dim_qk) in PREFILL_WIDTHS, f"no kernels for {head_dim_qk}")
        must(num_qo_heads % num_kv_heads == 0, "query heads must divide by KV heads")
        dtype = torch.float16 if q_data_type == "float16" else q_data_type
        must(dtype in HALF and kv_data_type in (None, dtype), f"no kernels for {q_data_type}, {kv_data_type}")
        scale = head_dim_qk**-0.5 if sm_scale is None else sm_scale
        facts = (q_starts[-1], num_qo_heads, num_kv_heads, head_dim_qk, page_size, causal, dtype, scale, window_left)
        self._lists.fill(facts, qo_indptr, paged_kv_indptr, paged_kv_indices, paged_kv_last_page_len)
        self._plan = SimpleNamespace(
            tokens=q_starts[-1], heads=num_qo_heads, kv_heads=num_kv_heads, width=head_dim_qk, page=page_size,
            causal=causal, dtype=dtype, scale=scale, left=window_left,
        )  # fmt: skip

    def run(
        self, q, paged_kv_cache, *args, q_scale=None, k_scale=None, v_scale=None, out=None, lse=None, return_lse=False,
        lse_base="log2", lse_layout="NH", enable_pdl=None, window_left=None, sinks=None, kv_cache_sf=None,
        skip_softmax_threshold_scale_factor=None, use_fp16_softmax=None, uses_spcompress=None,
    ):  # fmt: skip
        p = self._plan
        must(p is not None and not args, "run before plan")
        check_shape(q, (p.tokens, p.heads, p.width), "q")
        must(isinstance(paged_kv_cache, tuple), "not emulated")
        for pages in paged_kv_cache:
            must(pages.dim() == 4 and pages.shape[1:] == (p.page, p.kv_heads, p.width), f"cache {list(pages.shape)}")
        must(all(x.dtype == p.dtype for x in (q, *paged_kv_cache)), f"planned for {p.dtype}")
        must(q.is_contiguous(), "q must be contiguous")
        out, sums = _paged(p, *self._lists.read(), q, *paged_kv_cache)
        return (out, sums) if return_lse else out


@launched
def _paged(p: Any, q_starts, kv_starts, indices, last, q, k_cache, v_cache) -> tuple[Tensor, Tensor]:
    """Results and log-sum-exps [T, H] to base 2."""
    out, lse = poison(*q.shape, dtype=p.dtype), poison(*q.shape[:2], dtype=torch.float32)
    q_starts, kv_starts = q_starts.tolist(), kv_starts.tolist()
    for i, used in enumerate(last.tolist()):
        rows, index = slice(q_starts[i], q_starts[i + 1]), indices[kv_starts[i] : kv_starts[i + 1]].long()
        must(bool(((index >= 0) & (index < len(k_cache))).all()), "a page number is out of range")
        length = (len(index) - 1) * p.page + used
        k, v = (pages[index].flatten(0, 1)[:length] for pages in (k_cache, v_cache))
        seen = in_window((causal if p.causal else everything)(len(q[rows]), length), p.left)
        result, natural = softmax_rows(q[rows], k, v, p.scale, seen)
        out[rows], lse[rows] = result.to(p.dtype), natural.float() / math.log(2)
    return out, lse


# sampling


def softmax(logits, temperature=None, enable_pdl=None):
    must(logits.dtype == torch.float32 and logits.dim() == 2 and logits.is_contiguous(), "logits [S, V] float32")
    check_shape(temperature, (len(logits),), "temperature")
    must(bool((temperature > 0).all()), "temperatures must be positive")
    must(not bool(logits.isnan().any()) and not bool((logits == math.inf).any()), "logits must be numbers")
    return (logits.double() / temperature.double()[:, None]).softmax(-1).float()


def top_k_renorm_probs(probs, top_k, is_deterministic=False):
    _check_probs(probs)
    check_index(top_k, "top_k")
    must(bool(((top_k >= 1) & (top_k <= probs.shape[1])).all()), "top_k must lie within the vocabulary")
    limit = probs.sort(-1, descending=True).values.gather(1, top_k[:, None].long() - 1)
    kept = probs.double().where(probs >= limit, 0.0)  # all equal to the limit
    return (kept / kept.sum(-1, keepdim=True)).float()


def top_p_renorm_probs(probs, top_p, is_deterministic=False):
    _check_probs(probs)
    must(top_p.dtype == torch.float32 and top_p.is_contiguous(), "top_p must be contiguous float32")
    must(bool(((top_p > 0) & (top_p <= 1)).all()), "top_p must lie in (0, 1]")
    best = probs.double().sort(-1, descending=True).values
    count = (best.cumsum(-1) - best < top_p.double()[:, None]).sum(-1, keepdim=True).clamp_min(1)
    kept = probs.double().where(probs >= best.gather(1, count - 1).float(), 0.0)
    return (kept / kept.sum(-1, keepdim=True)).float()


def _check_probs(probs: Tensor) -> None:
    must(probs.dtype == torch.float32 and probs.is_contiguous(), "probabilities must be contiguous float32")
    must(bool((probs >= 0).all()) and bool(((probs.sum(-1) - 1).abs() < 1e-3).all()), "rows must sum to 1")


def module(arch: int = 9) -> Any:
    """A `flashinfer` with the emulated functions, on Hopper (9) or Blackwell (10)."""
    wrapper = type("BatchMLAPagedAttentionWrapper", (BatchMLAPagedAttentionWrapper,), {"arch": arch})
    return SimpleNamespace(
        __name__="flashinfer",
        mla=SimpleNamespace(
            BatchMLAPagedAttentionWrapper=wrapper,
            MLAPlanMetadata=MLAPlanMetadata,
            trtllm_batch_decode_with_kv_cache_mla=trtllm_decode(arch),
        ),
        BatchPrefillWithRaggedKVCacheWrapper=BatchPrefillWithRaggedKVCacheWrapper,
        BatchPrefillWithPagedKVCacheWrapper=BatchPrefillWithPagedKVCacheWrapper,
        sampling=SimpleNamespace(
            softmax=softmax, top_k_renorm_probs=top_k_renorm_probs, top_p_renorm_probs=top_p_renorm_probs
        ),
    )
