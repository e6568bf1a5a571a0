"""Routed experts on a GPU in Triton, for both batch layouts, with bf16 weights, or weights in FP8 or 4 bits kept as
stored.

Legend: T tokens, K experts per token, D hidden, I expert width, E experts, M rows.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from moe_engine.kernels.device import multiplies_fp8
from moe_engine.kernels.experts.batch import ExpertBatch, ExpertWeights
from moe_engine.kernels.experts.protocol import ExpertsCapabilities, QuantizedExperts
from moe_engine.kernels.experts.tiles import FOUR_BITS_WIDE, ExpertTiles, four_bits_tiles, row_classes, tiles_of
from moe_engine.kernels.experts.triton_grouped_gemm import Groups, down, gate_up, has_row_scales
from moe_engine.kernels.linear import triton_four_bits
from moe_engine.kernels.permutation.protocol import ExpertRows
from moe_engine.kernels.permutation.triton_permute import TritonPermutation
from moe_engine.kernels.quantization.codes import CodedWeight, GroupCodes
from moe_engine.kernels.quantization.groups import RowGroups
from moe_engine.kernels.quantization.protocol import (
    BLOCK_FP8,
    FP8,
    ROW_FP8,
    UNQUANTIZED,
    Activation,
    ActivationFormat,
    BlockFP8,
    BlockWeight,
    QuantizedActivation,
    QuantizedRows,
    RowFP8,
    RowWeight,
    num_blocks,
)
from moe_engine.kernels.quantization.reference import dequantize_weight
from moe_engine.kernels.quantization.triton_groups import quantize_groups
from moe_engine.kernels.quantization.triton_rows import quantize_rows
from moe_engine.kernels.triton.launch import element
from moe_engine.kernels.vendors.warming import StepShapes

PAIRS = 48
"""Pairs (token, expert) up to which each is a group of its own: experts that several tokens choose are rare, their
second read hits the cache, and sorting would cost a launch."""

_PADDED_MEAN = 64
"""Rows per expert for the tile choice of a padded batch whose size is unknown to the host: the capacity is a worst
case."""


@dataclass(frozen=True)
class TritonExpertWeights:
    """gate_up [E, 2I, D], gate's rows first, or up alone [E, I, D] without a gate, and down [E, D, I]; in FP8 with
    float32 scales per 128 x 128 block:
    gate_up_scales [E, 2, ceil(I / 128), ceil(D / 128)], down_scales [E, ceil(D / 128), ceil(I / 128)]; or per row:
    [E, 2I] and [E, D].
    In 4 bits with a `format`: uint8 [E, 2I, D / 2] and [E, D, I / 2], scales as in `triton_four_bits`; of NVFP4 float32
    factors gate_up_whole [E, 2] and down_whole [E, 1] too."""

    gate_up: Tensor
    down: Tensor
    gate_up_scales: Tensor | None = None
    down_scales: Tensor | None = None
    power_of_two: bool = False
    format: GroupCodes | None = None
    gate_up_whole: Tensor | None = None
    down_whole: Tensor | None = None

    @property
    def memory(self) -> list[Tensor]:
        scales = (self.gate_up_scales, self.down_scales, self.gate_up_whole, self.down_whole)
        return [part for part in (self.gate_up, self.down, *scales) if part is not None]

    @property
    def fp8(self) -> bool:
        return self.gate_up_scales is not None and self.format is None

    @property
    def row_scales(self) -> bool:
        return has_row_scales(self.gate_up_scales, self.format)


class TritonExperts:
    """`ExpertsKernel`. No host synchronization.

    Args:
        deterministic: tiles do not depend on the number of rows, so that results are batch-invariant, bit for bit.
    """

    name = "triton"

    def __init__(self, deterministic: bool = False) -> None:
        self._deterministic = deterministic
        self._permutation = TritonPermutation()
        self._identity: dict[torch.device, Tensor] = {}
        """int32 [PAIRS], 0 and on."""
        self._shapes: dict[tuple[Any, ...], ExpertWeights] = {}  # one layer per shape

    @property
    def capabilities(self) -> ExpertsCapabilities:
        blocks = QuantizedExperts(self.allocate_blocks, self.load_expert_blocks)
        codes = QuantizedExperts(
            self.allocate_codes, self.load_codes, takes=lambda format: format.four_bits, squared=True
        )
        return ExpertsCapabilities(
            {BlockFP8: blocks, RowFP8: QuantizedExperts(self.allocate_rows, self.load_expert_rows), GroupCodes: codes},
            routed_rows=self.routed_rows,
            takes_shared=True,
            read_first=lambda weights, slot: weights.data.gate_up[slot:],
            allocate_squared=partial(self.allocate, squared=True),
            biases=True,
            clamps=True,
            warm_up=self.warm_up,
        )

    def allocate(
        self, num_experts: int, hidden: int, width: int, dtype: Any, device: Any, squared: bool = False
    ) -> ExpertWeights:
        gate_up = torch.empty(num_experts, width if squared else 2 * width, hidden, dtype=dtype, device=device)
        down = torch.empty(num_experts, hidden, width, dtype=dtype, device=device)
        return self._weights(num_experts, hidden, width, TritonExpertWeights(gate_up, down))

    def allocate_blocks(
        self, num_experts: int, hidden: int, width: int, device: Any, format: BlockFP8 = BLOCK_FP8
    ) -> ExpertWeights:
        """See the protocol; on devices without FP8 products the experts become bf16."""
        wide, narrow = num_blocks(hidden), num_blocks(width)
        scales = (2, narrow, wide), (wide, narrow)
        return self._allocate_fp8(num_experts, hidden, width, device, scales, format.power_of_two)

    def allocate_rows(
        self, num_experts: int, hidden: int, width: int, device: Any, format: RowFP8 = ROW_FP8
    ) -> ExpertWeights:
        """As `allocate_blocks`, with a scale per row."""
        return self._allocate_fp8(num_experts, hidden, width, device, ((2 * width,), (hidden,)), format.power_of_two)

    def _allocate_fp8(
        self, num_experts: int, hidden: int, width: int, device: Any, scales: tuple[tuple[int, ...], tuple[int, ...]],
        power_of_two: bool,
    ) -> ExpertWeights:  # fmt: skip
        """scales: shapes of an expert's, of gate and up and of down."""
        if not multiplies_fp8(torch.device(device).type):
            return self.allocate(num_experts, hidden, width, torch.bfloat16, device)
        gate_up = torch.empty(num_experts, 2 * width, hidden, dtype=FP8, device=device)
        down = torch.empty(num_experts, hidden, width, dtype=FP8, device=device)
        up_scales, down_scales = (torch.empty(num_experts, *shape, device=device) for shape in scales)
        data = TritonExpertWeights(gate_up, down, up_scales, down_scales, power_of_two)
        return self._weights(num_experts, hidden, width, data)

    def allocate_codes(
        self, num_experts: int, hidden: int, width: int, device: Any, format: GroupCodes, squared: bool = False
    ) -> ExpertWeights:
        """Reserves experts in 4 bits, multiplied as stored."""
        parts = (num_experts, width if squared else 2 * width, hidden), (num_experts, hidden, width)
        (gate_up, up_scales), (down, down_scales) = (triton_four_bits.empty(format, *part, device) for part in parts)
        whole = [torch.zeros(num_experts, count, device=device) if format.nvfp4 else None for count in (2, 1)]
        data = TritonExpertWeights(gate_up, down, up_scales, down_scales, False, format, *whole)
        return self._weights(num_experts, hidden, width, data)

    def _weights(self, num_experts: int, hidden: int, width: int, data: TritonExpertWeights) -> ExpertWeights:
        self._permutation.sort_in_one_launch(data.gate_up.device)
        num_bytes = sum(part.numel() * part.element_size() for part in data.memory)
        weights = ExpertWeights(num_experts, hidden, width, data, num_bytes)
        kind = (data.gate_up.dtype, data.format, data.row_scales)
        self._shapes.setdefault((num_experts, hidden, width, *kind), weights)
        return weights

    def over(
        self, num_experts: int, hidden: int, width: int, gate_up: Tensor, gate_up_scales: Tensor | None, down: Tensor,
        down_scales: Tensor | None, power_of_two: bool,
    ) -> ExpertWeights:  # fmt: skip
        """Weights in another owner's memory: gate_up [E, 2I, D] and down [E, D, I], in FP8 with float32 scales
        [E, 2I / 128, D / 128] and [E, D / 128, I / 128]."""
        if gate_up_scales is not None:
            gate_up_scales = gate_up_scales.unflatten(1, (2, num_blocks(width)))
        data = TritonExpertWeights(gate_up, down, gate_up_scales, down_scales, power_of_two)
        return self._weights(num_experts, hidden, width, data)

    def load_expert(self, weights: ExpertWeights, expert: int, gate: Tensor, up: Tensor, down: Tensor) -> None:
        data: TritonExpertWeights = weights.data
        data.gate_up[expert, : len(gate)].copy_(gate)
        data.gate_up[expert, len(gate) :].copy_(up)
        data.down[expert].copy_(down)

    def load_expert_blocks(
        self, weights: ExpertWeights, expert: int, gate: BlockWeight, up: BlockWeight, down: BlockWeight
    ) -> None:
        if self._load_fp8(weights, expert, gate, up, down):
            gate_scales, up_scales = weights.data.gate_up_scales[expert]
            gate_scales.copy_(gate.scales)
            up_scales.copy_(up.scales)

    def load_expert_rows(
        self, weights: ExpertWeights, expert: int, gate: RowWeight, up: RowWeight, down: RowWeight
    ) -> None:
        if self._load_fp8(weights, expert, gate, up, down):
            torch.cat((gate.scales, up.scales), out=weights.data.gate_up_scales[expert])

    def _load_fp8(self, weights: ExpertWeights, expert: int, *parts: BlockWeight | RowWeight) -> bool:
        """Copies all but the scales of gate and up; False: the device has no FP8 products and stores the values."""
        data: TritonExpertWeights = weights.data
        if data.gate_up_scales is None or data.down_scales is None:
            self.load_expert(weights, expert, *map(dequantize_weight, parts))
            return False
        self.load_expert(weights, expert, *(part.data for part in parts))
        data.down_scales[expert].copy_(parts[-1].scales)
        return True

    def load_codes(
        self, weights: ExpertWeights, expert: int, gate: CodedWeight, up: CodedWeight, down: CodedWeight
    ) -> None:
        data = weights.data
        codes, scales, width = data.gate_up[expert], data.gate_up_scales[expert], data.gate_up.shape[1] // 2
        triton_four_bits.store(gate, codes[:width], scales[:, :width])
        triton_four_bits.store(up, codes[width:], scales[:, width:])
        triton_four_bits.store(down, data.down[expert], data.down_scales[expert])
        if data.format.nvfp4:
            whole = (data.gate_up_whole[expert, 0], data.gate_up_whole[expert, 1], data.down_whole[expert, 0])
            for place, part in zip(whole, (gate, up, down)):
                assert part.whole is not None
                place.copy_(part.whole[0])

    def expert_memory(self, weights: ExpertWeights, expert: int) -> list[Tensor]:
        return [part[expert] for part in weights.data.memory]

    def run(self, batch: ExpertBatch, weights: ExpertWeights) -> Tensor:
        x = batch.x.contiguous()
        if batch.layout == "padded":
            assert batch.counts is not None
            capacity, mean = x.shape[1], batch.mean_rows or _PADDED_MEAN
            sizes = weights.num_experts * capacity, min(capacity, mean), capacity
            groups = self._groups(batch.counts, weights, batch.result_dtype, *sizes)
        elif batch.layout == "grouped":
            assert batch.offsets is not None
            groups = self._grouped(batch.offsets, weights, batch.result_dtype, x.shape[0])
        else:
            raise ValueError(f"unknown layout {batch.layout!r}")
        rows: Tensor | QuantizedRows
        if batch.scales is not None:
            rows = QuantizedRows(x, batch.scales)
        elif batch.counts is not None and weights.data.fp8:
            rows = quantize_groups(x, RowGroups(batch.counts), weights.data.power_of_two)
        else:
            rows = self._quantized(x, weights)
        return self._products(rows, weights, groups, batch.result_dtype).view(x.shape)

    def input_format(self, weights: ExpertWeights) -> ActivationFormat:
        data: TritonExpertWeights = weights.data
        return ActivationFormat.fp8(data.power_of_two) if data.fp8 else UNQUANTIZED

    def run_routed(
        self, x: Activation, topk_weights: Tensor, topk_ids: Tensor, weights: ExpertWeights, add: Tensor | None = None
    ) -> Tensor:
        sums = self.routed_rows(x, topk_weights, topk_ids, weights, add)
        return self._permutation.combine(sums.rows, sums.positions, sums.weights, sums.add)

    def routed_rows(
        self, x: Activation, topk_weights: Tensor, topk_ids: Tensor, weights: ExpertWeights, add: Tensor | None = None
    ) -> ExpertRows:
        """Tokens are quantized once and read in place by the first product: no copy of K rows per token."""
        if topk_ids.numel() <= PAIRS and not self._deterministic:
            return self._pairs(x, topk_weights, topk_ids, weights, add)
        order = self._permutation.sort_by_expert(topk_ids, weights.num_experts)
        groups = self._grouped(order.offsets, weights, x.dtype, topk_ids.numel())
        rows = x.rows if isinstance(x, QuantizedActivation) else self._quantized(x.contiguous(), weights)
        out = self._products(rows, weights, groups, x.dtype, order.source, topk_ids.shape[1])
        return ExpertRows(out, order.positions, topk_weights, add)

    def _pairs(
        self, x: Activation, topk_weights: Tensor, topk_ids: Tensor, weights: ExpertWeights, add: Tensor | None
    ) -> ExpertRows:
        """`routed_rows` of few pairs, unsorted: pair p has row p."""
        ids, device = topk_ids.to(torch.int32).contiguous(), topk_ids.device
        if device not in self._identity:  # made by the eager run before a capture
            self._identity[device] = torch.arange(PAIRS, dtype=torch.int32, device=device)
        tiles = self._tiles_of(weights, x.dtype)
        groups = Groups(ids.view(-1), weights.num_experts, 0, ids.numel(), 1, tiles, pairs=True)
        rows = x.rows if isinstance(x, QuantizedActivation) else self._quantized(x.contiguous(), weights)
        out = self._products(rows, weights, groups, x.dtype, top_k=ids.shape[1])
        return ExpertRows(out, self._identity[device][: ids.numel()].view_as(ids), topk_weights, add)

    def warm_up(self, shapes: StepShapes) -> int:
        """Runs batches in the dispatcher's layout; rows of local tokens occur in the warm-up steps themselves. An idle
        rank would not launch any kernel in a warm-up step."""
        runs = 0
        for weights in self._shapes.values() if shapes.dispatched else ():
            device, experts = weights.data.gate_up.device, weights.num_experts
            plain = weights.data.gate_up_scales is None
            dtype = weights.data.gate_up.dtype if plain else getattr(torch, shapes.dtype)
            tiles = self._tiles_of(weights, dtype)
            for count in row_classes(experts, shapes.expert_rows, tiles):
                offsets = torch.zeros(experts + 1, dtype=torch.int32, device=device)
                self.run(ExpertBatch("grouped", _rows(count, weights, dtype), offsets=offsets), weights)
                runs += 2
            if shapes.expert_capacity:
                rows = _rows(experts * shapes.expert_capacity, weights, dtype).unflatten(0, (experts, -1))
                counts = torch.zeros(experts, dtype=torch.int32, device=device)
                for mean in row_classes(1, shapes.expert_capacity, tiles):
                    self.run(ExpertBatch("padded", rows, counts=counts, mean_rows=mean), weights)
                    runs += 2
        return runs

    def _grouped(self, offsets: Tensor, weights: ExpertWeights, dtype: torch.dtype, num_rows: int) -> Groups:
        return self._groups(offsets, weights, dtype, num_rows, -(-num_rows // weights.num_experts))

    def _groups(
        self, sizes: Tensor, weights: ExpertWeights, dtype: torch.dtype, num_rows: int, mean_rows: int,
        capacity: int = 0,
    ) -> Groups:  # fmt: skip
        return Groups(sizes, weights.num_experts, capacity, num_rows, mean_rows, self._tiles_of(weights, dtype))

    def _tiles_of(self, weights: ExpertWeights, dtype: torch.dtype) -> ExpertTiles:
        """`dtype`: of the result."""
        data: TritonExpertWeights = weights.data
        if data.format is None:
            return tiles_of(element(data.gate_up.dtype), self._deterministic)
        few = four_bits_tiles(data.format, weights.activation)
        return tiles_of(FOUR_BITS_WIDE if dtype == torch.float32 else few, self._deterministic)

    def _quantized(self, x: Tensor, weights: ExpertWeights) -> Tensor | QuantizedRows:
        """x [M, D] in the weights' activation format."""
        data: TritonExpertWeights = weights.data
        return quantize_rows(x, data.power_of_two) if data.fp8 else x

    def _products(
        self,
        x: Tensor | QuantizedRows,
        weights: ExpertWeights,
        groups: Groups,
        dtype: torch.dtype,
        source: Tensor | None = None,
        top_k: int = 1,
    ) -> Tensor:
        """x [M, D] (or [T, D] with the `source` of each row) -> [M, D]."""
        data: TritonExpertWeights = weights.data
        inner = gate_up(
            x, data.gate_up, data.gate_up_scales, groups, source, top_k, data.power_of_two, weights.bias, data.format,
            data.gate_up_whole, weights.activation,
        )  # fmt: skip
        return down(inner, data.down, data.down_scales, groups, dtype, weights.bias, data.format, data.down_whole)


def _rows(count: int, weights: ExpertWeights, dtype: torch.dtype) -> Tensor:
    return torch.zeros(count, weights.hidden, dtype=dtype, device=weights.data.gate_up.device)
