"""Memory of layers with an attention window, whose KV is bounded by it: a pool of their own in the ledger."""

from __future__ import annotations

from typing import Protocol

from moe_engine.models.config import ModelConfig
from moe_engine.planning.ledger import SLOT_TOKEN_BYTES, WINDOWS_ROW, LedgerRow, slot_table_bytes
from moe_engine.planning.step_limits import StepLimits
from moe_engine.row_sizes import window_pool_tokens

INDEXED_WINDOWS = 16
"""If all layers have windows, tokens without KV have only a number in the radix cache. Their maximum is the size of the
window pool times this."""


class WindowInput(Protocol):
    """The part of `SizingInput` that the pool of windowed layers depends on."""

    @property
    def local_model(self) -> ModelConfig: ...
    @property
    def kv_dtype(self) -> str: ...
    @property
    def limits(self) -> StepLimits: ...
    @property
    def page_size(self) -> int: ...
    @property
    def tier_ratio(self) -> float: ...
    @property
    def tier_bytes(self) -> int: ...
    @property
    def windows_in_tier(self) -> bool: ...
    @property
    def num_window_slots(self) -> int: ...
    @property
    def bytes_per_token(self) -> int: ...
    @property
    def max_total_tokens(self) -> int | None: ...
    @property
    def swa_ratio(self) -> float: ...


def window_bytes_per_token(given: WindowInput) -> int:
    """KV bytes of a token in all windowed layers, on one rank."""
    model = given.local_model
    with_kv = model.num_layers - len(model.state_layers)
    return model.kv_bytes_per_token(given.kv_dtype) // with_kv * len(model.windowed_layers)


def bound_windows(given: WindowInput, tokens: int) -> tuple[int, str]:
    """Tokens of the pool of windowed layers, or 0 with the reason why there is none.

    The pool holds the windows of all running requests if that is less than a KV cache of `tokens`, which would hold the
    whole context of all layers. Otherwise it has its share of the memory, and admission counts its free pages.
    """
    window, limits = given.local_model.longest_window, given.limits
    kept = f"layers with a window of {window} tokens keep the KV of the whole context"
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


def _share(given: WindowInput, tokens: int) -> int:
    """Slots of windowed layers in the memory of a KV cache of `tokens`: `--swa-full-tokens-ratio` of those of the other
    layers; all of it if there are no other layers."""
    ratio, windowed, others = given.swa_ratio, window_bytes_per_token(given), _other_bytes(given)
    tables = slot_table_bytes(given.limits.running, given.limits.row_width)
    memory = tokens * (windowed + others + SLOT_TOKEN_BYTES) - tables
    if given.max_total_tokens is not None:
        slots = ratio * tokens
    elif others:
        slots = ratio * memory / (others + ratio * windowed + SLOT_TOKEN_BYTES)
    else:
        slots = memory / (windowed + SLOT_TOKEN_BYTES * INDEXED_WINDOWS)
    return int(slots) // given.page_size * given.page_size


def _other_bytes(given: WindowInput) -> int:
    """KV bytes of a token in layers without a window, drafters included."""
    return given.bytes_per_token - (0 if given.num_window_slots else window_bytes_per_token(given))


def window_rows(given: WindowInput) -> list[LedgerRow]:
    """The ledger row of the pool of windowed layers, if they have one."""
    if not given.num_window_slots:
        return []
    each, model, slots = window_bytes_per_token(given), given.local_model, given.num_window_slots
    detail = f"{slots} tokens x {each} B in {len(model.windowed_layers)} layers with windows of {model.longest_window}"
    return [LedgerRow(WINDOWS_ROW, (slots + given.page_size) * each, detail)]
