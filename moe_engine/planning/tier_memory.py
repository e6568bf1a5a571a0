"""Memory of the host-RAM tier of the KV cache. On a CPU the tier uses the ledger's memory; on a GPU the device holds
only the rows of one copy."""

from __future__ import annotations

from typing import Protocol

from moe_engine.models.config import ModelConfig
from moe_engine.models.eagle_config import HeadConfig
from moe_engine.planning.ledger import LedgerRow
from moe_engine.planning.machine import Machine

COPY_ROWS_BYTES = 3 * (32 << 20)
"""Row buffers on a GPU: rows that leave the pool, in parts and whole, and rows that arrive
(`worker.kv_cache.kv_copies`)."""


class TierInput(Protocol):
    """The part of `SizingInput` that the tier depends on."""

    @property
    def machine(self) -> Machine: ...
    @property
    def kv_dtype(self) -> str: ...
    @property
    def uses_mtp(self) -> bool: ...
    @property
    def draft(self) -> ModelConfig | None: ...
    @property
    def head(self) -> HeadConfig | None: ...
    @property
    def tier_ratio(self) -> float: ...
    @property
    def tier_bytes(self) -> int: ...
    @property
    def page_size(self) -> int: ...
    @property
    def local_model(self) -> ModelConfig: ...


def tier_bytes_per_token(given: TierInput) -> int:
    """KV of a token in the tier, on one rank. A draft model recomputes its KV; the KV of an EAGLE head is kept."""
    own = given.local_model.kv_bytes_per_token(given.kv_dtype, given.uses_mtp)
    return own + (given.draft.kv_bytes_per_token(given.kv_dtype) if given.head is not None and given.draft else 0)


def tier_tokens(given: TierInput, num_slots: int) -> int:
    """Size of the tier in tokens, whole pages, beside a KV cache of `num_slots`."""
    tokens = given.tier_bytes // tier_bytes_per_token(given) if given.tier_bytes else int(given.tier_ratio * num_slots)
    return tokens - tokens % given.page_size


def tier_reserve(given: TierInput) -> tuple[int, float]:
    """Memory of the ledger that the tier takes: (bytes, tier tokens for each token of the KV cache)."""
    if not (given.tier_bytes or given.tier_ratio):
        return 0, 0.0
    if given.machine.device != "cpu":
        return COPY_ROWS_BYTES, 0.0
    return given.tier_bytes, 0.0 if given.tier_bytes else given.tier_ratio


def tier_rows(given: TierInput, tokens: int) -> list[LedgerRow]:
    """The tier's row of the ledger, if there is a tier."""
    if not tokens:
        return []
    if given.machine.device != "cpu":
        return [LedgerRow("KV copies", COPY_ROWS_BYTES, f"from and to a host tier of {tokens} tokens")]
    each = tier_bytes_per_token(given)
    return [LedgerRow("host KV tier", tokens * each, f"{tokens} tokens x {each} B")]
