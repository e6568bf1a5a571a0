"""The indexer in Triton, under the interpreter: against the formula in float64, ties, FP8 keys, parts of the scores;
with selections that do not depend on the batch; keys and queries in one launch."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
import torch

from moe_engine.kernels.attention.selected import Selected
from moe_engine.kernels.indexer import index_keys
from moe_engine.kernels.indexer.key_norm import KeyNorm
from moe_engine.kernels.indexer.reference import TorchIndexer, best
from moe_engine.kernels.ops.protocol import RotaryTable
from moe_engine.kernels.ops.reference import TorchOps
from tests.kernels.cpu.formulas import close, filled_cache, normal, paged_queries, random_trees, slots_of
from tests.kernels.cpu.index_formulas import TOP_K, causal, check_blocks, check_choices, scores_of, select
from tests.kernels.row_checks import check_choices_alone, check_ties

triton_indexer = pytest.importorskip("moe_engine.kernels.indexer.triton_indexer", reason="needs triton")
from moe_engine.kernels.indexer import triton_keys, triton_select  # noqa: E402
from moe_engine.kernels.ops import triton_router  # noqa: E402

LENS = [(1, 1), (1, 70), (3, 3), (1, 300), (5, 131), (2, 9)]


@pytest.mark.parametrize(
    ("heads", "width", "page_size", "dtype", "budget"),
    [(64, 128, 64, torch.bfloat16, 1 << 28), (5, 16, 1, torch.float32, 2600), (32, 32, 8, torch.float32, 1 << 28)],
)
def test_selection(heads: int, width: int, page_size: int, dtype: torch.dtype, budget: int) -> None:
    queries, size = paged_queries(LENS, page_size)
    cache = filled_cache(queries, size, 1, width, dtype=dtype)
    q, weights = normal(queries.num_tokens, heads, width, dtype=dtype), torch.randn(queries.num_tokens, heads)
    slots = select(triton_indexer.TritonIndexer(budget), q, weights, cache, queries)
    start = 0
    for request, (count, context) in enumerate(LENS):
        part, own = slice(start, start + count), slots_of(queries, request)
        wanted = scores_of(q[part], weights[part], cache[own, 0])
        check_choices(slots[part], wanted, own, causal(count, context), TOP_K)
        start += count


@pytest.mark.parametrize("fp8", [False, True], ids=["plain", "fp8"])
def test_weights_in_parts_are_summed(fp8: bool) -> None:
    queries, size = paged_queries(LENS)
    cache = filled_cache(queries, size, 1, 16, dtype=torch.float32)
    if fp8:
        records = torch.zeros(size, 1, 20, dtype=torch.uint8)
        triton_keys.write(torch.randn(size, 16), torch.arange(size), records)
        cache = records
    q, parts = normal(queries.num_tokens, 5, 16, dtype=torch.float32), torch.randn(3, queries.num_tokens, 5)
    kernel = triton_indexer.TritonIndexer()
    found = [select(kernel, q, weights, cache, queries) for weights in (parts, (parts[0] + parts[1]) + parts[2])]
    assert torch.equal(*found)


def test_entries_are_read_in_the_table_of_their_tokens() -> None:
    """Scores and selections equal those of a table with a slot for each entry."""
    queries, size = paged_queries(LENS)
    cache = filled_cache(queries, size, 1, 16, dtype=torch.float32)
    q, weights = normal(queries.num_tokens, 5, 16, dtype=torch.float32), torch.randn(queries.num_tokens, 5)
    table, rate = torch.randint(4 * size, (*queries.slot_table.shape, 4), dtype=torch.int32), 4
    table[:, :, 0] = queries.slot_table * rate
    entries = replace(queries, slot_table=table.flatten(1), rate=rate)
    found = [select(triton_indexer.TritonIndexer(), q, weights, cache, own) for own in (queries, entries)]
    assert torch.equal(*found)
    assert torch.equal(select(TorchIndexer(), q, weights, cache, entries), found[0])


@pytest.mark.parametrize("budget", [1 << 28, 2600])
def test_a_selection_is_written_behind_other_rows(budget: int) -> None:
    """Slots plus a number, from another column of each token on; nothing for tokens without any; all else stays."""
    queries, size = paged_queries(LENS)
    cache = filled_cache(queries, size, 1, 16, dtype=torch.float32)
    tokens, kernel = queries.num_tokens, triton_indexer.TritonIndexer(budget)
    q, weights = normal(tokens, 5, 16, dtype=torch.float32), torch.randn(tokens, 5)
    found = Selected.of_width(queries, TOP_K)
    kernel.select(q, weights, cache, queries, TOP_K, found, kernel.plan(queries))
    columns = torch.randint(0, 9, (tokens,), dtype=torch.int32)
    counts = found.counts_device * torch.randint(0, 2, (tokens,), dtype=torch.int32)
    rows = torch.randint(-1, 50, (tokens, TOP_K + 11), dtype=torch.int32)
    want, added = rows.clone(), random.randrange(1, 1000)
    for token, (column, count) in enumerate(zip(columns.tolist(), counts.tolist())):
        want[token, column : column + TOP_K] = -1
        want[token, column : column + count] = found.slots[token, :count] + added
    kernel.select_into(q, weights, cache, queries, TOP_K, rows, columns, counts, added, kernel.plan(queries))
    assert torch.equal(rows, want)


def test_the_lower_position_wins_a_tie() -> None:
    check_ties(triton_indexer.TritonIndexer())


@pytest.mark.parametrize("top_k", [1, 7, 600])
def test_radix_selection_equals_a_stable_sort(top_k: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Scores of all magnitudes and signs, zeros, infinities, long ties; several blocks of scores."""
    monkeypatch.setattr(triton_select, "BLOCK", 256)
    lens = [(1, 1000), (3, 800), (1, top_k), (1, 1)]
    queries, _ = paged_queries(lens)
    scores = torch.randn(queries.num_tokens, 1000) * 10.0 ** torch.randint(-30, 30, (queries.num_tokens, 1000))
    kinds = torch.randint(0, 6, scores.shape)
    special = torch.tensor([0.0, -0.0, 1.5, -1.5, float("inf")])
    scores = torch.where(kinds < 5, special[kinds.clamp(max=4)], scores)
    scores[1] = torch.randint(-3, 3, (1000,)).float()
    plan = triton_indexer.IndexPlan.of(queries)
    selected = Selected.empty(queries, top_k)
    selected.slots.fill_(-7)
    triton_select.select(scores, queries, plan.request_of, 0, triton_select.Selection(selected.slots, top_k))
    token = 0
    for request, (count, context) in enumerate(lens):
        for visible in range(context - count + 1, context + 1):
            counts = torch.tensor([min(visible, top_k)])
            row, slots = scores[token : token + 1, :visible], slots_of(queries, request)
            assert torch.equal(selected.slots[token], best(row, counts, slots, selected.slots.shape[1])[0])
            token += 1


def test_choices_do_not_depend_on_the_batch() -> None:
    check_choices_alone(triton_indexer.TritonIndexer(), torch.bfloat16, LENS)


@pytest.mark.parametrize(("width", "dtype"), [(16, torch.float32), (128, torch.bfloat16)])
def test_fp8_keys(width: int, dtype: torch.dtype) -> None:
    """Records and quantized queries: within a rounding step of the torch row's; scores by the formula over the stored
    values."""
    lens = [(3, 50), (1, 200)]
    queries, size = paged_queries(lens, 4)
    keys, slots = normal(size, width, dtype=dtype), torch.randperm(size)
    cache, other = (torch.zeros(size, 1, width + 4, dtype=torch.uint8) for _ in range(2))
    kernel = triton_indexer.TritonIndexer()
    kernel.write(keys, slots, cache, 4)
    TorchIndexer().write(keys, slots, other, 4)
    (values, scales), (want, want_scales) = (index_keys.unpack(c[:, 0], width) for c in (cache, other))
    assert torch.equal(scales, want_scales)
    assert ((values - want).abs() <= want.abs() / 8).all() and (values != want).float().mean() < 0.01
    stored = values.double() * scales.double()[:, None]
    q, weights = normal(4, 6, width, dtype=dtype), torch.randn(4, 6)
    rounded, folded = triton_keys.quantize_queries(q, weights)
    close(folded, index_keys.quantize_queries(q, weights)[1].double())
    got, start = select(kernel, q, weights, cache, queries), 0
    for request, (count, context) in enumerate(lens):
        part, own = slice(start, start + count), slots_of(queries, request)
        wanted = scores_of(rounded[part].float(), folded[part], stored[own])
        check_choices(got[part], wanted, own, causal(count, context), TOP_K)
        start += count


PARTS = 3
"""Parts of the gates' product."""


class Products:
    """Linear layers of an indexer as results that are already there."""

    def __init__(self, tokens: int, heads: int, width: int, dtype: torch.dtype) -> None:
        self.keys = normal(tokens, 3 * width, dtype=dtype, scale=3.0)[:, width : 2 * width] + 0.5  # rows are strided
        self.q, self.gates = normal(tokens, heads, width, dtype=dtype), torch.randn(PARTS, tokens, heads)
        self.norm = KeyNorm(1 + torch.rand(width), torch.randn(width) / 4, 1e-6)


def expected(
    made: Products, table: RotaryTable, positions: torch.Tensor, slots: torch.Tensor, cache: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """The separate operations of torch's rows."""
    ops, keys, q = TorchOps(), made.keys, made.q.clone()
    keys = torch.nn.functional.layer_norm(keys.float(), keys.shape[1:], made.norm.weight, made.norm.bias, made.norm.eps)
    keys = keys.to(made.keys.dtype)
    ops.rotate_leading(keys.unsqueeze(1), positions, table)
    TorchIndexer().write(keys, slots, cache, 1)
    ops.rotate_leading(q, positions, table)
    return q, made.gates.sum(0) * 0.3


@pytest.mark.each_value
@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize(
    ("tokens", "heads", "width", "rotary", "dtype"),
    [(1, 64, 128, 64, torch.bfloat16), (19, 5, 16, 8, torch.float32), (33, 2, 32, 8, torch.bfloat16)],
)
@pytest.mark.parametrize("fp8", [True, False])
def test_one_launch_equals_the_separate_operations(
    tokens: int, heads: int, width: int, rotary: int, dtype: torch.dtype, interleaved: bool, fp8: bool
) -> None:
    """Numbers differ by a rounding step where sums are ordered differently. Without queries only keys are written."""
    made = Products(tokens, heads, width, dtype)
    table = RotaryTable(torch.randn(50, rotary), interleaved)
    positions, slots = torch.randint(50, (tokens,)), torch.randperm(tokens + 9)[:tokens]
    record = (width + 4, torch.uint8) if fp8 else (width, dtype)
    cache, other, third = (torch.zeros(tokens + 9, 1, record[0], dtype=record[1]) for _ in range(3))
    prepare = triton_indexer.TritonIndexer().prepare
    got = prepare(made.keys, made.norm, made.q, made.gates, 0.3, positions, table, slots, cache)
    assert prepare(made.keys, made.norm, None, None, 0.3, positions, table, slots, third) is None
    assert torch.equal(cache, third)
    q, weights = expected(made, table, positions, slots, other)
    assert got is not None
    step = {torch.bfloat16: 2.0**-7, torch.float32: 1e-5}[dtype]
    if fp8:
        (keys, scales), (want, want_scales) = (index_keys.unpack(c[:, 0], width) for c in (cache, other))
        near(keys * scales[:, None], want * want_scales[:, None])
        wanted, folded = index_keys.quantize_queries(q, weights)
        near(got[0].float() * got[1][..., None], wanted.float() * folded[..., None])
    else:
        largest = float(other.abs().max())
        torch.testing.assert_close(cache, other, rtol=step, atol=step * largest)
        torch.testing.assert_close(got[0], q, rtol=step, atol=step)
        torch.testing.assert_close(got[1], weights)


@pytest.mark.parametrize(("tokens", "dtype"), [(3, torch.bfloat16), (300, torch.bfloat16), (5, torch.float32)])
@pytest.mark.parametrize("stored", [torch.bfloat16, torch.float32])
def test_gates_in_parts_equal_float64(tokens: int, dtype: torch.dtype, stored: torch.dtype) -> None:
    """A weight that is exact in bf16, as checkpoints have it, and one that is not; the error is that of float32."""
    heads, hidden = 5, 1200
    x, weight = normal(tokens, hidden, dtype=dtype), normal(heads, hidden, dtype=stored).float()
    gates = triton_indexer.TritonIndexer().gates(x, triton_router.prepare_gate(weight))
    assert gates.dtype == torch.float32 and gates.shape[1:] == (tokens, heads)
    exact = x.double() @ weight.double().T
    assert float((gates.double().sum(0) - exact).abs().max()) < 2e-5 * float(exact.abs().max())


def near(got: torch.Tensor, want: torch.Tensor) -> None:
    """Quantized numbers: within a step of e4m3, nearly all equal."""
    assert ((got - want).abs() <= want.abs() / 8 + want.abs().amax(-1, keepdim=True) / 128).all()
    assert float((got != want).float().mean()) < 0.15
    assert float((got - want).norm() / want.norm()) < 0.01


def test_draft_trees_are_refused() -> None:
    queries, _ = random_trees(paged_queries([(3, 9)])[0])
    with pytest.raises(ValueError, match="draft tree"):
        triton_indexer.TritonIndexer().plan(queries)


@pytest.mark.parametrize(("size", "count", "budget"), [(8, 5, 1 << 28), (4, 100, 1 << 28), (1, 3, 2000)])
def test_blocks_of_candidates(size: int, count: int, budget: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Several programs of block maxima, and tokens in parts."""
    monkeypatch.setattr(triton_select, "BLOCK", 64)
    check_blocks(triton_indexer.TritonIndexer(budget), torch.float32, size, count)
