"""An emulator of FlashMLA by its sources, on the CPU: flash_mla/flash_mla_interface.py,
csrc/api/{dense,sparse}_decode.h, tests/quant.py. Written without the adapter's code."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from tests.kernels.vendors.contract import causal as causal_mask
from tests.kernels.vendors.contract import check_index, everything, must, poison, softmax_rows
from tests.kernels.vendors.library_calls import launched

PAGE, LATENT, WIDTH, RECORD = 64, 512, 576, 656


class FlashMLASchedMeta:
    """One for each step and set of shapes; computed from the lengths at its first use, by a separate launch."""

    def __init__(self) -> None:
        self.config: tuple[Any, ...] | None = None
        self.lens: list[int] | None = None

    @launched
    def plan(self, lens: Tensor | None) -> None:
        self.lens = None if lens is None else lens.tolist()

    @launched
    def check(self, lens: Tensor | None) -> None:
        now = None if lens is None else lens.tolist()
        must(self.lens == now, f"the schedule was made for lengths {self.lens}, not {now}")


def unpack(records: Tensor) -> Tensor:
    """records [S, 656] -> [S, 576] float64, as read by the kernel."""
    raw = records.contiguous().view(torch.uint8)
    numbers = raw[:, :512].view(torch.float8_e4m3fn).double().unflatten(1, (4, 128))
    scales = raw[:, 512:528].contiguous().view(torch.float32).double()
    return torch.cat(
        ((numbers * scales[..., None]).flatten(1), raw[:, 528:].contiguous().view(torch.bfloat16).double()), 1
    )


def _module(arch: int, wheel: bool) -> Any:
    """The library, or sgl_kernel 0.4.10, which still accepts the arguments of 2025."""

    schedules: dict[int, tuple[Tensor, int]] = {}  # the tensors are kept, so that their ids stay unique

    def get_mla_metadata(*args, **kwargs):
        return FlashMLASchedMeta(), None

    def wheel_metadata(
        cache_seqlens=None, num_q_tokens_per_head_k=None, num_heads_k=None, num_heads_q=None, is_fp8_kvcache=False,
        topk=None,
    ):  # fmt: skip
        if cache_seqlens is None:
            return FlashMLASchedMeta(), None
        must(is_fp8_kvcache and topk is None and num_heads_k == 1, "schedules of 2025: emulated for dense FP8 only")
        check_index(cache_seqlens, "cache_seqlens")
        must(cache_seqlens.is_contiguous(), "cache_seqlens must be contiguous")
        made = _older_schedule(cache_seqlens)
        schedules[id(made)] = made, num_q_tokens_per_head_k
        return made, cache_seqlens.new_zeros(len(cache_seqlens) + 1)

    def wheel_with_kvcache(
        q, k_cache, block_table, cache_seqlens, head_dim_v, tile_scheduler_metadata, num_splits=None,
        softmax_scale=None, causal=False, descale_q=None, descale_k=None, is_fp8_kvcache=False, indices=None,
        attn_sink=None, extra_k_cache=None, extra_indices_in_kvcache=None, topk_length=None, extra_topk_length=None,
        kv_format=None,
    ):  # fmt: skip
        must(kv_format is None and (descale_q is None) == (descale_k is None), "both scales, or none")
        if not isinstance(tile_scheduler_metadata, FlashMLASchedMeta):
            must(indices is None and q.element_size() == 1, "schedules of 2025: emulated for dense FP8 only")
            must(arch == 9, "dense FP8 MLA is only supported on Hopper")
            must(id(tile_scheduler_metadata) in schedules, "a schedule of get_mla_metadata's")
            made, tokens = schedules[id(tile_scheduler_metadata)]
            _check_older(made, cache_seqlens)
            must(tokens == q.shape[1] * q.shape[2], f"the schedule is for {tokens} queries")
            must(len(num_splits) == len(q) + 1 and head_dim_v == LATENT, "num_splits or head_dim_v")
            return _dense_fp8(q, k_cache, block_table, cache_seqlens, softmax_scale, causal, descale_q, descale_k)
        must(descale_q is None, "FlashMLASchedMeta has no scales")
        return flash_mla_with_kvcache(
            q, k_cache, block_table, cache_seqlens, head_dim_v, tile_scheduler_metadata, num_splits, softmax_scale,
            causal, is_fp8_kvcache, indices, attn_sink, extra_k_cache, extra_indices_in_kvcache, topk_length,
            extra_topk_length,
        )  # fmt: skip

    def flash_mla_with_kvcache(
        q, k_cache, block_table, cache_seqlens, head_dim_v, tile_scheduler_metadata, num_splits=None,
        softmax_scale=None, causal=False, is_fp8_kvcache=False, indices=None, attn_sink=None, extra_k_cache=None,
        extra_indices_in_kvcache=None, topk_length=None, extra_topk_length=None,
    ):  # fmt: skip
        schedule = tile_scheduler_metadata
        must(isinstance(schedule, FlashMLASchedMeta) and num_splits is None, "a FlashMLASchedMeta, and no num_splits")
        must(
            q.dim() == 4 and q.stride(-1) == 1 and k_cache.dim() == 4 and k_cache.stride(-1) == 1, "q and cache are 4-D"
        )
        must(head_dim_v == LATENT and q.shape[3] == WIDTH, f"only 576 and 512, not {q.shape[3]} and {head_dim_v}")
        must(min(q.shape) > 0, "batch, queries and heads must be positive")
        topk = None if indices is None else indices.shape[-1]
        config = (*q.shape[:3], *k_cache.shape[1:3], causal, is_fp8_kvcache, topk)
        must(schedule.config in (None, config), f"the schedule was made for {schedule.config}, not {config}")
        if schedule.config is None:
            schedule.plan(topk_length if cache_seqlens is None else cache_seqlens)
        schedule.config = config
        schedule.check(topk_length if cache_seqlens is None else cache_seqlens)
        scale = q.shape[-1] ** -0.5 if softmax_scale is None else softmax_scale
        if indices is not None:
            must(not causal and is_fp8_kvcache and block_table is None, "sparse attention: FP8 records, no causal mask")
            must(topk_length is None or arch == 10, "no topk_length on Hopper")
            return _sparse(q, k_cache, indices, scale, topk_length)
        must(arch == 9, "dense decode is for Hopper")
        must(not is_fp8_kvcache and attn_sink is None and topk_length is None, "dense decode takes none of these")
        return _dense(q, k_cache, block_table, cache_seqlens, scale, causal)

    def flash_mla_sparse_fwd(q, kv, indices, sm_scale, d_v=512, attn_sink=None, topk_length=None):
        must(d_v == LATENT, "only values of 512")
        return _sparse_plain(q, kv, indices, sm_scale, 128 if arch == 9 else 64, attn_sink, topk_length)

    calls = (wheel_metadata, wheel_with_kvcache) if wheel else (get_mla_metadata, flash_mla_with_kvcache)
    return SimpleNamespace(
        __name__="sgl_kernel.flash_mla" if wheel else "flash_mla", get_mla_metadata=calls[0],
        flash_mla_with_kvcache=calls[1], flash_mla_sparse_fwd=flash_mla_sparse_fwd,
    )  # fmt: skip


@launched
def _dense_fp8(q, k_cache, block_table, cache_seqlens, scale, causal, descale_q, descale_k):
    """csrc of the dense FP8 kernel: scales of one element, results in bf16."""
    must(q.dtype == k_cache.dtype == torch.float8_e4m3fn, f"{q.dtype} and {k_cache.dtype}")
    must(q.stride(-1) == k_cache.stride(-1) == 1, "the last dimensions must be contiguous")
    for factor in (descale_q, descale_k):
        must(factor is not None and factor.dtype == torch.float32 and factor.shape == (1,), "scales of one float32")
    out, lse = _attend(
        q.double() * descale_q, k_cache.double() * descale_k, block_table, cache_seqlens, scale, causal, torch.bfloat16
    )
    return out, lse


@launched
def _dense(q, k_cache, block_table, cache_seqlens, scale, causal):
    must(q.dtype in (torch.bfloat16, torch.float16) and k_cache.dtype == q.dtype, f"{q.dtype} and {k_cache.dtype}")
    return _attend(q, k_cache, block_table, cache_seqlens, scale, causal, q.dtype)


def _attend(q, k_cache, block_table, cache_seqlens, scale, causal, dtype):
    must(k_cache.shape[1:] == (PAGE, 1, WIDTH), f"pages are {list(k_cache.shape[1:])}, not [64, 1, 576]")
    check_index(block_table, "block_table", 2)
    check_index(cache_seqlens, "cache_seqlens")
    must(len(block_table) == len(cache_seqlens) == len(q), "batch sizes differ")
    batch, count, heads = q.shape[:3]
    q.view(batch, count, 1, heads, WIDTH)  # as in the library
    out, lse = poison(batch, count, heads, LATENT, dtype=dtype), poison(batch, heads, count, dtype=torch.float32)
    for i, length in enumerate(cache_seqlens.tolist()):
        must(length > 0, "a length of 0")
        num_pages = -(-length // PAGE)
        must(num_pages <= block_table.shape[1], "the block table is too narrow")
        pages = block_table[i, :num_pages].long()
        must(bool(((pages >= 0) & (pages < len(k_cache))).all()), "a page number is out of range")
        keys = k_cache[pages].flatten(0, 1)[:length]
        seen = (causal_mask if causal else everything)(count, length)
        result, sums = softmax_rows(q[i], keys, keys[..., :LATENT], scale, seen)
        out[i] = result.to(dtype)
        lse[i] = torch.where(sums.isinf(), math.inf, sums).float().T  # a row without visible keys: +inf
    return out, lse


@launched
def _sparse(q, k_cache, indices, scale, topk_length):
    must(q.dtype == torch.bfloat16, f"sparse decode takes bf16, not {q.dtype}")
    must(q.shape[2] in (64, 128), f"sparse decode has kernels for 64 or 128 heads, not {q.shape[2]}")
    must(
        k_cache.dtype.itemsize == 1 and k_cache.shape[2:] == (1, RECORD), f"cache {k_cache.dtype} {list(k_cache.shape)}"
    )
    must(k_cache.stride(1) == RECORD, "a block must be contiguous")
    check_index(indices, "indices", 3)
    must(indices.shape[:2] == q.shape[:2] and indices.shape[2] % 64 == 0, f"indices {list(indices.shape)}")
    slots = len(k_cache) * k_cache.shape[1]
    if topk_length is not None:
        check_index(topk_length, "topk_length")
        must(len(topk_length) == len(q) and bool((topk_length <= indices.shape[2]).all()), "topk_length")
        listed = torch.arange(indices.shape[2]) < topk_length[:, None, None]
        indices = torch.where(listed, indices, -1)
    must(bool(((indices >= -1) & (indices < slots)).all()), "an index is out of range")
    flat = k_cache.reshape(slots, RECORD)
    out, lse = poison(*q.shape[:3], LATENT, dtype=q.dtype), poison(len(q), q.shape[2], q.shape[1], dtype=torch.float32)
    for i in range(len(q)):
        for j in range(q.shape[1]):
            keys = unpack(flat[indices[i, j][indices[i, j] >= 0].long()])[:, None]
            result, sums = softmax_rows(q[i, j : j + 1], keys, keys[..., :LATENT], scale, everything(1, len(keys)))
            out[i, j], lse[i, :, j] = result[0].to(q.dtype), sums[0].float()
    return out, lse


@launched
def _sparse_plain(q, kv, indices, scale, multiple, sink, lengths):
    """csrc/api/sparse_fwd.h: no batch dimension; an index of -1 or beyond the keys is skipped, and so are those from
    `lengths` on, whose keys may still make the result NaN. A sink scales the result, not the sums."""
    must(q.dtype == kv.dtype == torch.bfloat16, f"sparse prefill takes bf16, not {q.dtype} and {kv.dtype}")
    must(q.dim() == 3 and q.is_contiguous() and q.shape[1] in (64, 128), f"q is {list(q.shape)}, for 64 or 128 heads")
    width = q.shape[2]
    must(width in (WIDTH, LATENT) and kv.shape[1:] == (1, width) and kv.stride(-1) == 1, f"keys are {list(kv.shape)}")
    check_index(indices, "indices", 3)
    must(indices.shape[:2] == (len(q), 1) and indices.shape[2] % multiple == 0, f"indices {list(indices.shape)}")
    if sink is not None:
        must(sink.dtype == torch.float32 and sink.shape == (q.shape[1],) and sink.stride(0) == 1, "attn_sink")
    if lengths is not None:
        check_index(lengths, "topk_length")
        must(lengths.shape == (len(q),) and bool((lengths <= indices.shape[2]).all()), "topk_length")
        unread = indices[:, 0][torch.arange(indices.shape[2]) >= lengths[:, None]]
        must(bool(((unread < 0) | (unread >= len(kv))).all()), "a key is listed behind topk_length")
    out = poison(*q.shape[:2], LATENT, dtype=q.dtype)
    sums = poison(*q.shape[:2], dtype=torch.float32)
    for token, listed in enumerate(indices[:, 0]):
        keys = kv[listed[(listed >= 0) & (listed < len(kv))].long()]
        result, lse = softmax_rows(q[token : token + 1], keys, keys[..., :LATENT], scale, everything(1, len(keys)))
        if sink is not None:
            result = result * (lse - torch.logaddexp(lse, sink.double())).exp().unsqueeze(-1)
        out[token], sums[token] = result[0].to(q.dtype), lse[0].float()
    return out, sums, sums


@launched
def _older_schedule(lens: Tensor) -> Tensor:
    return lens.clone()


@launched
def _check_older(schedule: Tensor, lens: Tensor) -> None:
    must(schedule.tolist() == lens.tolist(), f"the schedule is for lengths {schedule.tolist()}, not {lens.tolist()}")


def _older_module() -> Any:
    """The interface of 2025: the caller requests a schedule for the step's lengths; no records."""
    schedules: dict[int, tuple[Tensor, int]] = {}  # the tensors are kept, so that their ids stay unique

    def get_mla_metadata(
        cache_seqlens, num_q_tokens_per_head_k, num_heads_k, num_heads_q=None, is_fp8_kvcache=False, topk=None
    ):
        check_index(cache_seqlens, "cache_seqlens")
        must(num_heads_k == 1 and not is_fp8_kvcache and topk is None, "not emulated")
        made = _older_schedule(cache_seqlens)
        schedules[id(made)] = made, num_q_tokens_per_head_k
        return made, cache_seqlens.new_zeros(len(cache_seqlens) + 1)

    def flash_mla_with_kvcache(
        q, k_cache, block_table, cache_seqlens, head_dim_v, tile_scheduler_metadata, num_splits, softmax_scale=None,
        causal=False, descale_q=None, descale_k=None, is_fp8_kvcache=False, indices=None,
    ):  # fmt: skip
        must(id(tile_scheduler_metadata) in schedules, "a schedule of get_mla_metadata's")
        made, tokens = schedules[id(tile_scheduler_metadata)]
        _check_older(made, cache_seqlens)
        must(tokens == q.shape[1] * q.shape[2], f"the schedule is for {tokens} queries, not {q.shape[1] * q.shape[2]}")
        must(len(num_splits) == len(q) + 1 and head_dim_v == LATENT, "num_splits or head_dim_v")
        return _dense(q, k_cache, block_table, cache_seqlens, softmax_scale, causal)

    return SimpleNamespace(
        __name__="sgl_kernel.flash_mla", get_mla_metadata=get_mla_metadata,
        flash_mla_with_kvcache=flash_mla_with_kvcache,
    )  # fmt: skip


def module(arch: int = 9, plans_itself: bool = True, wheel: bool = False) -> Any:
    """A `flash_mla` on Hopper (9) or Blackwell (10), the same of sgl_kernel, or the older interface on Hopper."""
    return _module(arch, wheel) if plans_itself else _older_module()
