"""Routed experts by DeepGEMM's grouped products, FP8 or bf16: gate and up, SiLU-mul, down.

Local tokens of a decode step are few rows for each expert, and most of DeepGEMM's aligned rows would be padding: the
Triton kernels run them over the same weights (measured as faster in vLLM's PR 13932). `aligned` batches of few rows
have the smaller tile's alignment.

Legend: D hidden, I expert width, E experts, M rows.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from moe_engine.kernels.experts.batch import ExpertBatch, ExpertWeights
from moe_engine.kernels.experts.protocol import ExpertsCapabilities, QuantizedExperts
from moe_engine.kernels.gated_activation import activate
from moe_engine.kernels.linear.deep_gemm_products import DeepGemm, Groups, Operand
from moe_engine.kernels.permutation.protocol import ExpertRows
from moe_engine.kernels.quantization.groups import RowGroups
from moe_engine.kernels.quantization.protocol import (
    BLOCK,
    BLOCK_FP8,
    FP8,
    UNQUANTIZED,
    Activation,
    ActivationFormat,
    BlockFP8,
    BlockWeight,
    QuantizedActivation,
    QuantizedRows,
    unquantized,
)
from moe_engine.kernels.quantization.reference import dequantize_weight
from moe_engine.kernels.vendors.warming import StepShapes, row_counts

if TYPE_CHECKING:
    from moe_engine.kernels.experts.triton_experts import TritonExperts

ROOMY = 2
"""Aligned rows per valid row above which the intermediate is compacted before the activation."""

FEW_ROWS = 64
"""Mean rows of an expert, up to which padding to DeepGEMM's 128 rows costs more than its faster tiles save."""


@dataclass(frozen=True)
class Stack:
    """A matrix [N, K] of every expert.

    Attributes:
        data: [E, N, K], e4m3 or bf16.
        memory: the stored scales; None for bf16.
        scales: a view of `memory` in the library's layout.
    """

    data: Tensor
    memory: Tensor | None
    scales: Tensor | None

    @property
    def operand(self) -> Operand | Tensor:
        return self.data if self.scales is None else (self.data, self.scales)

    @property
    def num_bytes(self) -> int:
        return sum(x.numel() * x.element_size() for x in (self.data, self.memory) if x is not None)


@dataclass(frozen=True)
class Layer:
    """Type of `ExpertWeights.data`. few: the same memory, for the kernel of few rows; None: there is none."""

    gate_up: Stack
    down: Stack
    power_of_two: bool = False
    few: ExpertWeights | None = None


class DeepGemmExperts:
    """`ExpertsKernel`; supports all layouts. No host synchronization.

    Args:
        deep_gemm: the library; default: the installed one.

    Raises:
        ImportError: the library is missing or lacks a required function.
    """

    name = "deep_gemm"

    def __init__(self, deep_gemm: DeepGemm | None = None) -> None:
        self._gemm = deep_gemm or DeepGemm()
        self._few = _kernel_of_few_rows(self._gemm)
        self._shapes: dict[tuple[Any, ...], ExpertWeights] = {}

    @property
    def capabilities(self) -> ExpertsCapabilities:
        blocks = QuantizedExperts(self.allocate_blocks, self.load_expert_blocks)
        gemm = self._gemm
        return ExpertsCapabilities(
            {BlockFP8: blocks},
            row_alignment=self._row_alignment,
            column_scales=not gemm.exponents,
            routed_rows=self.routed_rows,
            takes_shared=True,
            clamps=True,
            read_first=lambda weights, slot: weights.data.gate_up.data[slot:],
            warm_up=self.warm_up,
        )

    def _row_alignment(self, weights: ExpertWeights, mean_rows: int = 0) -> int:
        return self._gemm.row_alignment(weights.data.gate_up.data.device, mean_rows)

    def allocate(self, num_experts: int, hidden: int, width: int, dtype: Any, device: Any) -> ExpertWeights:
        if dtype != torch.bfloat16:
            raise ValueError(f"DeepGEMM multiplies bfloat16 or block FP8, not {dtype}")
        gate_up, down = (
            Stack(torch.empty(num_experts, *shape, dtype=dtype, device=device), None, None)
            for shape in ((2 * width, hidden), (hidden, width))
        )
        return self._weights(num_experts, hidden, width, Layer(gate_up, down))

    def allocate_blocks(
        self, num_experts: int, hidden: int, width: int, device: Any, format: BlockFP8 = BLOCK_FP8
    ) -> ExpertWeights:
        """See the protocol; experts of sizes that the library does not support in FP8 are kept in bf16."""
        if width % BLOCK or not self._gemm.serves(hidden, width) or not self._gemm.serves(2 * width, hidden):
            return self.allocate(num_experts, hidden, width, torch.bfloat16, device)
        gate_up = self._blocks(num_experts, 2 * width, hidden, device)
        down = self._blocks(num_experts, hidden, width, device)
        return self._weights(num_experts, hidden, width, Layer(gate_up, down, format.power_of_two))

    def _blocks(self, num_experts: int, n: int, k: int, device: Any) -> Stack:
        data = torch.empty(num_experts, n, k, dtype=FP8, device=device)
        if not self._gemm.exponents:
            scales = torch.empty(num_experts, -(-n // BLOCK), -(-k // BLOCK), device=device)
            return Stack(data, scales, scales)
        columns = self._gemm.packed_columns(k)
        memory = torch.empty(num_experts, columns, -(-n // 4) * 4, dtype=torch.int32, device=device)
        return Stack(data, memory, memory.transpose(1, 2)[:, :n])

    def _weights(self, num_experts: int, hidden: int, width: int, layer: Layer) -> ExpertWeights:
        num_bytes = layer.gate_up.num_bytes + layer.down.num_bytes
        if self._few is not None:
            parts = (layer.gate_up.data, layer.gate_up.scales, layer.down.data, layer.down.scales)
            layer = replace(layer, few=self._few.over(num_experts, hidden, width, *parts, layer.power_of_two))
        weights = ExpertWeights(num_experts, hidden, width, layer, num_bytes)
        self._shapes.setdefault((num_experts, hidden, width, layer.gate_up.data.dtype), weights)
        return weights

    def load_expert(self, weights: ExpertWeights, expert: int, gate: Tensor, up: Tensor, down: Tensor) -> None:
        layer: Layer = weights.data
        if layer.gate_up.scales is not None:
            raise ValueError("these experts were allocated in block FP8: load_expert_blocks fills them")
        layer.gate_up.data[expert, : weights.width].copy_(gate)
        layer.gate_up.data[expert, weights.width :].copy_(up)
        layer.down.data[expert].copy_(down)

    def load_expert_blocks(
        self, weights: ExpertWeights, expert: int, gate: BlockWeight, up: BlockWeight, down: BlockWeight
    ) -> None:
        layer: Layer = weights.data
        if layer.gate_up.scales is None:
            self.load_expert(weights, expert, *(dequantize_weight(part) for part in (gate, up, down)))
            return
        both = BlockWeight(
            torch.cat((gate.data, up.data)), torch.cat((gate.scales, up.scales)), gate.power_of_two and up.power_of_two
        )
        for stack, weight in ((layer.gate_up, both), (layer.down, down)):
            data, scales = self._gemm.weight(weight)
            assert stack.scales is not None
            stack.data[expert].copy_(data)
            stack.scales[expert].copy_(scales)

    def expert_memory(self, weights: ExpertWeights, expert: int) -> list[Tensor]:
        layer: Layer = weights.data
        parts = (layer.gate_up.data, layer.gate_up.memory, layer.down.data, layer.down.memory)
        return [part[expert] for part in parts if part is not None]

    def input_format(self, weights: ExpertWeights) -> ActivationFormat:
        layer: Layer = weights.data
        return UNQUANTIZED if layer.gate_up.scales is None else self._gemm.expert_format(layer.power_of_two)

    def run_routed(
        self, x: Activation, topk_weights: Tensor, topk_ids: Tensor, weights: ExpertWeights, add: Tensor | None = None
    ) -> Tensor:
        if not len(x):
            return torch.empty(0, weights.hidden, dtype=x.dtype, device=topk_ids.device)
        sums = self.routed_rows(x, topk_weights, topk_ids, weights, add)
        return self._gemm.permutation.combine(sums.rows, sums.positions, sums.weights, sums.add)

    def routed_rows(
        self, x: Activation, topk_weights: Tensor, topk_ids: Tensor, weights: ExpertWeights, add: Tensor | None = None
    ) -> ExpertRows:
        """Unquantized tokens are quantized once and written directly to their aligned positions. At least one token."""
        layer, permutation = weights.data, self._gemm.permutation
        width = (x.rows.data if isinstance(x, QuantizedActivation) else x).shape[1]
        if x.dtype != torch.bfloat16 or width != weights.hidden:
            raise ValueError(f"rows of {width} {x.dtype} do not fit experts of hidden size {weights.hidden}")
        if layer.few is not None and topk_ids.numel() <= FEW_ROWS * weights.num_experts:
            assert self._few is not None
            few = replace(layer.few, activation=weights.activation)
            return self._few.routed_rows(x, topk_weights, topk_ids, few, add)
        alignment, by_ends = self._gemm.alignment, self._gemm.row_alignment(topk_ids.device) > 0
        order = permutation.sort_by_expert(topk_ids, weights.num_experts, alignment, marks_padding=not by_ends)
        groups = self._gemm.aligned(order)
        first: Operand | Tensor
        if layer.gate_up.scales is None:
            tokens = unquantized(x)
            first = tokens.new_empty(groups.num_rows, width)
            permutation.permute(tokens, order.positions, first)
        else:
            quantized = self._gemm.quantized(x, layer.power_of_two)
            rows = QuantizedRows.empty(groups.num_rows, width, quantized.data.device)
            permutation.permute(quantized.data, order.positions, rows.data, quantized.scales, rows.scales)
            first = self._gemm.operand(rows)
        middle, valid = self._first(first, weights, groups), RowGroups(order.ends, alignment)
        fp8 = layer.down.scales is not None
        second = self._gemm.silu_mul_groups(middle, valid, fp8, layer.power_of_two, weights.activation.limit)
        return ExpertRows(self._last(second, weights, groups), order.positions, topk_weights, add)

    def run(self, batch: ExpertBatch, weights: ExpertWeights) -> Tensor:
        x = batch.x
        if batch.result_dtype != torch.bfloat16 or x.shape[-1] != weights.hidden:
            raise ValueError(f"rows {list(x.shape)} {x.dtype} do not fit experts of hidden size {weights.hidden}")
        if not x.numel():
            return torch.empty_like(x, dtype=torch.bfloat16)
        if batch.layout == "padded":
            assert batch.counts is not None
            return self._padded(batch, batch.counts.to(torch.int32).contiguous(), weights)
        if batch.layout == "aligned":
            assert batch.ends is not None
            return self._aligned(batch, batch.ends, weights)
        assert batch.offsets is not None
        groups = self._gemm.groups(batch.offsets, len(x))
        middle = self._first(self._spread(batch, weights.data, groups), weights, groups)
        return self._last(self._second(middle, weights, groups), weights, groups)[groups.place]

    def _first(self, x: Operand | Tensor, weights: ExpertWeights, groups: Groups) -> Tensor:
        """x [rows, D] in aligned positions -> gate and up [rows, 2I]."""
        stack: Stack = weights.data.gate_up
        return self._product(x, stack, 2 * weights.width, groups)

    def _last(self, x: Operand | Tensor, weights: ExpertWeights, groups: Groups) -> Tensor:
        """x [rows, I] in aligned positions -> [rows, D]."""
        return self._product(x, weights.data.down, weights.hidden, groups)

    def _product(self, x: Operand | Tensor, stack: Stack, width: int, groups: Groups) -> Tensor:
        out = torch.empty(groups.num_rows, width, dtype=torch.bfloat16, device=groups.place.device)
        self._gemm.grouped(x, stack.operand, out, groups)
        return out

    def _second(self, middle: Tensor, weights: ExpertWeights, groups: Groups) -> Operand | Tensor:
        """The input of the second product, in aligned positions."""
        if groups.num_rows > ROOMY * len(groups.place):  # a decode step: most aligned rows are padding
            return self._gemm.spread(self._active(middle[groups.place], weights), groups)
        return self._active(middle, weights)

    def _spread(self, batch: ExpertBatch, layer: Layer, groups: Groups) -> Operand | Tensor:
        return self._gemm.spread(batch.x if layer.gate_up.scales is None else self._operand(batch, layer), groups)

    def _operand(self, batch: ExpertBatch, layer: Layer) -> Operand:
        """Rows [M, D] and their scales."""
        if batch.scales is None:
            return self._gemm.rows(batch.x, layer.power_of_two)
        return batch.x, batch.scales

    def _active(self, middle: Tensor, weights: ExpertWeights) -> Operand | Tensor:
        """silu(gate) * up of middle [rows, 2I], in the second product's input format."""
        layer: Layer = weights.data
        if layer.down.scales is not None:
            return self._gemm.silu_mul(middle, layer.power_of_two, weights.activation.limit)
        gate, up = middle.chunk(2, dim=-1)
        return activate(gate, up, weights.activation)

    def _padded(self, batch: ExpertBatch, counts: Tensor, weights: ExpertWeights) -> Tensor:
        """[E, capacity, D]; rows after the counts are neither read nor written."""
        expected = expected_rows(batch.mean_rows, batch.x.shape[1])

        def multiply(a: Operand | Tensor, b: Operand | Tensor, out: Tensor) -> None:
            self._gemm.masked(a, b, out, counts, expected)

        return self._in_place(batch, RowGroups(counts), weights, multiply)

    def _aligned(self, batch: ExpertBatch, ends: Tensor, weights: ExpertWeights) -> Tensor:
        """[M, D]; rows outside the groups are neither read nor written."""

        def multiply(a: Operand | Tensor, b: Operand | Tensor, out: Tensor) -> None:
            self._gemm.grouped_by_ends(a, b, out, ends, batch.alignment)

        return self._in_place(batch, RowGroups(ends, batch.alignment), weights, multiply)

    def _in_place(
        self,
        batch: ExpertBatch,
        groups: RowGroups,
        weights: ExpertWeights,
        multiply: Callable[[Operand | Tensor, Operand | Tensor, Tensor], None],
    ) -> Tensor:
        """Both products of the valid rows, in the layout of the batch."""
        layer: Layer = weights.data
        first: Operand | Tensor = batch.x
        if batch.scales is not None:
            first = self._gemm.received(batch.x, batch.scales, groups)
        elif layer.gate_up.scales is not None:
            first = self._gemm.group_rows(batch.x, groups, layer.power_of_two)
        shape = batch.x.shape[:-1]
        middle = torch.empty(*shape, 2 * weights.width, dtype=torch.bfloat16, device=groups.sizes.device)
        multiply(first, layer.gate_up.operand, middle)
        fp8, limit = layer.down.scales is not None, weights.activation.limit
        second = self._gemm.silu_mul_groups(middle, groups, fp8, layer.power_of_two, limit, batch.row_weights)
        out = middle.new_empty(*shape, weights.hidden)
        multiply(second, layer.down.operand, out)
        return out

    def warm_up(self, shapes: StepShapes) -> int:
        runs = 0
        for weights in self._shapes.values():
            device, experts = weights.data.gate_up.data.device, weights.num_experts
            for count in row_counts(shapes.expert_rows):
                offsets = torch.full((experts + 1,), count, dtype=torch.int32, device=device)
                offsets[0] = 0
                rows = torch.zeros(count, weights.hidden, dtype=torch.bfloat16, device=device)
                self.run(ExpertBatch("grouped", rows, offsets=offsets), weights)
                runs += 2
            if shapes.expert_capacity:
                rows = torch.zeros(experts, shapes.expert_capacity, weights.hidden, dtype=torch.bfloat16, device=device)
                counts = torch.zeros(experts, dtype=torch.int32, device=device)
                for mean in expected_classes(shapes.expert_capacity):
                    self.run(ExpertBatch("padded", rows, counts=counts, mean_rows=mean), weights)
                    runs += 2
        return runs


def _kernel_of_few_rows(gemm: DeepGemm) -> TritonExperts | None:
    if not gemm.shares_with_triton:
        return None
    from moe_engine.kernels.experts.triton_experts import TritonExperts

    return TritonExperts()


def expected_rows(mean_rows: int, capacity: int) -> int:
    """Rows of an expert for the tile choice of a masked product: the next power of two, since each value may compile a
    kernel. Without a mean an eighth of the capacity."""
    mean = mean_rows or max(1, capacity // 8)
    return min(capacity, 1 << (mean - 1).bit_length())


def expected_classes(capacity: int) -> list[int]:
    """Every value of `expected_rows`."""
    return [*(1 << bit for bit in range((capacity - 1).bit_length())), capacity]
