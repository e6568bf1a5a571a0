"""Scratch memory of the attention backends, by what decides its size. The adapters take it from here and the memory
ledger counts it, so that there is one place to be wrong in. Imports no torch.

Sources: flashinfer/attention/scheduler.cuh (PrefillPlan, MLAPlan), FlashMLA csrc/api/dense_decode.h,
flash-attention hopper/flash_api.cpp.

Legend: T query tokens, H query heads, V width of a head's result (the latent, for the absorbed form).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

MIB = 1 << 20
MULTIPROCESSORS = 160
"""Of the largest GPU there are kernels for (B200: 148), where sizes are needed and no device is looked at."""

FLASHINFER_BYTES = 128 * MIB
"""What FlashInfer recommends for results of split contexts; plans that are recorded may need more."""

FLASHINFER_PLAN_BYTES = 8 * MIB
"""Of each FlashInfer wrapper, on the device (and page-locked on the host)."""

FLASHINFER_EAGER_WRAPPERS = 8
"""Wrappers that serve steps which are not recorded: in use, resting, and for both groups of a step."""

FLASHINFER_TILE = 16
"""Rows of the smallest tile of its GQA kernels."""

FA3_MOST_SPLITS = 128
FA3_SPLIT_BYTES = 256 * MIB
"""FlashAttention 3 takes memory for as many splits of every context as the longest of a batch might deserve: gigabytes
for MLA's wide results. More splits than fit here are not asked for."""

TRITON_ROWS = 2 * 128
"""Rows of partial results that a multiprocessor leaves at most: two blocks of the largest tile."""


@dataclass(frozen=True)
class AttentionLoad:
    """What decides the scratch memory of an attention backend on one rank.

    requests, tokens_each: of the largest step of decodes or verifications. heads, value_width: H and V.
    pages: of the longest context. graphs: recorded steps; 0: none.
    """

    requests: int
    tokens_each: int
    heads: int
    value_width: int
    pages: int
    graphs: int = 0

    @property
    def tokens(self) -> int:
        return self.requests * self.tokens_each

    @property
    def partial_bytes(self) -> int:
        """One float32 result and its log-sum-exp for every head of every query token."""
        return 4 * self.tokens * self.heads * (self.value_width + 1)

    @property
    def table_bytes(self) -> int:
        """Page numbers of all requests, kept where recordings read them."""
        return 4 * self.requests * self.pages if self.graphs else 0


Workspace = Callable[[AttentionLoad], int]
"""Bytes that a backend takes at most."""


def flashinfer_gqa_bytes(requests: int, rows_each: int, heads: int, groups: int, width: int) -> int:
    """The buffer that a recorded plan of GQA may fill: tiles of rows, each for all heads, at least two a
    multiprocessor.

    Args:
        rows_each: rows of a request, which are its query tokens times the heads that share a key.
    """
    tile = 128 if rows_each > 64 and width < 256 else 64 if rows_each > FLASHINFER_TILE else FLASHINFER_TILE
    tiles = max(requests * -(-rows_each // tile), 2 * MULTIPROCESSORS // groups)
    needed = 4 * heads * tiles * tile * (width + 1) + MIB
    return max(FLASHINFER_BYTES, -(-needed // MIB) * MIB)


def flashinfer_gqa(load: AttentionLoad, groups: int) -> int:
    each = load.tokens_each * load.heads // groups
    recorded = flashinfer_gqa_bytes(load.requests, each, load.heads, groups, load.value_width)
    more = recorded if load.graphs and recorded > FLASHINFER_BYTES else 0
    return flashinfer(load) + more


def flashinfer(load: AttentionLoad) -> int:
    wrappers = FLASHINFER_EAGER_WRAPPERS + load.graphs
    return FLASHINFER_BYTES + wrappers * FLASHINFER_PLAN_BYTES + load.table_bytes


def flashmla(load: AttentionLoad) -> int:
    """A result for each request and one more for each part of the device, a part having as many multiprocessors as a
    request has blocks of 64 rows."""
    rows = load.tokens_each * load.heads
    parts = max(1, MULTIPROCESSORS // -(-rows // 64))
    return load.partial_bytes // max(1, load.requests) * (load.requests + parts) + load.table_bytes


def fa3(load: AttentionLoad) -> int:
    return min(FA3_MOST_SPLITS * load.partial_bytes, max(FA3_SPLIT_BYTES, load.partial_bytes)) + load.table_bytes


def fa3_splits(tokens: int, heads: int, value_width: int) -> int:
    """The `num_splits` to ask FlashAttention 3 for: an upper bound, or 0 where it may decide itself."""
    each = 4 * tokens * heads * (value_width + 1)
    return 0 if FA3_MOST_SPLITS * each <= FA3_SPLIT_BYTES else max(1, FA3_SPLIT_BYTES // each)


def triton(load: AttentionLoad) -> int:
    """Results of contexts that are cut into pieces for the multiprocessors; no table: kernels read slots."""
    return 4 * 2 * MULTIPROCESSORS * TRITON_ROWS * (load.value_width + 1)
