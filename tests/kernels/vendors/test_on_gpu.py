"""The installed libraries on a GPU, against float64; other tests use emulators."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from moe_engine.kernels import tables
from moe_engine.kernels.device import Need, probe
from moe_engine.kernels.experts.batch import ExpertBatch
from moe_engine.kernels.indexer import index_keys
from moe_engine.kernels.kv_format.formats import E4M3
from moe_engine.kernels.quantization import reference as fp8
from moe_engine.kernels.queries import AttentionBatch, PagedQueries
from moe_engine.kernels.registry import Row, select
from moe_engine.worker.device_stream import make_graphs
from tests.kernels.cpu.formulas import (
    absorbed_attention,
    attend,
    close,
    close_each,
    filled_cache,
    gated,
    grouped_attention,
    normal,
    paged_queries,
    random_trees,
    slots_of,
)
from tests.kernels.cpu.index_formulas import TOP_K, scores_of
from tests.kernels.cpu.index_formulas import select as choose_slots
from tests.kernels.vendors.static_batch import SIZE, Static, replays
from tests.kernels.vendors.test_attention import LATENT, WIDTH
from tests.kernels.vendors.test_deep_gemm import near, weight

pytestmark = pytest.mark.gpu
BF16 = torch.bfloat16
VENDORS = ("deep_gemm", "flashinfer", "flashmla", "fa3", "trtllm_mla")
LENS = [(4, 70), (0, 3), (1, 1), (3, 3), (2, 65), (1, 900)]


def names(rows: list[Row]) -> list[str]:
    return [row.name for row in rows if row.name in VENDORS]


def build(family: str, rows: list[Row], name: str, kv_dtype: str = "auto") -> Any:
    """The row, or a skip with the reason why it cannot run here."""
    device, need = probe("cuda"), Need("bfloat16", kv_dtype, page_size=64)
    reason = next(row for row in rows if row.name == name).why_not(device, need)
    if reason:
        pytest.skip(reason)
    return select(family, rows, name, device, need).build()


def on_gpu(queries: PagedQueries) -> PagedQueries:
    moved = {
        name: getattr(queries, name).cuda()
        for name in ("rows", "query_starts", "context_lens_device", "slot_table", "visible")
        if getattr(queries, name) is not None
    }
    table = moved["slot_table"]
    moved["slot_table"] = table.where(table < 1 << 30, 0)  # as in the engine, every entry is a valid slot
    return replace(queries, **moved)


@pytest.mark.parametrize("name", names(tables.MLA))
@pytest.mark.parametrize("tree", [False, True])
def test_absorbed(name, tree):
    backend = build("attention", tables.MLA, name)
    queries, size = paged_queries(LENS, 64)
    queries, trees = random_trees(queries) if tree else (queries, None)
    cache = filled_cache(queries, size, WIDTH, dtype=BF16)
    cache.nan_to_num_()  # a whole tile may be loaded; the pool is never NaN
    q, scale = normal(queries.num_tokens, 16, WIDTH, dtype=BF16), WIDTH**-0.5
    moved = on_gpu(queries)
    plan = backend.plan(AttentionBatch(moved, None))
    got = backend.absorbed(q.cuda(), cache.cuda(), moved, scale, plan, LATENT)
    close(got.cpu(), absorbed_attention(q, cache, queries, scale, LATENT, trees), scale=3)


@pytest.mark.parametrize("name", [*names(tables.MLA), "triton"])
def test_expanded_whole_and_in_parts(name):
    """A context of 900 tokens in parts of 256 and 388, with causal attention among the last ones."""
    backend, nope, heads = build("attention", tables.MLA, name), 128, 16
    queries, size = paged_queries([(70, 900)], 64)
    cache, moved = normal(size, WIDTH, dtype=BF16).cuda(), on_gpu(queries)
    q, kv = normal(70, heads, 192, dtype=BF16).cuda(), normal(900, heads, 256, dtype=BF16).cuda()
    rope = backend.gather_latent(cache, moved, None)[:, LATENT:]
    keys = torch.cat((kv[..., :nope], rope[:, None].expand(-1, heads, -1)), -1).cpu()
    want = attend(q.cpu(), keys, kv[..., nope:].cpu(), 0.07)
    plan = backend.plan(AttentionBatch(None, moved))
    close(backend.expanded(q, kv, rope, moved, 0.07, plan).cpu(), want, scale=3)
    found, first = [], 0
    for length in (256, 256, 388):
        plan = backend.plan_chunk(moved, [first], [length])
        latent = backend.gather_latent(cache, moved, plan, q.new_empty(length, WIDTH), LATENT)
        found.append(backend.expanded_chunk(q, kv[first : first + length], latent[:, LATENT:], 0.07, plan))
        first += length
    for part in found[1:]:
        backend.merge_chunks(*found[0], *part)
    close(found[0][0].cpu(), want, scale=3)
    scores = torch.einsum("thd,shd->ths", q.cpu().double(), keys.double()) * 0.07
    hidden = torch.arange(900)[None] > torch.arange(830, 900)[:, None]
    sums = scores.masked_fill(hidden[:, None], -torch.inf).logsumexp(-1)
    torch.testing.assert_close(found[0][1].cpu().double(), sums, rtol=1e-3, atol=1e-2)


@pytest.mark.parametrize("name", names(tables.GQA))
@pytest.mark.parametrize("tree", [False, True])
def test_gqa(name, tree):
    backend = build("attention", tables.GQA, name)
    queries, size = paged_queries(LENS, 64)
    queries, trees = random_trees(queries) if tree else (queries, None)
    k, v = (filled_cache(queries, size, 2, 128, dtype=BF16).nan_to_num_() for _ in "kv")
    q, scale, moved = normal(queries.num_tokens, 8, 128, dtype=BF16), 128**-0.5, on_gpu(queries)
    got = backend.paged(q.cuda(), k.cuda(), v.cuda(), moved, scale, backend.plan(AttentionBatch(moved, None))).cpu()
    close_each(got, grouped_attention(q, k, v, queries, scale, trees), queries, scale=3)


@pytest.mark.parametrize("name", [*names(tables.MLA), "triton"])
@pytest.mark.parametrize("count", [1, 3])
def test_recorded_absorbed(name, count):
    """CUDA graphs over plans renewed in place: other lengths, rows and pages at every replay, with padding."""
    backend, heads, scale = build("attention", tables.MLA, name), 16, WIDTH**-0.5
    graphs = make_graphs(torch.device("cuda", 0))
    static = Static(count, 64)
    cache = normal(static.num_slots, WIDTH, dtype=BF16).cuda()
    q = normal(SIZE * count, heads, WIDTH, dtype=BF16).cuda()
    out = q.new_zeros(SIZE * count, heads, LATENT)

    def layers(plan: Any) -> None:
        for factor in (1.0, 0.5):
            out.copy_(backend.absorbed(q * factor, cache, static.queries, scale, plan, LATENT))

    for _ in replays(backend, graphs, static, q, layers, (SIZE, 1, 3, 2)):
        for i in range(SIZE):
            tokens, keys = slice(i * count, (i + 1) * count), cache.cpu()[static.slots(i)].double()[:, None]
            keys = keys.expand(-1, heads, -1)
            close(out[tokens].cpu(), attend(q[tokens].cpu() * 0.5, keys, keys[..., :LATENT], scale), scale=3)


@pytest.mark.parametrize("tokens", [1, 64, 300])
def test_deep_gemm_linear(tokens):
    kernel = build("linear", tables.LINEAR, "deep_gemm")
    w, x = weight(576, 7168), normal(tokens, 7168, dtype=BF16)
    moved = replace(w, data=w.data.cuda(), scales=w.scales.cuda())
    got: Tensor = kernel.run(x.cuda(), kernel.prepare_blocks(moved))
    near(got.cpu(), x.double() @ fp8.dequantize_weight(w).double().T)


@pytest.mark.parametrize("layout", ["grouped", "padded", "received"])
def test_deep_gemm_experts(layout):
    """`received`: padded rows of a dispatcher in FP8, with scales of rows beyond the counts that were never written."""
    kernel, counts, capacity = build("experts", tables.EXPERTS, "deep_gemm"), [3, 0, 130, 9], 192
    weights = kernel.allocate_blocks(4, 1024, 512, "cuda")
    parts = [(weight(512, 1024), weight(512, 1024), weight(1024, 512)) for _ in counts]
    for expert, part in enumerate(parts):
        kernel.load_expert_blocks(weights, expert, *part)
    x = normal(4, capacity, 1024, dtype=BF16)
    valid = torch.arange(capacity) < torch.tensor(counts)[:, None]
    rows, sizes = x.cuda(), {"counts": torch.tensor(counts, dtype=torch.int32).cuda()}
    if layout == "grouped":
        rows, sizes = x[valid].cuda(), {"offsets": torch.tensor([0, *counts]).cumsum(0).int().cuda()}
    batch = ExpertBatch(layout.replace("received", "padded"), rows, **sizes)
    if layout == "received":
        sent = fp8.quantize_rows(x.flatten(0, 1), kernel.input_format(weights).power_of_two)
        scales = sent.scales.unflatten(0, (4, capacity)).clone()
        scales[~valid] = torch.nan
        batch = replace(batch, x=sent.data.view(4, capacity, 1024).cuda(), scales=scales.cuda(), dtype=BF16)
    got = kernel.run(batch, weights).cpu()
    for expert, count in enumerate(counts):
        start = sum(counts[:expert])
        own = got[start : start + count] if layout == "grouped" else got[expert, :count]
        if count:
            near(own, gated(x[expert, :count], *map(fp8.dequantize_weight, parts[expert])))


def test_deep_gemm_indexer():
    """Prompts are scored by the library, over FP8 keys."""
    kernel, heads, width = build("indexer", tables.INDEXER, "deep_gemm", kv_dtype=E4M3), 64, 128
    queries, size = paged_queries([(70, 150)], 64)
    cache = torch.zeros(size, 1, width + 4, dtype=torch.uint8).cuda()
    kernel.write(normal(size, width, dtype=BF16).cuda(), torch.arange(size).cuda(), cache, 64)
    q, gates = normal(70, heads, width, dtype=BF16), torch.randn(70, heads)
    found = choose_slots(kernel, q.cuda(), gates.cuda(), cache, on_gpu(queries)).cpu()
    values, scales = index_keys.unpack(cache[:, 0].cpu(), width)
    rounded, folded = index_keys.quantize_queries(q, gates)
    own = slots_of(queries, 0)
    want = scores_of(rounded.float(), folded, values[own].double() * scales[own].double()[:, None])
    assert (found >= 0).sum(1).tolist() == [min(TOP_K, 81 + i) for i in range(70)]
    place = {int(slot): i for i, slot in enumerate(own)}
    for token, row in enumerate(found):  # rounding may exchange near ties
        chosen, best = [place[int(slot)] for slot in row], want[token, : 81 + token].topk(TOP_K).values
        assert want[token, chosen].min() >= best.min() - 1e-2 * best.abs().max()


@pytest.mark.parametrize("tokens", [1, 64, 301])
def test_fused_experts(tokens):
    """TensorRT-LLM's, with choices of another rank."""
    kernel, hidden, width = build("experts", tables.EXPERTS, "flashinfer_trtllm"), 1024, 512
    weights = kernel.allocate_blocks(6, hidden, width, "cuda")
    parts = [(weight(width, hidden), weight(width, hidden), weight(hidden, width)) for _ in range(6)]
    for expert, part in enumerate(parts):
        kernel.load_expert_blocks(weights, expert, *part)
    x, scores = normal(tokens, hidden, dtype=BF16), torch.rand(tokens, 4)
    ids = torch.rand(tokens, 8).argsort(1)[:, :4].int()  # 6 and 7 are not here
    want = torch.zeros(tokens, hidden, dtype=torch.float64)
    for expert, part in enumerate(parts):
        share = (scores.double() * (ids == expert)).sum(1, keepdim=True)
        want += share * gated(x, *map(fp8.dequantize_weight, part))
    near(kernel.run_routed(x.cuda(), scores.cuda(), ids.cuda(), weights).cpu(), want)
