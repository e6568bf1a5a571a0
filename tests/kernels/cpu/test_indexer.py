"""The indexer's selection and attention over it: against the formula in float64, ties, draft trees, FP8 keys; with bits
and choices that do not depend on the batch."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from moe_engine.kernels.attention.cpu import CpuMLA
from moe_engine.kernels.attention.protocol import MLABackend
from moe_engine.kernels.attention.reference import TorchMLA
from moe_engine.kernels.attention.selected import Selected, num_visible
from moe_engine.kernels.cpu.library import Library
from moe_engine.kernels.indexer import index_keys
from moe_engine.kernels.indexer.cpu import CpuIndexer
from moe_engine.kernels.indexer.protocol import IndexerKernel
from moe_engine.kernels.indexer.reference import TorchIndexer
from moe_engine.kernels.queries import AttentionBatch
from tests.kernels.cpu.conftest import threads
from tests.kernels.cpu.formulas import (
    NAN,
    close,
    close_rows,
    filled_cache,
    normal,
    paged_queries,
    random_trees,
    selected_attention,
    slots_of,
)
from tests.kernels.cpu.index_formulas import TOP_K, causal, check_blocks, check_choices, scores_of, select
from tests.kernels.row_checks import check_choices_alone, check_sinks_over_whole_rows, check_ties

LENS = [(1, 1), (1, 70), (3, 3), (1, 600), (5, 131), (2, 9), (16, 2500)]


def kernels(library: Library) -> list[IndexerKernel]:
    return [TorchIndexer(), CpuIndexer(library), CpuIndexer(library, logits_bytes=9000)]


@pytest.mark.parametrize(
    ("heads", "width", "page_size", "trees"),
    [
        (64, 128, 64, False),
        (5, 16, 1, True),
        (32, 32, 8, True),
        *(
            pytest.param(*case, marks=pytest.mark.exhaustive)
            for case in ((64, 128, 64, True), (5, 16, 1, False), (32, 32, 8, False))
        ),
    ],
)
@pytest.mark.each_value
def test_selection(
    any_library: Library, dtype: torch.dtype, heads: int, width: int, page_size: int, trees: bool
) -> None:
    queries, size = paged_queries(LENS, page_size)
    masks: list[Tensor] = []
    if trees:
        queries, masks = random_trees(queries)
    cache = filled_cache(queries, size, 1, width, dtype=dtype)
    q, weights = normal(queries.num_tokens, heads, width, dtype=dtype), torch.randn(queries.num_tokens, heads)
    found = [select(kernel, q, weights, cache, queries) for kernel in kernels(any_library)]
    assert torch.equal(found[1], found[2])
    for slots in found:
        start = 0
        for request, (count, context) in enumerate(LENS):
            part, own = slice(start, start + count), slots_of(queries, request)
            visible = causal(count, context)
            if trees:
                visible[:, context - count :] = masks[request]
            check_choices(slots[part], scores_of(q[part], weights[part], cache[own, 0]), own, visible, TOP_K)
            start += count


def test_the_lower_position_wins_a_tie(library: Library) -> None:
    check_ties(CpuIndexer(library))


def test_choices_do_not_depend_on_the_batch(any_library: Library, dtype: torch.dtype) -> None:
    with threads(2):
        check_choices_alone(CpuIndexer(any_library), dtype, LENS, around=lambda: threads(1))


@pytest.mark.parametrize("width", [16, 128])
def test_fp8_keys(any_library: Library, dtype: torch.dtype, width: int) -> None:
    """Quantized queries and keys: the formula over the dequantized numbers, whose error stays that of three bits."""
    queries, size = paged_queries([(3, 50), (1, 400)], 4)
    keys = normal(size, width, dtype=dtype)
    cache = torch.zeros(size, 1, width + 4, dtype=torch.uint8)
    kernel = CpuIndexer(any_library)
    kernel.write(keys, torch.arange(size), cache, 4)
    values, scales = index_keys.unpack(cache[:, 0], width)
    stored = values.double() * scales.double()[:, None]
    exact = index_keys.hadamard(keys).double()
    assert (stored - exact).abs().max() <= exact.abs().max() / 14
    assert torch.equal(scales, torch.exp2(torch.log2(scales).round()))
    q, weights = normal(4, 6, width, dtype=dtype), torch.randn(4, 6)
    rounded, folded = index_keys.quantize_queries(q, weights)
    for slots in (select(kernel, q, weights, cache, queries), select(TorchIndexer(), q, weights, cache, queries)):
        start = 0
        for request, (count, context) in enumerate([(3, 50), (1, 400)]):
            part, own = slice(start, start + count), slots_of(queries, request)
            want = scores_of(rounded[part].float(), folded[part], stored[own])
            check_choices(slots[part], want, own, causal(count, context), TOP_K)
            start += count


def test_hadamard_keeps_products() -> None:
    x, y = torch.randn(5, 64).double(), torch.randn(7, 64).double()
    close((index_keys.hadamard(x) @ index_keys.hadamard(y).T).float(), x @ y.T, 3)
    spread = index_keys.hadamard(torch.eye(64)[:1] * 8)
    assert torch.allclose(spread.abs(), torch.ones(1, 64))


def test_act_quant_follows_the_release() -> None:
    """A scale is the power of two at or above amax / 448, with amax at least 1e-4; division, then saturation."""
    x = torch.randn(64, 128) * torch.logspace(-8, 4, 64)[:, None]
    values, scales = index_keys.quantize(x)
    want = 2.0 ** torch.ceil(torch.log2(x.double().abs().amax(1).clamp(min=1e-4) / 448))
    assert torch.equal(scales.double(), want)
    assert torch.equal(values.float(), (x / scales[:, None]).clamp(-448, 448).to(torch.float8_e4m3fn).float())
    assert not values.float().isnan().any()


@pytest.mark.parametrize("form", ["plain", "fp8"])
@pytest.mark.parametrize("heads", [4, 20])
def test_attention_reads_the_selected_rows_only(library: Library, dtype: torch.dtype, heads: int, form: str) -> None:
    """Rows that no token selected are NaN; the result is that of attention over the selected rows."""
    from moe_engine.kernels.kv_format import latent_records
    from moe_engine.kernels.kv_format.formats import FP8_TOKEN

    latent, rotary = 48, 16
    counts = [1, 7, 64, 200, 130]
    cache = torch.full((900, latent + rotary), NAN, dtype=dtype)
    slots = torch.full((len(counts), 200), -1, dtype=torch.int32)
    for row, count in zip(slots, counts):
        row[:count] = torch.randperm(900)[:count].int()
        cache[row[:count].long()] = normal(count, latent + rotary, dtype=dtype)
    if form == "fp8":
        records = latent_records.pack(cache.nan_to_num(1e30), latent, FP8_TOKEN)
        cache, stored = latent_records.unpack(records, latent, rotary), records
    else:
        stored = cache
    selected = Selected(slots, counts, torch.tensor(counts, dtype=torch.int32))
    q = normal(len(counts), heads, latent + rotary, dtype=dtype)
    backends: list[MLABackend] = [TorchMLA(), CpuMLA(library)]
    for backend in backends:
        sparse = backend.capabilities.sparse
        assert sparse is not None
        got = sparse.run(q, stored, selected, 0.2, sparse.plan(selected), latent)
        close_rows(got, selected_attention(q, cache, slots, counts, 0.2, latent), 2)


@pytest.mark.parametrize(
    ("heads", "width", "counts"),
    [(64, 512, [1, 128, 640, 3]), (4, 32, [1, 16, 20, 7]), (1, 48, [70, 1]), (70, 64, [513, 2]), (8, 20, [9])],
)
def test_sinks_over_rows_that_are_values(
    any_library: Library, dtype: torch.dtype, heads: int, width: int, counts: list[int]
) -> None:
    check_sinks_over_whole_rows(TorchMLA(), dtype, heads, width, counts)
    for count in (1, 2):  # one thread, and few tokens on several
        with threads(count):
            check_sinks_over_whole_rows(CpuMLA(any_library), dtype, heads, width, counts)


def test_a_whole_selection_has_the_bits_of_dense_attention(library: Library, dtype: torch.dtype) -> None:
    queries, size = paged_queries([(1, 30), (4, 600), (2, 90)], 8)
    cache = filled_cache(queries, size, 64, dtype=dtype)
    q = normal(7, 12, 64, dtype=dtype)
    mla = CpuMLA(library)
    dense = mla.absorbed(q, cache, queries, 0.2, mla.plan(AttentionBatch(queries, None)), 48)
    index, weights = normal(7, 4, 16, dtype=dtype), torch.randn(7, 4)
    selected = Selected.empty(queries, 1000)
    CpuIndexer(library).select(index, weights, normal(size, 1, 16, dtype=dtype), queries, 1000, selected, None)
    sparse = mla.capabilities.sparse
    assert sparse is not None
    assert torch.equal(sparse.run(q, cache, selected, 0.2, sparse.plan(selected), 48), dense)


def test_counts() -> None:
    queries, _ = paged_queries([(3, 5), (1, 4)])
    assert num_visible(queries) == [3, 4, 5, 4]
    chain = replace(queries, visible=torch.tensor([1, 2, 5, 1]))
    assert num_visible(chain) == [3, 3, 4, 4]
    selected = Selected.empty(chain, 3)
    assert selected.counts == [3, 3, 3, 3] and selected.slots.shape == (4, 3)
    assert selected.queries().context_lens == selected.counts


@pytest.mark.parametrize(("size", "count"), [(8, 5), (4, 100), (1, 3)])
def test_blocks_of_candidates(library: Library, dtype: torch.dtype, size: int, count: int) -> None:
    for kernel in (TorchIndexer(), CpuIndexer(library), CpuIndexer(library, logits_bytes=900)):
        check_blocks(kernel, dtype, size, count)
