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
from moe_engine.kernels.quantization.protocol import (
    NUMBERS,
    Activation,
    BlockWeight,
    QuantizedActivation,
    QuantizedRows,
    Reads,
    numbers_of,
)
from moe_engine.kernels.quantization.reference import dequantize_weight
from moe_engine.kernels.quantization.triton_rows import quantize_rows, silu_mul_quantize


class TritonLinear(TorchLinear):
    """`LinearKernel`, `BlockScaledLinear`, and for FP8 `FusedMLP`. Plain weights go to torch, which calls cuBLAS."""

    name = "triton"

    def prepare_blocks(self, weight: BlockWeight, bias: Tensor | None = None) -> PreparedLinear:
        """As the protocol says; where the device multiplies no FP8, the weight becomes bf16."""
        if not multiplies_fp8(weight.data.device.type):
            return self.prepare(dequantize_weight(weight).to(torch.bfloat16), bias)
        n, k = weight.data.shape
        num_bytes = weight.num_bytes + (0 if bias is None else bias.numel() * bias.element_size())
        return PreparedLinear(k, n, weight, bias, num_bytes)

    def reads(self, weight: PreparedLinear) -> Reads:
        return Reads.fp8(weight.data.power_of_two) if isinstance(weight.data, BlockWeight) else NUMBERS

    def run(self, x: Activation, weight: PreparedLinear) -> Tensor:
        if isinstance(weight.data, BlockWeight):
            return block_gemm(_rows(x, weight.data), weight.data, x.dtype, weight.bias)
        return super().run(numbers_of(x), weight)

    def fuses_mlp(self, gate_up: PreparedLinear, down: PreparedLinear) -> bool:
        return isinstance(gate_up.data, BlockWeight) and isinstance(down.data, BlockWeight)

    def run_mlp(self, x: Activation, gate_up: PreparedLinear, down: PreparedLinear) -> Tensor:
        """The activation between the two products is quantised where it is computed: no bf16 copy of [T, I]."""
        inner = self.run(x, gate_up)  # [T, 2I]
        return block_gemm(silu_mul_quantize(inner, down.data.power_of_two), down.data, x.dtype, down.bias)


def _rows(x: Activation, weight: BlockWeight) -> QuantizedRows:
    return x.rows if isinstance(x, QuantizedActivation) else quantize_rows(x, weight.power_of_two)
