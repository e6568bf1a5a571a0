"""DeepGEMM's scores in the indexer, emulated: against the formula in float64 over the stored keys."""

from __future__ import annotations

import pytest
import torch

from moe_engine.kernels.device import Device, IndexWidths, Need
from moe_engine.kernels.indexer import index_keys
from moe_engine.kernels.kv_format.formats import E4M3
from moe_engine.kernels.vendors.availability import deep_gemm_indexer
from tests.kernels.cpu.formulas import normal, paged_queries, slots_of
from tests.kernels.cpu.index_formulas import TOP_K, causal, check_choices, scores_of, select
from tests.kernels.vendors.deep_gemm_emulator import DeepGemmEmulator

indexer = pytest.importorskip("moe_engine.kernels.indexer.deep_gemm", reason="needs triton")
triton_keys = indexer.triton_keys
HEADS, WIDTH = 32, 32


@pytest.mark.parametrize("current", [True, False])
@pytest.mark.parametrize("budget", [1 << 28, 4 * 20 * 150])
def test_prompts_are_scored_by_the_library(budget: int, current: bool) -> None:
    queries, size = paged_queries([(70, 150)], 16)
    keys, cache = normal(size, WIDTH, dtype=torch.bfloat16), torch.zeros(size, 1, WIDTH + 4, dtype=torch.uint8)
    library = DeepGemmEmulator(takes_ends=current)
    kernel = indexer.DeepGemmIndexer(library.module, budget)
    kernel.write(keys, torch.arange(size), cache, 16)
    q, weights = normal(70, HEADS, WIDTH, dtype=torch.bfloat16), torch.randn(70, HEADS)
    found = select(kernel, q, weights, cache, queries)
    values, scales = index_keys.unpack(cache[:, 0], WIDTH)
    rounded, folded = triton_keys.quantize_queries(q, weights)
    own = slots_of(queries, 0)
    want = scores_of(rounded.float(), folded, values[own].double() * scales[own].double()[:, None])
    check_choices(found, want, own, causal(70, 150), TOP_K)
    assert library.compiled


def test_decodes_are_scored_in_triton() -> None:
    queries, size = paged_queries([(1, 90), (2, 40)], 16)
    cache = torch.zeros(size, 1, WIDTH + 4, dtype=torch.uint8)
    library = DeepGemmEmulator()
    kernel = indexer.DeepGemmIndexer(library.module)
    kernel.write(normal(size, WIDTH, dtype=torch.bfloat16), torch.arange(size), cache, 16)
    found = select(kernel, normal(3, HEADS, WIDTH, dtype=torch.bfloat16), torch.randn(3, HEADS), cache, queries)
    assert (found[0] >= 0).all() and not library.compiled


def test_refusals(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("moe_engine.kernels.vendors.probe.Library.installed", lambda self: "deep_gemm")
    hopper = Device("cuda", "H200", (9, 0))

    def why_not(heads: int, width: int, kv_dtype: str) -> str | None:
        return deep_gemm_indexer(hopper, Need("bfloat16", kv_dtype, index=IndexWidths(heads, width, 2048)))

    assert why_not(64, 128, E4M3) is None
    assert "FP8 index keys" in str(why_not(64, 128, "auto"))
    assert "index heads" in str(why_not(16, 128, E4M3)) and "channels" in str(why_not(64, 16, E4M3))
    blackwell = deep_gemm_indexer(Device("cuda", "B200", (10, 0)), Need("bfloat16", E4M3))
    assert "kernels for sm_90; B200" in str(blackwell)
    library = DeepGemmEmulator().module
    del library.fp8_fp4_mqa_logits
    with pytest.raises(ImportError, match="fp8_fp4_mqa_logits"):
        indexer.DeepGemmIndexer(library)
