"""The error of a launch that does not fit: the sum of its ledger, and the nearest flags that fit."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

from moe_engine.errors import ConfigError
from moe_engine.planning.memory.dispatch import SMALL_DISPATCH
from moe_engine.planning.memory.ledger import LedgerRow, MemoryLedger, gb
from moe_engine.planning.memory.ledger_rows import PROCESS_BYTES, fixed_rows
from moe_engine.planning.memory.limit import (
    CPU_SHARE,
    GPU_RESERVE_BYTES,
    GPU_RESERVE_SHARE,
    fitting_tokens,
    memory_limit,
)
from moe_engine.planning.memory.sizing_input import SizingInput
from moe_engine.planning.memory.tier import tier_rows, tier_size
from moe_engine.planning.step_limits import StepLimits

SMALLER_STEPS = (
    *((1 << power, 0, 0) for power in range(17, 8, -1)), (512, 64, 0), (512, 32, 32768), (256, 8, 8192), (128, 1, 1024)
)  # fmt: skip
"""Chunk, running requests and context (0: as requested) that a refusal tries, nearest first."""


def refusal(given: SizingInput, rows: tuple[LedgerRow, ...], limit: int, limit_reason: str, fits: int) -> ConfigError:
    per_token = given.bytes_per_token
    rows = (*rows, *tier_rows(given, tier_size(given, given.min_tokens)))
    ledger = MemoryLedger(rows, limit, limit_reason, per_token, given.min_tokens, given.page_size)
    if fits > 0 and given.max_total_tokens is not None:
        return ConfigError(
            f"--max-total-tokens {given.max_total_tokens} needs {gb(ledger.kv_bytes)} of KV ({per_token} B a token): "
            f"at most {fits} fit, because {ledger.sum_text()} leave {gb(max(0, limit - ledger.fixed_bytes))} of "
            f"{gb(limit)} ({limit_reason}); use --max-total-tokens {fits}{_or(_fixes(given))}"
        )
    kv = f" + KV of {given.min_tokens} tokens {gb(ledger.kv_bytes)}"
    on_cpu = given.machine.on_cpu
    place = "this machine" if on_cpu else "a GPU"
    message = (
        f"{given.model.source}: {ledger.sum_text()}{kv} = {gb(ledger.total_bytes)}, but {place} offers "
        f"{gb(limit)} ({limit_reason}); "
    )
    if fixes := _fixes(given):
        return ConfigError(message + "it fits with " + " or with ".join(fixes))
    if on_cpu:
        least = int((ledger.weight_bytes + PROCESS_BYTES) / CPU_SHARE)
    else:
        least = int(ledger.weight_bytes * (1 + GPU_RESERVE_SHARE)) + GPU_RESERVE_BYTES
    needs = f"the weights alone need a {'machine' if on_cpu else 'GPU'} with more than {gb(least)} of free memory"
    num_ranks, num_devices = given.parallel.ranks_per_node, given.machine.num_devices or 1
    if num_ranks < num_devices and given.parallel.num_replicas == 1:
        needs += f", and this launch uses {num_ranks} of {num_devices} GPUs; divide them with --tp-size {num_devices}"
        return ConfigError(f"{message}{needs}, or let `moe-engine plan --workload` choose the form")
    return ConfigError(f"{message}no flag changes that: {needs}")


def _or(fixes: list[str]) -> str:
    return "".join(f", or {fix}" for fix in fixes)


def _fixes(given: SizingInput) -> list[str]:
    """Flags with which the same launch fits, nearest first: a smaller step, a larger share of the memory, or a smaller
    host-RAM tier."""
    fixes = []
    for flags, limits in _smaller_steps(given):
        if _fits(dataclasses.replace(given, limits=limits)):
            fixes.append(" ".join(flags))
            break
    fraction = _sufficient_fraction(given)
    if fraction is not None:
        fixes.append(f"--mem-fraction-static {fraction:g}")
    if given.tier_bytes and (size := _smaller_tier(given)):
        fixes.append(f"--hicache-size {size}")
    if given.drafts and _fits(_without_drafts(given)):
        fixes.append("no --speculative-algorithm")
    return fixes


def _fits(given: SizingInput) -> bool:
    rows = fixed_rows(given)
    return fitting_tokens(given, rows, memory_limit(given, rows)[0]) >= given.min_tokens


def _smaller_tier(given: SizingInput) -> int:
    """A --hicache-size with which the launch fits: half of the memory that is left, so that the KV cache gets the other
    half. 0: none."""
    without = dataclasses.replace(given, tier_bytes=0)
    rows = fixed_rows(without)
    size = (memory_limit(without, rows)[0] - sum(row.num_bytes for row in rows)) // (2 * 10**9)
    return size if 0 < size * 10**9 < given.tier_bytes else 0


def _without_drafts(given: SizingInput) -> SizingInput:
    limits = dataclasses.replace(given.limits, request_tokens=1, drafting_tokens=1, draft_slots=0, choices=1)
    limits = dataclasses.replace(limits, followed_again=0)
    return dataclasses.replace(given, limits=limits, uses_mtp=False, draft=None, head=None)


def _smaller_steps(given: SizingInput) -> Iterator[tuple[list[str], StepLimits]]:
    """Smaller and smaller steps, each with its flags."""
    page = given.page_size
    for tokens in (SMALL_DISPATCH, SMALL_DISPATCH // 4):
        if given.limits.low_latency == "decode" and tokens < given.limits.low_latency_tokens:
            limits = dataclasses.replace(given.limits, dispatch_limit=tokens)
            yield [f"--max-dispatch-tokens-per-rank {tokens}"], limits
    for chunk, running, context in SMALLER_STEPS:
        limits, flags = given.limits, []
        chunk = max(page, chunk - chunk % page)
        if limits.chunk == -1 or chunk < limits.chunk:
            limits = dataclasses.replace(limits, chunk=chunk)
            flags.append(f"--chunked-prefill-size {chunk}")
        if running and running < limits.running:
            limits = _with_running(limits, running)
            flags.append(f"--max-running-requests {running}")
        if context and context < limits.context_len:
            limits = dataclasses.replace(limits, context_len=context)
            flags.append(f"--context-length {context}")
        if flags:
            yield flags, limits


def _with_running(limits: StepLimits, running: int) -> StepLimits:
    """The limits with fewer requests. By default each has a snapshot; else the number of states is given by a flag."""
    fewer = limits.running - running
    by_default = limits.num_snapshots == limits.running
    snapshots = running if by_default else limits.num_snapshots + fewer * (limits.num_snapshots > 0)
    return dataclasses.replace(limits, running=running, num_snapshots=snapshots)


def _sufficient_fraction(given: SizingInput) -> float | None:
    """The least --mem-fraction-static that fits the launch into 97% of the available memory, or None."""
    tier = tier_rows(given, tier_size(given, given.min_tokens))
    rows = (*fixed_rows(given), *tier)
    ledger = MemoryLedger(rows, 0, "", given.bytes_per_token, given.min_tokens, given.page_size)
    if ledger.total_bytes > 0.97 * given.machine.available_bytes:
        return None
    static = (ledger.static_bytes + sum(row.num_bytes for row in tier)) / given.machine.total_bytes
    fraction = int(static * 1000 + 1) / 1000
    return fraction if fraction < 1 and fraction != given.mem_fraction else None
