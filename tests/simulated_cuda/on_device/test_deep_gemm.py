"""DeepGEMM's adapters over this project's kernels on a simulated GPU: values against those of quantized numbers."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from moe_engine.kernels.experts.batch import ExpertBatch
from moe_engine.kernels.experts.deep_gemm import DeepGemmExperts
from moe_engine.kernels.linear.deep_gemm import DeepGemmLinear
from moe_engine.kernels.linear.deep_gemm_products import SMALL_ROWS, DeepGemm
from moe_engine.kernels.quantization import reference as fp8
from tests.kernels.cpu.formulas import normal
from tests.kernels.vendors.deep_gemm_emulator import ALIGNMENT, DeepGemmEmulator
from tests.kernels.vendors.test_deep_gemm import BF16, choose, near, quantized_mlp, routed, weight
from tests.simulated_cuda import libraries, streams

HIDDEN, WIDTH, NUM = 256, 128, 3

libraries.install()


def library(takes_ends: bool) -> DeepGemm:
    return DeepGemm(DeepGemmEmulator(9, takes_ends).module, (9, 0))


def check(got: Tensor, want: Tensor) -> None:
    """Within what other roundings to bf16 and FP8 change in tens of rows (three rows differed by 0.038)."""
    assert (got.double() - want).norm() < 0.03 * want.norm()


@pytest.mark.parametrize("takes_ends", [True, False])
def test_experts_in_every_layout(takes_ends: bool) -> None:
    kernel = DeepGemmExperts(library(takes_ends))
    weights = kernel.allocate_blocks(NUM, HIDDEN, WIDTH, "cuda")
    parts = [(weight(WIDTH, HIDDEN), weight(WIDTH, HIDDEN), weight(HIDDEN, WIDTH)) for _ in range(NUM)]
    for expert, part in enumerate(parts):
        kernel.load_expert_blocks(weights, expert, *part)
    weights.data = replace(weights.data, few=None)
    counts, mlp = [3, 0, 41], quantized_mlp(9, parts)
    rows = [normal(count, HIDDEN, dtype=BF16) for count in counts]
    batches: list[tuple[ExpertBatch, list[slice]]] = []
    sizes: dict[str, Any] = {"dtype": torch.int32, "device": "cuda"}
    offsets = torch.tensor([0, *counts]).cumsum(0).tolist()
    spans = [slice(*pair) for pair in itertools.pairwise(offsets)]
    batches.append((ExpertBatch("grouped", torch.cat(rows).cuda(), offsets=torch.tensor(offsets, **sizes)), spans))
    padded = torch.zeros(NUM, 50, HIDDEN, dtype=BF16)
    for place, part in zip(padded, rows):
        place[: len(part)] = part
    spans = [slice(50 * expert, 50 * expert + count) for expert, count in enumerate(counts)]
    batches.append((ExpertBatch("padded", padded.cuda(), counts=torch.tensor(counts, **sizes)), spans))
    for alignment in (ALIGNMENT, SMALL_ROWS) if takes_ends else ():
        spans = [slice(0, 3), slice(alignment, alignment), slice(alignment, alignment + 41)]
        x = torch.zeros(2 * alignment, HIDDEN, dtype=BF16)
        for span, part in zip(spans, rows):
            x[span] = part
        ends = torch.tensor([span.stop for span in spans], **sizes)
        batches.append((ExpertBatch("aligned", x.cuda(), ends=ends, alignment=alignment), spans))
    kernel.run(*batches[0][:1], weights)  # the first product asks the library what it takes
    for batch, spans in batches:
        quantized = fp8.quantize_rows(batch.x.cpu().flatten(0, -2))
        scales = quantized.scales.contiguous().view(*batch.x.shape[:-1], -1)
        arrived = replace(batch, x=quantized.data.view(batch.x.shape).cuda(), scales=scales.cuda(), dtype=BF16)
        for given in (batch, arrived):
            streams.waits.clear()
            got = kernel.run(given, weights)
            assert not streams.waits
            flat = got.cpu().flatten(0, -2)
            wanted = [mlp(part, expert) for expert, part in enumerate(rows) if len(part)]
            check(torch.cat([flat[span] for span in spans]), torch.cat(wanted))
    x, ids, shares = normal(21, HIDDEN, dtype=BF16), choose(21, 2, NUM), torch.rand(21, 2)
    got = kernel.run_routed(x.cuda(), shares.cuda(), ids.cuda(), weights)
    check(got.cpu(), routed(x, shares, ids, mlp, NUM))


@pytest.mark.parametrize("tokens", [1, 40])
def test_products(tokens: int) -> None:
    kernel, w = DeepGemmLinear(library(True)), weight(192, HIDDEN)
    prepared = kernel.prepare_blocks(replace(w, data=w.data.cuda(), scales=w.scales.cuda()))
    x = normal(tokens, HIDDEN, dtype=BF16)
    got: Tensor = kernel.run(x.cuda(), prepared)
    near(got.cpu(), x.double() @ fp8.dequantize_weight(w).double().T)
