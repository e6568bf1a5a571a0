"""Attention as calls to time: the named shapes of `kernels/attention/shapes.py`, over scattered pages of a pool.

No command: `benchmarks.kernels` and `benchmarks.gpu_suite` time these calls.

Legend: R requests, t query tokens of each, s context tokens, H heads, G KV heads, C kv_lora_rank, P rotary width.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from benchmarks.kernel_cases import Call, KernelCase, NotServed, normal
from moe_engine.kernels.attention.shapes import AttentionShape, named_shapes
from moe_engine.kernels.kv_format.formats import FP8_GROUPS
from moe_engine.kernels.kv_format.latent_records import pack
from moe_engine.kernels.queries import AttentionBatch, PagedQueries

PAGE = 64
"""A page size that every row supports."""

NO_RECORDS = ("flashinfer", "fa3")
"""Rows without FP8 record support."""


def queries(shape: AttentionShape, device: str) -> PagedQueries:
    """The shape's requests."""
    return paged_queries(shape.requests, shape.query_tokens, shape.context, device)


def paged_queries(requests: int, count: int, context: int, device: str, page_size: int = PAGE) -> PagedQueries:
    """Requests with `count` query tokens each, at the end of contexts whose pages are scattered over the pool."""
    pages = -(-context // page_size)
    order = torch.randperm(requests * pages, device=device).view(requests, pages)
    slots = order[..., None] * page_size + torch.arange(page_size, device=device)
    lengths = torch.full((requests,), context, dtype=torch.int32, device=device)
    rows = torch.arange(requests, dtype=torch.int32, device=device)
    starts = torch.arange(0, requests * count + 1, count, dtype=torch.int32, device=device)
    table = slots.reshape(requests, -1).int()
    return PagedQueries([count] * requests, [context] * requests, rows, starts, lengths, table, page_size)


def pool_size(asked: PagedQueries) -> int:
    """Slots of the pool: whole pages."""
    return asked.slot_table.numel()


def attention_case(shape: AttentionShape) -> KernelCase:
    """One layer's call; the plan is made in advance, as once per step."""
    makers: dict[str, Callable[[AttentionShape, Any, str], Call]] = {
        "absorbed": _absorbed, "expanded": _expanded, "paged": _paged,
    }  # fmt: skip
    make, family = makers[shape.form], "gqa" if shape.form == "paged" else "mla"
    return KernelCase(family, shape.name, shape, False, lambda kernel, device: make(shape, kernel, device))


def attention_cases() -> list[KernelCase]:
    """Every named shape."""
    return [attention_case(shape) for shape in named_shapes()]


def _absorbed(shape: AttentionShape, kernel: Any, device: str) -> Call:
    asked, latent = queries(shape, device), shape.value
    q = normal(shape.tokens, shape.heads, shape.key, device=device)
    cache = normal(pool_size(asked), shape.key, device=device)
    if shape.row_bytes != 2 * shape.key:
        if kernel.name in NO_RECORDS:
            raise NotServed("reads no FP8 records")
        cache = pack(cache, latent, FP8_GROUPS)
    plan = kernel.plan(AttentionBatch(asked, None))
    return lambda: kernel.absorbed(q, cache, asked, shape.key**-0.5, plan, latent)


def _expanded(shape: AttentionShape, kernel: Any, device: str) -> Call:
    """Keys and values are given: their expansion from the latent is a product, timed separately."""
    asked, tokens = queries(shape, device), shape.requests * shape.context
    rotary = shape.rotary
    q = normal(shape.tokens, shape.heads, shape.key, device=device)
    kv = normal(tokens, shape.heads, shape.key - rotary + shape.value, device=device)
    k_rope = normal(tokens, rotary, device=device)
    plan = kernel.plan(AttentionBatch(None, asked))
    return lambda: kernel.expanded(q, kv, k_rope, asked, shape.key**-0.5, plan)


def _paged(shape: AttentionShape, kernel: Any, device: str) -> Call:
    asked = queries(shape, device)
    keys, values = (normal(pool_size(asked), shape.groups, shape.key, device=device) for _ in "kv")
    q: Tensor = normal(shape.tokens, shape.heads, shape.key, device=device)
    decodes = shape.query_tokens < shape.context
    plan = kernel.plan(AttentionBatch(asked, None) if decodes else AttentionBatch(None, asked))
    return lambda: kernel.paged(q, keys, values, asked, shape.key**-0.5, plan)
