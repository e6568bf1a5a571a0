"""Scratch memory of the attention backends, by what decides its size. The adapters take it from here and the memory
ledger counts it, so that there is one place to be wrong in. Imports no torch.

Sources: flashinfer/attention/scheduler.cuh (PrefillPlan, MLAPlan), FlashMLA csrc/api/dense_decode.h,
flash-attention hopper/flash_api.cpp.

Legend: T query tokens, H query heads, V width of a head's result (the latent, for the absorbed form).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from moe_engine.kernels.device import HeadWidths

MIB = 1 << 20
MULTIPROCESSORS = 160
"""Of the largest GPU there are kernels for (B200: 148), where sizes are needed and no device is looked at."""

FLASHINFER_BYTES = 128 * MIB
"""What FlashInfer recommends for results of split contexts; plans that are recorded may need more."""

FLASHINFER_PLAN_BYTES = 8 * MIB
"""Of each FlashInfer wrapper, on the device (and page-locked on the host)."""

FLASHINFER_EAGER_WRAPPERS = 8
"""Wrappers that serve steps which are not recorded: in use, resting, and for both groups of a step."""

FLASHINFER_SMALL_PLAN_BYTES = MIB
"""Of the wrappers for prompts whose plans fit into that."""

FLASHINFER_PLAN_SLACK = 1 << 16
"""Lists by multiprocessor, and alignment."""

FLASHINFER_SMALL_PLANS = 96
"""Three of each of 16 long prompts (parts of one length share one), in two steps, one of them in flight."""

FLASHINFER_TILE = 16
"""Rows of the smallest tile of its GQA kernels."""

FA3_MOST_SPLITS = 128
FA3_SPLIT_BYTES = 256 * MIB
"""FlashAttention 3 takes memory for as many splits of every context as the longest of a batch might deserve: gigabytes
for MLA's wide results. More splits than fit here are not asked for."""

TRITON_ROWS = 2 * 128
"""Rows of partial results that a multiprocessor leaves at most: two ends of its work, of the largest tile each."""


@dataclass(frozen=True)
class AttentionLoad:
    """What decides the scratch memory of an attention backend on one rank.

    requests, tokens_each: of the largest step of decodes or verifications. widths: of the model there.
    pages: of the longest context. graphs, recorded: how many steps are recorded, and requests of the largest.
    record_page: tokens of a page where the cache holds FP8 records, which some kernels read by lists of slots; else 0.
    expanded: context tokens whose keys and values are held at once, for MLA.
    """

    requests: int
    tokens_each: int
    widths: HeadWidths
    pages: int
    graphs: int = 0
    recorded: int = 0
    record_page: int = 0
    expanded: int = 0

    @property
    def key_bytes(self) -> int:
        """Keys with their rotary channels in place, of tokens that are expanded; vendor kernels compute in 16 bits."""
        return 2 * self.expanded * self.widths.heads * self.widths.key

    @property
    def value_bytes(self) -> int:
        """Their values as a tensor of their own."""
        return 2 * self.expanded * self.widths.heads * self.widths.value

    @property
    def row_bytes(self) -> int:
        """One float32 result and its log-sum-exp for every head of a query token."""
        return 4 * self.widths.heads * (self.widths.result + 1)

    @property
    def sizes(self) -> tuple[int, ...]:
        """Requests of the largest eager step, and of the largest recorded one, whose memory is another."""
        return (self.requests, self.recorded) if self.graphs else (self.requests,)

    @property
    def table_bytes(self) -> int:
        """Page numbers of all requests, kept where recordings read them."""
        return 4 * self.recorded * self.pages if self.graphs else 0

    @property
    def list_bytes(self) -> int:
        """The slots of every token that each query token sees, kept where recordings read them."""
        return self.record_page * self.tokens_each * self.table_bytes


Workspace = Callable[[AttentionLoad], int]
"""Bytes that a backend takes at most, recordings included."""


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


def flashinfer(load: AttentionLoad) -> int:
    """Its ragged kernels get keys and values of their own."""
    plans = (FLASHINFER_EAGER_WRAPPERS + load.graphs) * FLASHINFER_PLAN_BYTES
    if load.expanded:
        plans += FLASHINFER_SMALL_PLANS * FLASHINFER_SMALL_PLAN_BYTES
    return FLASHINFER_BYTES + plans + load.table_bytes + load.key_bytes + load.value_bytes


def flashinfer_ragged_plan_bytes(tokens: int, requests: int, heads: int) -> int:
    """What a plan of so many query tokens takes at most: Hopper's lists have an entry for each head of 128 tokens,
    others' one for each 16 tokens, and one a token."""
    return 4 * (7 * heads * (-(-tokens // 128) + requests) + 2 * tokens + 4 * requests) + FLASHINFER_PLAN_SLACK


def flashinfer_gqa(load: AttentionLoad) -> int:
    """A recorded plan that needs a larger buffer gets one of its own."""
    widths = load.widths
    rows_each = load.tokens_each * widths.heads // widths.groups
    needed = flashinfer_gqa_bytes(load.recorded, rows_each, widths.heads, widths.groups, widths.key)
    return flashinfer(load) + (needed if load.graphs and needed > FLASHINFER_BYTES else 0)


def flashmla(load: AttentionLoad) -> int:
    """A result for each request and one more for each part of the device, a part having as many multiprocessors as a
    request has blocks of 64 rows; of records the lists of recorded steps (which Hopper does not record); and what
    FlashInfer takes for prompts, which is more than any other row that may run them."""
    parts = max(1, MULTIPROCESSORS // -(-load.tokens_each * load.widths.heads // 64))
    splits = sum(size + parts for size in load.sizes)
    kept = load.list_bytes if load.record_page else load.table_bytes
    prompts = flashinfer(replace(load, graphs=0, recorded=0))
    return splits * load.tokens_each * load.row_bytes + kept + prompts


def fa3(load: AttentionLoad) -> int:
    """Its varlen kernels get keys of their own."""
    splits = (FA3_MOST_SPLITS * size * load.tokens_each * load.row_bytes for size in load.sizes)
    return sum(min(num_bytes, FA3_SPLIT_BYTES) for num_bytes in splits) + load.table_bytes + load.key_bytes


def fa3_splits(tokens: int, heads: int, value_width: int) -> int:
    """The `num_splits` to ask FlashAttention 3 for: an upper bound, or 0 where it may decide itself."""
    each = 4 * tokens * heads * (value_width + 1)
    return 0 if FA3_MOST_SPLITS * each <= FA3_SPLIT_BYTES else max(1, FA3_SPLIT_BYTES // each)


def triton(load: AttentionLoad) -> int:
    """Results of contexts that are cut into pieces for the multiprocessors; no table: kernels read slots. (With
    --enable-deterministic-inference contexts are cut at fixed places, and what that takes grows with them.)"""
    return len(load.sizes) * 4 * MULTIPROCESSORS * TRITON_ROWS * (load.widths.result + 1)
