"""Scratch memory sizes of the attention backends, and the number of weight buffers. The adapters allocate by these
functions and the memory ledger counts by them. Imports no torch.

Sources: flashinfer/attention/scheduler.cuh (PrefillPlan, MLAPlan), FlashMLA csrc/api/dense_decode.h,
flash-attention hopper/flash_api.cpp.

Legend: T query tokens, H query heads, V width of a head's result (the latent, for the absorbed form).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from moe_engine.kernels.device import ExpertWidths, HeadWidths

MIB = 1 << 20
MULTIPROCESSORS = 160
"""SM count of the largest supported GPU (B200: 148), for sizing without a device."""

FLASHINFER_BYTES = 128 * MIB
"""FlashInfer's recommended size for split results; captured plans may need more."""

TRTLLM_BYTES = 128 * MIB
"""Workspace of trtllm-gen's MLA decode: counters and split results."""

FLASHINFER_PLAN_BYTES = 8 * MIB
"""Bytes of each FlashInfer wrapper, on the device (and page-locked on the host)."""

FLASHINFER_EAGER_WRAPPERS = 8
"""Wrappers of eager steps: in use, waiting for reuse, and for both groups of a step."""

FLASHINFER_SMALL_PLAN_BYTES = MIB
"""Bytes of a prompt wrapper whose plan fits into this size."""

FLASHINFER_PLAN_SLACK = 1 << 16
"""Per-SM lists, and alignment."""

FLASHINFER_SMALL_PLANS = 96
"""Three of each of 16 long prompts (chunks of one length share one), in two steps, one of them in flight."""

FLASHINFER_TILE = 16
"""Rows of the smallest tile of FlashInfer's GQA kernels."""

FA3_MOST_SPLITS = 128
FA3_SPLIT_BYTES = 256 * MIB
"""FlashAttention 3 allocates for as many splits of every context as the longest in a batch may need: gigabytes for
MLA's wide results. Caps the requested splits."""

TRTLLM_MOST_TILE = 128
"""Rows of the largest tile of trtllm-gen's fused experts."""

WEIGHT_BUFFERS = 2
"""Device buffers of the layers whose weights wait in host memory (`weight_stream`)."""

TRITON_ROWS = 2 * 128
"""Max rows of partial results per SM: two ends of its work, of the largest tile each."""


@dataclass(frozen=True)
class AttentionLoad:
    """Inputs of an attention backend's scratch memory size on one rank.

    requests, tokens_each: of the largest decode or verification step. widths: head widths of the model. pages: of the
    longest context. graphs, recorded: captured steps, and requests of the largest. record_page: tokens per page
    if the cache holds FP8 records, which some kernels read by lists of slots; else 0. expanded: max context tokens with
    expanded keys and values at once, for MLA.
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
        """Expanded keys including their rotary channels; vendor kernels compute in 16 bits."""
        return 2 * self.expanded * self.widths.heads * self.widths.key

    @property
    def value_bytes(self) -> int:
        """Expanded values as a separate tensor."""
        return 2 * self.expanded * self.widths.heads * self.widths.value

    @property
    def row_bytes(self) -> int:
        """A float32 result and log-sum-exp per head, for one query token."""
        return 4 * self.widths.heads * (self.widths.result + 1)

    @property
    def sizes(self) -> tuple[int, ...]:
        """Requests of the largest eager step, and of the largest captured step, which has memory of its own."""
        return (self.requests, self.recorded) if self.graphs else (self.requests,)

    @property
    def table_bytes(self) -> int:
        """Page numbers of all requests, at fixed addresses for captured graphs."""
        return 4 * self.recorded * self.pages if self.graphs else 0

    @property
    def list_bytes(self) -> int:
        """Slots of all tokens visible to each query token, at fixed addresses for captured graphs."""
        return self.record_page * self.tokens_each * self.table_bytes


Workspace = Callable[[AttentionLoad], int]
"""Max bytes of a backend, captured graphs included."""


def flashinfer_gqa_bytes(requests: int, rows_each: int, heads: int, groups: int, width: int) -> int:
    """Buffer of a captured GQA plan: tiles of rows, each for all heads, at least two per SM.

    Args:
        rows_each: rows of a request: its query tokens times the heads that share a key.
    """
    tile = 128 if rows_each > 64 and width < 256 else 64 if rows_each > FLASHINFER_TILE else FLASHINFER_TILE
    tiles = max(requests * -(-rows_each // tile), 2 * MULTIPROCESSORS // groups)
    needed = 4 * heads * tiles * tile * (width + 1) + MIB
    return max(FLASHINFER_BYTES, -(-needed // MIB) * MIB)


def flashinfer(load: AttentionLoad) -> int:
    """The ragged kernels get separate keys and values."""
    plans = (FLASHINFER_EAGER_WRAPPERS + load.graphs) * FLASHINFER_PLAN_BYTES
    if load.expanded:
        plans += FLASHINFER_SMALL_PLANS * FLASHINFER_SMALL_PLAN_BYTES
    return FLASHINFER_BYTES + plans + load.table_bytes + load.key_bytes + load.value_bytes


def flashinfer_ragged_plan_bytes(tokens: int, requests: int, heads: int) -> int:
    """Max plan bytes of `tokens` query tokens: Hopper's lists have an entry per head and 128 tokens, others one
    per 16 tokens, and one per token."""
    return 4 * (7 * heads * (-(-tokens // 128) + requests) + 2 * tokens + 4 * requests) + FLASHINFER_PLAN_SLACK


def flashinfer_gqa(load: AttentionLoad) -> int:
    """A captured plan that needs a larger buffer gets its own."""
    widths = load.widths
    rows_each = load.tokens_each * widths.heads // widths.groups
    needed = flashinfer_gqa_bytes(load.recorded, rows_each, widths.heads, widths.groups, widths.key)
    return flashinfer(load) + (needed if load.graphs and needed > FLASHINFER_BYTES else 0)


def flashmla(load: AttentionLoad) -> int:
    """A result per request and one per partition of the device (with as many SMs as a request has blocks of 64
    rows); for records, the lists of captured steps (Hopper captures none); and FlashInfer's memory for prompts, the
    largest of the rows that may run them."""
    parts = max(1, MULTIPROCESSORS // -(-load.tokens_each * load.widths.heads // 64))
    splits = sum(size + parts for size in load.sizes)
    kept = load.list_bytes if load.record_page else load.table_bytes
    prompts = flashinfer(replace(load, graphs=0, recorded=0))
    return splits * load.tokens_each * load.row_bytes + kept + prompts


def trtllm_mla(load: AttentionLoad) -> int:
    """A workspace and the page table of captured steps; and FlashInfer's memory for prompts and draft trees."""
    return TRTLLM_BYTES + load.table_bytes + flashinfer(replace(load, graphs=0, recorded=0))


def fa3(load: AttentionLoad) -> int:
    """The varlen kernels get separate keys."""
    splits = (FA3_MOST_SPLITS * size * load.tokens_each * load.row_bytes for size in load.sizes)
    return sum(min(num_bytes, FA3_SPLIT_BYTES) for num_bytes in splits) + load.table_bytes + load.key_bytes


def fa3_splits(tokens: int, heads: int, value_width: int) -> int:
    """`num_splits` for FlashAttention 3: an upper bound, or 0 to let the library decide."""
    each = 4 * tokens * heads * (value_width + 1)
    return 0 if FA3_MOST_SPLITS * each <= FA3_SPLIT_BYTES else max(1, FA3_SPLIT_BYTES // each)


def triton(load: AttentionLoad) -> int:
    """Partial results of contexts split over SMs; no table: kernels read slots. (With --enable-deterministic-inference
    contexts are cut at fixed places, and the memory grows with their length.)"""
    return len(load.sizes) * 4 * MULTIPROCESSORS * TRITON_ROWS * (load.widths.result + 1)


def trtllm_experts(experts: ExpertWidths, count: int, tokens: int) -> int:
    """Results of both products and the quantized activation, of all choices, each expert padded to whole tiles.
    Source: prepare_moe of csrc/trtllm_fused_moe_kernel_launcher.cu."""
    rows = tokens * experts.top_k + (count + 4) * (TRTLLM_MOST_TILE - 1)
    each = 3 * experts.width + 3 * experts.width // 128 * 4 + 2 * experts.hidden
    return rows * each
