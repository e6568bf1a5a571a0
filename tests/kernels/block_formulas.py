"""The selection of blocks by its definition, in float64, one query token and KV head at a time."""

from __future__ import annotations

import torch
from torch import Tensor

from moe_engine.kernels.block_index import selection
from moe_engine.kernels.block_index.protocol import BlockIndexKernel
from moe_engine.kernels.block_index.rule import BlockRule
from moe_engine.kernels.queries import PagedQueries
from tests.kernels.cpu.formulas import slots_of


def selected_rows(
    kernel: BlockIndexKernel, q: Tensor, cache: Tensor, queries: PagedQueries, rule: BlockRule
) -> list[list[int]]:
    """The rows that a kernel selects for each (query token, KV head); their number is the one planned on the host."""
    selected = selection.empty(queries, rule, q.shape[1])
    selected.slots.fill_(-7)
    kernel.select(q, cache, queries, rule, selected, kernel.plan(queries))
    rows = selected.slots.tolist()
    for row, count in zip(rows, selected.counts):
        assert -1 not in row[:count] and set(row[count:]) <= {-1}
    return [row[:count] for row, count in zip(rows, selected.counts)]


def expected_rows(q: Tensor, cache: Tensor, queries: PagedQueries, rule: BlockRule) -> list[list[int]]:
    found, token, heads = [], 0, q.shape[1]
    for request, (count, context) in enumerate(zip(queries.query_lens, queries.context_lens)):
        slots = slots_of(queries, request)
        for visible in range(context - count + 1, context + 1):
            scores = q[token].double() @ cache[slots[:visible], 0].double().T  # [G, s]
            own = (visible - 1) // rule.size
            for head in range(heads):
                best = [float(part.max()) for part in scores[head].split(rule.size)]
                free = sorted(range(max(0, own + 1 - rule.local)), key=lambda block: (-best[block], block))
                local = list(range(max(0, own + 1 - rule.local), own + 1))
                blocks = sorted(local + free[: rule.top_k - len(local)])
                positions = [p for b in blocks for p in range(b * rule.size, min((b + 1) * rule.size, visible))]
                found.append((slots[positions] * heads + head).tolist())
            token += 1
    return found


def check_selection(
    kernel: BlockIndexKernel, lens: list[tuple[int, int]], queries: PagedQueries, q: Tensor, cache: Tensor,
    rule: BlockRule,
) -> None:  # fmt: skip
    """Equal to the formula; a request alone selects what it selects in the batch."""
    whole = selected_rows(kernel, q, cache, queries, rule)
    assert whole == expected_rows(q, cache, queries, rule)
    assert max(len(row) for row in whole) <= rule.max_tokens
    assert torch.equal(cache.isnan().any(-1).any(-1), cache.isnan().all(-1).all(-1)), "the cache is not written"
