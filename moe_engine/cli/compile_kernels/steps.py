"""Tensors of a step on a device, from its sizes only.

Legend: T tokens, R requests, S sampled rows.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from moe_engine.kernels.queries import AttentionBatch, PagedQueries
from moe_engine.kernels.warmup_sizes import StepSize


class StepTensors:
    """Creates a step's tensors on the device, split from one upload like in the engine."""

    def __init__(self, device: torch.device, max_requests: int, max_context: int, page_size: int) -> None:
        self._device = device
        self._page_size = page_size
        self._slot_table = torch.empty(max_requests + 1, max_context, dtype=torch.int32, device=device)

    def integers(self, *counts: int, dtype: torch.dtype = torch.int64) -> tuple[Tensor, ...]:
        """Adjacent views of one tensor."""
        return torch.empty(sum(counts), dtype=dtype, device=self._device).split(list(counts))

    def rows(self, count: int, width: int, dtype: torch.dtype) -> torch.Tensor:
        """[count, width]."""
        return torch.empty(count, width, dtype=dtype, device=self._device)

    def _queries(self, lens: list[int], contexts: list[int]) -> PagedQueries:
        count = len(lens)
        lengths, starts, rows = self.integers(count, count + 1, count, dtype=torch.int32)
        return PagedQueries(lens, contexts, rows, starts, lengths, self._slot_table, self._page_size)

    def attention(self, size: StepSize, visible: bool = False) -> AttentionBatch:
        """Decodes first, as models expect. visible: decodes have `PagedQueries.visible`."""
        decode = prefill = None
        if size.decodes:
            decode = self._queries([size.queries] * size.decodes, [size.context] * size.decodes)
            if visible:
                decode = replace(decode, visible=self.integers(decode.num_tokens)[0])
        if size.prefill:
            prefill = self._queries([size.prefill], [size.prefix + size.prefill])
        return AttentionBatch(decode, prefill)
