"""Cases of indexers: keys and queries, selections of tokens, of blocks, and of pools (DeepSeek V3.2 and V4.1,
GLM-5.3-Flash, MiniMax-M3).

Queries and keys are small integers: scores are exact, and all rows select the same.
Legend: R requests of one token each, I channels of an index head.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from benchmarks.gpu_suite.launched import kernel_case
from benchmarks.gpu_suite.steps import Decodes, exact
from benchmarks.kernel_cases import POSITIONS, Call, KernelCase, NotServed, normal, rotary_table, writes
from moe_engine.kernels.attention.selected import Selected
from moe_engine.kernels.block_index import selection
from moe_engine.kernels.block_index.rule import BlockRule
from moe_engine.kernels.indexer.key_norm import KeyNorm
from moe_engine.kernels.indexer.pools import PooledTokens, PoolRule, PoolTurns
from moe_engine.kernels.indexer.protocol import BlockChoice
from moe_engine.kernels.ops.reference import TorchOps

PARTS = 4
"""Parts of the gates' product."""
EPS = 1e-6


def _key_norm(width: int, device: str) -> KeyNorm:
    return KeyNorm(torch.rand(width, device=device) + 0.5, torch.randn(width, device=device) / 4, EPS)


@kernel_case("indexer", "index_rows.{heads}x{width}.t{tokens}")
def prepared(kernel: Any, device: str, tokens: int, heads: int, width: int = 128) -> Call:
    """All work between an indexer's products and its scores. A row without it: the layer's operations."""
    rotary = width // 2
    norm, table = _key_norm(width, device), rotary_table(rotary, device)
    keys, q = normal(tokens, width, device=device), normal(tokens, heads, width, device=device)
    gates = torch.randn(PARTS, tokens, heads, device=device)
    positions = torch.randint(POSITIONS, (tokens,), device=device)
    slots, cache = torch.randperm(2 * tokens, device=device)[:tokens], keys.new_zeros(2 * tokens, 1, width)

    def together() -> tuple[Tensor, ...]:
        return *kernel.prepare(keys, norm, q, gates, 0.3, positions, table, slots, cache), cache

    def apart() -> tuple[Tensor, ...]:
        rows, turned, ops = norm.run(keys), q.clone(), TorchOps()
        for x in (rows.unsqueeze(1), turned):
            ops.rotate_leading(x, positions, table)
        kernel.write(rows, slots, cache, 1)
        return turned, gates.sum(0) * 0.3, cache

    return apart if kernel.prepare is None else together


@kernel_case("indexer", "index_select.{heads}x{width}.k{top_k}{fp8:.fp8}{blocks:.blocks}.r{requests}.s{context}")
def selected(
    kernel: Any, device: str, requests: int, context: int, top_k: int, heads: int, blocks: int = 0, fp8: bool = False,
    width: int = 128,
) -> Call:  # fmt: skip
    """The best tokens of each query. blocks: chosen too, of 8 tokens each. fp8: keys in records."""
    asked = Decodes.of(requests, context, device).queries
    keys = exact(asked.slot_table.numel(), 1, width, device=device)
    q = exact(requests, heads, width, device=device)
    if fp8 and kernel.name == "triton":
        ones = torch.ones(len(keys), 1, 1, device=device)
        keys = torch.cat((keys.to(torch.float8_e4m3fn).view(torch.uint8), ones.view(torch.uint8)), 2)
        q = q.to(torch.float8_e4m3fn)
    elif fp8 and kernel.name != "torch":  # torch's reads the same numbers unquantized
        raise NotServed("has pages of another layout")
    weights = exact(requests, heads, device=device, dtype=torch.float32)
    found, plan = Selected.empty(asked, top_k), kernel.plan(asked)
    chosen = torch.empty(requests, blocks, dtype=torch.int32, device=device)
    choice = BlockChoice(8, chosen) if blocks else None
    results = (found.slots, chosen) if blocks else (found.slots,)
    return writes(results, kernel.select, q, weights, keys, asked, top_k, found, plan, choice)


@kernel_case("block_index", "select_blocks.{heads}x{width}.k{rule.top_k}x{rule.size}.r{requests}.s{context}")
def selected_blocks(
    kernel: Any, device: str, requests: int, context: int, heads: int, rule: BlockRule, width: int = 128
) -> Call:
    """The best blocks of each query and KV head."""
    asked = Decodes.of(requests, context, device).queries
    keys = exact(asked.slot_table.numel(), 1, width, device=device)
    q = exact(requests, heads, width, device=device)
    found, plan = selection.empty(asked, rule, heads), kernel.plan(asked)
    return writes(found.slots, kernel.select, q, keys, asked, rule, found, plan)


@kernel_case("indexer", "pool_keys.{size}x{width}.r{requests}")
def pool_keys(kernel: Any, device: str, requests: int, context: int, size: int = 4, width: int = 128) -> Call:
    """Keys and gates of tokens, and the keys of the pools that they complete."""
    step, norm = Decodes.of(requests, context, device), _key_norm(width, device)
    keys, gates = (normal(requests, width, device=device) for _ in "kg")
    cache = normal(step.num_slots, 1, width, device=device), normal(step.num_slots, 1, width, device=device)
    bias = torch.randn(size, width, device=device)
    return writes(cache, kernel.pools.write, keys, norm, gates, bias, step.positions, step.slots, cache)


@kernel_case("indexer", "pool_means.{size}x{width}{halves:.halves}.r{requests}")
def pool_means(
    kernel: Any, device: str, requests: int, context: int, size: int = 4, width: int = 128, halves: bool = False
) -> Call:
    """Keys of tokens, and the normed and rotated means of the pools that they complete. A row without them: apart.
    halves: rotated by halves."""
    rotary = width // 2
    step, weight = Decodes.of(requests, context, device), torch.rand(width, device=device) + 0.5
    keys = normal(requests, width, device=device)
    cache = normal(step.num_slots, 1, width, device=device)
    rows = step.positions // size * size
    table = replace(rotary_table(rotary, device), interleaved=not halves)
    turns = PoolTurns(step.positions, rows, table, size)

    def together() -> Tensor:
        kernel.pools.write_means(keys, weight, EPS, turns, step.slots, cache)
        return cache

    def apart() -> Tensor:
        stored, ops, slots = cache.squeeze(1), TorchOps(), step.slots
        stored.index_copy_(0, slots, keys)
        places = slots.unsqueeze(1) + torch.arange(1 - size, 1, device=device)
        pooled = stored[places.clamp_(min=0)].float().mean(1).to(stored.dtype).unsqueeze(1)
        pooled = ops.rms_norm(pooled, weight, EPS)
        ops.rotate_leading(pooled, rows, turns.table)
        completes = ((step.positions + 1) % size == 0).unsqueeze(1)
        stored.index_copy_(0, slots, torch.where(completes, pooled.squeeze(1), keys))
        return cache

    return apart if kernel.pools.write_means is None else together


@kernel_case("indexer", "pool_slots.{rule.size}x{rule.most}{chosen:.chosen}.r{requests}")
def pool_slots(kernel: Any, device: str, requests: int, context: int, rule: PoolRule, chosen: bool) -> Call:
    """How many pools each token sees, and the slots of the chosen ones' tokens."""
    width = rule.size * rule.most + rule.size - 1 if chosen else context
    step = Decodes.of(requests, context, device)
    tokens = PooledTokens(step.positions, step.queries.rows, step.queries.slot_table, rule)
    numbers = torch.randint(step.num_slots // rule.size, (requests, rule.most), dtype=torch.int32, device=device)
    pools, counts = torch.empty(2, requests, dtype=torch.int32, device=device)
    out = torch.empty(requests, width, dtype=torch.int32, device=device)

    def call() -> tuple[Tensor, ...]:
        kernel.pools.count(tokens, pools, counts)
        kernel.pools.place(numbers if chosen else None, tokens, out)
        return pools, counts, out

    return call


def cases(requests: int, context: int, heads: int, top_k: int, width: int = 128) -> list[KernelCase]:
    """Of a decode step, in which `top_k` of `context` tokens are selected."""
    rule = BlockRule(min(128, top_k), min(16, context // top_k))
    return [
        prepared(requests, heads, width),
        selected(requests, context, top_k, heads, width=width),
        selected(requests, context, top_k, heads, fp8=True, width=width),
        selected(requests, context, top_k, heads, blocks=min(128, context // 16), width=width),
        selected_blocks(requests, context, 4, rule, width),
        pool_keys(requests, context, width=width),
        pool_means(requests, context, width=width),
        pool_means(requests, context, width=width, halves=True),
        pool_slots(requests, context, PoolRule(4, top_k // 4), chosen=True),
        pool_slots(requests, context, PoolRule(4, context // 4), chosen=False),
    ]
