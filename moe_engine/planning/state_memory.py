"""Layers with a state for each request: memory of the states, the flags that they exclude, and the flag that they set.

A state is that of the request's last computed token. The state at an earlier token is not kept, so nothing that goes
back to an earlier token is available: cached prefixes, rejected drafts, KV outside the pool.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Protocol

from moe_engine.config.args import EngineArgs
from moe_engine.config.scheduling import CACHE_AWARE_POLICIES
from moe_engine.errors import ConfigError
from moe_engine.models.config import STATE_BYTES, ModelConfig
from moe_engine.parallel.topology import Topology
from moe_engine.planning.ledger import STATES_ROW, LedgerRow
from moe_engine.planning.resolution_log import Record
from moe_engine.planning.step_limits import StepLimits

PADDING_ROWS = 1
NOT_CAPTURED = "layers with a state for each request: a padded decode would change the state of a request"


class StateInput(Protocol):
    """The part of `SizingInput` that the states depend on."""

    @property
    def local_model(self) -> ModelConfig: ...
    @property
    def dtype(self) -> str: ...
    @property
    def limits(self) -> StepLimits: ...


def state_rows(given: StateInput) -> list[LedgerRow]:
    """The ledger row of the states on one rank, if the model has such layers."""
    model = given.local_model
    if not model.state_groups:
        return []
    each, rows = sum(group.num_bytes(given.dtype) for group in model.state_groups), given.limits.running + PADDING_ROWS
    detail = f"{given.limits.running} requests x {each} B in {len(model.state_layers)} layers, and a row for padding"
    return [LedgerRow(STATES_ROW, rows * each, detail)]


def with_states(
    args: EngineArgs, model: ModelConfig, draft: ModelConfig | None, topology: Topology, record: Record
) -> EngineArgs:
    """The flags of a launch, without the radix cache if a layer has a state for each request.

    Raises:
        ConfigError: a flag that these layers exclude, or a state that the ranks cannot divide.
    """
    if draft is not None and draft.state_groups:
        raise ConfigError(
            f"--speculative-draft-model-path: {draft.source} has layers with a state for each request, and drafts that "
            "are rejected cannot be taken out of it; use another draft model, or NGRAM"
        )
    if not model.state_groups:
        return args
    for complaint in (*_wrong_parts(model, topology.attn_tp_size), *_excluded(args)):
        raise ConfigError(f"{complaint} ({model.source} has layers with a state for each request)")
    if args.scheduling.disable_radix_cache:
        return args
    reason = "a state for each request is kept for its last token only, not for the end of a prefix"
    record.note("disable_radix_cache", True, reason)
    return dataclasses.replace(args, scheduling=dataclasses.replace(args.scheduling, disable_radix_cache=True))


def _wrong_parts(model: ModelConfig, ranks: int) -> Iterator[str]:
    for part in (part for group in model.state_groups for part in group.parts):
        if part.dtype is not None and part.dtype not in STATE_BYTES:
            yield f"a state of {part.dtype}: use {', '.join(STATE_BYTES)}"
        if part.sharded is not None and (width := part.shape[part.sharded]) % ranks:
            yield (
                f"--tp-size / --attn-dp-size: {width} channels or heads of a state cannot be divided over the {ranks} "
                "ranks of an attention group; use a divisor"
            )


def _excluded(args: EngineArgs) -> Iterator[str]:
    policy, algorithm = args.scheduling.schedule_policy, args.speculative.speculative_algorithm
    if policy in CACHE_AWARE_POLICIES:
        yield f"--schedule-policy {policy}: orders by cached prefixes, and no prefix is cached; use fcfs"
    if algorithm is not None:
        yield (
            f"--speculative-algorithm {algorithm}: not available yet: rejected drafts cannot be taken out of a state; "
            "leave it out"
        )
    if args.memory.enable_hierarchical_cache:
        yield (
            f"--enable-hierarchical-cache (--kv-connector {args.memory.kv_connector}): not available yet: a state is "
            "not stored with the KV of a prefix; leave it out"
        )
    if args.parallel.enable_two_batch_overlap:
        yield (
            "--enable-two-batch-overlap: not available yet: the halves of a step may share a request and its state; "
            "leave it out"
        )
    if args.backends.enable_torch_compile:
        yield "--enable-torch-compile: not available yet: only layers with attention are compiled; leave it out"
