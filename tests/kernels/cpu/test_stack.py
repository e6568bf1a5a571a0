"""Decoders of grouped-query attention in one call: the bits of the separate calls, which have their own oracles."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from moe_engine.kernels.attention.cpu import CpuGQA
from moe_engine.kernels.cpu.library import Library
from moe_engine.kernels.decoder.grouped import GQALayer
from moe_engine.kernels.decoder.stack import StackedLayer
from moe_engine.kernels.kv_format import head_records
from moe_engine.kernels.kv_format.formats import FP8_TOKEN
from moe_engine.kernels.linear.cpu import CpuLinear
from moe_engine.kernels.linear.protocol import PreparedLinear
from moe_engine.kernels.ops.cpu import CpuOps
from moe_engine.kernels.queries import AttentionBatch, PagedQueries
from tests.kernels.cpu.formulas import filled_cache, normal, paged_queries, rotary_table, slots_of

HIDDEN, HEADS, GROUPS, WIDTH, ROTARY, MIDDLE, EPS, SCALE = 72, 6, 2, 40, 24, 48, 1e-5, 0.15


def _weight(linear: CpuLinear, rows: int, columns: int, dtype: torch.dtype, bias: bool = False) -> PreparedLinear:
    return linear.prepare(
        normal(rows, columns, dtype=dtype, scale=columns**-0.5), normal(rows, dtype=dtype) if bias else None
    )


def _layer(linear: CpuLinear, dtype: torch.dtype, normed: bool) -> GQALayer:
    return GQALayer(
        qkv=_weight(linear, (HEADS + 2 * GROUPS) * WIDTH, HIDDEN, dtype, bias=not normed),
        o=_weight(linear, HIDDEN, HEADS * WIDTH, dtype),
        norms=(1 + torch.rand(WIDTH), 1 + torch.rand(WIDTH)) if normed else None,
        sinks=None if normed else torch.randn(HEADS),
        heads=HEADS,
        key_heads=GROUPS,
        rotary=rotary_table(700, ROTARY, interleaved=normed),
        eps=EPS,
        scale=SCALE,
    )


def _separate(
    library: Library, layer: GQALayer, hidden: Tensor, positions: Tensor, slots: Tensor, cache: tuple[Tensor, Tensor],
    queries: PagedQueries,
) -> Tensor:  # fmt: skip
    linear, ops = CpuLinear(library), CpuOps(library)
    qkv = linear.run(hidden, layer.qkv).view(-1, HEADS + 2 * GROUPS, WIDTH)
    q, k, v = qkv.split([HEADS, GROUPS, GROUPS], 1)
    if layer.norms is not None:
        q, k = (ops.rms_norm(part, norm, EPS) for part, norm in zip((q, k), layer.norms))
    for part in (q, k):
        ops.rotate_leading(part, positions, layer.rotary)
    ops.write_kv(k, v, slots, *cache)
    return linear.run(CpuGQA(library).paged(q, *cache, queries, SCALE, None, layer.sinks).flatten(1), layer.o)


@pytest.mark.parametrize(("normed", "fp8", "window"), [(True, False, None), (False, True, None), (False, False, 50)])
def test_a_stack_has_the_bits_of_its_layers(
    any_library: Library, dtype: torch.dtype, normed: bool, fp8: bool, window: int | None
) -> None:
    gqa, linear, ops = CpuGQA(any_library), CpuLinear(any_library), CpuOps(any_library)
    queries, size = paged_queries([(1, 1), (3, 70), (1, 600)], 4)
    queries = replace(queries, window=window)
    layers = [_layer(linear, dtype, normed) for _ in range(2)]
    norms = [1 + torch.rand(HIDDEN) for _ in range(5)]
    parts = [(_weight(linear, 2 * MIDDLE, HIDDEN, dtype), _weight(linear, HIDDEN, MIDDLE, dtype)) for _ in range(2)]
    caches = []
    for _ in range(2):
        cache = [filled_cache(queries, size, GROUPS, WIDTH, dtype=dtype) for _ in range(2)]
        caches.append(tuple(head_records.pack(x.float(), FP8_TOKEN) if fp8 else x for x in cache))
    embedding, ids = normal(30, HIDDEN, dtype=dtype), torch.randint(30, (queries.num_tokens,))
    ends = zip(queries.query_lens, queries.context_lens)
    positions = torch.cat([torch.arange(context - count, context) for count, context in ends])
    slots = torch.cat([slots_of(queries, r)[-count:] for r, count in enumerate(queries.query_lens)]).long()
    want_caches = [tuple(x.clone() for x in cache) for cache in caches]
    residual = embedding[ids]
    hidden = ops.rms_norm(residual, norms[0], EPS)
    for i, layer in enumerate(layers):
        part = _separate(any_library, layer, hidden, positions, slots, want_caches[i], queries)
        hidden = ops.add_rms_norm(part, residual, norms[2 * i + 1], EPS)
        hidden = ops.add_rms_norm(linear.run_mlp(hidden, *parts[i]), residual, norms[2 * i + 2], EPS)
    decoder = gqa.capabilities.decoder
    assert decoder is not None
    stacked = []
    for i, layer in enumerate(layers):
        fused = decoder.fuse_gqa(layer)
        assert fused is not None
        stacked.append(StackedLayer(fused, norms[2 * i + 1], norms[2 * i + 2], EPS, mlp=parts[i]))
    stack = decoder.fuse_stack(embedding, norms[0], stacked)
    assert stack is not None
    plan = gqa.plan(AttentionBatch(queries, None))
    got = stack.run(ids, positions, slots, tuple(caches), queries, plan)
    assert torch.isfinite(got).all() and torch.equal(got, hidden)
    for mine, theirs in zip(caches, want_caches):
        for a, b in zip(mine, theirs):
            assert torch.equal(a.view(torch.uint8), b.view(torch.uint8))
