"""The steps that a launch may run, as few of them as show every kernel: all sizes up to the largest, by powers of two.

Kernels choose tiles by the number of tokens, so sizes between two powers add nothing; an odd one is there because
uploads are cut into arguments that then are not aligned.

Legend: T tokens, R requests, S sampled rows.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from moe_engine.kernels.attention.protocol import AttentionBatch, PagedQueries

ODD = 3
PREFIX = 100
"""Tokens that stand in the cache before a prefill continues."""


@dataclass(frozen=True)
class StepSize:
    """`decodes` requests with `queries` tokens each, and one with `prefill` tokens after `prefix` of them."""

    decodes: int
    queries: int
    context: int
    prefill: int = 0
    prefix: int = 0

    @property
    def tokens(self) -> int:
        return self.decodes * self.queries + self.prefill


def ladder(largest: int) -> list[int]:
    """1, 2, 4, ... and `largest`, with an odd number among them."""
    powers = {1 << n for n in range(largest.bit_length()) if 1 << n <= largest}
    return sorted(powers | {largest, min(ODD, largest)})


def step_sizes(max_requests: int, max_chunk: int, max_context: int, num_drafts: int) -> Iterator[StepSize]:
    """Decodes of all sizes with short and long contexts, verifications of drafts, prefills from and after a prefix."""
    contexts = sorted({min(64, max_context), min(4096, max_context), max_context})
    for requests in ladder(max_requests):
        for context in contexts:
            yield StepSize(requests, 1, context)
            if num_drafts and context > num_drafts:
                yield StepSize(requests, 1 + num_drafts, context)
    for tokens in ladder(min(max_chunk, max_context - 1)):
        yield StepSize(0, 1, 0, tokens)
        if tokens + PREFIX < max_context:
            yield StepSize(0, 1, 0, tokens, PREFIX)
            yield StepSize(2, 1, min(64, max_context), tokens, PREFIX)


class StepTensors:
    """Makes a step's tensors on the device, cut from one upload as the engine cuts them."""

    def __init__(self, device: torch.device, max_requests: int, max_context: int, page_size: int) -> None:
        self._device = device
        self._page_size = page_size
        self._slot_table = torch.empty(max_requests + 1, max_context, dtype=torch.int32, device=device)

    def integers(self, *counts: int, dtype: torch.dtype = torch.int64) -> tuple[Tensor, ...]:
        """Neighbouring pieces of one tensor."""
        return torch.empty(sum(counts), dtype=dtype, device=self._device).split(list(counts))

    def _queries(self, lens: list[int], contexts: list[int]) -> PagedQueries:
        count = len(lens)
        lengths, starts, rows = self.integers(count, count + 1, count, dtype=torch.int32)
        return PagedQueries(lens, contexts, rows, starts, lengths, self._slot_table, self._page_size)

    def attention(self, size: StepSize) -> AttentionBatch:
        """Decodes first, as models expect."""
        decode = prefill = None
        if size.decodes:
            decode = self._queries([size.queries] * size.decodes, [size.context] * size.decodes)
        if size.prefill:
            prefill = self._queries([size.prefill], [size.prefix + size.prefill])
        return AttentionBatch(decode, prefill)
