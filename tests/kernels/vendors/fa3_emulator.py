"""An emulator of FlashAttention 3 by its sources, on the CPU: hopper/flash_attn_interface.py, hopper/flash_api.cpp.
Written without the adapter's code. With `wheel`, the varlen function has sgl_kernel's keyword for the log-sum-exp."""

from __future__ import annotations

import itertools
import zlib
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from tests.kernels.vendors.contract import causal as causal_mask
from tests.kernels.vendors.contract import check_index, check_shape, everything, in_window, must, poison, softmax_rows
from tests.kernels.vendors.library_calls import launched

HALF = (torch.bfloat16, torch.float16)


@launched
def flash_attn_with_kvcache(
    q, k_cache, v_cache, k=None, v=None, qv=None, rotary_cos=None, rotary_sin=None, cache_seqlens=None,
    cache_batch_idx=None, cache_leftpad=None, page_table=None, cu_seqlens_q=None, cu_seqlens_k_new=None,
    max_seqlen_q=None, rotary_seqlens=None, q_descale=None, k_descale=None, v_descale=None, softmax_scale=None,
    causal=False, window_size=(-1, -1), attention_chunk=0, softcap=0.0, rotary_interleaved=True,
    scheduler_metadata=None, num_splits=0, pack_gqa=None, sm_margin=0, return_softmax_lse=False,
):  # fmt: skip
    must(k is None and v is None and page_table is not None and cu_seqlens_q is not None, "not emulated")
    _check_operands(q, k_cache, v_cache)
    _check_widths(q.shape[-1], v_cache.shape[-1])
    check_index(page_table, "page_table", 2)
    check_index(cache_seqlens, "cache_seqlens")
    starts = _starts(cu_seqlens_q, len(q))
    must(len(starts) == len(page_table) + 1 == len(cache_seqlens) + 1, "batch sizes differ")
    must(max_seqlen_q == max(b - a for a, b in itertools.pairwise(starts)), f"max_seqlen_q {max_seqlen_q}")
    must(num_splits == 0 or 1 <= num_splits <= 256, f"num_splits {num_splits}")
    pages, size = k_cache.shape[:2]
    if scheduler_metadata is not None:
        shape = q.shape[1], k_cache.shape[2], q.shape[2], v_cache.shape[3]
        asked = (len(page_table), max_seqlen_q, page_table.shape[1] * size, *shape, q.dtype, size)
        expected = _schedule(asked, cache_seqlens, cu_seqlens_q, causal, window_size, num_splits)
        must(torch.equal(scheduler_metadata, expected), "a schedule of other arguments or lengths")
    check_shape(v_cache, (pages, size, k_cache.shape[2], v_cache.shape[3]), "v_cache")
    if qv is not None:
        must(q.shape[-1] <= 64 and v_cache.shape[-1] >= 256, "qv is for widths of at most 64, values of at least 256")
        check_shape(qv, (*q.shape[:2], v_cache.shape[-1]), "qv")
        must(qv.dtype == q.dtype and qv.stride(-1) == 1, "qv must be like q")
    scale = (q.shape[-1] + (0 if qv is None else qv.shape[-1])) ** -0.5 if softmax_scale is None else softmax_scale
    out = poison(*q.shape[:2], v_cache.shape[-1], dtype=q.dtype)
    lse = poison(q.shape[1], len(q), dtype=torch.float32)
    for i, length in enumerate(cache_seqlens.tolist()):
        count, rows = -(-length // size), slice(starts[i], starts[i + 1])
        must(length > 0 and count <= page_table.shape[1], f"length {length} with {page_table.shape[1]} pages")
        index = page_table[i, :count].long()
        must(bool(((index >= 0) & (index < pages)).all()), "a page number is out of range")
        keys, values = (x[index].flatten(0, 1)[:length] for x in (k_cache, v_cache))
        query = q[rows]
        if qv is not None:
            query, keys = torch.cat((query, qv[rows]), -1), torch.cat((keys, values), -1)
        must(window_size == (-1, -1) or (causal and window_size[1] == 0), f"not emulated: window {window_size}")
        seen = in_window((causal_mask if causal else everything)(len(query), length), window_size[0])
        result, sums = softmax_rows(query, keys, values, scale, seen)
        out[rows], lse[:, rows] = result.to(q.dtype), sums.float().T
    return (out, lse, None, None) if return_softmax_lse else out


@launched
def get_scheduler_metadata(
    batch_size, max_seqlen_q, max_seqlen_k, num_heads_q, num_heads_kv, headdim, cache_seqlens,
    qkv_dtype=torch.bfloat16, headdim_v=None, cu_seqlens_q=None, cu_seqlens_k_new=None, cache_leftpad=None,
    page_size=None, max_seqlen_k_new=0, causal=False, window_size=(-1, -1), attention_chunk=0, has_softcap=False,
    num_splits=0, pack_gqa=None, sm_margin=0,
):  # fmt: skip
    must(batch_size == len(cache_seqlens) == len(cu_seqlens_q) - 1, "batch sizes differ")
    shape = num_heads_q, num_heads_kv, headdim, headdim if headdim_v is None else headdim_v
    asked = (batch_size, max_seqlen_q, max_seqlen_k, *shape, qkv_dtype, page_size)
    return _schedule(asked, cache_seqlens, cu_seqlens_q, causal, window_size, num_splits)


def wheel_scheduler_metadata(
    batch_size, max_seqlen_q, max_seqlen_k, num_heads, num_heads_k, headdim, cache_seqlens, qkv_dtype=torch.bfloat16,
    headdim_v=None, cu_seqlens_q=None, cu_seqlens_k=None, cu_seqlens_k_new=None, seqused_q=None, leftpad_k=None,
    page_size=None, max_seqlen_k_new=0, causal=False, window_size=(-1, -1), attention_chunk=0, has_softcap=False,
    num_splits=0, pack_gqa=None, sm_margin=0,
):  # fmt: skip
    """As in sgl_kernel 0.4.10."""
    must(cu_seqlens_k is cu_seqlens_k_new is seqused_q is leftpad_k is None, "not emulated")
    return get_scheduler_metadata(
        batch_size, max_seqlen_q, max_seqlen_k, num_heads, num_heads_k, headdim, cache_seqlens, qkv_dtype, headdim_v,
        cu_seqlens_q, page_size=page_size, causal=causal, window_size=window_size, num_splits=num_splits,
    )  # fmt: skip


def _schedule(asked, cache_seqlens, cu_seqlens_q, causal, window_size, num_splits):
    """int32 of the library's size: the lengths of each request, and a digest of all other arguments."""
    batch, most = asked[:2]
    local = window_size != (-1, -1)
    swizzled = local or (causal and most > 1)
    columns = 2 + (not local) + swizzled
    out = torch.zeros(-(-batch // 4) * 4 * columns + 1, dtype=torch.int32)
    out[:batch], out[batch : 2 * batch] = cache_seqlens, cu_seqlens_q.diff()
    digest = repr((asked, causal and most > 1, window_size, num_splits)).encode()
    out[-1] = zlib.crc32(digest) & 0x7FFFFFFF
    return out


@launched
def flash_attn_varlen_func(
    q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, seqused_q=None, seqused_k=None,
    softmax_scale=None, causal=False, qv=None, q_descale=None, k_descale=None, v_descale=None, window_size=(-1, -1),
    attention_chunk=0, softcap=0.0, num_splits=1, pack_gqa=None, deterministic=False, sm_margin=0,
    return_attn_probs=False,
):  # fmt: skip
    out, lse = _varlen(q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, softmax_scale, causal)
    return (out, lse) if return_attn_probs else out


@launched
def wheel_varlen_func(
    q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q=None, max_seqlen_k=None, seqused_q=None, seqused_k=None,
    page_table=None, softmax_scale=None, causal=False, qv=None, q_descale=None, k_descale=None, v_descale=None,
    window_size=(-1, -1), attention_chunk=0, softcap=0.0, num_splits=1, pack_gqa=None, only_qv=False, sm_margin=0,
    return_softmax_lse=False, sinks=None, score_mod=None, aux_tensors=None, ver=3, out=None,
):  # fmt: skip
    out, lse = _varlen(q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, softmax_scale, causal)
    return (out, lse, None, None) if return_softmax_lse else out


def _varlen(q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, softmax_scale, causal):
    """out [T, H, V] and its log-sum-exp [H, T], natural."""
    _check_operands(q, k, v)
    _check_widths(q.shape[-1], v.shape[-1])
    check_shape(v, (*k.shape[:2], v.shape[2]), "v")
    a, b = _starts(cu_seqlens_q, len(q)), _starts(cu_seqlens_k, len(k))
    must(len(a) == len(b), "batch sizes differ")
    for starts, most in ((a, max_seqlen_q), (b, max_seqlen_k)):
        must(most == max(y - x for x, y in itertools.pairwise(starts)), f"longest is {most}")
    out, lse = poison(*q.shape[:2], v.shape[-1], dtype=q.dtype), poison(q.shape[1], len(q), dtype=torch.float32)
    scale = softmax_scale or q.shape[-1] ** -0.5
    for q0, q1, k0, k1 in zip(a, a[1:], b, b[1:]):
        must(not causal or k1 - k0 >= q1 - q0, "the first query tokens would see nothing")
        seen = (causal_mask if causal else everything)(q1 - q0, k1 - k0)
        result, sums = softmax_rows(q[q0:q1], k[k0:k1], v[k0:k1], scale, seen)
        out[q0:q1], lse[:, q0:q1] = result.to(q.dtype), sums.float().T
    return out, lse


def _check_operands(q: Tensor, k: Tensor, v: Tensor) -> None:
    for x in (q, k, v):
        must(x.dtype == q.dtype and q.dtype in HALF, f"{x.dtype} beside {q.dtype}")
        must(x.stride(-1) == 1, "the last dimension must be contiguous")
    must(q.shape[-1] == k.shape[-1] and q.shape[-2] % k.shape[-2] == 0, "widths or heads do not fit")


def _check_widths(key: int, value: int) -> None:
    must(key <= 256 and key % 8 == 0 and value % 8 == 0, f"widths {key}, {value}")
    unequal = (128 < key <= 192 and 96 < value <= 128) or (key <= 64 and value <= 512)
    must(key == value or unequal, f"no kernels for keys of {key} and values of {value}")


def _starts(x: Tensor, total: int) -> list[int]:
    check_index(x, "cu_seqlens")
    values = x.tolist()
    must(values[0] == 0 and values == sorted(values) and values[-1] == total, f"prefix sums {values} of {total}")
    return values


def module(wheel: bool = False) -> Any:
    """The library's own package, or sgl_kernel's."""
    return SimpleNamespace(
        get_scheduler_metadata=wheel_scheduler_metadata if wheel else get_scheduler_metadata,
        __name__="sgl_kernel.flash_attn" if wheel else "flash_attn_interface",
        flash_attn_with_kvcache=flash_attn_with_kvcache,
        flash_attn_varlen_func=wheel_varlen_func if wheel else flash_attn_varlen_func,
    )
