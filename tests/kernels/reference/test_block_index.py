"""Selections of blocks by torch's row against the formula: ties, several local blocks, contexts of all lengths;
attention over a selection against a softmax in float64."""

from __future__ import annotations

import random

import pytest
import torch

from moe_engine.kernels.attention.cpu import CpuGQA
from moe_engine.kernels.attention.reference import TorchGQA
from moe_engine.kernels.block_index import reference, selection
from moe_engine.kernels.block_index.reference import TorchBlockIndex
from moe_engine.kernels.block_index.rule import BlockRule
from moe_engine.kernels.queries import AttentionBatch
from tests.kernels.block_formulas import check_selection, expected_rows
from tests.kernels.cpu.formulas import close, filled_cache, normal, paged_queries, random_trees

LENS = [(1, 1), (1, 70), (3, 3), (1, 8), (5, 131), (2, 9), (1, 24)]


@pytest.mark.parametrize(
    ("rule", "heads", "width"), [(BlockRule(8, 3), 2, 16), (BlockRule(5, 4, 2), 3, 12), (BlockRule(16, 1), 1, 32)]
)
def test_selection(rule: BlockRule, heads: int, width: int, monkeypatch: pytest.MonkeyPatch) -> None:
    queries, size = paged_queries(LENS, random.choice((1, 4)))
    cache = filled_cache(queries, size, 1, width, dtype=torch.float32)
    q = normal(queries.num_tokens, heads, width, dtype=torch.float32)
    check_selection(TorchBlockIndex(), LENS, queries, q, cache, rule)
    monkeypatch.setattr(reference, "MAX_SCORES", 300)
    monkeypatch.setattr(selection, "TOKENS_AT_ONCE", 2)
    check_selection(TorchBlockIndex(), LENS, queries, q, cache, rule)


def test_the_lower_block_wins_a_tie() -> None:
    queries, size = paged_queries([(2, 50)])
    cache = torch.ones(size, 1, 16)
    check_selection(TorchBlockIndex(), [(2, 50)], queries, torch.ones(2, 2, 16), cache, BlockRule(8, 3))


def test_a_draft_tree_is_refused() -> None:
    queries, _ = random_trees(paged_queries([(3, 20)])[0])
    with pytest.raises(ValueError, match=r"a draft tree .* has no blocks"):
        TorchBlockIndex().plan(queries)


@pytest.mark.parametrize("backend", [TorchGQA, CpuGQA])
def test_attention_over_a_selection(backend: type) -> None:
    """Softmax over the selected tokens of each KV head, in float64."""
    rule, kv_heads, group, width = BlockRule(8, 3), 2, 3, 24
    queries, size = paged_queries(LENS)
    index = filled_cache(queries, size, 1, 16, dtype=torch.float32)
    keys, values = (filled_cache(queries, size, kv_heads, width, dtype=torch.float32) for _ in range(2))
    q = normal(queries.num_tokens, kv_heads * group, width, dtype=torch.float32)
    index_q = normal(queries.num_tokens, kv_heads, 16, dtype=torch.float32)
    selected, kernel = selection.empty(queries, rule, kv_heads), TorchBlockIndex()
    kernel.select(index_q, index, queries, rule, selected, kernel.plan(queries))
    rows, attention = selected.queries(), backend()
    plan = attention.plan(AttentionBatch(rows, None))
    flat = [part.view(-1, 1, width) for part in (keys, values)]
    got = attention.paged(q.view(-1, group, width), *flat, rows, 0.2, plan)
    want = []
    for row, chosen in enumerate(expected_rows(index_q, index, queries, rule)):
        scores = q.view(-1, group, width)[row].double() @ flat[0][chosen, 0].double().T * 0.2
        want.append(scores.softmax(-1) @ flat[1][chosen, 0].double())
    close(got, torch.stack(want), 3)
