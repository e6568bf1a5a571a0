"""Batches with few rows per expert run in Triton with DeepGEMM's weights."""

from __future__ import annotations

import pytest
import torch

from moe_engine.kernels.experts import deep_gemm
from moe_engine.kernels.experts.deep_gemm import DeepGemmExperts
from moe_engine.kernels.gate_form import GELU_LIMIT, GatedActivation
from moe_engine.kernels.linear.deep_gemm_products import DeepGemm
from moe_engine.kernels.quantization import reference, triton_rows
from tests.kernels.triton.launches import launches
from tests.kernels.vendors.deep_gemm_emulator import DeepGemmEmulator

NUM, HIDDEN, WIDTH, TOP_K = 3, 256, 128, 2


def experts(arch: int) -> DeepGemmExperts:
    return DeepGemmExperts(DeepGemm(DeepGemmEmulator(arch, True).module, (arch, 0), triton_rows))


@pytest.mark.parametrize("fp8", [False, True])
@pytest.mark.parametrize("limit", [0.0, 0.4, -0.3, GELU_LIMIT])
def test_results_equal_those_of_deep_gemm(fp8: bool, limit: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """Holds also after an expert moved, because both kernels read the same memory."""
    kernel = experts(9)
    if fp8:
        weights = kernel.allocate_blocks(NUM, HIDDEN, WIDTH, "cpu")
    else:
        weights = kernel.allocate(NUM, HIDDEN, WIDTH, torch.bfloat16, "cpu")
    weights.activation = GatedActivation(limit)
    x, topk_weights = torch.randn(5, HIDDEN).bfloat16(), torch.rand(5, TOP_K)
    ids = torch.rand(5, NUM + 1).argsort(1)[:, :TOP_K].int() - 1
    for expert in (0, 1, 2, 1):
        parts = [torch.randn(*shape) * 0.06 for shape in ((WIDTH, HIDDEN), (WIDTH, HIDDEN), (HIDDEN, WIDTH))]
        if fp8:
            kernel.load_expert_blocks(weights, expert, *map(reference.quantize_weight, parts))
        else:
            kernel.load_expert(weights, expert, *parts)
    for tokens in (1, 5):
        given = x[:tokens], topk_weights[:tokens], ids[:tokens], weights
        with launches() as names:
            few = kernel.run_routed(*given)
        assert {"gate_up_kernel", "down_kernel"} < set(names)
        with monkeypatch.context() as without:
            without.setattr(deep_gemm, "FEW_ROWS", 0)
            many = kernel.run_routed(*given)
        few, many = few.float(), many.float()
        if fp8:  # sums in another order round a code near the middle of two to the other one: 6 % of its value
            assert (few - many).norm() < 0.1 * many.norm()
        else:
            torch.testing.assert_close(few, many, rtol=2**-6, atol=2**-6 * float(many.abs().amax()))


def test_packed_scales_are_not_shared() -> None:
    assert experts(10).allocate_blocks(NUM, HIDDEN, WIDTH, "cpu").data.few is None
