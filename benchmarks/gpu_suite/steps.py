"""Tokens of a decode step over scattered pages: the common input of cases of attention and of caches.

Legend: R requests, T tokens.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from benchmarks.attention_cases import paged_queries, pool_size
from moe_engine.kernels.queries import PagedQueries

PAGE = 128
"""Slots of a page: whole pools, blocks and windows of any model."""


@dataclass(frozen=True)
class Decodes:
    """One token of each request. The contexts differ by a token each, so that of N requests N / n complete a window of
    n tokens, as on average over a text."""

    queries: PagedQueries
    positions: Tensor  # [R] int64
    slots: Tensor  # [R] int64

    @classmethod
    def of(cls, requests: int, context: int, device: str) -> Decodes:
        """`context`: of the longest request."""
        asked = paged_queries(requests, 1, context, device, PAGE)
        lens = [context - i % PAGE % context for i in range(requests)]
        lengths = torch.tensor(lens, dtype=torch.int32, device=device)
        positions = lengths.long() - 1
        slots = asked.slot_table[torch.arange(requests, device=device), positions].long()
        return cls(replace(asked, context_lens=lens, context_lens_device=lengths), positions, slots)

    @property
    def num_slots(self) -> int:
        return pool_size(self.queries)


def exact(*shape: int, device: str, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """Small integers: all rows compute the same scores from them, and of equal ones select the lower position."""
    return torch.randint(-2, 3, shape, device=device).to(dtype)
