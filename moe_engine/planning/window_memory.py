"""Memory of layers with an attention window, whose KV is bounded by it: a pool of their own in the ledger."""

from __future__ import annotations

from typing import Protocol

from moe_engine.models.config import ModelConfig
from moe_engine.planning.ledger import WINDOWS_ROW, LedgerRow
from moe_engine.planning.step_limits import StepLimits
from moe_engine.types import window_pool_tokens


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
    def num_window_slots(self) -> int: ...


def window_bytes_per_token(given: WindowInput) -> int:
    """KV bytes of a token in all windowed layers, on one rank."""
    model = given.local_model
    with_kv = model.num_layers - len(model.state_layers)
    return model.kv_bytes_per_token(given.kv_dtype) // with_kv * len(model.windowed_layers)


def bound_windows(given: WindowInput, tokens: int) -> tuple[int, str]:
    """Tokens of a pool of windowed layers in which no allocation fails, if it is smaller than a KV cache of `tokens`;
    else 0, with the reason."""
    window, limits = given.local_model.longest_window, given.limits
    kept = f"layers with a window of {window} tokens keep the KV of the whole context"
    if given.tier_ratio or given.tier_bytes:
        return 0, f"{kept}: --enable-hierarchical-cache copies the KV of all layers"
    step = limits.prompt_tokens + limits.decode_tokens
    slots = window_pool_tokens(window, given.page_size, limits.running, step, limits.draft_slots)
    if slots < tokens:
        return slots, ""
    windows = f"windows of {limits.running} running requests and of a step of {step} tokens take {slots}"
    flags = "--max-running-requests, --chunked-prefill-size"
    return 0, f"{kept}: {windows}, the KV cache has {tokens} tokens ({flags})"


def window_rows(given: WindowInput) -> list[LedgerRow]:
    """The ledger row of the pool of windowed layers, if they have one."""
    if not given.num_window_slots:
        return []
    each, model, slots = window_bytes_per_token(given), given.local_model, given.num_window_slots
    windows = f"{given.limits.running} windows of {model.longest_window} tokens"
    detail = f"{slots} tokens x {each} B in {len(model.windowed_layers)} layers, for {windows}"
    return [LedgerRow(WINDOWS_ROW, (slots + given.page_size) * each, detail)]
