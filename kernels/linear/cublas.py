"""Base of the GPU linear rows: products with unquantized weights by torch (cuBLAS), of few rows by a Triton kernel.

cuBLAS's kernels neither start while the launch before them ends nor announce the next one. With few rows the gaps
before and after a small product are a third of its time, so that a dependent launch is worth more than a library's
tiles (TensorRT-LLM's kernels of minimal latency for DeepSeek-V3 are made for the same reason).

Legend: T tokens, H heads, K in-features, N out-features.
"""

from __future__ import annotations

import torch
from torch import Tensor

from moe_engine.kernels.device import starts_early
from moe_engine.kernels.linear.protocol import PreparedLinear
from moe_engine.kernels.linear.reference import TorchLinear
from moe_engine.kernels.linear.tiles import FEW_PLAIN, FEW_ROWS, MAX_FEW_BYTES, MOST_NORMED, MOST_QUANTIZED
from moe_engine.kernels.quantization.protocol import BLOCK

MAX_NORMED_BYTES = 1 << 26
"""The same of a product that norms its rows, where a gap and a launch are worth more than tuned tiles."""

MAX_HEADS_BYTES, MOST_REQUESTING = 1 << 23, 256
"""Size of the largest weight of heads, and rows, of a product that requests weights behind it."""

MIN_PROGRAMS = 64
"""Programs of a product per head, of 128 channels each, that read a weight at the memory's rate: about half of the SMs.
cuBLAS divides a head between more."""


class CublasLinear(TorchLinear):
    """`LinearKernel` whose per-head products are written directly to `out`. The torch row copies them; the copy is
    needed under torch.compile only."""

    def run(self, x: Tensor, weight: PreparedLinear) -> Tensor:
        if not _is_few(x, weight.data):
            return super().run(x, weight)
        from moe_engine.kernels.linear.triton_fixed_gemm import fixed_gemm

        return fixed_gemm(x, weight.data, weight.bias, tiles=FEW_PLAIN)

    def run_into(self, x: Tensor, weight: PreparedLinear, out: Tensor) -> Tensor:
        """See `LinearCapabilities`."""
        if _is_few(x, weight.data):
            from moe_engine.kernels.linear.triton_fixed_gemm import fixed_gemm

            return fixed_gemm(x, weight.data, weight.bias, out, FEW_PLAIN)
        if weight.bias is None:
            return torch.mm(x, weight.data.t(), out=out)
        return torch.addmm(weight.bias, x, weight.data.t(), out=out)

    def run_heads(self, x: Tensor, weight: PreparedLinear, out: Tensor | None = None) -> Tensor:
        if _is_few(x, weight.data):
            from moe_engine.kernels.linear.triton_fixed_gemm import fixed_gemm

            return fixed_gemm(x, weight.data, None, out, FEW_PLAIN)
        if weight.following and _requests(x, weight.data):
            from moe_engine.kernels.linear.triton_fixed_gemm import fixed_gemm

            return fixed_gemm(x, weight.data, None, out, following=weight.following)
        if out is None:
            out = x.new_empty(x.shape[0], x.shape[1], weight.out_features)
        torch.bmm(x.transpose(0, 1), weight.data.transpose(1, 2), out=out.transpose(0, 1))
        return out


def _requests(x: Tensor, heads: Tensor) -> bool:
    """Whether small products per head request what follows, which cuBLAS cannot: while all their tiles run at once."""
    same = heads.dtype == x.dtype and x.element_size() == 2
    return same and len(x) <= MOST_REQUESTING and heads.nbytes <= MAX_HEADS_BYTES and starts_early(heads.device.type)


def _is_few(x: Tensor, weight: Tensor) -> bool:
    """Whether the product is a dependent launch."""
    return is_few(len(x), weight) and weight.dtype == x.dtype and x.element_size() == 2


def is_few(count: int, weight: Tensor) -> bool:
    """Whether a gap is worth more than a library's tiles, for `count` rows."""
    return 0 < count <= FEW_ROWS and weight.nbytes <= MAX_FEW_BYTES and starts_early(weight.device.type)


def quantizes_few_heads(count: int, heads: Tensor, consumer: Tensor) -> bool:
    """Whether `count` rows of a product per head [H, N, K] are quantized by it, for a consumer with an FP8 weight."""
    wide = consumer.shape[1] > MOST_QUANTIZED and heads.shape[1] % BLOCK == 0
    enough = heads.shape[0] * heads.shape[1] // BLOCK >= MIN_PROGRAMS
    return wide and enough and 0 < count <= FEW_ROWS and starts_early(heads.device.type)


def norms_few(count: int, weight: Tensor) -> bool:
    """Whether a product with an FP8 weight [N, K] computes the norm of its `count` rows."""
    few, narrow = 0 < count <= MOST_NORMED, weight.shape[1] <= MOST_QUANTIZED
    return few and narrow and weight.nbytes <= MAX_NORMED_BYTES and starts_early(weight.device.type)
