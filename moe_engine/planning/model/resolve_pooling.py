"""Pooled models (embeddings, scores): the flags that they exclude, and the flags that they set."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

from moe_engine.config.args import EngineArgs
from moe_engine.config.scheduling import CACHE_AWARE_POLICIES
from moe_engine.errors import ConfigError
from moe_engine.models.config import ModelConfig
from moe_engine.models.config_sections.pooling import PoolingConfig
from moe_engine.planning.resolution_log import Record

NOT_CAPTURED = "a pooled model has no decodes"


def resolve_pooling(args: EngineArgs, model: ModelConfig, record: Record) -> EngineArgs:
    """The flags of a launch, without the radix cache if the vector needs the states of all tokens.

    Raises:
        ConfigError: a flag that a pooled model excludes.
    """
    pooling = model.pooling
    if pooling is None:
        return args
    for complaint in _excluded(args, pooling):
        raise ConfigError(f"{complaint} ({model.source} is served for vectors, not for text)")
    if not args.model.is_embedding:
        record.note("is_embedding", True, f"{model.architecture} has no language-model head")
    if pooling.reads_last or args.scheduling.disable_radix_cache:
        return args
    record.note("disable_radix_cache", True, f"the vector ({pooling.kind}) needs the states of a cached prefix too")
    return dataclasses.replace(args, scheduling=dataclasses.replace(args.scheduling, disable_radix_cache=True))


def _excluded(args: EngineArgs, pooling: PoolingConfig) -> Iterator[str]:
    policy, algorithm = args.scheduling.schedule_policy, args.speculative.speculative_algorithm
    if algorithm is not None:
        yield f"--speculative-algorithm {algorithm}: no token is generated; leave it out"
    if args.parallel.enable_two_batch_overlap:
        yield "--enable-two-batch-overlap: not available yet for vectors; leave it out"
    if args.backends.enable_torch_compile:
        yield "--enable-torch-compile: compiles decodes, and there are none; leave it out"
    if pooling.reads_last:
        return
    if policy in CACHE_AWARE_POLICIES:
        yield f"--schedule-policy {policy}: orders by cached prefixes, and no prefix is cached; use fcfs"
    if args.memory.enable_hierarchical_cache:
        yield "--enable-hierarchical-cache: keeps cached prefixes, and no prefix is cached; leave it out"
