"""Linear layers on a GPU: weights in FP8 and in 4 bits stay so and use this project's Triton products, others torch's.

Legend: T tokens, H heads, K in-features, N out-features, I width of an MLP.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from moe_engine.kernels.device import multiplies_fp8
from moe_engine.kernels.linear.cublas import CublasLinear, is_few, norms_few, quantizes_few_heads
from moe_engine.kernels.linear.protocol import LinearCapabilities, MLPCall, PreparedLinear
from moe_engine.kernels.linear.tiles import FEW_BLOCK_FP8, FIXED_BLOCK_FP8, MOST_QUANTIZED
from moe_engine.kernels.linear.triton_block_gemm import block_gemm
from moe_engine.kernels.linear.triton_fixed_gemm import fixed_gemm
from moe_engine.kernels.linear.triton_four_bits_gemm import FourBitsWeight, four_bits_gemm
from moe_engine.kernels.linear.triton_heads import heads_quantized
from moe_engine.kernels.quantization.codes import CodedWeight, GroupCodes
from moe_engine.kernels.quantization.protocol import (
    UNQUANTIZED,
    Activation,
    ActivationFormat,
    BlockFP8,
    BlockWeight,
    ProductInput,
    QuantizedActivation,
    QuantizedRows,
    RowFP8,
    RowsToNorm,
    RowWeight,
    unquantized,
)
from moe_engine.kernels.quantization.reference import dequantize_weight
from moe_engine.kernels.quantization.triton_rows import quantize_rows, silu_mul_quantize

_FP8 = (BlockWeight, RowWeight)


class TritonLinear(CublasLinear):
    """`LinearKernel`. Unquantized weights use torch (cuBLAS).

    Args:
        deterministic: the tiling of every product is independent of the number of rows (batch-invariant results);
            unquantized weights then use that product too.
    """

    name = "triton"

    def __init__(self, deterministic: bool = False) -> None:
        self._deterministic = deterministic
        self._tiles = FIXED_BLOCK_FP8 if deterministic else None

    @property
    def capabilities(self) -> LinearCapabilities:
        return LinearCapabilities(
            {BlockFP8: self.prepare_blocks, RowFP8: self.prepare_rows, GroupCodes: self.prepare_codes},
            heads_quantized=self.run_heads_quantized,
            norms=self.norms,
            quantizes_heads=self.quantizes_heads,
            takes=lambda format: not isinstance(format, GroupCodes) or format.four_bits,
            into=self.run_into,
        )

    def prepare_blocks(self, weight: BlockWeight, bias: Tensor | None = None) -> PreparedLinear:
        """See the protocol; on devices without FP8 products the weight becomes bf16."""
        return self._prepare_fp8(weight, bias)

    def prepare_rows(self, weight: RowWeight, bias: Tensor | None = None) -> PreparedLinear:
        """As `prepare_blocks`, with a scale per row."""
        return self._prepare_fp8(weight, bias)

    def _prepare_fp8(self, weight: BlockWeight | RowWeight, bias: Tensor | None) -> PreparedLinear:
        if not multiplies_fp8(weight.data.device.type):
            return self.prepare(dequantize_weight(weight).to(torch.bfloat16), bias)
        n, k = weight.data.shape
        num_bytes = weight.num_bytes + (0 if bias is None else bias.numel() * bias.element_size())
        return PreparedLinear(k, n, weight, bias, num_bytes, memory=weight.data)

    def prepare_codes(self, weight: CodedWeight, bias: Tensor | None = None) -> PreparedLinear:
        """A weight of `GroupCodes.four_bits`, multiplied as stored."""
        data = FourBitsWeight.of(weight)
        n, k = weight.shape
        return PreparedLinear(k, n, data, bias, data.num_bytes + (0 if bias is None else bias.nbytes))

    def input_format(self, weight: PreparedLinear) -> ActivationFormat:
        return ActivationFormat.fp8(weight.data.power_of_two) if isinstance(weight.data, _FP8) else UNQUANTIZED

    def quantizes_heads(self, count: int, heads: PreparedLinear, consumer: PreparedLinear) -> bool:
        """See `LinearCapabilities`."""
        if self._deterministic or not isinstance(consumer.data, _FP8) or not isinstance(heads.data, Tensor):
            return False
        return quantizes_few_heads(count, heads.data, consumer.data.data)

    def norms(self, x: Tensor, weight: PreparedLinear) -> bool:
        """See `LinearCapabilities`."""
        return isinstance(weight.data, _FP8) and not self._deterministic and norms_few(len(x), weight.data.data)

    def run(self, x: ProductInput, weight: PreparedLinear) -> Tensor:
        if isinstance(x, RowsToNorm):
            return block_gemm(x, weight.data, x.dtype, weight.bias)
        if isinstance(weight.data, _FP8):
            itself = isinstance(x, Tensor) and self._quantizes(len(x), weight)
            return self._product(x if itself else _rows(x, weight.data), weight, x.dtype)  # type: ignore[arg-type]
        if isinstance(weight.data, FourBitsWeight):
            return four_bits_gemm(unquantized(x), weight.data, weight.bias, self._deterministic)
        if self._deterministic:
            return fixed_gemm(unquantized(x), weight.data, weight.bias)
        return super().run(unquantized(x), weight)

    def run_into(self, x: Tensor, weight: PreparedLinear, out: Tensor) -> Tensor:
        if self._deterministic:
            return fixed_gemm(x, weight.data, weight.bias, out)
        return super().run_into(x, weight, out)

    def run_heads(self, x: Tensor, weight: PreparedLinear, out: Tensor | None = None) -> Tensor:
        return fixed_gemm(x, weight.data, None, out) if self._deterministic else super().run_heads(x, weight, out)

    def run_heads_quantized(self, x: Tensor, weight: PreparedLinear, format: ActivationFormat) -> QuantizedActivation:
        """See the protocol."""
        return heads_quantized(x, weight.data, format.power_of_two, self._deterministic)

    def _product(self, rows: QuantizedRows | Tensor, weight: PreparedLinear, dtype: torch.dtype) -> Tensor:
        count = len(rows if isinstance(rows, Tensor) else rows.data)
        tiles = FEW_BLOCK_FP8 if self._is_few(count, weight) else self._tiles
        return block_gemm(rows, weight.data, dtype, weight.bias, tiles)

    def _quantizes(self, count: int, weight: PreparedLinear) -> bool:
        """Whether the product of `count` unquantized rows quantizes them itself."""
        return weight.in_features <= MOST_QUANTIZED and self._is_few(count, weight)

    def _is_few(self, count: int, weight: PreparedLinear) -> bool:
        return not self._deterministic and is_few(count, weight.data.data)

    def fuse_mlp(self, gate_up: PreparedLinear, down: PreparedLinear, limit: float = 0.0) -> MLPCall | None:
        if not (isinstance(gate_up.data, _FP8) and isinstance(down.data, _FP8)):
            return None
        return partial(self.run_mlp, gate_up=gate_up, down=down, limit=limit)

    def run_mlp(self, x: Activation, gate_up: PreparedLinear, down: PreparedLinear, limit: float = 0.0) -> Tensor:
        """The activation between the two products is quantized as it is computed: no bf16 copy of [T, I]."""
        inner = self.run(x, gate_up)  # [T, 2I]
        return self._product(silu_mul_quantize(inner, down.data.power_of_two, limit=limit), down, x.dtype)


def _rows(x: Activation, weight: BlockWeight | RowWeight) -> QuantizedRows:
    return x.rows if isinstance(x, QuantizedActivation) else quantize_rows(x, weight.power_of_two)
