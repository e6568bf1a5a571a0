"""Memory of the host-RAM tier of the KV cache. On a CPU the tier uses the ledger's memory; on a GPU the device holds
only the rows of one copy."""

from __future__ import annotations

from typing import NamedTuple

from moe_engine.planning.memory.ledger import LedgerRow
from moe_engine.planning.memory.sizing_input import SizingInput
from moe_engine.planning.memory.states import state_bytes
from moe_engine.planning.step_limits import kept_window
from moe_engine.types.row_sizes import TRANSFER_PIECE_TOKENS, TRANSFER_SLOTS, transfer_window_bytes

COPY_ROWS_BYTES = 3 * (32 << 20)
"""Row buffers on a GPU: rows that leave the pool, in parts and whole, and rows that arrive
(`worker.kv_cache.kv_copies`)."""

COPIED_STATES = 3
"""States on a GPU at once: one that leaves the device, in parts and whole, and one that arrives."""


def tier_bytes_per_token(given: SizingInput) -> int:
    """KV of a token in the tier, on one rank, without that of windowed layers with a pool of their own. A draft model
    recomputes its KV; the KV of an EAGLE head is kept."""
    own = given.model_bytes_per_token
    own -= given.window_bytes_per_token if given.num_window_slots else 0
    return own + (given.draft.kv_bytes_per_token(given.kv_dtype) if given.head is not None and given.draft else 0)


class TierSize(NamedTuple):
    """Size of the tier on each rank: tokens, in whole pages, states of prefixes, and tokens of windowed layers."""

    tokens: int = 0
    states: int = 0
    windows: int = 0


def tier_size(given: SizingInput, num_slots: int) -> TierSize:
    """Size of the tier of a KV cache of `num_slots`: a multiple of the KV cache, its snapshots and its windows."""
    if not (given.tier_bytes or given.tier_ratio):
        return TierSize()
    snapshots, ratio = given.limits.num_snapshots, given.tier_ratio
    each, of_state = tier_bytes_per_token(given), _state_bytes(given)
    if given.num_window_slots:
        if given.tier_bytes:
            ratio = given.tier_bytes / (num_slots * each + given.num_window_slots * given.window_bytes_per_token)
        return TierSize(_pages(given, ratio * num_slots), windows=_window_tokens(given, ratio))
    if not snapshots:
        tokens = given.tier_bytes // each if given.tier_bytes else int(ratio * num_slots)
        return TierSize(_pages(given, tokens))
    if given.tier_bytes:
        ratio = given.tier_bytes / (num_slots * each + snapshots * of_state)
    return TierSize(_pages(given, ratio * num_slots), max(1, int(ratio * snapshots)))


def _pages(given: SizingInput, tokens: float) -> int:
    return int(tokens) // given.page_size * given.page_size


def _window_tokens(given: SizingInput, ratio: float) -> int:
    """Tokens of the tier's window pool: at least one window."""
    if not given.num_window_slots:
        return 0
    least = kept_window(given.model, given.limits) + 2 * given.page_size
    return _pages(given, max(ratio * given.num_window_slots, least))


def _state_bytes(given: SizingInput) -> int:
    """Bytes of the state of a prefix; 0 if no states are cached."""
    return state_bytes(given.local_model, given.dtype) if given.limits.num_snapshots else 0


def tier_reserve(given: SizingInput) -> tuple[int, float]:
    """Memory of the ledger that the tier takes: (bytes, tier tokens for each token of the KV cache)."""
    if not (given.tier_bytes or given.tier_ratio):
        return 0, 0.0
    of_state = _state_bytes(given)
    if not given.machine.on_cpu:
        return COPY_ROWS_BYTES + COPIED_STATES * of_state, 0.0
    pieces = _transfer_bytes(given)
    if given.tier_bytes:
        return given.tier_bytes + pieces, 0.0
    beside = max(1, int(given.tier_ratio * given.limits.num_snapshots)) * of_state
    if given.num_window_slots:
        beside += _window_tokens(given, given.tier_ratio) * given.window_bytes_per_token
    return beside + pieces, given.tier_ratio


def _transfer_bytes(given: SizingInput) -> int:
    """Memory of the first connection of `--disaggregation-mode`; 0 without."""
    return transfer_window_bytes(tier_bytes_per_token(given)) if given.transfers else 0


def tier_host_rows(given: SizingInput, size: TierSize) -> tuple[LedgerRow, ...]:
    """The tier's memory of the host in addition to that of a GPU."""
    return tuple(_host_rows(given, size)) if size.tokens and not given.machine.on_cpu else ()


def tier_rows(given: SizingInput, size: TierSize) -> list[LedgerRow]:
    """The tier's rows of the ledger, if there is a tier."""
    if not size.tokens:
        return []
    if not given.machine.on_cpu:
        of_state = _state_bytes(given)
        states = f" and {size.states} states" if size.states else ""
        detail = f"from and to a host tier of {size.tokens} tokens{states}"
        return [LedgerRow("KV copies", COPY_ROWS_BYTES + COPIED_STATES * of_state, detail)]
    return _host_rows(given, size)


def _host_rows(given: SizingInput, size: TierSize) -> list[LedgerRow]:
    each, of_state = tier_bytes_per_token(given), _state_bytes(given)
    rows = [LedgerRow("host KV tier", size.tokens * each, f"{size.tokens} tokens x {each} B")]
    if size.states:
        rows.append(LedgerRow("host tier of states", size.states * of_state, f"{size.states} states x {of_state} B"))
    if size.windows:
        of_token = given.window_bytes_per_token
        detail = f"{size.windows} tokens x {of_token} B in layers with windows"
        rows.append(LedgerRow("host tier of windows", size.windows * of_token, detail))
    if given.transfers:
        detail = f"{TRANSFER_SLOTS} pieces of {TRANSFER_PIECE_TOKENS} tokens; as much for each further connection"
        rows.append(LedgerRow("transfer window", _transfer_bytes(given), detail))
    return rows
