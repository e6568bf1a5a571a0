"""Layers with a state for each request: memory of the states, the flags that they exclude, and the flag that they set.

A state belongs to the request's last computed token. States at earlier tokens exist only in snapshots, if the layers
store them: without snapshots no prefix is cached. A verification keeps a state for each draft position. The host-RAM
tier has states of its own (`tier.py`).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

from moe_engine.config.args import EngineArgs
from moe_engine.config.disaggregation import OFF
from moe_engine.config.scheduling import CACHE_AWARE_POLICIES
from moe_engine.errors import ConfigError
from moe_engine.models.config import ModelConfig
from moe_engine.models.config_sections.state import STATE_BYTES
from moe_engine.planning.inputs.machine import Machine
from moe_engine.planning.memory.ledger import STATES_ROW, LedgerRow, gb
from moe_engine.planning.memory.sizing_input import SizingInput
from moe_engine.planning.resolution_log import Record
from moe_engine.planning.step_limits import StepLimits

PADDING_ROWS = 1
STATES_SHARE = 1 / 3
"""Share of the memory without the weights that states take by default; KV cache and steps get the rest."""


def state_rows(given: SizingInput) -> list[LedgerRow]:
    """The ledger row of the states on one rank, if the model has such layers."""
    model = given.local_model
    if not model.state_groups:
        return []
    each, snapshots = state_bytes(model, given.dtype), given.limits.num_snapshots
    running, layers = given.limits.running, len(model.state_layers)
    positions = running * given.limits.request_tokens if given.limits.drafts else 0
    kept = f", {snapshots} snapshots" * bool(snapshots) + f", {positions} draft positions" * bool(positions)
    detail = f"{running} requests{kept} x {each} B in {layers} layers, and a row for padding"
    return [LedgerRow(STATES_ROW, (running + PADDING_ROWS + snapshots + positions) * each, detail)]


def state_bytes(model: ModelConfig, dtype: str) -> int:
    """Bytes of the states of one request in all layers."""
    return sum(group.num_bytes(dtype) for group in model.state_groups)


def stores_any(model: ModelConfig) -> bool:
    """Whether the layers can store the state after any token of a step."""
    return all(group.stores_any for group in model.state_groups)


def caches_prefixes(model: ModelConfig) -> bool:
    """Whether snapshots of the states can be kept for prefixes."""
    return stores_any(model) and not model.windows


def with_room_for_kv(
    limits: StepLimits, args: EngineArgs, model: ModelConfig, dtype: str, machine: Machine, weights: int
) -> StepLimits:
    """The limits with fewer running requests, if their number is open and their states would leave too little memory.

    Args:
        model: with the heads of one rank. weights: bytes of this rank.
    """
    if not model.state_groups or args.memory.max_running_requests is not None:
        return limits
    cached = not args.scheduling.disable_radix_cache and args.memory.max_mamba_cache_size is None
    each = state_bytes(model, dtype) * (1 + cached + limits.request_tokens * limits.drafts)
    most = max(1, int(STATES_SHARE * (machine.available_bytes - weights)) // each)
    if most >= limits.running:
        return limits
    reason = f"states of {gb(each)} for each request take a third of the memory that the weights leave"
    return dataclasses.replace(limits, running=most, running_reason=reason)


def with_snapshots(limits: StepLimits, args: EngineArgs, model: ModelConfig, record: Record) -> StepLimits:
    """The limits with the number of snapshots for cached prefixes.

    Raises:
        ConfigError: --max-mamba-cache-size leaves no snapshot.
    """
    asked, running = args.memory.max_mamba_cache_size, limits.running
    if not model.state_groups or args.scheduling.disable_radix_cache:
        if asked is not None:
            record.remark("--max-mamba-cache-size: no effect (no state is cached)")
        return limits
    if asked is None:
        record.note("max_mamba_cache_size", 2 * running, "a snapshot for each running request")
    elif asked <= running:
        raise ConfigError(
            f"--max-mamba-cache-size {asked}: {running} requests run, each with a state, which leaves no snapshot for "
            f"cached prefixes; give {running + 1} or more, fewer --max-running-requests, or --disable-radix-cache"
        )
    return dataclasses.replace(limits, num_snapshots=running if asked is None else asked - running)


def with_states(args: EngineArgs, model: ModelConfig, draft: ModelConfig | None, record: Record) -> EngineArgs:
    """The flags of a launch, without the radix cache if a layer has a state for each request.

    Raises:
        ConfigError: a flag or a dtype of a state that these layers exclude.
    """
    if draft is not None and draft.state_groups:
        raise ConfigError(
            f"--speculative-draft-model-path: {draft.source} has layers with a state for each request, and drafts that "
            "are rejected cannot be taken out of it; use another draft model, or NGRAM"
        )
    if not model.state_groups:
        return args
    for complaint in (*_wrong_parts(model), *_excluded(args, model)):
        raise ConfigError(f"{complaint} ({model.source} has layers with a state for each request)")
    if args.scheduling.disable_radix_cache or caches_prefixes(model):
        return args
    reason = "a state for each request is kept for its last token only, not for the end of a prefix"
    record.note("disable_radix_cache", True, reason)
    return dataclasses.replace(args, scheduling=dataclasses.replace(args.scheduling, disable_radix_cache=True))


def _wrong_parts(model: ModelConfig) -> Iterator[str]:
    for part in (part for group in model.state_groups for part in group.parts):
        if part.dtype is not None and part.dtype not in STATE_BYTES:
            yield f"a state of {part.dtype}: use {', '.join(STATE_BYTES)}"


def _excluded(args: EngineArgs, model: ModelConfig) -> Iterator[str]:
    policy, algorithm = args.scheduling.schedule_policy, args.speculative.speculative_algorithm
    if policy in CACHE_AWARE_POLICIES and not caches_prefixes(model):
        yield f"--schedule-policy {policy}: orders by cached prefixes, and no prefix is cached; use fcfs"
    if algorithm is not None and not stores_any(model):
        yield (
            f"--speculative-algorithm {algorithm}: not available: rejected drafts cannot be taken out of a state: the "
            "layers do not store those of draft positions (StateGroup.stores_any); leave it out"
        )
    mode, memory = args.disaggregation.disaggregation_mode, args.memory
    if mode != OFF and not caches_prefixes(model):
        yield f"--disaggregation-mode {mode}: moves cached prefixes, and no prefix is cached; leave it out"
    elif memory.enable_hierarchical_cache and not caches_prefixes(model):
        yield "--enable-hierarchical-cache: keeps cached prefixes, and no prefix is cached; leave it out"
    elif memory.enable_hierarchical_cache and memory.kv_connector != "host":
        yield (
            f"--kv-connector {memory.kv_connector}: only the connector host stores states with the KV of a prefix; use "
            "it, or leave --enable-hierarchical-cache out"
        )
    if args.parallel.enable_two_batch_overlap:
        yield (
            "--enable-two-batch-overlap: not available yet: the halves of a step may share a request and its state; "
            "leave it out"
        )
    if args.backends.enable_torch_compile:
        yield "--enable-torch-compile: not available yet: only layers with attention are compiled; leave it out"
