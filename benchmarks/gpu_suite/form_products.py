"""Forms of products, experts, attention and indexers that some models launch and DeepSeek V3 does not: each line of a
table is a case.

Legend: T tokens, R requests, H heads, G KV heads, W width of a head.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from benchmarks.attention_cases import NO_RECORDS, PAGE, paged_queries, pool_size
from benchmarks.gpu_suite.draft_cases import tree_queries
from benchmarks.gpu_suite.launched import counted, kernel_case
from benchmarks.gpu_suite.steps import Decodes, exact
from benchmarks.kernel_cases import (
    POSITIONS,
    Call,
    KernelCase,
    NotServed,
    experts_case,
    linear_case,
    normal,
    rotary_table,
)
from moe_engine.kernels.attention.selected import Selected, Shift, Turn
from moe_engine.kernels.attention_windows import ChunkWindow
from moe_engine.kernels.experts.shapes import (
    DEEPSEEK_V3,
    GEMMA_4,
    GPT_OSS_20B_MXFP4,
    KIMI_K3,
    MINIMAX_M3,
    NEMOTRON_3,
    QWEN3_30B_ROWS,
    ExpertModel,
    ExpertShape,
)
from moe_engine.kernels.gate_form import GatedActivation
from moe_engine.kernels.indexer import index_keys
from moe_engine.kernels.indexer.key_norm import KeyNorm
from moe_engine.kernels.kv_format import head_records, latent_records
from moe_engine.kernels.kv_format.formats import FP8_GROUPS, FP8_TOKEN
from moe_engine.kernels.linear.shapes import LinearShape
from moe_engine.kernels.ops.reference import TorchOps
from moe_engine.kernels.queries import AttentionBatch, PagedQueries

EPS = 1e-6
OWN_RECORDS = ("torch", "cpu", "triton")
"""Rows of grouped attention with FP8 records of heads."""
NARROW = 1 << 31
"""Elements of a cache whose offsets need 64 bits."""

PRODUCTS = (
    LinearShape("glm-4.6.qkv", 1, 14336, 5120, True, biased=True),
    LinearShape("v4.q_b", 1, 32768, 1024, True, power_of_two=True),
    LinearShape("v4.o_b", 1, 4096, 8192, True, power_of_two=True),
    LinearShape("gpt-oss.qkv", 1, 5120, 2880, False, biased=True),
)


def products(*rows: int, part: int = 1) -> Iterator[KernelCase]:
    """`PRODUCTS`, or a `part` of their sizes."""
    for shape in PRODUCTS:
        for m in rows:
            yield linear_case(replace(shape, name=f"{shape.name}.m{m}", rows=m, n=shape.n // part, k=shape.k // part))


FP8_MINIMAX_M3 = replace(MINIMAX_M3, name="minimax-m3-fp8", fp8=True)
GLM_53_FLASH = ExpertModel("glm-5.3-flash", 288, 8, 4096, 2048, fp8=False, activation=GatedActivation(10.0))
EXPERTS = {
    DEEPSEEK_V3: (3,), QWEN3_30B_ROWS: (3, 40, 100), GPT_OSS_20B_MXFP4: (3, 40), FP8_MINIMAX_M3: (3, 40, 600),
    GLM_53_FLASH: (3, 40, 600), NEMOTRON_3: (3, 40, 100), KIMI_K3: (2,), GEMMA_4: (3, 600),
}  # fmt: skip
"""Tokens: with few a pair is a row of its own, with more the weights are the left factor, the most take large tiles."""


def experts(local: int) -> Iterator[KernelCase]:
    for model, tokens in EXPERTS.items():
        for count in tokens:
            yield experts_case(ExpertShape(replace(model, name=f"form.{model.name}"), count, local))


# -- attention


class Paged(NamedTuple):
    """window: of `PagedQueries`. sinks: a logit of each head. wide: the caches have offsets of 64 bits. tree: the
    tokens of a request are a draft tree. fp8: the caches are records of e4m3. cap: bound of the scores."""

    window: int | None = None
    sinks: bool = False
    wide: bool = False
    tree: bool = False
    fp8: bool = False
    cap: float = 0.0


PAGED = {
    "window": Paged(ChunkWindow(64)), "window.sinks": Paged(64, True), "wide": Paged(wide=True),
    "wide.window": Paged(ChunkWindow(64), wide=True), "wide.sinks": Paged(sinks=True, wide=True),
    "wide.tree": Paged(wide=True, tree=True), "fp8.window": Paged(64, fp8=True),
    "fp8.window.sinks": Paged(64, True, fp8=True),
    "wide.fp8": Paged(wide=True, fp8=True), "wide.fp8.window": Paged(ChunkWindow(64), wide=True, fp8=True),
    "wide.fp8.sinks": Paged(sinks=True, wide=True, fp8=True), "capped": Paged(cap=50.0),
    "capped.window": Paged(64, cap=50.0), "wide.capped": Paged(wide=True, cap=50.0),
    "wide.capped.window": Paged(64, wide=True, cap=50.0), "wide.fp8.capped": Paged(wide=True, fp8=True, cap=50.0),
    "wide.fp8.capped.window": Paged(64, wide=True, fp8=True, cap=50.0),
}  # fmt: skip
"""Of Llama 4, gpt-oss, K-EXAONE and Gemma 2, and of every model with a large cache."""


@kernel_case("gqa", "paged.{name}.{heads}x{width}.q{count}.r{requests}.s{context}")
def paged(kernel: Any, device: str, name: str, requests: int, count: int, context: int, heads: int, width: int) -> Call:
    """Grouped attention in one of the forms `PAGED`."""
    groups, (window, has_sinks, wide, tree, fp8, cap) = max(1, heads // 8), PAGED[name]
    able = kernel.capabilities
    if fp8 and kernel.name not in OWN_RECORDS:
        raise NotServed("reads no records of heads")
    if window and not (able.chunked if isinstance(window, ChunkWindow) else able.windows):
        raise NotServed("has no such window")
    if has_sinks and able.sinks is None:
        raise NotServed("has no sinks")
    if cap and able.capped is None:
        raise NotServed("does not bound scores")
    asked = replace(_queries(tree, requests, count, context, device), window=window)
    q, sinks = normal(asked.num_tokens, heads, width, device=device), torch.randn(heads, device=device)
    pack = partial(head_records.pack, form=FP8_TOKEN) if fp8 else None
    asked, caches = _caches(asked, 2, (groups, width), wide, device, pack)
    given = q, *caches, asked, width**-0.5, kernel.plan(AttentionBatch(asked, None))
    if cap:
        return partial(able.capped, *given, None, cap)
    return partial(able.sinks, *given, sinks) if has_sinks else partial(kernel.paged, *given)


def _queries(tree: bool, requests: int, count: int, context: int, device: str) -> PagedQueries:
    """`count` tokens of each request, one after the other or as a draft tree."""
    return (
        tree_queries(requests, count, context, device) if tree
        else paged_queries(requests, count, context, device, PAGE)
    )  # fmt: skip


def _caches(
    asked: PagedQueries, count: int, row: tuple[int, ...], wide: bool, device: str,
    pack: Callable[[Tensor], Tensor] | None = None,
) -> tuple[PagedQueries, list[Tensor]]:  # fmt: skip
    """The queries over caches; wide: their slots are the last ones, and no other memory of the caches is touched.
    pack: rows to records."""
    own = pool_size(asked)
    numbers = [normal(own, *row, device=device) for _ in range(count)]
    rows = numbers if pack is None else [pack(x) for x in numbers]
    first = -(-NARROW // rows[0].shape[1:].numel()) // PAGE * PAGE if wide else 0
    caches = [x.new_empty(first + own, *x.shape[1:]) for x in rows]
    for cache, values in zip(caches, rows):
        cache[first:] = values
    return replace(asked, slot_table=asked.slot_table + first), caches


class Latent(NamedTuple):
    """selected: over `Selected` rows, which are values as a whole; else MLA's with rotary channels. turned: results are
    rotated back. shifted: rows of another cache are named by numbers behind the own ones. tree, fp8: as in `Paged`."""

    selected: bool = True
    turned: bool = False
    shifted: bool = False
    tree: bool = False
    fp8: bool = False


LATENT = {
    "mla": Latent(False),
    "mla.tree": Latent(False, tree=True),
    "mla.fp8": Latent(False, fp8=True),
    "glm-5.3": Latent(),
    "v4": Latent(turned=True),
    "v4.1": Latent(turned=True, shifted=True),
}


@kernel_case("mla", "latent.wide.{name}.{width}x{heads}.r{requests}.s{context}")
def latent(kernel: Any, device: str, name: str, requests: int, context: int, heads: int, width: int) -> Call:
    """MLA in one of the forms `LATENT`, over a cache with offsets of 64 bits."""
    form = LATENT[name]
    own = width + 64 * (not form.selected)
    asked = _queries(form.tree, requests, 1 + 3 * form.tree, context, device)
    if form.fp8 and kernel.name in NO_RECORDS:
        raise NotServed("reads no FP8 records")
    pack = partial(latent_records.pack, latent=width, form=FP8_GROUPS) if form.fp8 else None
    asked, (cache,) = _caches(asked, 1, (own,), True, device, pack)
    q = normal(asked.num_tokens, heads, own, device=device)
    if not form.selected:
        plan = kernel.plan(AttentionBatch(asked, None))
        return lambda: kernel.absorbed(q, cache, asked, own**-0.5, plan, width)
    sparse, positions = kernel.capabilities.sparse, torch.randint(POSITIONS, (requests,), device=device)
    if sparse is None or not sparse.sinks:
        raise NotServed("has no sinks over selected rows")
    slots, shift = asked.slot_table.int(), None
    if form.shifted and sparse.shifts:
        first = len(cache) - pool_size(asked)
        slots, shift = slots - first + 1000, Shift(1000, first - 1000)
    lengths = torch.full((requests,), context, dtype=torch.int32, device=device)
    selected, sinks = (
        Selected(slots[:, :context], [context] * requests, lengths, shift),
        torch.randn(heads, device=device),
    )
    turn, given = Turn(positions, rotary_table(64, device)), (q, cache, selected, own**-0.5, sparse.plan(selected))
    if form.turned and sparse.turned is not None:
        return lambda: sparse.turned(*given, width, sinks, turn)

    def apart() -> Tensor:
        found: Tensor = sparse.run(*given, width, sinks)
        if form.turned:
            TorchOps().rotate(found, turn.positions, turn.table, inverse=True)
        return found

    return apart


# -- indexers

INDEX_ROWS = {
    "v3.2": (False, True),
    "glm-5.2": (True, True),
    "v3.2.keys": (False, False),
    "glm-5.2.keys": (True, False),
}
"""Interleaved pairs, and whether there are queries: a layer that uses the selection of another one keeps keys only."""


def index_rows(name: str, tokens: int, heads: int, width: int) -> KernelCase:
    """The work between an indexer's products and its scores over FP8 keys."""
    interleaved, queries = INDEX_ROWS[name]

    def prepare(kernel: Any, device: str) -> Call:
        norm = KeyNorm(torch.rand(width, device=device) + 0.5, torch.randn(width, device=device) / 4, EPS)
        keys, q = normal(tokens, width, device=device), normal(tokens, heads, width, device=device)
        gates, table = torch.randn(4, tokens, heads, device=device), rotary_table(width // 2, device)
        positions, table = torch.randint(POSITIONS, (tokens,), device=device), replace(table, interleaved=interleaved)
        slots, record = torch.randperm(2 * tokens, device=device)[:tokens], index_keys.pack(keys[:1]).shape[1]
        cache = torch.zeros(2 * tokens, 1, record, dtype=torch.uint8, device=device)
        given = keys, norm, q if queries else None, gates if queries else None, 0.3, positions, table, slots, cache

        def together() -> tuple[Tensor, ...]:
            found = kernel.prepare(*given)
            return _products(found, cache) if queries else (index_keys.unpack(cache.squeeze(1), width)[0],)

        def apart() -> tuple[Tensor, ...]:
            rows, turned = norm.run(keys), q.clone()
            for x in (rows.unsqueeze(1), turned):
                TorchOps().rotate_leading(x, positions, table)
            index_keys.write(rows, slots, cache)
            found = index_keys.quantize_queries(turned, gates.sum(0) * 0.3)
            return _products(found, cache) if queries else (index_keys.unpack(cache.squeeze(1), width)[0],)

        return apart if kernel.prepare is None else together

    def _products(found: tuple[Tensor, Tensor], cache: Tensor) -> tuple[Tensor, ...]:
        """Scaled queries and the keys: the scales themselves may be on either side of a power of two."""
        return found[0].float() * found[1].unsqueeze(2), index_keys.unpack(cache.squeeze(1), width)[0]

    return counted("indexer", f"index_rows.{name}.{heads}x{width}.t{tokens}", prepare, fp8=True)


@kernel_case("indexer", "index_select.placed.{heads}x{width}.k{top_k}.r{requests}.s{context}")
def placed(kernel: Any, device: str, requests: int, context: int, top_k: int, heads: int, width: int) -> Call:
    """The best entries of each query, behind the rows of its window. A row without it: the selection, then its
    place."""
    window = 16
    asked = Decodes.of(requests, context, device).queries
    keys = exact(asked.slot_table.numel(), 1, width, device=device)
    q, weights = exact(requests, heads, width, device=device), exact(requests, heads, device=device).float()
    rows = torch.full((requests, window + top_k), -7, dtype=torch.int32, device=device)
    columns = torch.full((requests,), window, dtype=torch.int32, device=device)
    counts, plan = torch.full((requests,), top_k, dtype=torch.int32, device=device), kernel.plan(asked)

    def call() -> Tensor:
        if kernel.select_into is not None:
            kernel.select_into(q, weights, keys, asked, top_k, rows, columns, counts, 5, plan)
        else:
            found = Selected.empty(asked, top_k)
            kernel.select(q, weights, keys, asked, top_k, found, plan)
            rows[:, window : window + found.slots.shape[1]] = found.slots + 5
        return rows

    return call


def cases(
    tokens: int, many: int, context: int, heads: int, width: int, wide: bool = True, part: int = 1
) -> list[KernelCase]:
    """Of decode steps, and products of 100 and of `many` rows. wide: also with caches of 4 GB. part: of the products'
    sizes."""
    names = [name for name, form in PAGED.items() if wide or not form.wide]
    return [
        *products(tokens, 100, many, part=part),
        *(paged(name, tokens, count, context, heads, width) for name in names for count in (1, 4)),
        *(latent(name, tokens, context, heads, 4 * width) for name in LATENT if wide),
        *(index_rows(name, tokens, heads, width) for name in INDEX_ROWS),
        placed(tokens, context, context // 4, heads, width),
    ]
