"""Cases of speculation: chains and trees of drafts, prompt lookup, attention within trees. The kernels of the
bookkeeping belong to the rows of sampling.

Legend: R requests, S drafts of each, N nodes of a tree.
"""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any

import torch
from torch import Tensor

from benchmarks.attention_cases import PAGE, paged_queries, pool_size
from benchmarks.gpu_suite.launched import kernel_case
from benchmarks.kernel_cases import Call, KernelCase, NotServed, normal, writes
from moe_engine.kernels.attention.vendors.trees import TreeMask
from moe_engine.kernels.decoder.drafting import RowTables
from moe_engine.kernels.queries import AttentionBatch, PagedQueries
from moe_engine.kernels.speculation.choice import chain_kernels, decode_kernels, tree_kernels
from moe_engine.kernels.speculation.protocol import ChainBuffers
from moe_engine.kernels.speculation.trees import ancestor_masks
from tests.kernels.reference.chains import cloned, drawn_chain, drawn_runs, drawn_tables, drawn_tree
from tests.kernels.reference.decodes import drawn_decodes

REPEATS = 64
"""Most calls of a case: each appends S + 1 tokens to the rows."""


def _drawn(requests: int, drafts: int, width: int, device: str) -> tuple[torch.Generator, RowTables, ChainBuffers]:
    """Rows with room for all calls, and their chains."""
    generator = torch.Generator().manual_seed(0)
    tables = drawn_tables(generator, requests, width, hidden=512)
    tables.lengths.clamp_(max=width - REPEATS * (drafts + 2))
    chain = drawn_chain(generator, requests, 0, drafts, num_rows=requests)
    return generator, RowTables(*(table.to(device) for table in tables)), cloned(chain, device)


def _tensors(*buffers: Any) -> tuple[Tensor, ...]:
    """All tensors of some buffers."""
    values = [getattr(part, field.name) for part in buffers for field in fields(part)]
    return tuple(value for value in values if isinstance(value, Tensor))


def _refuse_others(kernel: Any) -> None:
    if kernel.name not in ("torch", "triton"):
        raise NotServed("has torch's work around drafts")


@kernel_case("sampling", "chains.{drafts}.r{requests}", context="width")
def chains(sampling: Any, device: str, requests: int, drafts: int, width: int) -> Call:
    """The bookkeeping of a step with chains: inputs, acceptance, states, the runs of a drafter."""
    _refuse_others(sampling)
    generator, tables, chain = _drawn(requests, drafts, width, device)
    kernels, back = chain_kernels(sampling), 1
    runs = cloned(drawn_runs(generator, chain, back, 1, 2), device)
    hidden, kept = (normal(n, 512, device=device) for n in (chain.ids.numel(), requests * back))
    states = kept.clone()

    def call() -> tuple[Tensor, ...]:
        kernels.inputs(tables, chain)
        kernels.accept(tables, chain, None)
        kernels.keep_states(states, hidden, chain.rows, chain.last)
        kernels.runs(tables, chain, runs)
        found = kernels.gather_states(kept, hidden, runs.sources.flatten())
        return *_tensors(chain, runs), *tables[:4], states, found

    return call


@kernel_case("sampling", "decodes.r{requests}", context="width")
def decodes(sampling: Any, device: str, requests: int, width: int) -> Call:
    """The bookkeeping of a captured step without drafts."""
    _refuse_others(sampling)
    drawn = drawn_decodes(torch.Generator().manual_seed(requests), requests, 3, width, device)
    kernels = decode_kernels(sampling)

    def call() -> tuple[Tensor, ...]:
        kernels.enter(*drawn[:-1])
        kernels.keep(drawn.sampled, drawn.rows, drawn.last_tokens)
        return drawn.tensors()

    return call


@kernel_case("sampling", "prompt_lookup.{drafts}.r{requests}.s{width}", context="width")
def lookups(sampling: Any, device: str, requests: int, drafts: int, width: int) -> Call:
    """Drafts of prompt lookup."""
    _refuse_others(sampling)
    _, tables, chain = _drawn(requests, drafts, width, device)
    kernels = chain_kernels(sampling)
    kernels.inputs(tables, chain)
    return writes(chain.ids, kernels.find_ngrams, tables, chain, 1, 4)


@kernel_case("sampling", "trees.{depth}x{topk}.r{requests}", context="width")
def trees(sampling: Any, device: str, requests: int, depth: int, topk: int, width: int) -> Call:
    """The bookkeeping of a step with trees."""
    _refuse_others(sampling)
    generator, tables, chain = _drawn(requests, depth, width, device)
    drawn = drawn_tree(generator, requests, depth, topk)
    tree = replace(cloned(drawn, device), levels=[cloned(level, device) for level in drawn.levels])
    kernels = tree_kernels(sampling)
    chain_kernels(sampling).inputs(tables, chain)

    def call() -> tuple[Tensor, ...]:
        kernels.spread(tables, chain, tree)
        kernels.enter(chain, tree)
        kernels.walk(chain, tree)
        return _tensors(chain, tree, *tree.levels)

    return call


def tree_queries(requests: int, nodes: int, context: int, device: str) -> PagedQueries:
    """Binary trees of `nodes` nodes behind a context."""
    asked = paged_queries(requests, nodes, context, device, PAGE)
    parents = (torch.arange(nodes, device=device) - 1) // 2
    return replace(asked, visible=ancestor_masks(parents.expand(requests, -1)).flatten())


@kernel_case("mla", "tree.{latent}x{heads}.n{nodes}.r{requests}.s{context}")
def tree_latent(
    kernel: Any, device: str, requests: int, nodes: int, context: int, heads: int, latent: int = 512
) -> Call:
    """MLA's verification of trees."""
    asked = tree_queries(requests, nodes, context, device)
    q, plan = normal(requests * nodes, heads, latent + 64, device=device), kernel.plan(AttentionBatch(asked, None))
    cache = normal(pool_size(asked), latent + 64, device=device)
    return lambda: kernel.absorbed(q, cache, asked, (latent + 64) ** -0.5, plan, latent)


@kernel_case("gqa", "tree.{heads}x{groups}.n{nodes}.r{requests}.s{context}")
def tree_paged(
    kernel: Any, device: str, requests: int, nodes: int, context: int, heads: int, groups: int, width: int = 128
) -> Call:
    """Grouped attention's verification of trees."""
    asked = tree_queries(requests, nodes, context, device)
    keys, values = (normal(pool_size(asked), groups, width, device=device) for _ in "kv")
    q, plan = normal(requests * nodes, heads, width, device=device), kernel.plan(AttentionBatch(asked, None))
    return lambda: kernel.paged(q, keys, values, asked, width**-0.5, plan)


@kernel_case("mla", "tree_merge.{latent}x{heads}.n{nodes}.r{requests}.s{context}")
def tree_merge(
    kernel: Any, device: str, requests: int, nodes: int, context: int, heads: int, latent: int = 512
) -> Call:
    """Attention within trees, merged into that over their contexts, which a library has computed."""
    asked = tree_queries(requests, nodes, context, device)
    q, tokens, scale = normal(requests * nodes, heads, latent + 64, device=device), requests * nodes, latent**-0.5
    cache = normal(pool_size(asked), 1, latent + 64, device=device)
    out, lse = normal(tokens, heads, latent, device=device), torch.randn(tokens, heads, device=device)
    mask = TreeMask.of(asked)

    def in_torch() -> Tensor:
        return mask.merge(out, lse, *mask.attend(q, cache, cache[..., :latent], scale))

    def in_triton() -> Tensor:
        from moe_engine.kernels.attention.triton.tree import add_tree

        merged = out.clone()
        add_tree(merged, lse, q, cache, cache[..., :latent], asked, scale)
        return merged

    _refuse_others(kernel)
    return in_triton if kernel.name == "triton" else in_torch


def cases(requests: int, context: int, heads: int, latent: int = 512) -> list[KernelCase]:
    """Of a step that verifies drafts."""
    width = context + REPEATS * 8
    return [
        chains(requests, 3, width), decodes(requests, width), lookups(requests, 3, width), trees(requests, 3, 2, width),
        tree_latent(requests, 8, context, heads, latent), tree_paged(requests, 8, context, heads, max(1, heads // 4)),
        tree_merge(requests, 8, context, heads, latent),
    ]  # fmt: skip
