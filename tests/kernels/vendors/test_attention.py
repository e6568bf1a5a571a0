"""The attention adapters with emulators that refuse invalid calls as the libraries do, against float64."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from moe_engine.kernels.attention.reference import TorchMLA
from moe_engine.kernels.attention.selected import Selected
from moe_engine.kernels.attention.vendors.fa3 import FA3GQA, FA3MLA, PROMPT_TOKENS
from moe_engine.kernels.attention.vendors.flashinfer import SPARE
from moe_engine.kernels.attention.vendors.flashinfer_gqa import FlashInferGQA
from moe_engine.kernels.attention.vendors.flashinfer_mla import FlashInferMLA
from moe_engine.kernels.attention.vendors.flashmla import FlashMLA
from moe_engine.kernels.attention.vendors.trtllm_mla import TrtllmMLA
from moe_engine.kernels.device import IndexWidths
from moe_engine.kernels.kv_format.latent_records import FP8_GROUPS, FP8_TOKEN, pack, record_bytes
from moe_engine.kernels.queries import AttentionBatch
from tests.kernels.cpu.formulas import (
    NAN,
    absorbed_attention,
    close,
    close_each,
    close_rows,
    expanded_attention,
    filled_cache,
    grouped_attention,
    normal,
    paged_queries,
    random_trees,
    selected_attention,
    slots_of,
)
from tests.kernels.vendors import fa3_emulator, flash_mla_emulator, flashinfer_emulator

BF16 = torch.bfloat16
LENS = [
    [(1, 5), (1, 64), (1, 1), (1, 129)],
    [(4, 70), (0, 3), (1, 1), (3, 3), (2, 65)],
    [(5, 129)],
    [(0, 9)],
]
LATENT, WIDTH = 512, 576


def flash_mla(arch: int = 9, plans_itself: bool = True, wheel: bool = False) -> FlashMLA:
    return FlashMLA(flash_mla_emulator.module(arch, plans_itself, wheel), expanded=TorchMLA())


MLA = {
    "flashinfer": (lambda: FlashInferMLA(flashinfer_emulator.module()), (1, 16, 64)),
    "fa3": (lambda: FA3MLA(fa3_emulator.module()), (1, 16, 64)),
    "trtllm_mla": (lambda: TrtllmMLA(flashinfer_emulator.module(10), 10), (32, 64)),
    "flashmla": (flash_mla, (64, 128)),
    "flashmla of the wheel": (lambda: flash_mla(wheel=True), (64,)),
    "flashmla of 2025": (lambda: flash_mla(plans_itself=False), (64,)),
}
MLA_CASES = [(name, page) for name, (_, pages) in MLA.items() for page in pages]
GQA = {
    "flashinfer": lambda: FlashInferGQA(flashinfer_emulator.module()),
    "fa3": lambda: FA3GQA(fa3_emulator.module()),
}


@pytest.mark.parametrize("name,page_size", MLA_CASES)
@pytest.mark.parametrize("lens", LENS)
def test_absorbed_equals_float64(name, page_size, lens):
    backend, heads = MLA[name][0](), 3 if page_size == 16 else 2
    queries, size = paged_queries(lens, page_size)
    cache = filled_cache(queries, size, WIDTH, dtype=BF16)
    q, scale = normal(queries.num_tokens, heads, WIDTH, dtype=BF16), WIDTH**-0.5
    plan = backend.plan(AttentionBatch(queries, None))
    want = absorbed_attention(q, cache, queries, scale, LATENT)
    close(backend.absorbed(q, cache, queries, scale, plan), want)
    close(backend.absorbed(q, cache, queries, scale, plan, LATENT), want)  # a second layer
    close(backend.absorbed(q, cache, queries, scale, None), want)  # without a plan


@pytest.mark.parametrize("name,page_size", MLA_CASES)
@pytest.mark.parametrize("lens", [[(5, 90), (1, 1), (0, 4), (7, 7), (2, 66)], [(9, 9)]])
def test_absorbed_trees_equal_float64(name, page_size, lens):
    backend = MLA[name][0]()
    plain, size = paged_queries(lens, page_size)
    queries, trees = random_trees(plain)
    cache = filled_cache(queries, size, WIDTH, dtype=BF16)
    q, scale = normal(queries.num_tokens, 3, WIDTH, dtype=BF16), WIDTH**-0.5
    got = backend.absorbed(q, cache, queries, scale, backend.plan(AttentionBatch(queries, None)))
    close(got, absorbed_attention(q, cache, queries, scale, LATENT, trees), scale=2)  # both parts are rounded
    with pytest.raises(ValueError, match="causal"):
        backend.gather_latent(cache, queries, None)
    with pytest.raises(ValueError, match="causal"):
        backend.expanded(q, q, cache[:, LATENT:], queries, scale, None)


@pytest.mark.parametrize("name", MLA)
@pytest.mark.parametrize("lens", [[(5, 20), (3, 3), (0, 6), (70, 70)], [(1, 40)], [(0, 4)]])
def test_expanded_equals_float64(name, lens):
    backend, page_size = MLA[name][0](), 64
    queries, size = paged_queries(lens, page_size)
    cache = filled_cache(queries, size, WIDTH, dtype=BF16)
    heads, nope, rotary, value = 3, 128, 64, 128
    plan = backend.plan(AttentionBatch(None, queries))
    context = backend.gather_latent(cache, queries, plan)
    rows = torch.cat([slots_of(queries, i) for i in range(queries.num_requests)])
    assert torch.equal(context, cache[rows])
    q = normal(queries.num_tokens, heads, nope + rotary, dtype=BF16)
    kv = normal(len(rows), heads, nope + value, dtype=BF16)
    k_rope, scale = context[:, LATENT:], (nope + rotary) ** -0.5
    got = backend.expanded(q, kv, k_rope, queries, scale, plan)
    assert got.shape == (queries.num_tokens, heads, value)
    close_each(got, expanded_attention(q, kv, k_rope, queries, scale), queries)


@pytest.mark.parametrize(
    "arch,page_size,at_once,wheel",
    [(9, 1, 1 << 24, False), (9, 64, 256, True), (10, 16, 1 << 24, False), (10, 64, 256, True)],
)
@pytest.mark.parametrize("tree", [False, True])
def test_flashmla_over_fp8_records(arch, page_size, tree, at_once, wheel, monkeypatch):
    monkeypatch.setattr("moe_engine.kernels.attention.vendors.flashmla_records.MAX_LISTED", at_once)
    backend = flash_mla(arch, wheel=wheel)
    queries, size = paged_queries([(1, 70), (0, 3), (1, 1), (3, 3)], page_size)
    queries, trees = random_trees(queries) if tree else (queries, None)
    records = torch.full((size, 656), 255, dtype=torch.uint8)  # NaN for every read
    for i in range(queries.num_requests):
        slots = slots_of(queries, i)
        records[slots] = pack(normal(len(slots), WIDTH, dtype=BF16), LATENT, FP8_GROUPS)
    q, scale = normal(queries.num_tokens, 16, WIDTH, dtype=BF16), WIDTH**-0.5
    got = backend.absorbed(q, records, queries, scale, backend.plan(AttentionBatch(queries, None)))
    exact = flash_mla_emulator.unpack(records)
    close(got, absorbed_attention(q, exact, queries, scale, LATENT, trees))
    if not tree:
        rows = torch.cat([slots_of(queries, i) for i in range(queries.num_requests)])
        close(backend.gather_latent(records, queries, None), exact[rows])


def draw_selection(selected: Selected, size: int, width: int) -> torch.Tensor:
    """Draws the lists; returns a cache [size, width] whose other rows are NaN."""
    cache = torch.full((size, width), NAN, dtype=BF16)
    selected.slots.fill_(-1)
    for row, count in zip(selected.slots, selected.counts):
        row[:count] = torch.randperm(size)[:count].int()
        cache[row[:count].long()] = normal(count, width, dtype=BF16)
    return cache


@pytest.mark.parametrize(("arch", "heads", "fp8"), [(9, 16, False), (9, 128, True), (10, 70, False), (10, 64, True)])
@pytest.mark.parametrize("most", [5, 128])
def test_flashmla_over_selected_tokens(arch: int, heads: int, fp8: bool, most: int) -> None:
    """Lists of several lengths, set after the plan and changed between layers; all other rows are NaN."""
    sparse = FlashMLA(flash_mla_emulator.module(arch), TorchMLA(), arch, IndexWidths(64, 128, most)).capabilities.sparse
    counts, size, scale = [min(count, most) for count in (1, 3, 90, 128)], 300, WIDTH**-0.5
    selected = Selected(torch.empty(4, most, dtype=torch.int32), counts, torch.tensor(counts, dtype=torch.int32))
    plan = sparse.plan(selected)
    for _ in range(2):
        cache = draw_selection(selected, size, WIDTH)
        stored = pack(cache, LATENT, FP8_GROUPS) if fp8 else cache
        exact = flash_mla_emulator.unpack(stored) if fp8 else cache
        q = normal(4, heads, WIDTH, dtype=BF16)
        got = sparse.run(q, stored, selected, scale, plan, LATENT)
        close_rows(got, selected_attention(q, exact, selected.slots, counts, scale, LATENT), 3)


@pytest.mark.parametrize(("arch", "heads", "most"), [(9, 8, 130), (9, 64, 5), (10, 128, 640), (10, 70, 64)])
def test_flashmla_with_sinks_over_whole_rows(arch: int, heads: int, most: int) -> None:
    """DeepSeek V4: rows are keys and values; lists of several lengths, one plan for two layers."""
    module = flash_mla_emulator.module(arch)
    sparse = FlashMLA(module, TorchMLA(), arch, IndexWidths(64, 128, most), sinks=True).capabilities.sparse
    counts, size, scale = [min(count, most) for count in (1, 3, 90, 640)], 700, LATENT**-0.5
    selected = Selected(torch.empty(4, most, dtype=torch.int32), counts, torch.tensor(counts, dtype=torch.int32))
    plan = sparse.plan_in_place(selected)
    for _ in range(2):
        cache = draw_selection(selected, size, LATENT)
        q, sinks = normal(4, heads, LATENT, dtype=BF16), torch.randn(heads)
        got = sparse.run(q, cache, selected, scale, plan, LATENT, sinks)
        for token, (own, count) in enumerate(zip(selected.slots, counts)):
            keys = cache[own[:count].long()].double()
            scores = torch.cat((q[token].double() @ keys.T * scale, sinks.double().unsqueeze(1)), 1)
            close_rows(got[token : token + 1], (scores.softmax(1)[:, :-1] @ keys).unsqueeze(0), 3)


def test_flashmla_without_sinks_is_refused() -> None:
    module = flash_mla_emulator.module()
    module.flash_mla_sparse_fwd = lambda q, kv, indices, sm_scale, d_v=512: None
    with pytest.raises(ImportError, match="no attention sinks: too old"):
        FlashMLA(module, TorchMLA(), 9, IndexWidths(64, 128, 512), sinks=True)
    with pytest.raises(ValueError, match="sinks for rows of 512 channels, not 576"):
        sparse = FlashMLA(flash_mla_emulator.module(), TorchMLA(), 9, sinks=True).capabilities.sparse
        selected = Selected(torch.zeros(1, 1, dtype=torch.int32), [1], torch.ones(1, dtype=torch.int32))
        cache = torch.zeros(1, WIDTH, dtype=BF16)
        sparse.run(cache.view(1, 1, -1), cache, selected, 1.0, sparse.plan(selected), LATENT, torch.zeros(1))


@pytest.mark.parametrize(("tokens", "flash_mla"), [(3, True), (PROMPT_TOKENS, False), (PROMPT_TOKENS, True)])
def test_fa3_over_selected_tokens(tokens: int, flash_mla: bool) -> None:
    """Lists set after the plan and changed between layers, rows outside of them NaN. Steps of many tokens run on
    FlashMLA where it is installed; the kernel that must not run is None."""
    library, prompts = fa3_emulator.module(), flash_mla_emulator.module(9) if flash_mla else None
    unused = library, "flash_attn_with_kvcache"
    if flash_mla and tokens < PROMPT_TOKENS:
        unused = prompts, "flash_mla_sparse_fwd"
    if flash_mla:
        setattr(*unused, None)
    most, heads, size, scale = 24, 16, 300, WIDTH**-0.5
    sparse = FA3MLA(library, IndexWidths(64, 128, most), prompts).capabilities.sparse
    counts = [min(1 + 5 * i, most) for i in range(tokens)]
    selected = Selected(torch.empty(tokens, most, dtype=torch.int32), counts, torch.tensor(counts, dtype=torch.int32))
    plan = sparse.plan(selected)
    for _ in range(2):
        cache = draw_selection(selected, size, WIDTH)
        q = normal(tokens, heads, WIDTH, dtype=BF16)
        got = sparse.run(q, cache, selected, scale, plan, LATENT)
        close_rows(got, selected_attention(q, cache, selected.slots, counts, scale, LATENT), 3)


def test_flashmla_without_its_sparse_kernel_is_refused() -> None:
    module = flash_mla_emulator.module()
    del module.flash_mla_sparse_fwd
    with pytest.raises(ImportError, match="flash_mla_sparse_fwd"):
        FlashMLA(module, TorchMLA(), 9, IndexWidths(64, 128, 2048))


@pytest.mark.parametrize("name", GQA)
@pytest.mark.parametrize("page_size", [1, 16])
@pytest.mark.parametrize("lens", LENS)
@pytest.mark.parametrize("tree", [False, True])
def test_gqa_equals_float64(name, page_size, lens, tree):
    backend = GQA[name]()
    queries, size = paged_queries(lens, page_size)
    queries, trees = random_trees(queries) if tree and queries.num_tokens else (queries, None)
    heads, groups, width = 6, 2, 64
    k, v = (filled_cache(queries, size, groups, width, dtype=BF16) for _ in range(2))
    q, scale = normal(queries.num_tokens, heads, width, dtype=BF16), width**-0.5
    plan = backend.plan(AttentionBatch(queries, None))
    got = backend.paged(q, k, v, queries, scale, plan)
    close_each(got, grouped_attention(q, k, v, queries, scale, trees), queries, scale=2)


def test_both_groups_of_a_step_have_plans_of_their_own():
    backend = FlashInferGQA(flashinfer_emulator.module())
    decode, size = paged_queries([(1, 9), (1, 30)], 4)
    prefill, more = paged_queries([(7, 12)], 4)
    caches = ((decode, size), (prefill, more))
    k, v = (torch.cat([filled_cache(*owner, 2, 64, dtype=BF16) for owner in caches]) for _ in "kv")
    prefill = replace(prefill, slot_table=prefill.slot_table + size)
    q, scale = normal(9, 4, 64, dtype=BF16), 0.125
    plan = backend.plan(AttentionBatch(decode, prefill))
    got = [backend.paged(q[:2], k, v, decode, scale, plan), backend.paged(q[2:], k, v, prefill, scale, plan)]
    for queries, part, out in ((decode, q[:2], got[0]), (prefill, q[2:], got[1])):
        alone = FlashInferGQA(flashinfer_emulator.module())
        close(out, alone.paged(part, k, v, queries, scale, None).double())


def test_later_steps_plan_ahead_and_wrappers_are_used_again():
    module = flashinfer_emulator.module()
    wrapper = module.mla.BatchMLAPagedAttentionWrapper
    backend, wrapper.made = FlashInferMLA(module), 0
    for step in range(8):
        queries, size = paged_queries([(1, 5 + step), (1, 40)], 8)
        cache = filled_cache(queries, size, WIDTH, dtype=BF16)
        q = normal(2, 16, WIDTH, dtype=BF16)
        plan = backend.plan(AttentionBatch(queries, None))
        before = wrapper.made
        got = backend.absorbed(q, cache, queries, 0.04, plan)
        close(got, absorbed_attention(q, cache, queries, 0.04, LATENT))
        assert step == 0 or wrapper.made == before, "planned at the layer"
    assert wrapper.made <= SPARE + 3


@pytest.mark.parametrize("name", MLA)
def test_sizes_without_kernels_are_refused(name):
    backend = MLA[name][0]()
    queries, size = paged_queries([(1, 5)], 64)
    with pytest.raises(ValueError, match=r"not \d+|a latent of"):
        backend.absorbed(normal(1, 4, 96, dtype=BF16), torch.zeros(size, 96, dtype=BF16), queries, 1.0, None)


def test_flashmla_refuses_records_that_it_does_not_read():
    queries, size = paged_queries([(1, 5)], 64)
    q = normal(1, 4, WIDTH, dtype=BF16)
    other = torch.zeros(size, record_bytes(FP8_TOKEN, LATENT, 64), dtype=torch.uint8)
    own = torch.zeros(size, record_bytes(FP8_GROUPS, LATENT, 64), dtype=torch.uint8)
    for backend, cache in ((flash_mla(), other), (flash_mla(plans_itself=False), own)):
        with pytest.raises(ValueError, match="does not support this FP8 record format"):
            backend.absorbed(q, cache, queries, 1.0, None)


def test_flashmla_refuses_pages_that_are_not_multiples_of_64():
    queries, size = paged_queries([(1, 5)], 16)
    with pytest.raises(ValueError, match="pages of 16"):
        flash_mla().absorbed(normal(1, 4, WIDTH, dtype=BF16), torch.zeros(size, WIDTH, dtype=BF16), queries, 1.0, None)


def test_slots_nobody_owns_are_not_read():
    """The caches above have NaN in these slots; this test shows their effect."""
    queries, size = paged_queries([(1, 5)], 16)
    cache = filled_cache(queries, size, WIDTH, dtype=BF16)
    cache[slots_of(queries, 0)[2]] = NAN
    backend = MLA["fa3"][0]()
    assert backend.absorbed(normal(1, 4, WIDTH, dtype=BF16), cache, queries, 1.0, None).isnan().all()
