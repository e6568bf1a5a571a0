"""Permute and unpermute on one rank: from received tokens to the experts' rows and back.

Legend: N received tokens, K experts per token, E experts of this rank, D hidden.
"""

from __future__ import annotations

import torch
from torch import Tensor

from moe_engine.kernels.experts.protocol import ExpertBatch
from moe_engine.kernels.permutation.protocol import Permutation
from moe_engine.kernels.quantization.protocol import FP8, num_blocks
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
        self, tokens: Tokens, positions: Tensor, num_rows: int, keeps_fp8: bool, slot: int
    ) -> tuple[Tensor, Tensor | None]:
        """[num_rows, D] in the activation dtype, or in FP8 with scales."""
        if not keeps_fp8 or tokens.scales is None:
            rows = self._rows[slot].take(num_rows)
            self._permutation.permute(decode(tokens, self._dtype), positions, rows)
            return rows, None
        rows, scales = self._fp8_rows[slot].take(num_rows), self._scales[slot].take(num_rows)
        self._permutation.permute(tokens.data, positions, rows, tokens.scales, scales)
        return rows, scales

    def reduce(self, rows: Tensor, positions: Tensor, weights: Tensor) -> Tensor:
        return self._permutation.combine(rows, positions, weights)


class GroupedLayout(_PermutedRows):
    """`grouped`: one row per local (token, choice), sorted by expert, then by arrival. Synchronises with the device."""

    def expand(self, tokens: Tokens, keeps_fp8: bool, slot: int) -> tuple[ExpertBatch, Tensor]:
        offsets, positions = self._permutation.group(tokens.ids, self._num_experts)
        rows, scales = self._permute(tokens, positions, self._count(offsets), keeps_fp8, slot)
        return ExpertBatch("grouped", rows, offsets=offsets, scales=scales, dtype=self._dtype), positions

    def _count(self, offsets: Tensor) -> int:
        return int(offsets.cpu().numpy()[-1])


class PaddedLayout(_PermutedRows):
    """`padded`: [E, capacity, D] with counts on the device; shapes depend on no value and the host never waits.

    A token has an expert at most once, so the capacity is the max number of received tokens.
    """

    def __init__(self, shape: DispatchShape, permutation: Permutation, device: torch.device) -> None:
        super().__init__(shape, permutation, device)
        self._capacity = shape.num_ranks * shape.max_tokens

    def expand(self, tokens: Tokens, keeps_fp8: bool, slot: int) -> tuple[ExpertBatch, Tensor]:
        sizes = self._num_experts, self._capacity
        counts, positions = self._permutation.place(tokens.ids, *sizes)
        rows, scales = self._permute(tokens, positions, self._num_experts * self._capacity, keeps_fp8, slot)
        x, scales = rows.unflatten(0, sizes), None if scales is None else scales.unflatten(0, sizes)
        return ExpertBatch("padded", x, counts=counts, scales=scales, dtype=self._dtype), positions

    def reduce(self, rows: Tensor, positions: Tensor, weights: Tensor) -> Tensor:
        return super().reduce(rows.flatten(0, 1), positions, weights)
