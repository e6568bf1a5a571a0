"""TensorRT-LLM's fused experts with an emulator that refuses invalid calls as the library does, against float64."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from moe_engine.kernels.backends import plan_kernels
from moe_engine.kernels.device import Device, ExpertWidths, Need
from moe_engine.kernels.experts.batch import ExpertBatch
from moe_engine.kernels.experts.flashinfer_trtllm import TrtllmExperts
from moe_engine.kernels.experts.reference import TorchExperts
from moe_engine.kernels.quantization import reference as fp8
from moe_engine.kernels.quantization.protocol import BlockWeight, QuantizedActivation
from moe_engine.kernels.vendors import probe
from moe_engine.kernels.weight_forms import FP8_BLOCKS
from moe_engine.kernels.workspaces import trtllm_experts
from tests.kernels.cpu.formulas import block_product, gated, normal, silu
from tests.kernels.vendors.contract import ContractBroken
from tests.kernels.vendors.test_deep_gemm import fp8_close, fp8_experts, near
from tests.kernels.vendors.trtllm_moe_emulator import TrtllmMoeEmulator

BF16 = torch.bfloat16
HIDDEN, WIDTH = 256, 128
BLACKWELL = Device("cuda", "B200", (10, 0))
WIDTHS = ExpertWidths(7168, 2048, 8, form=FP8_BLOCKS)


def made() -> tuple[TrtllmMoeEmulator, TrtllmExperts]:
    emulator = TrtllmMoeEmulator()
    return emulator, TrtllmExperts(TorchExperts(), emulator.module, fp8.quantize_rows)


def expert(x: Tensor, gate: BlockWeight, up: BlockWeight, down: BlockWeight) -> Tensor:
    """In float64 on quantized numbers."""
    rows = fp8.quantize_rows(x)
    inner = silu(block_product(rows, gate)) * block_product(rows, up)
    return block_product(fp8.quantize_rows(inner.float()), down)


def choices(tokens: int, count: int, top_k: int, foreign: int) -> Tensor:
    """int32 [T, K], different experts of a token; `foreign` experts on either side are on other ranks."""
    return torch.rand(tokens, count + 2 * foreign).argsort(1)[:, :top_k].int() - foreign


@pytest.mark.parametrize(("tokens", "count", "top_k", "foreign"), [(1, 4, 2, 0), (5, 3, 3, 2), (8, 2, 4, 3)])
def test_local_tokens_equal_float64(tokens: int, count: int, top_k: int, foreign: int) -> None:
    """Also on a rank that holds fewer experts than a token chooses."""
    emulator, kernel = made()
    weights, parts = fp8_experts(kernel, count, HIDDEN, WIDTH)
    x, add = normal(tokens, HIDDEN, dtype=BF16), normal(tokens, HIDDEN, dtype=BF16)
    ids, scores = choices(tokens, count, top_k, foreign), torch.rand(tokens, top_k)
    exact, true = torch.zeros(2, tokens, HIDDEN, dtype=torch.float64)
    for token, chosen in enumerate(ids.tolist()):
        for slot, e in enumerate(chosen):
            if 0 <= e < count:
                one, share = x[token : token + 1], float(scores[token, slot])
                exact[token] += share * expert(one, *parts[e])[0]
                true[token] += share * gated(one, *map(fp8.dequantize_weight, parts[e]))[0]
    got = kernel.run_routed(x, scores, ids, weights)
    assert got.dtype == BF16
    fp8_close(got, exact)
    near(got, true)
    fp8_close(kernel.run_routed(x, scores, ids, weights, add), exact + add.double())
    rows = QuantizedActivation(fp8.quantize_rows(x), None, BF16)
    assert torch.equal(kernel.run_routed(rows, scores, ids, weights), got)
    assert emulator.calls == [tokens] * 3


def test_idle_ranks_and_moved_experts() -> None:
    emulator, kernel = made()
    weights, parts = fp8_experts(kernel, 3, HIDDEN, WIDTH)
    empty = kernel.run_routed(normal(0, HIDDEN, dtype=BF16), torch.empty(0, 2), torch.empty(0, 2).int(), weights)
    assert empty.shape == (0, HIDDEN) and not emulator.calls
    for target, source in zip(kernel.expert_memory(weights, 0), kernel.expert_memory(weights, 2), strict=True):
        assert target.is_contiguous()
        target.copy_(source)
    x = normal(2, HIDDEN, dtype=BF16)
    got = kernel.run_routed(x, torch.ones(2, 1), torch.zeros(2, 1).int(), weights)
    fp8_close(got, expert(x, *parts[2]))
    assert weights.num_bytes == 3 * 3 * (HIDDEN * WIDTH + 4 * HIDDEN // 128 * WIDTH // 128)


def test_experts_of_other_sizes_and_formats_run_on_the_other_kernel() -> None:
    emulator, kernel = made()
    weights, parts = fp8_experts(kernel, 2, HIDDEN, 192)
    plain = kernel.allocate(2, HIDDEN, WIDTH, BF16, "cpu")
    for e in range(2):
        kernel.load_expert(
            plain, e, *(normal(*shape, dtype=BF16) for shape in ((WIDTH, HIDDEN), (WIDTH, HIDDEN), (HIDDEN, WIDTH)))
        )
    x, ids, scores = normal(3, HIDDEN, dtype=BF16), torch.zeros(3, 1).int(), torch.ones(3, 1)
    near(kernel.run_routed(x, scores, ids, weights), gated(x, *map(fp8.dequantize_weight, parts[0])))
    assert kernel.run_routed(x, scores, ids, plain).isfinite().all() and not emulator.calls
    assert not kernel.input_format(plain).rows
    with pytest.raises(ValueError, match="leave --moe-a2a-backend out"):
        kernel.run(ExpertBatch("padded", x[None], counts=torch.ones(1).int()), weights)


def test_the_emulator_refuses_what_the_library_refuses() -> None:
    emulator, kernel = made()
    weights, _ = fp8_experts(kernel, 3, HIDDEN, WIDTH)
    call = emulator.module.fused_moe.trtllm_fp8_block_scale_routed_moe
    rows = fp8.quantize_rows(normal(5, HIDDEN, dtype=BF16))
    layer, ids = weights.data, torch.zeros(5, 1).int()
    good = {
        "topk_ids": (ids, torch.ones(5, 1)), "routing_bias": None, "hidden_states": rows.data,
        "hidden_states_scale": rows.scales.T.contiguous(), "gemm1_weights": layer.first,
        "gemm1_weights_scale": layer.first_scales, "gemm2_weights": layer.second,
        "gemm2_weights_scale": layer.second_scales, "num_experts": 4, "top_k": 1, "n_group": None, "topk_group": None,
        "intermediate_size": WIDTH, "local_expert_offset": 0, "local_num_experts": 3, "routed_scaling_factor": None,
        "routing_method_type": 1, "use_shuffled_weight": True, "weight_layout": 2,
        "output": torch.empty(5, HIDDEN, dtype=BF16),
    }  # fmt: skip
    call(**good)
    for changed in (
        {"hidden_states_scale": rows.scales.contiguous()}, {"num_experts": 3},
        {"topk_ids": (ids - 1, torch.ones(5, 1))},
        {"topk_ids": (ids.long(), torch.ones(5, 1))}, {"gemm1_weights": layer.first.flatten(1)},
        {"hidden_states_scale": rows.scales.T}, {"local_num_experts": 4},
    ):  # fmt: skip
        with pytest.raises(ContractBroken):
            call(**good | changed)
    with pytest.raises(ContractBroken, match="an expert twice"):
        twice = torch.zeros(5, 2).int(), torch.ones(5, 2)
        call(**good | {"topk_ids": twice, "top_k": 2})


@pytest.mark.parametrize(
    ("device", "need", "text"),
    [
        (Device("cuda", "H200", (9, 0)), Need("bfloat16"), "has kernels for sm_100"),
        (BLACKWELL, Need("float16"), "computes in bfloat16"),
        (BLACKWELL, Need("bfloat16", deterministic=True), "--enable-deterministic-inference"),
        (BLACKWELL, Need("bfloat16", experts=replace(WIDTHS, form=None)), "not stored in FP8 blocks"),
        (BLACKWELL, Need("bfloat16", experts=replace(WIDTHS, dispatched=True)), "leave --moe-a2a-backend out"),
        (BLACKWELL, Need("bfloat16", experts=replace(WIDTHS, width=192)), "128 n channels, not 7168 and 192"),
        (BLACKWELL, Need("bfloat16", experts=replace(WIDTHS, top_k=40)), "at most 32 experts"),
    ],
)
def test_launches_that_the_row_does_not_take_are_refused_by_name(device, need, text, monkeypatch) -> None:
    monkeypatch.setattr(probe, "_found", lambda name: True)
    need = replace(need, page_size=64)
    with pytest.raises(ValueError, match=text):
        plan_kernels(device, need, {"experts": "flashinfer_trtllm"})
    experts = plan_kernels(device, replace(need, deterministic=False, dtype="bfloat16")).row("experts").name
    assert experts == ("flashinfer_trtllm" if need.experts is None and device is BLACKWELL else "deep_gemm")


def test_local_block_fp8_experts_choose_it_on_blackwell(monkeypatch) -> None:
    monkeypatch.setattr(probe, "_found", lambda name: True)
    plan = plan_kernels(BLACKWELL, Need("bfloat16", page_size=64, experts=WIDTHS))
    choice = next(choice for choice in plan.choices if choice.family == "experts")
    assert choice.row.name == "flashinfer_trtllm" and choice.options["plain"].row.name == "deep_gemm"


def test_the_workspace_covers_the_librarys_buffers() -> None:
    """V3, 8,192 tokens on one rank: both products' results, the activation and their scales, experts padded to 128."""
    rows = 8192 * 8 + 257 * 127
    parts = rows * (2 * 2048 + 2048 + 2 * 7168) + 4 * rows * (2 * 2048 + 2048) // 128
    assert parts <= trtllm_experts(WIDTHS, 257, 8192) < 1.01 * parts
