"""Runs a launch's model, with one layer of each kind, through all step sizes on meta tensors.

So every kernel is launched with the arguments of the real launch; on an absent device a launch compiles the kernel.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from moe_engine.cli.compile_kernels.absent_ranks import AbsentSymmetricMemory, first_rank, with_exchange
from moe_engine.cli.compile_kernels.steps import StepTensors
from moe_engine.kernels.backends import Backends
from moe_engine.kernels.kv_format.formats import STORED
from moe_engine.kernels.sampling.protocol import SamplingParameters
from moe_engine.kernels.warmup_sizes import StepSize, step_sizes
from moe_engine.models.batch import ForwardBatch, Model
from moe_engine.models.compressed_cache import CompressedCache
from moe_engine.models.compressed_config import CompressedConfig, SharedEntriesConfig
from moe_engine.models.config import ModelConfig
from moe_engine.models.loader import LoadOptions, load_model
from moe_engine.models.sharding import local_config
from moe_engine.parallel.context import ParallelContext, with_all_reduce
from moe_engine.parallel.step_sizes import StepSizes
from moe_engine.planning.resolved_config import ResolvedConfig
from moe_engine.types.row_sizes import row_width

META = torch.device("meta")
STATES = 4096
"""Rows of states; kernels do not depend on their number."""


def one_layer_of_each(model: ModelConfig) -> ModelConfig:
    """The model truncated after the first layer of its last kind: all other layers are equal to one of these. Models
    whose layers read what others keep, or more the later they are, stay whole."""
    attention = model.attention
    has_ngrams = model.streams is not None and model.streams.engram is not None
    if isinstance(attention, SharedEntriesConfig) or model.residual_block or has_ngrams:
        return model
    kinds = [_kind(model, layer) for layer in range(model.num_layers)]
    count = 1 + max(kinds.index(kind) for kind in kinds)
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


def exercise(config: ResolvedConfig, backends: Backends, sizes: Iterable[StepSize] | None = None) -> Iterator[StepSize]:
    """Runs every step size and yields it when done. Tensors are on the meta device: results have no values.

    Args:
        sizes: default: those of `step_sizes`.
    """
    dtype = getattr(torch, config.dtype)
    fused = not config.args.parallel.disable_shared_experts_fusion and config.lora is None
    backends = replace(backends, fuse_shared_experts=fused)
    parallel = _parallel(config, dtype)
    cut = one_layer_of_each(config.model)
    load = LoadOptions(config.dtype, META, "dummy")
    model = load_model(config.model_path, cut, load, backends, parallel, max_positions=config.context_len)
    local = local_config(cut, parallel)
    requests = config.max_running_requests
    kv = _caches(local, config, requests)
    chunk = config.limits.prompt_tokens
    speculation = config.speculation
    drafts = speculation.num_nodes(speculation.num_steps) - 1 if speculation is not None else 0
    tensors = StepTensors(META, requests, row_width(config.context_len, drafts), config.page_size)
    with torch.no_grad():
        for size in step_sizes(requests, chunk, config.context_len, drafts) if sizes is None else sizes:
            run_step(model, backends, tensors, kv, size, parallel)
            yield size


def run_step(
    model: Model, backends: Backends, tensors: StepTensors, kv: list[Any], size: StepSize, parallel: ParallelContext
) -> None:
    """A forward, the logits of one token per request, greedy and random sampling."""
    count, requests = size.tokens, size.decodes + bool(size.prefill)
    ids, positions, slots, rows = tensors.integers(count, count, count, requests)
    sizes = None
    if parallel.world_size > 1:
        groups = parallel.attn_dp_size
        sizes = StepSizes.known(parallel, [count] * groups, [requests] * groups, bool(size.prefill))
    attention = tensors.attention(size)
    plan = backends.attention.plan(attention)
    batch = ForwardBatch(ids, positions, slots, rows, attention, plan, kv, sizes)
    hidden = model.forward(batch)
    logits = model.logits(hidden.index_select(0, rows), sizes)
    backends.sampling.greedy(logits)
    backends.sampling.sample(logits, *_parameters(tensors, requests))


def _parameters(tensors: StepTensors, count: int) -> tuple[SamplingParameters, Tensor]:
    """Parameters and uniform numbers of random sampling; the kernels do not depend on the rows' sampling kinds."""
    import numpy as np

    temperature, top_p, min_p, uniform = tensors.integers(count, count, count, count, dtype=torch.float32)
    (top_k,) = tensors.integers(count)
    return SamplingParameters(np.full(count, 4, np.uint8), temperature, top_p, min_p, top_k, True), uniform


def _caches(model: ModelConfig, config: ResolvedConfig, max_rows: int) -> list[Any]:
    """`ForwardBatch.kv` of the model, with the launch's number of slots: kernels have offsets of 64 bits over caches of
    2^31 elements or more."""
    kv_dtype, ledger = config.kv_cache_dtype, config.ledger
    dtype, slots = getattr(torch, STORED[kv_dtype][0]), ledger.num_tokens + ledger.page_size

    def new(*shape: int) -> Tensor:
        return torch.empty(*shape, dtype=dtype, device=META)

    if isinstance(model.attention, CompressedConfig):
        return list(CompressedCache.of_layers(model, range(model.num_layers), slots, max_rows, new))

    def parts(layer: int) -> tuple[Tensor, ...]:
        own = slots if model.window_of(layer) is None else ledger.num_window_slots or slots
        return tuple(new(own, *part) for part in model.kv_parts(layer, kv_dtype))

    layers = [parts(i) for i in range(model.num_layers)]
    caches: list[Any] = [layer[0] if len(layer) == 1 else layer for layer in layers]
    for group in model.state_groups:
        for layer in group.layers:
            caches[layer] = tuple(
                torch.empty(STATES, *part.shape, dtype=getattr(torch, part.dtype or config.dtype), device=META)
                for part in group.parts
            )
    return caches


def _parallel(config: ResolvedConfig, dtype: torch.dtype) -> ParallelContext:
    plan = config.parallel
    parallel = first_rank(plan.topology, META)
    if plan.all_reduce.is_custom:
        parallel = with_all_reduce(parallel, config.model.hidden_size, dtype, AbsentSymmetricMemory())
    if plan.dispatch is None or not plan.topology.travels:
        return parallel
    limits = config.limits
    return with_exchange(parallel, config.model, plan.dispatch, dtype, limits.forward_tokens, limits.low_latency_tokens)
