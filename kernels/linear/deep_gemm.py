"""Linear layers whose weights stay in block FP8, by DeepGEMM; bf16 weights and MLA's absorbed ones by torch (cuBLAS).

On Hopper small products of few rows run in Triton, as in `CublasLinear`: DeepGEMM's kernels start early, but announce
nothing.

Legend: T tokens, K in-features, N out-features.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from moe_engine.kernels.linear.cublas import CublasLinear, is_few, norms_few, quantizes_few_heads
from moe_engine.kernels.linear.deep_gemm_products import DeepGemm, Operand
from moe_engine.kernels.linear.protocol import LinearCapabilities, MLPCall, PreparedLinear
from moe_engine.kernels.linear.tiles import FEW_BLOCK_FP8, MOST_QUANTIZED
from moe_engine.kernels.quantization.protocol import (
    UNQUANTIZED,
    Activation,
    ActivationFormat,
    BlockFP8,
    BlockWeight,
    ProductInput,
    QuantizedActivation,
    QuantizedRows,
    RowsToNorm,
    unquantized,
)
from moe_engine.kernels.quantization.reference import dequantize_weight
from moe_engine.kernels.vendors.warming import StepShapes, row_counts


@dataclass(frozen=True)
class Blocks:
    """Type of `PreparedLinear.data` for an FP8 weight. `power_of_two`: of the scales of activations."""

    operand: Operand
    power_of_two: bool


class DeepGemmLinear(CublasLinear):
    """`LinearKernel`; results are bf16.

    Args:
        deep_gemm: the library; default: the installed one.

    Raises:
        ImportError: the library is missing or lacks a required function.
    """

    name = "deep_gemm"

    def __init__(self, deep_gemm: DeepGemm | None = None) -> None:
        self._gemm = deep_gemm or DeepGemm()
        self._shapes: dict[tuple[int, int], PreparedLinear] = {}

    @property
    def capabilities(self) -> LinearCapabilities:
        heads = None if self._gemm.heads_quantized is None else self.run_heads_quantized
        better = None if heads is None else self.quantizes_heads
        return LinearCapabilities(
            {BlockFP8: self.prepare_blocks}, self.warm_up, heads, quantizes_heads=better, norms=self.norms,
            into=self.run_into,
        )  # fmt: skip

    def prepare_blocks(self, weight: BlockWeight, bias: Tensor | None = None) -> PreparedLinear:
        """See the protocol; a weight of sizes that the library does not support becomes bf16."""
        n, k = weight.data.shape
        if not self._gemm.serves(n, k):
            return self.prepare(dequantize_weight(weight).to(torch.bfloat16), bias)
        data = Blocks(self._gemm.weight(weight), weight.power_of_two)
        kept = data.operand if bias is None else (*data.operand, bias)
        num_bytes = sum(part.numel() * part.element_size() for part in kept)
        prepared = PreparedLinear(k, n, data, bias, num_bytes, bias is not None, data.operand[0])
        self._shapes.setdefault((n, k), prepared)
        return prepared

    def input_format(self, weight: PreparedLinear) -> ActivationFormat:
        return self._gemm.input_format(weight.data.power_of_two) if isinstance(weight.data, Blocks) else UNQUANTIZED

    def quantizes_heads(self, count: int, heads: PreparedLinear, consumer: PreparedLinear) -> bool:
        """See `LinearCapabilities`."""
        if self._gemm.exponents or not isinstance(consumer.data, Blocks) or not isinstance(heads.data, Tensor):
            return False
        return quantizes_few_heads(count, heads.data, consumer.data.operand[0])

    def norms(self, x: Tensor, weight: PreparedLinear) -> bool:
        """See `LinearCapabilities`."""
        if not isinstance(weight.data, Blocks) or x.dtype != torch.bfloat16 or self._gemm.exponents:
            return False
        return norms_few(len(x), weight.data.operand[0])

    def run(self, x: ProductInput, weight: PreparedLinear) -> Tensor:
        data: Any = weight.data
        if isinstance(x, RowsToNorm):
            return self._few(x, weight)
        if not isinstance(data, Blocks):
            return super().run(unquantized(x), weight)
        width = (x.rows.data if isinstance(x, QuantizedActivation) else x).shape[1]
        if x.dtype != torch.bfloat16 or width != weight.in_features:
            raise ValueError(f"{len(x)} rows of {width} {x.dtype} do not fit {weight.in_features} in-features")
        if isinstance(x, Tensor) and self._quantizes(len(x), weight):
            return self._few(x, weight)
        return self._product(lambda: self._gemm.dense_rows(x, data.power_of_two), weight, len(x))

    def run_heads_quantized(self, x: Tensor, weight: PreparedLinear, format: ActivationFormat) -> QuantizedActivation:
        """See `LinearCapabilities`."""
        assert self._gemm.heads_quantized is not None
        return self._gemm.heads_quantized(x, weight.data, format.power_of_two, exponents=format.exponents)

    def fuse_mlp(self, gate_up: PreparedLinear, down: PreparedLinear, limit: float = 0.0) -> MLPCall | None:
        if not (isinstance(gate_up.data, Blocks) and isinstance(down.data, Blocks)):
            return None
        return partial(self.run_mlp, gate_up=gate_up, down=down, limit=limit)

    def run_mlp(self, x: Activation, gate_up: PreparedLinear, down: PreparedLinear, limit: float = 0.0) -> Tensor:
        """The activation between the two products is quantized in the kernel that computes it."""
        inner = self.run(x, gate_up)  # [T, 2I]
        return self._product(lambda: self._gemm.dense_silu_mul(inner, down.data.power_of_two, limit), down, len(inner))

    def _product(self, rows: Callable[[], Operand], weight: PreparedLinear, count: int) -> Tensor:
        """The product of `count` tokens with an FP8 weight: [T, N]."""
        if self._is_few(count, weight.data):
            return self._few(QuantizedRows(*rows()), weight)
        device = weight.data.operand[0].device
        out = torch.empty(count, weight.out_features, dtype=torch.bfloat16, device=device)
        if count:
            self._gemm.dense(rows(), weight.data.operand, out)
        return out if weight.bias is None else out.add_(weight.bias)

    def _quantizes(self, count: int, weight: PreparedLinear) -> bool:
        """Whether the product of `count` unquantized rows quantizes them itself."""
        return weight.in_features <= MOST_QUANTIZED and self._is_few(count, weight.data)

    def _is_few(self, count: int, blocks: Blocks) -> bool:
        return not self._gemm.exponents and is_few(count, blocks.operand[0])

    def _few(self, rows: QuantizedRows | Tensor | RowsToNorm, weight: PreparedLinear) -> Tensor:
        """The product of few rows, by Triton."""
        from moe_engine.kernels.linear.triton_block_gemm import block_gemm

        data, scales = weight.data.operand
        blocks = BlockWeight(data, scales, weight.data.power_of_two)
        tiles = None if isinstance(rows, RowsToNorm) else FEW_BLOCK_FP8
        return block_gemm(rows, blocks, torch.bfloat16, weight.bias, tiles)

    def warm_up(self, shapes: StepShapes) -> int:
        counts = row_counts(shapes.tokens)
        for weight in self._shapes.values():
            device = weight.data.operand[0].device
            rows = torch.zeros(max(counts, default=0), weight.in_features, dtype=torch.bfloat16, device=device)
            for count in counts:
                self.run(rows[:count], weight)
        return len(counts) * len(self._shapes)
