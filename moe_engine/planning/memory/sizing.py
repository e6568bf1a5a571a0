"""Sizes the KV cache and the running requests: fills the memory ledger, or refuses with the nearest flags that fit."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass

from moe_engine.planning.memory.ledger import GB, SLOT_TOKEN_BYTES, LedgerRow, MemoryLedger, gb, tokens_that_fit
from moe_engine.planning.memory.ledger_rows import fixed_rows
from moe_engine.planning.memory.limit import check_fraction, fitting_tokens, memory_limit
from moe_engine.planning.memory.refusal import refusal
from moe_engine.planning.memory.sizing_input import SizingInput
from moe_engine.planning.memory.tier import tier_host_rows, tier_rows, tier_size
from moe_engine.planning.memory.tier_fit import fit_tier
from moe_engine.planning.memory.windows import INDEXED_WINDOWS, bound_windows, window_rows

CPU_KV_BYTES = 2 * GB
CPU_KV_SHARE = 0.1
"""The default KV cache on a CPU is at most the larger of these two (the share is of available memory), or one whole
context: prefixes stay cached until the pool is full, and a laptop needs its memory for other programs."""

FRACTION_STEPS = 1_000_000
"""--mem-fraction-static is reported in these parts, rounded up: passed as a flag it gives the same KV cache."""


@dataclass(frozen=True)
class Sizing:
    ledger: MemoryLedger
    tokens_reason: str
    max_running_requests: int
    running_reason: str
    mem_fraction_static: float
    fraction_reason: str
    window_remark: str = ""
    """The reason why the KV of windowed layers is not bounded by their window."""
    tier_ratio: float = 0.0
    tier_reason: str = ""
    """The reason why the tier is smaller than its default."""


def size_memory(given: SizingInput) -> Sizing:
    """Fills the memory ledger. Raises ConfigError with the sum and the nearest flags that fit, if it does not fit."""
    given, remark = _with_bounded_windows(given)
    rows = fixed_rows(given)
    limit, limit_reason = memory_limit(given, rows)
    fits = fitting_tokens(given, rows, limit)
    if fits < given.min_tokens:
        raise refusal(given, rows, limit, limit_reason, fits)
    tokens, reason = _choose_tokens(given, fits)
    if given.mem_fraction is not None and tokens == fits:
        check_fraction(given, given.mem_fraction, rows)
    page, ids = given.page_size, SLOT_TOKEN_BYTES * (tokens + given.page_size)
    rows = (*rows, LedgerRow("tokens of slots", ids, "ids beside the KV cache, for penalties"))
    limit, limit_reason = memory_limit(given, rows)
    given, reduced = fit_tier(given, tokens)
    tier = tier_size(given, tokens)
    rows = (*rows, *tier_rows(given, tier))
    ledger = MemoryLedger(
        rows, limit, limit_reason, given.bytes_per_token, tokens, page, given.logits_rows, given.num_window_slots,
        *tier, (*given.offload.host_rows, *tier_host_rows(given, tier)),
    )  # fmt: skip
    running, running_reason = _choose_running(given, tokens)
    kept = remark, given.tier_ratio, reduced
    if given.mem_fraction is not None:
        return Sizing(ledger, reason, running, running_reason, given.mem_fraction, "given", *kept)
    static = ledger.static_bytes / given.machine.total_bytes
    fraction = math.ceil(static * FRACTION_STEPS) / FRACTION_STEPS
    why = "weights and KV of the ledger / total memory"
    return Sizing(ledger, reason, running, running_reason, fraction, why, *kept)


def _with_bounded_windows(given: SizingInput) -> tuple[SizingInput, str]:
    """The launch with a pool of windowed layers, or the same launch with the reason if there are windows."""
    if not given.model.longest_window:
        return given, ""
    rows = fixed_rows(given)
    tokens, _ = _choose_tokens(given, fitting_tokens(given, rows, memory_limit(given, rows)[0]))
    slots, remark = bound_windows(given, tokens)
    return dataclasses.replace(given, num_window_slots=slots), remark


def _choose_tokens(given: SizingInput, fits: int) -> tuple[int, str]:
    page = given.page_size
    if given.max_total_tokens is not None:
        asked = given.max_total_tokens - given.max_total_tokens % page
        return asked, "given" if asked == given.max_total_tokens else f"as given, in whole pages of {page}"
    useful = given.limits.context_len * given.limits.running
    useful += -useful % page
    if not given.bytes_per_token:
        most = INDEXED_WINDOWS * given.num_window_slots or useful
        return min(useful, most, fits), "all layers have windows or states: numbers without KV"
    modest = max(CPU_KV_BYTES, int(CPU_KV_SHARE * given.machine.available_bytes))
    if given.machine.on_cpu and useful <= fits and useful * given.bytes_per_token <= modest:
        return useful, f"{given.limits.running} requests of {given.limits.context_len} tokens cannot use more"
    if given.machine.on_cpu and given.mem_fraction is None:
        one_request = -(-given.limits.context_len // page) * page
        left = modest - sum(row.num_bytes for row in window_rows(given))
        enough = max(tokens_that_fit(left, given.bytes_per_token, page), one_request)
        if enough <= fits:
            return enough, f"{gb(modest)} of KV by default on a CPU; {fits} would fit (--max-total-tokens {fits})"
    return fits, "the rest of the memory ledger"


def _choose_running(given: SizingInput, tokens: int) -> tuple[int, str]:
    """SGLang's clamp(tokens / context * 512, 2048, 4096), at most tokens / 2, one per page, and the device's cap."""
    running = given.limits.running
    if not given.running_is_auto:
        return running, "given"
    each = max(2, given.page_size)
    if (most := max(1, tokens // each)) < running:
        return most, f"{tokens} KV tokens, at least {each} for each"
    if given.limits.running_reason:
        return running, given.limits.running_reason
    if given.machine.on_cpu:
        reason = "SGLang's rule gives 2048 or more; on a CPU a step's time grows with every request"
    else:
        reason = "the minimum of SGLang's rule; more would take memory from the KV cache"
    if given.drafts:
        counted = given.limits.request_tokens
        reason += f"; SGLang's 48 with drafts is not needed: the ledger counts {counted} tokens each"
    return running, reason
