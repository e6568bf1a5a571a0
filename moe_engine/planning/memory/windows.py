"""Memory of layers with an attention window, whose KV is bounded by it: a pool of their own in the ledger."""

from __future__ import annotations

from moe_engine.planning.memory.ledger import KEPT_ROW, SLOT_TOKEN_BYTES, WINDOWS_ROW, LedgerRow, slot_table_bytes
from moe_engine.planning.memory.sizing_input import SizingInput
from moe_engine.planning.step_limits import kept_window
from moe_engine.types.row_sizes import window_pool_tokens

INDEXED_WINDOWS = 16
"""If all layers have windows, tokens without KV have only a number in the radix cache. Their maximum is the size of the
window pool times this."""


def bound_windows(given: SizingInput, tokens: int) -> tuple[int, str]:
    """Tokens of the pool of windowed layers, or 0 with the reason why there is none.

    The pool holds the windows of all running requests if that is less than a KV cache of `tokens`, which would hold the
    whole context of all layers. Otherwise it has its share of the memory, and admission counts its free pages.
    """
    limits, window = given.limits, kept_window(given.model, given.limits)
    kept = f"layers with a window of {given.model.longest_window} tokens keep the KV of the whole context"
    if given.tier_ratio or given.tier_bytes:
        if not given.windows_in_tier:
            return 0, f"{kept}: storage, another server or --kv-connector takes the KV of all layers"
        if not _other_bytes(given):
            return 0, f"{kept}: --enable-hierarchical-cache needs a layer without a window"
    if not given.swa_ratio:
        return 0, f"{kept}: --disable-hybrid-swa-memory"
    if given.max_total_tokens is None and tokens >= limits.running * limits.context_len:
        shared = tokens  # memory is not scarce
    else:
        shared = _share(given, tokens)
    step = limits.prompt_tokens + limits.decode_tokens
    page, drafts = given.page_size, limits.draft_slots
    least, most = (window_pool_tokens(window, page, running, step, drafts) for running in (1, limits.running))
    slots = min(most, max(least, shared))
    if slots < tokens:
        return slots, ""
    windows = f"a window and a step of {step} tokens take {least}"
    flags = "--chunked-prefill-size, --max-running-requests"
    return 0, f"{kept}: {windows}, the KV cache has {tokens} tokens ({flags})"


def _share(given: SizingInput, tokens: int) -> int:
    """Slots of windowed layers in the memory of a KV cache of `tokens`: `--swa-full-tokens-ratio` of those of the other
    layers; all of it if there are no other layers."""
    ratio, windowed, others = given.swa_ratio, given.window_bytes_per_token, _other_bytes(given)
    tables = slot_table_bytes(given.limits.running, given.limits.row_width)
    memory = tokens * (windowed + others + SLOT_TOKEN_BYTES) - tables
    if given.max_total_tokens is not None:
        slots = ratio * tokens
    elif others:
        slots = ratio * memory / (others + ratio * windowed + SLOT_TOKEN_BYTES)
    else:
        slots = memory / (windowed + SLOT_TOKEN_BYTES * INDEXED_WINDOWS)
    return int(slots) // given.page_size * given.page_size


def _other_bytes(given: SizingInput) -> int:
    """KV bytes of a token in layers without a window, drafters included."""
    return given.bytes_per_token - (0 if given.num_window_slots else given.window_bytes_per_token)


def window_rows(given: SizingInput) -> list[LedgerRow]:
    """The ledger rows of the pool of windowed layers, if they have one, and of contributions to entries."""
    return [*_pool_rows(given), *_kept_rows(given)]


def _kept_rows(given: SizingInput) -> list[LedgerRow]:
    limits = given.limits
    each = given.local_model.kept_bytes_of_request(given.kv_dtype, limits.draft_slots)
    if not each:
        return []
    detail = f"{limits.running} requests x {each} B of tokens behind their last entries, and a row for padding"
    return [LedgerRow(KEPT_ROW, (limits.running + 1) * each, detail)]


def _pool_rows(given: SizingInput) -> list[LedgerRow]:
    if not given.num_window_slots:
        return []
    each, model, slots = given.window_bytes_per_token, given.local_model, given.num_window_slots
    detail = f"{slots} tokens x {each} B in {len(given.windowed_layers)} layers with windows of {model.longest_window}"
    return [LedgerRow(WINDOWS_ROW, (slots + given.page_size) * each, detail)]
