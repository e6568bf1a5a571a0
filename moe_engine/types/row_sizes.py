"""Sizes that scheduler, worker and memory ledger share: columns of per-row tables, pages of a window pool."""

from __future__ import annotations

PAD_TOKENS = 8
"""Positions by which a row may exceed the context length: an overlapped decode whose result is dropped."""


def row_width(context_len: int, num_drafts: int = 0) -> int:
    """Columns of the worker's per-row tables, indexed by token position.

    Args:
        num_drafts: KV slots of one step's drafts; two steps can be in flight.
    """
    return -(-(context_len + PAD_TOKENS + 2 * num_drafts) // 16) * 16


def window_request_pages(window: int, page_size: int, draft_slots: int) -> int:
    """Max pages of a window pool that a request needs, without those of its prompt in a step: its window and the slots
    of two steps' drafts, rounded to pages at both ends. A page that left the window stays allocated until the step in
    flight ends."""
    return -(-(window + 2 * draft_slots) // page_size) + 3


def window_pool_tokens(window: int, page_size: int, max_rows: int, step_tokens: int, draft_slots: int) -> int:
    """Tokens of a window pool that holds `max_rows` requests, and the prompts of the step to plan and of the step in
    flight."""
    each = window_request_pages(window, page_size, draft_slots)
    return max_rows * each * page_size + 3 * -(-step_tokens // page_size) * page_size


TRANSFER_PIECE_TOKENS = 256
"""Tokens of a piece of a transfer between servers: a copy, and a message."""
TRANSFER_SLOTS = 8
"""Pieces of all transfers of a connection that are sent and not acknowledged: the slots of its window."""


def transfer_window_bytes(bytes_per_token: int) -> int:
    """Memory of one connection between a prefill and a decode rank, on each side."""
    return TRANSFER_SLOTS * TRANSFER_PIECE_TOKENS * bytes_per_token
