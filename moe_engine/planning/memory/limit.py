"""Memory that the engine may use, and the KV slots that fit into it with the fixed rows."""

from __future__ import annotations

import math

from moe_engine.errors import ConfigError
from moe_engine.planning.memory.ledger import GB, SLOT_TOKEN_BYTES, STATIC_ROWS, LedgerRow, gb, tokens_that_fit
from moe_engine.planning.memory.sizing_input import SizingInput
from moe_engine.planning.memory.tier import tier_bytes_per_token, tier_reserve

CPU_SHARE = 0.8
"""Share of the available memory that an engine on a CPU uses by default; the rest is for other programs."""

GPU_RESERVE_BYTES = GB
GPU_RESERVE_SHARE = 0.04


def memory_limit(given: SizingInput, rows: tuple[LedgerRow, ...]) -> tuple[int, str]:
    """Memory limit of the engine, and its reason."""
    machine = given.machine
    if given.mem_fraction is not None:
        static = int(given.mem_fraction * machine.total_bytes)
        others = sum(row.num_bytes for row in rows if row.name not in STATIC_ROWS)
        if static + others > machine.available_bytes:
            return machine.available_bytes, f"available memory, {machine.source}"
        share = f"--mem-fraction-static {given.mem_fraction:g} of {gb(machine.total_bytes)} for weights and KV"
        return static + others, share + ", plus the other rows"
    if machine.on_cpu:
        available = gb(machine.available_bytes)
        return int(CPU_SHARE * machine.available_bytes), f"{CPU_SHARE:.0%} of {available} available, {machine.source}"
    reserve = max(GPU_RESERVE_BYTES, int(GPU_RESERVE_SHARE * machine.total_bytes))
    return machine.available_bytes - reserve, f"{gb(machine.available_bytes)} free, less a reserve of {gb(reserve)}"


def check_fraction(given: SizingInput, fraction: float, rows: tuple[LedgerRow, ...]) -> None:
    """Refuses a share that exceeds the free memory, instead of silently using less."""
    total, available = given.machine.total_bytes, given.machine.available_bytes
    others = sum(row.num_bytes for row in rows if row.name not in STATIC_ROWS)
    static = int(fraction * total)
    if static + others > available:
        most = int((available - others) / total * 1000) / 1000
        raise ConfigError(
            f"--mem-fraction-static {fraction:g} asks for {gb(static)} of {gb(total)} for weights and KV, and steps "
            f"take {gb(others)} more, but only {gb(available)} are free; use at most {most:g}, or free memory"
        )


def fitting_tokens(given: SizingInput, rows: tuple[LedgerRow, ...], limit: int) -> int:
    """KV slots that fit. --mem-fraction-static counts weights and KV only; else the slots' token ids count too."""
    left = limit - sum(row.num_bytes for row in rows)
    ids = 0 if given.mem_fraction is not None else SLOT_TOKEN_BYTES
    stored, ratio = tier_reserve(given)
    each = given.bytes_per_token + ids + math.ceil(ratio * tier_bytes_per_token(given))
    return tokens_that_fit(left - stored, each, given.page_size)
