"""Permute and unpermute on one rank: from received tokens to the experts' rows and back.

Legend: N received tokens, K experts per token, E experts of this rank, D hidden.
"""

from __future__ import annotations

import torch
from torch import Tensor

from moe_engine.kernels.experts.protocol import ExpertBatch
from moe_engine.kernels.permutation.protocol import Permutation
from moe_engine.kernels.quantization.protocol import FP8, ActivationFormat, num_blocks
from moe_engine.parallel.dispatch.buffers import RowBuffer
from moe_engine.parallel.dispatch.payload import decode
from moe_engine.parallel.dispatch.protocol import NUM_LIVE, DispatchShape, Tokens


class _PermutedRows:
    """Copies tokens into the rows of a batch, in buffers of their own for every slot."""

    def __init__(self, shape: DispatchShape, permutation: Permutation, device: torch.device) -> None:
        self._num_experts = shape.num_local
        self._dtype = shape.dtype
        self._permutation = permutation
        self._rows = [RowBuffer(shape.hidden, shape.dtype, device) for _ in range(NUM_LIVE)]
        self._fp8_rows = [RowBuffer(shape.hidden, FP8, device) for _ in range(NUM_LIVE)]
        self._scales = [RowBuffer(num_blocks(shape.hidden), torch.float32, device) for _ in range(NUM_LIVE)]

    def _permute(
        self, tokens: Tokens, positions: Tensor, num_rows: int, keeps_fp8: bool, slot: int, by_column: bool = False
    ) -> tuple[Tensor, Tensor | None]:
        """[num_rows, D] in the activation dtype, or in FP8 with scales, column-major with `by_column`."""
        if not keeps_fp8 or tokens.scales is None:
            rows = self._rows[slot].take(num_rows)
            self._permutation.permute(decode(tokens, self._dtype), positions, rows)
            return rows, None
        rows, scales = self._fp8_rows[slot].take(num_rows), self._scales[slot].take(num_rows)
        if by_column:
            scales = scales.view(scales.shape[1], num_rows).t()
        self._permutation.permute(tokens.data, positions, rows, tokens.scales, scales)
        return rows, scales

    def reduce(self, rows: Tensor, positions: Tensor, weights: Tensor) -> Tensor:
        return self._permutation.combine(rows, positions, weights)


class GroupedLayout(_PermutedRows):
    """`grouped`: one row per local (token, choice), sorted by expert, then by arrival; `aligned` for kernels with a row
    alignment. Synchronizes with the device, unless the exchange has read the counts."""

    def expand(self, tokens: Tokens, format: ActivationFormat, slot: int) -> tuple[ExpertBatch, Tensor]:
        alignment = format.row_alignment
        if alignment > 1:
            order = self._permutation.sort_by_expert(tokens.ids, self._num_experts, alignment, marks_padding=False)
            count = self._count(tokens, order.offsets, alignment)
            rows, scales = self._permute(tokens, order.positions, count, format.rows, slot, format.column_scales)
            batch = ExpertBatch("aligned", rows, scales=scales, dtype=self._dtype, ends=order.ends, alignment=alignment)
            return batch, order.positions
        offsets, positions = self._permutation.group(tokens.ids, self._num_experts)
        rows, scales = self._permute(tokens, positions, self._count(tokens, offsets, 1), format.rows, slot)
        return ExpertBatch("grouped", rows, offsets=offsets, scales=scales, dtype=self._dtype), positions

    def _count(self, tokens: Tokens, offsets: Tensor, alignment: int) -> int:
        """Rows of the batch, with the padding of groups."""
        if tokens.counts is None:
            return int(offsets.cpu().numpy()[-1])
        return sum(-(-count // alignment) * alignment for count in tokens.counts)


class PaddedLayout(_PermutedRows):
    """`padded`: [E, capacity, D] with counts on the device; shapes depend on no value and the host never waits.

    A token has an expert at most once, so the capacity is the max number of received tokens.
    """

    def __init__(self, shape: DispatchShape, permutation: Permutation, device: torch.device) -> None:
        super().__init__(shape, permutation, device)
        self._capacity = shape.num_ranks * shape.max_tokens

    def expand(self, tokens: Tokens, format: ActivationFormat, slot: int) -> tuple[ExpertBatch, Tensor]:
        sizes = self._num_experts, self._capacity
        counts, positions = self._permutation.place(tokens.ids, *sizes)
        rows, scales = self._permute(tokens, positions, self._num_experts * self._capacity, format.rows, slot)
        x, scales = rows.unflatten(0, sizes), None if scales is None else scales.unflatten(0, sizes)
        return ExpertBatch("padded", x, counts=counts, scales=scales, dtype=self._dtype), positions

    def reduce(self, rows: Tensor, positions: Tensor, weights: Tensor) -> Tensor:
        return super().reduce(rows.flatten(0, 1), positions, weights)
