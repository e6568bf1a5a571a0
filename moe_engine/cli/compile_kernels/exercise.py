"""Runs a launch's model, with one layer of each kind, through all step sizes on meta tensors.

So every kernel is launched with the arguments of the real launch; on an absent device a launch compiles the kernel.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace
from itertools import pairwise
from typing import Any

import torch

from moe_engine.cli.compile_kernels.absent_ranks import AbsentSymmetricMemory, first_rank, with_exchange
from moe_engine.cli.compile_kernels.drafts import drafts_of, num_own_layers
from moe_engine.cli.compile_kernels.forwards import META, caches, run_step
from moe_engine.cli.compile_kernels.steps import StepTensors
from moe_engine.kernels.backends import Backends
from moe_engine.kernels.warmup_sizes import StepSize, step_sizes
from moe_engine.models.config import ModelConfig
from moe_engine.models.config_sections.compressed import CompressedConfig, SharedEntriesConfig
from moe_engine.models.loader import LoadOptions, load_model
from moe_engine.models.sharding import local_config
from moe_engine.parallel.context import ParallelContext, with_all_reduce
from moe_engine.planning.resolved_config import ResolvedConfig
from moe_engine.types.row_sizes import row_width


def one_layer_of_each(model: ModelConfig) -> ModelConfig:
    """The model truncated after the first of each pair of adjacent kinds: all other layers are equal to one of these,
    the norm before the next layer included. Models whose layers read what others keep, or more the later they are, stay
    whole."""
    attention = model.attention
    has_ngrams = model.streams is not None and model.streams.engram is not None
    if isinstance(attention, SharedEntriesConfig) or model.residual_block or has_ngrams:
        return model
    kinds = [_kind(model, layer) for layer in range(model.num_layers)]
    pairs = list(pairwise(kinds))
    count = max((2 + pairs.index(pair) for pair in pairs), default=1)
    states = tuple(replace(group, layers=tuple(i for i in group.layers if i < count)) for group in model.state_groups)
    return replace(model, num_layers=count, moe_layers=model.moe_layers[:count], state_groups=states)


def _kind(model: ModelConfig, layer: int) -> tuple[Any, ...]:
    """What a layer's kernels depend on."""
    attention, moe = model.attention_of(layer), model.moe
    entries = (attention.rate(layer), attention.selects(layer)) if isinstance(attention, CompressedConfig) else ()
    return (
        None if moe is None else (model.moe_layers[layer], moe.hashes(layer)), model.has_attention(layer),
        [layer in group.layers for group in model.state_groups], attention, model.rope_of(layer),
        model.window_of(layer), layer in attention.shared_layers, entries,
    )  # fmt: skip


def exercise(
    config: ResolvedConfig,
    backends: Backends,
    sizes: Iterable[StepSize] | None = None,
    drafting: Backends | None = None,
) -> Iterator[StepSize]:
    """Runs every step size and yields it when done. Tensors are on the meta device: results have no values.

    Args:
        sizes: default: those of `step_sizes`.
        drafting: of a draft model or head; None: those are left out.
    """
    dtype = getattr(torch, config.dtype)
    fused = not config.args.parallel.disable_shared_experts_fusion and config.lora is None
    backends = replace(backends, fuse_shared_experts=fused)
    parallel, speculation, drafts = _parallel(config, dtype), config.speculation, 0
    own_layers = num_own_layers(config)
    cut = config.model if own_layers else one_layer_of_each(config.model)  # layers that draft are numbered after all
    load = LoadOptions(config.dtype, META, "dummy")
    model = load_model(config.model_path, cut, load, backends, parallel, max_positions=config.context_len)
    requests = config.max_running_requests
    kv = caches(local_config(cut, parallel), config, requests, own_layers)
    trees = speculation is not None and speculation.topk > 1
    if speculation is not None:
        drafts = speculation.num_nodes(speculation.num_steps) - 1
    tensors = StepTensors(META, requests, row_width(config.context_len, drafts), config.page_size)
    own = None if drafting is None else replace(drafting, fuse_shared_experts=fused)
    with torch.no_grad():
        run_drafts = drafts_of(config, model, load, backends, own, tensors, kv)
        chunk, most = config.limits.prompt_tokens, config.context_len
        for size in step_sizes(requests, chunk, most, drafts) if sizes is None else sizes:
            run_step(model, backends, tensors, kv, size, parallel, visible=trees and size.queries > 1)
            run_drafts(size)
            yield size


def _parallel(config: ResolvedConfig, dtype: torch.dtype) -> ParallelContext:
    plan = config.parallel
    parallel = first_rank(plan.topology, META)
    if plan.all_reduce.is_custom:
        parallel = with_all_reduce(parallel, config.model.hidden_size, dtype, AbsentSymmetricMemory())
    if plan.dispatch is None or not plan.topology.travels:
        return parallel
    limits = config.limits
    return with_exchange(parallel, config.model, plan.dispatch, dtype, limits.forward_tokens, limits.low_latency_tokens)
