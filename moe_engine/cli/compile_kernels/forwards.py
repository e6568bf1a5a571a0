"""Forwards of a model from the sizes of a step only: its caches, its batch, and the sampling of its logits."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from moe_engine.cli.compile_kernels.steps import StepTensors
from moe_engine.kernels.backends import Backends
from moe_engine.kernels.kv_format.formats import STORED
from moe_engine.kernels.sampling.protocol import SamplingParameters
from moe_engine.kernels.warmup_sizes import StepSize
from moe_engine.models.batch import ForwardBatch, Model
from moe_engine.models.compressed_cache import CompressedCache
from moe_engine.models.config import ModelConfig
from moe_engine.models.config_sections.compressed import CompressedConfig
from moe_engine.parallel.context import ParallelContext
from moe_engine.parallel.step_sizes import StepSizes
from moe_engine.planning.resolved_config import ResolvedConfig

META = torch.device("meta")
STATES = 4096
"""Rows of states; kernels do not depend on their number."""


def make_batch(
    backends: Backends, tensors: StepTensors, kv: list[Any], parallel: ParallelContext | None, size: StepSize,
    visible: bool = False,
) -> ForwardBatch:  # fmt: skip
    """A step of this size. visible: as `StepTensors.attention`."""
    count, requests = size.tokens, size.decodes + bool(size.prefill)
    ids, positions, slots, rows = tensors.integers(count, count, count, requests)
    sizes = None
    if parallel is not None and parallel.world_size > 1:
        groups = parallel.attn_dp_size
        sizes = StepSizes.known(parallel, [count] * groups, [requests] * groups, bool(size.prefill))
    attention = tensors.attention(size, visible)
    return ForwardBatch(ids, positions, slots, rows, attention, backends.attention.plan(attention), kv, sizes)


def run_step(
    model: Model, backends: Backends, tensors: StepTensors, kv: list[Any], size: StepSize,
    parallel: ParallelContext | None, visible: bool = False,
) -> None:  # fmt: skip
    """A forward, the logits of one token per request, greedy and random sampling. visible: as in `make_batch`."""
    batch = make_batch(backends, tensors, kv, parallel, size, visible)
    hidden = model.forward(batch).index_select(0, batch.logits_rows)
    logits = model.logits(hidden, batch.sizes)
    for each in (logits, logits.to(hidden.dtype)) if backends.sampling.reads_half else (logits,):
        backends.sampling.greedy(each)
    backends.sampling.sample(logits, *_parameters(tensors, len(batch.logits_rows)))


def _parameters(tensors: StepTensors, count: int) -> tuple[SamplingParameters, Tensor]:
    """Parameters and uniform numbers of random sampling; the kernels do not depend on the rows' sampling kinds."""
    import numpy as np

    temperature, top_p, min_p, uniform = tensors.integers(count, count, count, count, dtype=torch.float32)
    (top_k,) = tensors.integers(count)
    return SamplingParameters(np.full(count, 4, np.uint8), temperature, top_p, min_p, top_k, True), uniform


def caches(model: ModelConfig, config: ResolvedConfig, max_rows: int, own_drafts: int = 0) -> list[Any]:
    """`ForwardBatch.kv` of the model and of its own draft layers, with the launch's number of slots: kernels have
    offsets of 64 bits over caches of 2^31 elements or more."""
    kv_dtype, ledger = config.kv_cache_dtype, config.ledger
    count = model.num_layers + own_drafts
    dtype, slots = getattr(torch, STORED[kv_dtype][0]), ledger.num_tokens + ledger.page_size

    def new(*shape: int) -> Tensor:
        return torch.empty(*shape, dtype=dtype, device=META)

    if isinstance(model.attention, CompressedConfig):
        return list(CompressedCache.of_layers(model, range(count), slots, max_rows, new))

    def parts(layer: int) -> tuple[Tensor, ...]:
        own = slots if model.window_of(layer) is None else ledger.num_window_slots or slots
        return tuple(new(own, *part) for part in model.kv_parts(layer, kv_dtype))

    layers = [parts(i) for i in range(count)]
    found: list[Any] = [layer[0] if len(layer) == 1 else layer for layer in layers]
    for group in model.state_groups:
        for layer in group.layers:
            found[layer] = tuple(
                torch.empty(STATES, *part.shape, dtype=getattr(torch, part.dtype or config.dtype), device=META)
                for part in group.parts
            )
    return found
