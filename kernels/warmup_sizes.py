"""Warm-up sizes: a minimal set of steps that launches every kernel, with sizes up to the largest, by powers of two.

Kernels select tiles by the number of tokens, and consecutive limits differ at least by a factor of two: between two
powers of two no new kernel appears. An odd size is included, since uploads are then sliced into unaligned arguments.
Warm-up runs these steps before READY, and ``moe-engine compile`` compiles for them. Imports no torch.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

ODD = 3
PREFIX = 1000
"""Cached tokens before a continued prefill, if the context has room: long enough that MLA uses the absorbed form for
short chunks and the expanded form for long ones."""

MOST_ABSORBED = 512
"""Max query tokens of a chunk in MLA's absorbed form."""


@dataclass(frozen=True)
class StepSize:
    """`decodes` requests with `queries` tokens each at the end of `context`, and one request with `prefill` tokens
    after a prefix of `prefix` tokens."""

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
    return sorted(powers | {largest, min(ODD, largest)}) if largest > 0 else []


def prompt_sizes(max_chunk: int, max_context: int) -> Iterator[StepSize]:
    """Prompts from their first token, and chunks that continue one."""
    for tokens in ladder(min(max_chunk, max_context - 1)):
        yield StepSize(0, 1, 0, tokens)
        prefix = min(PREFIX, max_context - 1 - tokens)
        if prefix > 0:
            yield StepSize(0, 1, 0, tokens, prefix)


def step_sizes(max_requests: int, max_chunk: int, max_context: int, num_drafts: int) -> Iterator[StepSize]:
    """Decodes of all sizes with short and long contexts, verification of drafts, prompts, chunks in both forms of
    attention, and mixed steps."""
    contexts = sorted({min(64, max_context), min(4096, max_context), max_context})
    for requests in ladder(max_requests):
        for context in contexts:
            yield StepSize(requests, 1, context)
            if num_drafts and context > num_drafts:
                yield StepSize(requests, 1 + num_drafts, context)
    for size in prompt_sizes(max_chunk, max_context):
        yield size
        if size.prefix:
            yield StepSize(2, 1, min(64, max_context), size.prefill, size.prefix)
            if size.prefill <= MOST_ABSORBED:
                yield StepSize(1, size.prefill, size.prefix + size.prefill)
