"""Linear layers on a GPU: block-FP8 weights stay FP8 and run on our own product, others on torch's.

Legend: T tokens, K in-features, N out-features, I width of an MLP.
"""

from __future__ import annotations

import torch
from torch import Tensor

from moe_engine.kernels.device import multiplies_fp8
from moe_engine.kernels.linear.protocol import PreparedLinear
from moe_engine.kernels.linear.reference import TorchLinear
from moe_engine.kernels.linear.triton_block_gemm import block_gemm
from moe_engine.kernels.quantization.protocol import BlockWeight
from moe_engine.kernels.quantization.reference import dequantize_weight
from moe_engine.kernels.quantization.triton_rows import quantize_rows, rms_norm_quantize, silu_mul_quantize


class TritonLinear(TorchLinear):
    """`LinearKernel`, `BlockScaledLinear`, and for FP8 `NormedLinear` and `FusedMLP`. Plain weights go to torch, which
    calls cuBLAS."""

    name = "triton"

    def prepare_blocks(self, weight: BlockWeight, bias: Tensor | None = None) -> PreparedLinear:
        """As the protocol says; where the device multiplies no FP8, the weight becomes bf16."""
        if not multiplies_fp8(weight.data.device.type):
            return self.prepare(dequantize_weight(weight).to(torch.bfloat16), bias)
        n, k = weight.data.shape
        num_bytes = weight.num_bytes + (0 if bias is None else bias.numel() * bias.element_size())
        return PreparedLinear(k, n, weight, bias, num_bytes)

    def run(self, x: Tensor, weight: PreparedLinear) -> Tensor:
        if not isinstance(weight.data, BlockWeight):
            return super().run(x, weight)
        return block_gemm(quantize_rows(x, weight.data.power_of_two), weight.data, x.dtype, weight.bias)

    def takes_norm(self, weight: PreparedLinear) -> bool:
        return isinstance(weight.data, BlockWeight)

    def run_normed(self, x: Tensor, norm: Tensor, eps: float, weight: PreparedLinear) -> Tensor:
        _, rows = rms_norm_quantize(x, norm, eps, power_of_two=weight.data.power_of_two, keep=False)
        return block_gemm(rows, weight.data, x.dtype, weight.bias)

    def fuses_mlp(self, gate_up: PreparedLinear, down: PreparedLinear) -> bool:
        return isinstance(gate_up.data, BlockWeight) and isinstance(down.data, BlockWeight)

    def run_mlp(self, x: Tensor, gate_up: PreparedLinear, down: PreparedLinear) -> Tensor:
        """The activation between the two products is quantised where it is computed: no bf16 copy of [T, I]."""
        rows = quantize_rows(x, gate_up.data.power_of_two)
        inner = block_gemm(rows, gate_up.data, x.dtype, gate_up.bias)  # [T, 2I]
        return block_gemm(silu_mul_quantize(inner, down.data.power_of_two), down.data, x.dtype, down.bias)
