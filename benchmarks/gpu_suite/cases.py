"""Cases beside the named shapes: attention over a paged cache, experts in the padded layout, quantisation, permutation.

Legend: R requests, H heads, S context tokens, C kv_lora_rank, P rotary width, E experts, M rows of an expert.
"""

from __future__ import annotations

from typing import Any

import torch

from benchmarks.kernel_cases import Call, KernelCase, load_experts, normal
from moe_engine.kernels.attention.protocol import AttentionBatch, PagedQueries
from moe_engine.kernels.experts.protocol import ExpertBatch

LATENT, ROTARY = 512, 64
PAGE = 64
V3_HIDDEN, V3_WIDTH = 7168, 2048
EXPERTS = 16  # of a rank


def queries(requests: int, context: int, device: str, page_size: int = PAGE) -> PagedQueries:
    """One query token a request; the pages of the contexts lie scattered over the pool."""
    pages = -(-context // page_size)
    order = torch.randperm(requests * pages, device=device).view(requests, pages)
    slots = order[..., None] * page_size + torch.arange(page_size, device=device)
    lengths = torch.full((requests,), context, dtype=torch.int32, device=device)
    rows = torch.arange(requests, dtype=torch.int32, device=device)
    starts = torch.arange(requests + 1, dtype=torch.int32, device=device)
    table = slots.reshape(requests, -1).int()
    return PagedQueries([1] * requests, [context] * requests, rows, starts, lengths, table, page_size)


def mla_decode(heads: int, requests: int, context: int) -> KernelCase:
    """Absorbed MLA of one token a request; the plan is made before, as once a step."""
    width = LATENT + ROTARY

    def prepare(kernel: Any, device: str) -> Call:
        asked = queries(requests, context, device)
        pool = -(-context // PAGE) * PAGE * requests
        cache, q = normal(pool, width, device=device), normal(requests, heads, width, device=device)
        plan = kernel.plan(AttentionBatch(asked, None))
        return lambda: kernel.absorbed(q, cache, asked, width**-0.5, plan, LATENT)

    moved = 2 * requests * (context * width + heads * (width + LATENT))
    flops = 2 * requests * heads * context * (width + LATENT)
    return KernelCase("mla", f"mla.decode.h{heads}.b{requests}.s{context}", moved, flops, False, prepare)


def gqa_decode(heads: int, groups: int, width: int, requests: int, context: int) -> KernelCase:
    """Paged grouped-query attention of one token a request."""

    def prepare(kernel: Any, device: str) -> Call:
        asked = queries(requests, context, device)
        pool = -(-context // PAGE) * PAGE * requests
        keys, values = (normal(pool, groups, width, device=device) for _ in range(2))
        q = normal(requests, heads, width, device=device)
        plan = kernel.plan(AttentionBatch(asked, None))
        return lambda: kernel.paged(q, keys, values, asked, width**-0.5, plan)

    moved = 2 * requests * (2 * context * groups * width + 2 * heads * width)
    flops = 4 * requests * heads * context * width
    name = f"gqa.decode.h{heads}g{groups}x{width}.b{requests}.s{context}"
    return KernelCase("gqa", name, moved, flops, False, prepare)


def padded_experts(rows: int) -> KernelCase:
    """The experts of one rank with `rows` tokens each, in the padded layout; only valid rows are compared."""

    def prepare(kernel: Any, device: str) -> Call:
        weights = load_experts(kernel, EXPERTS, V3_HIDDEN, V3_WIDTH, True, device)
        x = normal(EXPERTS, rows, V3_HIDDEN, device=device)
        counts = torch.full((EXPERTS,), rows, dtype=torch.int32, device=device)
        batch = ExpertBatch("padded", x, counts=counts)
        return lambda: kernel.run(batch, weights)

    numbers = 3 * V3_HIDDEN * V3_WIDTH
    moved = EXPERTS * (numbers + 4 * numbers // 128**2 + 4 * rows * V3_HIDDEN)
    flops = 2 * EXPERTS * rows * numbers
    return KernelCase("experts", f"experts.padded.m{rows}", moved, flops, True, prepare)


def quantize(tokens: int, width: int) -> KernelCase:
    """bf16 rows to e4m3 with a scale for every 128 channels."""

    def prepare(kernel: Any, device: str) -> Call:
        x = normal(tokens, width, device=device)
        return lambda: kernel.quantize_rows(x).scales

    moved = tokens * width * 3 + 4 * tokens * (width // 128)
    return KernelCase("quantization", f"quantize.{width}.t{tokens}", moved, 0, False, prepare)


def permute(tokens: int, hidden: int, experts: int, top_k: int) -> KernelCase:
    """Rows gathered in the order of their experts, the order being known."""

    def prepare(kernel: Any, device: str) -> Call:
        x = normal(tokens, hidden, device=device)
        ids = torch.rand(tokens, experts, device=device).topk(top_k).indices.int()
        order = kernel.sort_by_expert(ids, experts)
        return lambda: kernel.permute(x, order)

    moved = 2 * tokens * hidden * (1 + top_k)
    return KernelCase("permutation", f"permute.{hidden}x{top_k}.t{tokens}", moved, 0, False, prepare)


def parity_cases() -> list[KernelCase]:
    """Small ones: correctness needs no size."""
    attention = [mla_decode(heads, 5, 300) for heads in (16, 128)] + [gqa_decode(32, 8, 128, 5, 300)]
    return [*attention, padded_experts(8)]


def timed_cases() -> list[KernelCase]:
    """The points that have targets, and their neighbours."""
    cases = [mla_decode(16, 128, context) for context in (2048, 4096, 8192)]
    cases += [mla_decode(128, 128, context) for context in (2048, 4096)]
    cases += [mla_decode(16, 1, 4096), gqa_decode(32, 8, 128, 128, 4096)]
    cases += [padded_experts(rows) for rows in (8, 32, 64, 128)]
    return [*cases, quantize(4096, 7168), permute(4096, 7168, 256, 8)]
