"""Dispatch on one rank: sort the (token, choice) pairs by expert, and sum them back.

Legend: T tokens, K experts per token, M = T*K rows, E experts.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from moe_engine.kernels.experts.protocol import ExpertBatch
from moe_engine.kernels.quantization.protocol import UNQUANTIZED, Activation, ActivationFormat, unquantized
from moe_engine.parallel.dispatch.protocol import Phase, Tokens


@dataclass(frozen=True)
class LocalHandle:
    """Dispatch data for combine: the row of each (token, choice)."""

    position: Tensor  # [T, K] row of the batch
    num_tokens: int


class LocalDispatcher:
    """Produces the ``grouped`` layout; `combine` applies the router weights. Interface of `PhasedDispatcher`."""

    def __init__(self, num_experts: int) -> None:
        self._num_experts = num_experts

    takes_rows = False

    def dispatch(
        self,
        x: Activation,
        topk_ids: Tensor,
        topk_weights: Tensor,
        phase: Phase = "prefill",
        format: ActivationFormat = UNQUANTIZED,
    ) -> tuple[ExpertBatch, LocalHandle]:
        """x [T, D], topk_ids [T, K] -> rows sorted by expert, then by token. All phases are equal."""
        x = unquantized(x)
        num_tokens, top_k = topk_ids.shape
        flat = topk_ids.reshape(-1).long()
        order = torch.argsort(flat, stable=True)  # [M]
        counts = torch.bincount(flat, minlength=self._num_experts)
        offsets = torch.zeros(self._num_experts + 1, dtype=torch.int32, device=x.device)
        offsets[1:] = counts.cumsum(0)
        position = torch.empty_like(order)
        position[order] = torch.arange(order.numel(), device=x.device)
        rows = x.index_select(0, order // top_k)
        return ExpertBatch("grouped", rows, offsets=offsets), LocalHandle(position.view(num_tokens, top_k), num_tokens)

    def combine(self, rows: Tensor, topk_weights: Tensor, handle: LocalHandle) -> Tensor:
        """rows [M, D] in dispatch order, weights [T, K] -> [T, D], summed over K in float32 in column order."""
        chosen = rows.index_select(0, handle.position.reshape(-1))
        chosen = chosen.view(*handle.position.shape, rows.shape[-1])  # [T, K, D]
        weighted = chosen.float().mul_(topk_weights.unsqueeze(-1))  # in place: no third copy of K rows per token
        return weighted.sum(dim=1).to(rows.dtype)


class LocalExchange:
    """The exchange of a single rank with all experts: the reference for layouts and multi-rank tests."""

    def deliver(self, tokens: Tokens, slot: int) -> tuple[Tokens, None]:
        return tokens, None

    def collect(self, partial: Tensor, handle: None) -> Tensor:
        return partial
