"""The adapters over latents in unscaled e4m3 numbers (`FP8_TENSOR`), with emulators of the libraries' FP8 contracts,
against float64; and which row is refused."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from moe_engine.kernels import tables
from moe_engine.kernels.attention.reference import TorchMLA
from moe_engine.kernels.attention.vendors.fa3 import FA3MLA
from moe_engine.kernels.attention.vendors.flashinfer_mla import FlashInferMLA
from moe_engine.kernels.attention.vendors.flashmla import FlashMLA
from moe_engine.kernels.attention.vendors.trtllm_mla import TrtllmMLA
from moe_engine.kernels.device import Device, HeadWidths, Need
from moe_engine.kernels.kv_format.formats import E4M3_TENSOR
from moe_engine.kernels.kv_format.latent_records import LARGEST_E4M3
from moe_engine.kernels.queries import AttentionBatch, PagedQueries
from moe_engine.kernels.registry import select
from moe_engine.kernels.vendors import limits, probe
from tests.kernels.cpu.formulas import (
    absorbed_attention,
    close,
    drawn_scale,
    normal,
    paged_queries,
    random_trees,
    slots_of,
)
from tests.kernels.vendors import fa3_emulator, flash_mla_emulator, flashinfer_emulator
from tests.kernels.vendors.contract import ContractBroken

BF16, E4M3 = torch.bfloat16, torch.float8_e4m3fn
LATENT, WIDTH = 512, 576
LENS = [[(1, 5), (1, 64), (1, 129)], [(4, 70), (0, 3), (1, 1), (3, 3)], [(0, 9)]]
BACKENDS = {
    "trtllm_mla": lambda: TrtllmMLA(flashinfer_emulator.module(10), 10),
    "flashmla": lambda: FlashMLA(flash_mla_emulator.module(9, wheel=True), TorchMLA(), 9, kv_dtype=E4M3_TENSOR),
    "flashinfer": lambda: FlashInferMLA(flashinfer_emulator.module(9), 9, kv_dtype=E4M3_TENSOR),
}
READS_FP8_QUERIES = ("trtllm_mla", "flashmla")


def e4m3(values: Tensor) -> Tensor:
    return values.float().clamp(-LARGEST_E4M3, LARGEST_E4M3).to(E4M3)


def filled(queries: PagedQueries, size: int) -> Tensor:
    """Random rows in the slots of requests, some beyond the range; NaN in all others."""
    cache = torch.full((size, WIDTH), float("nan")).to(E4M3)
    for request in range(queries.num_requests):
        slots = slots_of(queries, request)
        cache[slots] = e4m3(normal(len(slots), WIDTH, dtype=BF16))
    return cache


@pytest.mark.parametrize("name", BACKENDS)
@pytest.mark.parametrize("lens", LENS)
def test_absorbed_and_gathered_equal_float64(name: str, lens: list[tuple[int, int]]) -> None:
    backend = BACKENDS[name]()
    queries, size = paged_queries(lens, 64)
    cache, scale = filled(queries, size), WIDTH**-0.5
    q = normal(queries.num_tokens, 3, WIDTH, dtype=BF16)
    if len(q):
        q[0, 0, :2] = torch.tensor([600.0, -1e4])  # saturate
    read = e4m3(q) if name in READS_FP8_QUERIES else q
    want = absorbed_attention(read, cache.double(), queries, scale, LATENT)
    plan = backend.plan(AttentionBatch(queries, None))
    for query in {"bf16": q, "as read": read}.values():
        got = backend.absorbed(query, cache, queries, scale, plan, LATENT)
        assert got.dtype == BF16
        close(got, want)
    rows = torch.cat([slots_of(queries, request) for request in range(queries.num_requests)])
    out = torch.empty(len(rows), WIDTH, dtype=BF16)
    assert backend.gather_latent(cache, queries, None, out, LATENT) is out
    assert torch.equal(out, cache[rows].to(BF16))


@pytest.mark.parametrize("name", BACKENDS)
def test_layers_with_scales_share_a_plan(name: str) -> None:
    """The rows of each layer are divided by its `k_scale`: scores and the result are multiplied by it."""
    backend, scale = BACKENDS[name](), WIDTH**-0.5
    queries, size = paged_queries([(1, 70), (1, 129)], 64)
    plan = backend.plan(AttentionBatch(queries, None))
    for divisor in (1.0, drawn_scale(), drawn_scale()):
        cache, q = filled(queries, size), normal(queries.num_tokens, 3, WIDTH, dtype=BF16)
        got = backend.absorbed(q, cache, queries, scale * divisor, plan, LATENT) * divisor
        read = e4m3(q) if name in READS_FP8_QUERIES else q
        close(got, absorbed_attention(read, cache.double() * divisor, queries, scale, LATENT), scale=2)


@pytest.mark.parametrize("name", ["flashmla", "flashinfer"])
def test_trees_equal_float64(name: str) -> None:
    backend = BACKENDS[name]()
    queries, trees = random_trees((made := paged_queries([(5, 90), (1, 1), (7, 7)], 64))[0])
    cache, scale = filled(queries, made[1]), WIDTH**-0.5
    q = normal(queries.num_tokens, 3, WIDTH, dtype=BF16)
    q = e4m3(q).to(BF16)
    got = backend.absorbed(q, cache, queries, scale, backend.plan(AttentionBatch(queries, None)))
    close(got, absorbed_attention(q, cache.double(), queries, scale, LATENT, trees), scale=2)


def test_builds_without_fp8_latents_do_not_load() -> None:
    with pytest.raises(ImportError, match="no dense kernel for FP8"):
        FlashMLA(flash_mla_emulator.module(9), TorchMLA(), 9, kv_dtype=E4M3_TENSOR)
    module = flashinfer_emulator.module(9)
    older = type("Older", (), {"run": lambda self, query, kv_cache, out: None})
    module.mla.BatchMLAPagedAttentionWrapper = older
    with pytest.raises(ImportError, match="reads no FP8 latents"):
        FlashInferMLA(module, 9, kv_dtype=E4M3_TENSOR)
    FlashInferMLA(module, 9)


def test_the_emulators_refuse_what_the_libraries_refuse() -> None:
    """Queries of another type than the cache, scales that are missing, and FA3's product with `qv` in FP8."""
    queries, size = paged_queries([(1, 70)], 64)
    cache, q = filled(queries, size), normal(1, 64, WIDTH, dtype=BF16)
    with pytest.raises(ContractBroken):
        FA3MLA(fa3_emulator.module()).absorbed(q, cache, queries, 1.0, None)


@pytest.mark.parametrize(
    ("major", "trees", "heads", "libraries", "row"),
    [
        (10, False, 128, ("flashinfer", "flash_mla"), "trtllm_mla"),
        (10, True, 128, ("flashinfer", "flash_mla"), "triton"),
        (9, True, 16, ("flashinfer", "sgl_kernel.flash_mla", "flash_attn_interface"), "flashmla"),
        (9, False, 128, ("flash_mla", "sgl_kernel.flash_mla"), "flashmla"),  # both builds
        (9, False, 128, ("flashinfer", "flash_mla", "flash_attn_interface"), "flashinfer"),
        (9, False, 128, ("flash_attn_interface",), "triton"),
    ],
)
def test_rows_by_gpu_and_library(
    major: int, trees: bool, heads: int, libraries: tuple[str, ...], row: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(probe, "_found", lambda name: name in libraries)
    monkeypatch.setattr("moe_engine.kernels.triton.availability.version", lambda: (3, 9))
    need = Need("bfloat16", E4M3_TENSOR, page_size=64, widths=HeadWidths(heads, 1, 192, 128, 512, 64), trees=trees)
    assert select("attention", tables.MLA, "auto", Device("cuda", "GPU", (major, 0)), need).row.name == row


def test_widths_of_fp8_latents() -> None:
    assert limits.flashinfer_fp8(HeadWidths(16, 1, 192, 128, 512, 64)) is None
    assert "512+64" in str(limits.flashinfer_fp8(HeadWidths(16, 1, 192, 128, 256, 64)))
