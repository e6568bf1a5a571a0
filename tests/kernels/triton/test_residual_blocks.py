"""Attention over blocks of the residual in Triton, under the interpreter, against the torch operation
(`tests/kernels/cpu/test_residual_blocks.py` compares that with its formula)."""

from __future__ import annotations

import pytest
import torch

from moe_engine.kernels.ops.residual_blocks import mix_blocks
from tests.kernels.cpu.test_residual_blocks import drawn, run
from tests.kernels.drawn import block_weights

kernel = pytest.importorskip("moe_engine.kernels.ops.triton_residual_blocks", reason="needs triton")
TritonOps = pytest.importorskip("moe_engine.kernels.ops.triton_ops", reason="needs triton").TritonOps

SHAPES = [(3, 1100, 1), (9, 72, 3), (1, 40, 5), (18, 24, 2)]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=["bf16", "fp32"])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.each_value
def test_mix_blocks(shape: tuple[int, int, int], dtype: torch.dtype) -> None:
    drawing = drawn(*shape, dtype)
    mix = TritonOps().capabilities.mix_blocks
    bound = 3e-2 if dtype == torch.bfloat16 else 1e-4
    for norm in (None, 1 + 0.3 * torch.randn(shape[1])):
        found, wanted = run(mix, *drawing, norm), run(mix_blocks, *drawing, norm)
        for one, other in zip(found, wanted, strict=True):
            torch.testing.assert_close(one, other, rtol=bound, atol=bound)


def test_a_token_does_not_depend_on_others_and_strides() -> None:
    width, norm = 100, torch.rand(100)
    wide, x = torch.randn(6, 5 * width + 7), torch.randn(6, 2 * width)[1:5, :width]
    weights = block_weights(width, 2, starts=True)
    whole = wide.clone()
    together = kernel.mix(x, whole[1:5, : 5 * width], weights, norm)
    for t in range(4):
        own = wide.clone()
        alone = kernel.mix(x[t : t + 1], own[t + 1 : t + 2, : 5 * width], weights, norm)
        assert torch.equal(alone[0], together[t]) and torch.equal(own[t + 1], whole[t + 1])
    changed = (whole != wide).nonzero()
    assert (
        changed[:, 1].min() >= 2 * width and changed[:, 1].max() < 3 * width and len(set(changed[:, 0].tolist())) == 4
    )
    assert kernel.mix(None, whole[:0, : 5 * width], weights, norm).shape == (0, width)
