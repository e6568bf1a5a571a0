"""Selections of blocks in C++: against the formula and torch's row over drawn shapes, exact ties, and the same choices
in every batch."""

from __future__ import annotations

import random

import pytest
import torch
from torch import Tensor

from moe_engine.kernels.block_index.cpu import CpuBlockIndex
from moe_engine.kernels.block_index.reference import TorchBlockIndex
from moe_engine.kernels.block_index.rule import BlockRule
from moe_engine.kernels.cpu.library import Library
from tests.kernels.block_formulas import check_selection, selected_rows
from tests.kernels.cpu.conftest import threads
from tests.kernels.cpu.formulas import filled_cache, normal, only, paged_queries, random_trees

LENS = [(1, 1), (1, 70), (3, 3), (1, 600), (5, 131), (2, 9), (150, 400)]


def small_integers(*shape: int, dtype: torch.dtype) -> Tensor:
    """Their products are exact in every order of additions, and many are equal."""
    return torch.randint(-1, 2, shape).to(dtype)


@pytest.mark.parametrize(
    ("rule", "heads", "width"),
    [(BlockRule(8, 3), 2, 16), (BlockRule(5, 4, 2), 3, 12), (BlockRule(128, 2), 4, 128), (BlockRule(16, 1), 1, 32)],
)
@pytest.mark.each_value
def test_selection(any_library: Library, dtype: torch.dtype, rule: BlockRule, heads: int, width: int) -> None:
    queries, size = paged_queries(LENS, random.choice((1, 4, 64)))
    cache = filled_cache(queries, size, 1, width, dtype=dtype)
    q = normal(queries.num_tokens, heads, width + 3, dtype=dtype)[..., 1 : 1 + width]
    for kernel in (CpuBlockIndex(any_library), CpuBlockIndex(any_library, max_scores=100)):
        check_selection(kernel, LENS, queries, q, cache, rule)


@pytest.mark.parametrize("draw", range(8))
def test_exact_ties_as_in_torch(library: Library, dtype: torch.dtype, draw: int) -> None:
    """Drawn rules, widths, and requests with and without a prefix."""
    contexts = [random.randint(1, 500) for _ in range(random.randint(1, 5))]
    lens = [(random.randint(1, context), context) for context in contexts]
    top_k = random.randint(1, 6)
    rule = BlockRule(random.randint(1, 140), top_k, random.randint(1, top_k))
    heads, width = random.randint(1, 5), random.randint(1, 140)
    queries, size = paged_queries(lens, random.choice((1, 3, 16)))
    cache = filled_cache(queries, size, 1, width, dtype=dtype)
    cache = torch.where(cache.isnan(), cache, small_integers(size, 1, width, dtype=dtype))
    q = small_integers(queries.num_tokens, heads, width, dtype=dtype)
    with threads(random.choice((1, 2))):
        got = selected_rows(CpuBlockIndex(library), q, cache, queries, rule)
    assert got == selected_rows(TorchBlockIndex(), q, cache, queries, rule)


def test_a_score_does_not_depend_on_the_place_of_its_key(any_library: Library, dtype: torch.dtype) -> None:
    """All blocks have the same keys in other places, and so the same score, bit for bit: the lowest are selected."""
    rule, blocks, width = BlockRule(24, 4, 2), 40, 100
    lens = [(30, rule.size * blocks), (1, rule.size * blocks - 5)]
    queries, size = paged_queries(lens, 8)
    keys, cache = normal(rule.size, width, dtype=dtype), filled_cache(queries, size, 1, width, dtype=dtype)
    for request, (_, context) in enumerate(lens):
        order = torch.cat([torch.randperm(rule.size) for _ in range(blocks)])[:context]
        cache[queries.slot_table[queries.rows[request], :context].long(), 0] = keys[order]
    q = normal(queries.num_tokens, 3, width, dtype=dtype)
    rows = selected_rows(CpuBlockIndex(any_library), q, cache, queries, rule)
    start = 0
    for request, (count, context) in enumerate(lens):
        slots = queries.slot_table[queries.rows[request]]
        for row, visible in enumerate(range(context - count + 1, context + 1)):
            own = (visible - 1) // rule.size
            positions = [*range(2 * rule.size), *range((own - 1) * rule.size, visible)]
            for head in range(3):
                assert rows[start + row * 3 + head] == (slots[positions] * 3 + head).tolist()
        start += count * 3


def test_choices_do_not_depend_on_the_batch(any_library: Library, dtype: torch.dtype) -> None:
    rule, heads = BlockRule(8, 3), 2
    queries, size = paged_queries(LENS, 4)
    cache = filled_cache(queries, size, 1, 40, dtype=dtype)
    q = normal(queries.num_tokens, heads, 40, dtype=dtype)
    kernel = CpuBlockIndex(any_library)
    with threads(2):
        rows = selected_rows(kernel, q, cache, queries, rule)
    start = 0
    for request, (count, _) in enumerate(LENS):
        cut = random.randint(1, count)
        for part in (slice(0, count), slice(0, cut), slice(cut - 1, cut)):
            tokens = slice(start + part.start, start + part.stop)
            alone = selected_rows(kernel, q[tokens], cache, only(queries, request, part), rule)
            assert alone == rows[tokens.start * heads : tokens.stop * heads]
        start += count


def test_a_draft_tree_is_refused(library: Library) -> None:
    queries, _ = random_trees(paged_queries([(3, 20)])[0])
    with pytest.raises(ValueError, match=r"a draft tree .* has no blocks"):
        CpuBlockIndex(library).plan(queries)
