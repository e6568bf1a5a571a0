"""Selections of blocks in Triton, under the interpreter: against the formula, ties, parts of the scores, captured plans
with longer rows of the slot table."""

from __future__ import annotations

import pytest
import torch

from moe_engine.kernels.block_index import selection
from moe_engine.kernels.block_index.rule import BlockRule
from tests.kernels.block_formulas import check_selection, expected_rows
from tests.kernels.cpu.formulas import filled_cache, normal, paged_queries

triton_blocks = pytest.importorskip("moe_engine.kernels.block_index.triton_blocks", reason="needs triton")

LENS = [(1, 1), (1, 70), (3, 3), (1, 150), (5, 131), (2, 9)]


@pytest.mark.parametrize(
    ("rule", "heads", "width", "dtype", "most"),
    [
        (BlockRule(8, 3), 2, 16, torch.float32, 1 << 24),
        (BlockRule(16, 4, 2), 1, 32, torch.bfloat16, 40),
        (BlockRule(24, 2), 3, 20, torch.float32, 1 << 24),
    ],
)
def test_selection(rule: BlockRule, heads: int, width: int, dtype: torch.dtype, most: int) -> None:
    queries, size = paged_queries(LENS, 4)
    cache = filled_cache(queries, size, 1, width, dtype=dtype)
    q = normal(queries.num_tokens, heads, width, dtype=dtype)
    check_selection(triton_blocks.TritonBlockIndex(most), LENS, queries, q, cache, rule)


def test_the_lower_block_wins_a_tie() -> None:
    queries, size = paged_queries([(2, 50)])
    cache = torch.ones(size, 1, 16)
    q = torch.ones(2, 2, 16)
    check_selection(triton_blocks.TritonBlockIndex(), [(2, 50)], queries, q, cache, BlockRule(8, 3))


def test_a_captured_plan_reads_lengths_on_the_device() -> None:
    """The plan is made for one length, and serves others that are written into the queries' tensors."""
    rule, kernel = BlockRule(8, 3), triton_blocks.TritonBlockIndex()
    queries, size = paged_queries([(2, 120), (2, 90)])
    cache = filled_cache(queries, size, 1, 16, dtype=torch.float32)
    plan = kernel.plan_in_place(queries, 2)
    selected = selection.empty(queries, rule, 2, longest=queries.slot_table.shape[1])
    for lens in ([120, 90], [3, 61], [25, 8]):
        queries.context_lens[:] = lens
        queries.context_lens_device.copy_(torch.tensor(lens))
        q = normal(4, 2, 16, dtype=torch.float32)
        kernel.select(q, cache, queries, rule, selected, plan)
        want = expected_rows(q, cache, queries, rule)
        assert [[slot for slot in row if slot >= 0] for row in selected.slots.tolist()] == want
        assert selection.counts(queries, rule, 2) == [len(row) for row in want]
