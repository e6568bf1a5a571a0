"""Activations are quantized once, by the norm before their readers: values, bits, and the number of kernels."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from moe_engine.kernels.experts.triton_experts import TritonExperts
from moe_engine.kernels.linear.triton_linear import TritonLinear
from moe_engine.kernels.ops.protocol import OpsCapabilities
from moe_engine.kernels.ops.triton_ops import TritonOps
from moe_engine.kernels.permutation.triton_permute import TritonPermutation
from moe_engine.kernels.quantization import reference
from moe_engine.kernels.quantization.protocol import (
    UNQUANTIZED,
    ActivationFormat,
    QuantizedActivation,
    as_format,
    common_format,
    unquantized,
)
from moe_engine.kernels.quantization.triton_rows import quantize_rows
from moe_engine.models.config_file import load_model_config
from moe_engine.models.layers.linear import Linear
from moe_engine.models.loader import LoadOptions, load_model
from moe_engine.parallel.dispatch.build import PhasedDispatcher
from moe_engine.parallel.dispatch.exchanged import ExchangedDispatcher, LocalExchange
from moe_engine.parallel.dispatch.layouts import GroupedLayout, PaddedLayout
from moe_engine.parallel.dispatch.protocol import DispatchShape, Layout
from moe_engine.parallel.experts import DispatchedExperts
from tests.kernels.triton.launches import launches
from tests.kernels.triton.test_fp8_model import SIZES
from tests.models.checkpoints import make_checkpoint
from tests.models.stepper import Chunk, Stepper, make_backends


def stepper(path: Path, ops: object, linear: object, experts: object) -> Stepper:
    config = load_model_config(path)
    kernels = {"ops": ops, "linear": linear, "experts": experts}
    backends = replace(make_backends(config), **kernels, fuse_shared_experts=False)  # type: ignore[arg-type]
    return Stepper(load_model(path, config, LoadOptions("float32"), backends), config, backends)


def decode_launches(loaded: Stepper) -> Counter[str]:
    loaded.step([Chunk(0, [7], False)])
    with launches() as names:
        loaded.step([Chunk(0, [41], True)])
    return Counter(names)


class NormsApart(TritonOps):
    """Ops without quantized norms: norms and quantization are two kernels."""

    @property
    def capabilities(self) -> OpsCapabilities:
        return replace(super().capabilities, quantized_norms=None)


def test_a_layer_quantizes_once_for_all_that_read(tmp_path: Path) -> None:
    """A dense layer and a mixture: q_a and kv_a read one quantization, gate and up one; the router, the shared expert
    and the routed experts of the mixture all read the output of the norm before them."""
    path = make_checkpoint("deepseek_v3", tmp_path, seed=3, fp8=True, **SIZES)
    shared = stepper(path, TritonOps(), TritonLinear(), TritonExperts())
    apart = stepper(path, NormsApart(), TritonLinear(), TritonExperts())
    together, separate = decode_launches(shared), decode_launches(apart)
    layers, mixtures = 2, 1
    # before attention, q_b, and the feed-forward part; that of a mixture is part of its router
    assert together["rms_norm_quantize_kernel"] == 3 * layers - mixtures
    assert together["norm_route_kernel"] == separate["norm_route_kernel"] == mixtures
    assert together["quantize_kernel"] == layers  # the output of attention, for o_proj
    assert together["rms_norm_kernel"] == 0 and together["combine_norm_kernel"] == 1  # the last one, before the head
    assert separate["rms_norm_quantize_kernel"] == 0 and separate["rms_norm_kernel"] == 3 * layers - mixtures
    assert separate["quantize_kernel"] == 4 * layers + mixtures
    assert together["sum_logits_kernel"] == separate["sum_logits_kernel"] == mixtures  # the launch before it announces
    assert separate.total() - together.total() == 3 * layers + mixtures
    assert together["silu_mul_quantize_kernel"] == layers  # after the product: the dense and the shared MLP


@pytest.mark.parametrize("power_of_two", [False, True])
@pytest.mark.parametrize("adds", [False, True])
def test_norms_quantize_what_they_give(power_of_two: bool, adds: bool) -> None:
    """The rows are the quantized numbers, bit for bit, and the numbers are those of the plain norm."""
    ops, norm, reads = TritonOps(), torch.rand(300) + 0.5, ActivationFormat(True, True, power_of_two)
    x, stream = torch.randn(5, 300).bfloat16(), torch.randn(5, 300).bfloat16()
    once = stream.clone()
    if adds:
        found = ops.add_rms_norm_quantized(reads, x, once, norm, 1e-5)
        want = ops.add_rms_norm(x, stream, norm, 1e-5)
        assert torch.equal(once, stream)
    else:
        found, want = ops.rms_norm_quantized(reads, x, norm, 1e-5), ops.rms_norm(x, norm, 1e-5)
    numbers = unquantized(found)
    torch.testing.assert_close(numbers, want, rtol=2**-7, atol=0)  # sums in another order: one step of bf16
    again = quantize_rows(numbers, power_of_two)
    assert torch.equal(found.rows.data.view(torch.uint8), again.data.view(torch.uint8))
    assert torch.equal(found.rows.scales, again.scales)


def test_what_serves_several_readers() -> None:
    fp8, powers = ActivationFormat.fp8(False), ActivationFormat.fp8(True)
    assert common_format(fp8, fp8) == fp8 and common_format(UNQUANTIZED, powers) == ActivationFormat(True, True, True)
    assert common_format(UNQUANTIZED, UNQUANTIZED) == UNQUANTIZED == common_format()
    assert common_format(fp8, powers, powers) == UNQUANTIZED  # readers do not get scales of the wrong kind
    x = torch.randn(3, 128)
    alone = QuantizedActivation(reference.quantize_rows(x), None, x.dtype)
    assert as_format(x, fp8) is x and as_format(alone, fp8) is alone
    with pytest.raises(ValueError, match=r"unquantized values .* were not kept"):
        unquantized(alone)
    both = replace(alone, unquantized=x)
    plain = Linear(TritonLinear(), torch.randn(8, 128))
    assert plain.input_format == UNQUANTIZED and torch.equal(plain(both), plain(x))


@pytest.mark.parametrize("layout", ["grouped", "padded"])
def test_tokens_that_travel_in_fp8_are_quantized_once(layout: str) -> None:
    """Quantized by the norm; unquantized tokens are quantized by dispatch. Experts give the results of local tokens."""
    num, top_k, hidden, width, tokens = 4, 2, 256, 128, 9
    kernel = TritonExperts()
    weights = kernel.allocate_blocks(num, hidden, width, "cpu")
    for expert in range(num):
        shapes = ((width, hidden), (width, hidden), (hidden, width))
        parts = (reference.quantize_weight(torch.randn(*shape) * shape[1] ** -0.5) for shape in shapes)
        kernel.load_expert_blocks(weights, expert, *parts)
    shape = DispatchShape(num, 1, top_k, hidden, tokens, torch.bfloat16, fp8=True)
    made_of = shape, TritonPermutation(), torch.device("cpu")
    arranged: Layout = PaddedLayout(*made_of) if layout == "padded" else GroupedLayout(*made_of)
    dispatcher = ExchangedDispatcher(shape, LocalExchange(), arranged, None)
    experts = DispatchedExperts(PhasedDispatcher(lambda: {"prefill": dispatcher}), kernel, weights)
    assert experts.input_format == ActivationFormat.fp8(False)

    ids, topk_weights = torch.rand(tokens, num).argsort(1)[:, :top_k].int(), torch.rand(tokens, top_k)
    norm = torch.rand(hidden) + 0.5
    normed = TritonOps().rms_norm_quantized(
        ActivationFormat(True, True), torch.randn(tokens, hidden).bfloat16(), norm, 1e-6
    )
    want = kernel.run_routed(normed, topk_weights, ids, weights)
    with launches() as names:
        got = experts.run(normed, topk_weights, ids)
    assert not any("quantize" in name for name in names), names
    torch.testing.assert_close(got, want, rtol=2**-6, atol=2**-7 * float(want.abs().max()))
    with launches() as names:
        again = experts.run(unquantized(normed), topk_weights, ids)
    assert not any("quantize" in name for name in names), names  # before dispatch, in torch
    torch.testing.assert_close(again, want, rtol=0, atol=0.05 * float(want.abs().max()))
