"""Attention of emulated vendor libraries in CUDA graphs: plans renewed in place, replays against float64."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from moe_engine.kernels.attention.reference import TorchMLA
from moe_engine.kernels.attention.selected import Selected
from moe_engine.kernels.attention.vendors.fa3 import FA3GQA, FA3MLA
from moe_engine.kernels.attention.vendors.flashinfer_gqa import FlashInferGQA
from moe_engine.kernels.attention.vendors.flashinfer_mla import FlashInferMLA
from moe_engine.kernels.attention.vendors.flashmla import FlashMLA
from moe_engine.kernels.attention.vendors.trtllm_mla import TrtllmMLA
from moe_engine.kernels.device import IndexWidths
from moe_engine.kernels.kv_format.formats import E4M3_TENSOR
from moe_engine.kernels.kv_format.latent_records import FP8_GROUPS, as_queries, pack
from moe_engine.kernels.queries import AttentionBatch
from moe_engine.worker.device_stream import CudaGraphs
from tests.kernels.cpu.formulas import (
    absorbed_attention,
    attend,
    close,
    close_rows,
    drawn_scale,
    normal,
    paged_queries,
    selected_attention,
)
from tests.kernels.vendors import fa3_emulator, flash_mla_emulator, flashinfer_emulator
from tests.kernels.vendors.contract import ContractBroken
from tests.kernels.vendors.static_batch import SIZE, Static, planned, replays
from tests.kernels.vendors.test_attention import draw_selection
from tests.kernels.vendors.test_on_gpu import on_gpu
from tests.simulated_cuda import libraries

BF16 = torch.bfloat16
LATENT, WIDTH = 512, 576

libraries.install()


def flash_mla(plans_itself: bool) -> FlashMLA:
    return FlashMLA(flash_mla_emulator.module(9, plans_itself), expanded=TorchMLA())


MLA = {
    "flashinfer": (lambda: FlashInferMLA(flashinfer_emulator.module(9), 9), 1),
    "flashinfer on Blackwell": (lambda: FlashInferMLA(flashinfer_emulator.module(10), 10), 16),
    "trtllm_mla": (lambda: TrtllmMLA(flashinfer_emulator.module(10), 10), 32),
    "fa3": (lambda: FA3MLA(fa3_emulator.module()), 16),
    "flashmla": (lambda: flash_mla(True), 128),
    "flashmla of 2025": (lambda: flash_mla(False), 64),
    "trtllm_mla, e4m3": (lambda: TrtllmMLA(flashinfer_emulator.module(10), 10), 32),
    "flashmla, e4m3": (
        lambda: FlashMLA(flash_mla_emulator.module(9, wheel=True), TorchMLA(), 9, kv_dtype=E4M3_TENSOR), 64,
    ),
    "flashinfer, e4m3": (lambda: FlashInferMLA(flashinfer_emulator.module(9), 9, kv_dtype=E4M3_TENSOR), 16),
}  # fmt: skip
GQA = {
    "flashinfer": (lambda: FlashInferGQA(flashinfer_emulator.module()), 4),
    "fa3": (lambda: FA3GQA(fa3_emulator.module()), 1),
}


@pytest.fixture
def graphs() -> CudaGraphs:
    return CudaGraphs(torch.device("cuda", 0))


def drawn(*shape: int) -> Tensor:
    return normal(*shape, dtype=BF16).cuda()


def check(out: Tensor, q: Tensor, keys: Tensor, static: Static, scale: float) -> None:
    """Absorbed attention of every request. keys [slots, `WIDTH`], on the CPU."""
    out, q = out.cpu(), q.cpu()
    for i in range(static.size):
        tokens = slice(i * static.count, (i + 1) * static.count)
        k = keys[static.slots(i)].double()[:, None].expand(-1, q.shape[1], -1)
        close(out[tokens], attend(q[tokens], k, k[..., :LATENT], scale))


@pytest.mark.parametrize("name", MLA)
@pytest.mark.parametrize("count", [1, 3])
def test_absorbed_replayed_equals_float64(graphs: CudaGraphs, name: str, count: int) -> None:
    backend, page_size, heads, scale = MLA[name][0](), MLA[name][1], 3, WIDTH**-0.5
    static = Static(count, page_size)
    cache, q = drawn(static.num_slots, WIDTH), drawn(SIZE * count, heads, WIDTH)
    cache = as_queries(cache) if "e4m3" in name else cache
    rounds = "e4m3" in name and backend.capabilities.fp8_queries
    out = q.new_zeros(SIZE * count, heads, LATENT)

    last = scale * drawn_scale() / 4 if "e4m3" in name else scale  # the second layer has another `k_scale`

    def layers(plan: Any) -> None:
        for factor, own in ((1.0, scale), (0.5, last)):  # the layers share a plan; `out` keeps the second one's result
            out.copy_(backend.absorbed(q * factor, cache, static.queries, own, plan, LATENT))

    for _ in replays(backend, graphs, static, q, layers, (SIZE, 1, 3, 2)):
        check(out, as_queries(q * 0.5) if rounds else q * 0.5, cache.cpu(), static, last)


@pytest.mark.parametrize("name", MLA)
def test_requests_of_different_lengths(name: str) -> None:
    """Eager steps: queries that are copied into a rectangle have the cache's number format."""
    backend, page_size, scale = MLA[name][0](), MLA[name][1], WIDTH**-0.5
    queries, size = paged_queries([(4, 70), (1, 9), (3, 5)], page_size)
    cache, q = normal(size, WIDTH, dtype=BF16), normal(queries.num_tokens, 3, WIDTH, dtype=BF16)
    cache = as_queries(cache) if "e4m3" in name else cache
    moved = on_gpu(queries)
    plan = backend.plan(AttentionBatch(moved, None))
    got = backend.absorbed(q.cuda(), cache.cuda(), moved, scale, plan, LATENT).cpu()
    rounded = as_queries(q).to(BF16) if "e4m3" in name and backend.capabilities.fp8_queries else q
    close(got, absorbed_attention(rounded, cache.to(BF16), queries, scale, LATENT), scale=3)


CHUNKED = ("flashinfer", "trtllm_mla", "fa3")
"""Libraries with kernels of their own for the expanded form."""


@pytest.mark.parametrize("name", CHUNKED)
def test_contexts_in_chunks(name: str) -> None:
    """A context whose keys and values are expanded part by part, the last one causal."""
    backend, page_size, heads, lens = MLA[name][0](), MLA[name][1], 2, (16, 17, 7)
    queries, size = paged_queries([(7, sum(lens))], page_size)
    cache, moved = drawn(size, WIDTH), on_gpu(queries)
    q, kv = drawn(7, heads, 192), drawn(sum(lens), heads, 256)
    chunks = backend.capabilities.chunks
    assert chunks is not None
    found, ropes, first = [], [], 0
    for length in lens:
        plan = chunks.plan(moved, [first], [length])
        latent = backend.gather_latent(cache, moved, plan, q.new_empty(length, WIDTH), LATENT)
        ropes.append(latent[:, LATENT:])
        found.append(chunks.expanded(q, kv[first : first + length], ropes[-1], 0.07, plan))
        first += length
    for part in found[1:]:
        chunks.merge(*found[0], *part)
    keys = torch.cat((kv[..., :128], torch.cat(ropes)[:, None].expand(-1, heads, -1)), -1).cpu()
    close(found[0][0].cpu(), attend(q.cpu(), keys, kv[..., 128:].cpu(), 0.07), scale=3)


def test_selections_replayed_equal_float64(graphs: CudaGraphs) -> None:
    """FlashAttention 3 over selected tokens: each replay reads the lists and lengths written before it."""
    most, heads, size, scale = 12, 3, 40, WIDTH**-0.5
    cache, q = drawn(size, WIDTH), drawn(SIZE, heads, WIDTH)
    sparse = FA3MLA(fa3_emulator.module(), IndexWidths(64, 128, most)).capabilities.sparse
    assert sparse is not None and sparse.plan_in_place is not None
    selected = Selected(
        torch.zeros(SIZE, most, dtype=torch.int32, device="cuda"),
        [1] * SIZE,
        torch.ones(SIZE, dtype=torch.int32).cuda(),
    )
    out, plan = q.new_zeros(SIZE, heads, LATENT), sparse.plan_in_place(selected)
    graph = graphs.capture(lambda: out.copy_(sparse.run(q, cache, selected, scale, plan, LATENT)))
    for _ in range(3):
        counts = torch.randint(1, most + 1, (SIZE,)).tolist()
        slots = torch.full((SIZE, most), -1, dtype=torch.int32)
        for row, count in zip(slots, counts):
            row[:count] = torch.randperm(size)[:count].int()
        selected.counts[:] = counts
        selected.counts_device.copy_(torch.tensor(counts, dtype=torch.int32))
        selected.slots.copy_(slots)
        plan.renew()
        graph.replay()
        close_rows(out.cpu(), selected_attention(q.cpu(), cache.cpu(), slots, counts, scale, LATENT), 3)


@pytest.mark.parametrize("form", ["rows", "records", "sinks"])
def test_selections_of_flashmla(form: str) -> None:
    most, heads, counts, size, scale = 24, 16, [1, 3, 20], 60, WIDTH**-0.5
    width, module = LATENT if form == "sinks" else WIDTH, flash_mla_emulator.module(9)
    backend = FlashMLA(module, TorchMLA(), 9, IndexWidths(64, 128, most), sinks=form == "sinks")
    sparse = backend.capabilities.sparse
    assert sparse is not None
    selected = Selected(torch.empty(3, most, dtype=torch.int32), counts, torch.tensor(counts, dtype=torch.int32))
    cache, q, sinks = draw_selection(selected, size, width), normal(3, heads, width, dtype=BF16), torch.randn(heads)
    stored = pack(cache, LATENT, FP8_GROUPS) if form == "records" else cache
    moved = Selected(selected.slots.cuda(), counts, selected.counts_device.cuda())
    given = sinks.cuda() if form == "sinks" else None
    got = sparse.run(q.cuda(), stored.cuda(), moved, scale, sparse.plan(moved), LATENT, given).cpu()
    if form != "sinks":
        exact = flash_mla_emulator.unpack(stored) if form == "records" else cache
        close_rows(got, selected_attention(q, exact, selected.slots, counts, scale, LATENT), 3)
        return
    for token, (own, count) in enumerate(zip(selected.slots, counts)):
        keys = cache[own[:count].long()].double()
        scores = torch.cat((q[token].double() @ keys.T * scale, sinks.double().unsqueeze(1)), 1)
        close_rows(got[token : token + 1], (scores.softmax(1)[:, :-1] @ keys).unsqueeze(0), 3)


@pytest.mark.parametrize("name", GQA)
@pytest.mark.parametrize("count", [1, 3])
def test_gqa_replayed_equals_float64(graphs: CudaGraphs, name: str, count: int) -> None:
    backend, page_size, heads, groups, width = GQA[name][0](), GQA[name][1], 6, 2, 64
    static = Static(count, page_size)
    keys, values = (drawn(static.num_slots, groups, width) for _ in "kv")
    q, scale = drawn(SIZE * count, heads, width), width**-0.5
    out = torch.zeros_like(q)

    def layer(plan: Any) -> None:
        out.copy_(backend.paged(q, keys, values, static.queries, scale, plan))

    for _ in replays(backend, graphs, static, q, layer, (SIZE, 1, 3)):
        for i in range(SIZE):
            tokens, slots = slice(i * count, (i + 1) * count), static.slots(i)
            k, v = (x.cpu()[slots].repeat_interleave(heads // groups, 1) for x in (keys, values))
            close(out[tokens].cpu(), attend(q[tokens].cpu(), k, v, scale), scale=2)


@pytest.mark.parametrize("name", MLA)
def test_smaller_graphs_share_the_buffers_of_the_largest(graphs: CudaGraphs, name: str) -> None:
    backend, page_size, scale = MLA[name][0](), MLA[name][1], 0.04
    made = []
    for size in (4, 2):
        static = Static(1, page_size, size)
        cache, q = drawn(static.num_slots, WIDTH), drawn(size, 2, WIDTH)
        out = q.new_zeros(size, 2, LATENT)

        def layer(plan: Any, static=static, cache=cache, q=q, out=out) -> None:
            out.copy_(backend.absorbed(q, cache, static.queries, scale, plan))

        layer(backend.plan(static.batch))
        plan = planned(backend, static)
        made.append((static, cache, q, out, plan, graphs.capture(lambda: layer(plan))))  # noqa: B023
    for turn in (0, 1, 0, 1, 1):
        static, cache, q, out, plan, graph = made[turn]
        static.step(static.size)
        plan.renew()
        graph.replay()
        check(out, q, cache.cpu(), static, scale)


@pytest.mark.parametrize("name", MLA)
def test_a_plan_that_is_not_renewed_is_noticed(graphs: CudaGraphs, name: str) -> None:
    """A negative control of the tests above: replays with old plans give other results."""
    backend, page_size = MLA[name][0](), MLA[name][1]
    static = Static(1, page_size)
    cache, q = drawn(static.num_slots, WIDTH), drawn(SIZE, 2, WIDTH)
    out = q.new_zeros(SIZE, 2, LATENT)

    def layer(plan: Any) -> None:
        out.copy_(backend.absorbed(q, cache, static.queries, 0.04, plan))

    layer(backend.plan(static.batch))
    plan = planned(backend, static)
    graph = graphs.capture(lambda: layer(plan))
    static.step(SIZE)
    static.rows.copy_(torch.arange(1, SIZE + 1, dtype=torch.int32))
    graph.replay()
    keys = cache.cpu()[static.slots(3)].double()[:, None].expand(-1, 2, -1)
    want = attend(q[3:].cpu(), keys, keys[..., :LATENT], 0.04)
    assert (out[3:].cpu().double() - want).abs().max() > 0.05 * want.abs().max()


def test_eager_plans_cannot_be_captured(graphs: CudaGraphs) -> None:
    """The emulators refuse what a GPU would compute incorrectly without an error."""
    for backend, page_size in ((MLA["flashinfer"][0](), 1), (flash_mla(True), 64)):
        static = Static(1, page_size)
        cache, q = drawn(static.num_slots, WIDTH), drawn(SIZE, 2, WIDTH)
        plan = backend.plan(static.batch)

        def layer(backend=backend, q=q, cache=cache, static=static, plan=plan) -> Tensor:
            return backend.absorbed(q, cache, static.queries, 0.04, plan)

        layer()
        with pytest.raises(ContractBroken):
            graph = graphs.capture(layer)
            static.step(SIZE)
            graph.replay()


def test_layers_that_differ_are_refused_during_capture() -> None:
    backend, static = FlashInferMLA(flashinfer_emulator.module(), 9), Static(1, 1)
    cache, q = drawn(static.num_slots, WIDTH), drawn(SIZE, 2, WIDTH)
    backend.absorbed(q, cache, static.queries, 0.04, backend.plan(static.batch))
    plan = planned(backend, static)
    with pytest.raises(RuntimeError, match="layers differ"):
        backend.absorbed(q, cache, static.queries, 0.05, plan)


def test_batches_without_plans_in_place() -> None:
    """Prompts, and decodes before the first run of a layer, whose sizes are unknown."""
    static = Static(1, 64)
    prompts = AttentionBatch(None, static.queries)
    for make, _ in (*MLA.values(), *GQA.values()):
        backend = make()
        assert backend.capabilities.plan_in_place(prompts) is None
        if not isinstance(backend, (FA3MLA, FA3GQA, TrtllmMLA)):
            assert backend.capabilities.plan_in_place(static.batch) is None


def over_records(arch: int) -> FlashMLA:
    return FlashMLA(flash_mla_emulator.module(arch), expanded=TorchMLA(), major=arch)


@pytest.mark.parametrize("count", [1, 3])
def test_flashmla_over_fp8_records_replayed_on_blackwell(graphs: CudaGraphs, count: int) -> None:
    """Slot lists of the maximum width: entries beyond a token's length are remains of other steps."""
    backend, heads, scale = over_records(10), 3, WIDTH**-0.5
    made = []
    for size in (SIZE, 2):  # the graphs share buffers
        static = Static(count, 16, size)
        records = pack(normal(static.num_slots, WIDTH, dtype=BF16), LATENT, FP8_GROUPS).cuda()
        q = drawn(size * count, heads, WIDTH)
        out = q.new_zeros(size * count, heads, LATENT)

        def layers(plan: Any, static=static, records=records, q=q, out=out) -> None:
            for factor in (1.0, 0.5):  # two layers share lists and schedule
                out.copy_(backend.absorbed(q * factor, records, static.queries, scale, plan, LATENT))

        layers(backend.plan(static.batch))
        layers(planned(backend, static))
        plan = planned(backend, static)
        made.append((static, records, q, out, plan, graphs.capture(lambda: layers(plan))))  # noqa: B023
    for turn, live in ((0, SIZE), (1, 1), (0, 2), (1, 2), (0, 3)):
        static, records, q, out, plan, graph = made[turn]
        static.step(live)
        q.copy_(normal(*q.shape, dtype=BF16))
        plan.renew()
        graph.replay()
        check(out, q * 0.5, flash_mla_emulator.unpack(records.cpu()), static, scale)


def test_flashmla_over_fp8_records_stays_eager_on_hopper() -> None:
    """FlashMLA's kernel takes no lengths on Hopper: a graph would read lists of the longest possible context."""
    backend, static = over_records(9), Static(1, 64)
    records = torch.zeros(static.num_slots, 656, dtype=torch.uint8).cuda()
    backend.absorbed(drawn(SIZE, 2, WIDTH), records, static.queries, 0.04, None)
    assert backend.capabilities.plan_in_place(static.batch) is None
