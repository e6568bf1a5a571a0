"""Startup of a rank before READY: kernels, weights, KV pool, speculation, warm-up, CUDA graphs."""

from __future__ import annotations

import time
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch

from moe_engine.kernels.backends import Backends, KernelPlan
from moe_engine.kernels.registry import Choice
from moe_engine.kernels.torch_regions import CompiledRegions
from moe_engine.kernels.triton import guard
from moe_engine.models import sizes
from moe_engine.models.batch import Model
from moe_engine.models.config import ModelConfig
from moe_engine.models.config_sections.compressed import CompressedConfig
from moe_engine.models.layers.decoder import Decoder
from moe_engine.models.loader import LoadOptions, load_model
from moe_engine.models.sharding import local_config
from moe_engine.parallel.context import ParallelContext
from moe_engine.storage.backends import open_storage
from moe_engine.worker.batch.mla_form import form_policy
from moe_engine.worker.batch.request_rows import RequestRows
from moe_engine.worker.batch.row_adapters import RowAdapters
from moe_engine.worker.batch.row_images import RowImages
from moe_engine.worker.device_stream import DeviceStream, make_weight_stream
from moe_engine.worker.eplb.expert_control import ExpertControl
from moe_engine.worker.fused_decode import fused_decode
from moe_engine.worker.kv_cache.kv_pool import KVPool, kv_spec
from moe_engine.worker.kv_cache.make_copies import make_copies
from moe_engine.worker.kv_cache.state_pool import StatePool
from moe_engine.worker.lora_adapters import LoraAdapters
from moe_engine.worker.model_runner import ModelRunner
from moe_engine.worker.options import WorkerOptions
from moe_engine.worker.pooling import PoolingRunner
from moe_engine.worker.sampling.logits_passes import LogitsPasses
from moe_engine.worker.startup.compile_setup import finish_regions, start_regions
from moe_engine.worker.startup.expert_setup import attach_experts, attach_routed, with_experts
from moe_engine.worker.startup.graph_setup import capture_graphs
from moe_engine.worker.startup.kernel_choice import build_backends
from moe_engine.worker.startup.load_options import load_options
from moe_engine.worker.startup.offload_setup import note_offload
from moe_engine.worker.startup.speculation_setup import add_speculation, draft_bytes, mtp_layers, num_mtp_layers
from moe_engine.worker.startup.warmup import NUM_TOKENS, compile_kernels, warm_sizes, warm_up


@dataclass(frozen=True)
class WorkerInfo:
    """Facts of a ready worker."""

    choices: tuple[Choice, ...] = ()
    weight_bytes: int = 0
    """The drafter's included."""
    kv_bytes: int = 0
    num_graphs: int = 0
    """Captured decode steps."""
    load_seconds: float = 0.0


def build_runner(
    options: WorkerOptions, stream: DeviceStream, parallel: ParallelContext, progress: bool
) -> tuple[ModelRunner, WorkerInfo, ExpertControl]:
    """Builds kernels, loads the model, allocates the KV pool, warms up and captures graphs; runs on the step thread."""
    began = time.perf_counter()
    guard.reset()
    if stream.asynchronous:  # Triton is for accelerators only, and its import takes a second
        guard.watch()
    regions = start_regions(options.compiled)
    config = options.model
    local = local_config(config, parallel)
    dtype = getattr(torch, options.dtype)
    weight_stream = make_weight_stream(stream, options.offloaded_layers)
    backends = replace(kernels_for(options.kernels.model, options, regions), weight_stream=weight_stream)
    parallel = with_experts(parallel, config, options.experts, stream.device)
    speculation = options.speculation
    num_drafts = speculation.num_slots(speculation.num_steps) if speculation is not None else 0
    rows = RequestRows(options.max_rows, options.context_len, config.vocab_size, stream, num_drafts=num_drafts)
    # before the weights: a folder that cannot be written ends the start immediately
    storage = None if options.storage is None else open_storage(options.storage, parallel.world_rank)
    load = load_options(options, stream.device, parallel, progress)
    model = _load(options, load, backends, parallel, rows)
    loaded = time.perf_counter()
    if weight_stream is not None:
        note_offload(weight_stream, model)
    pool = _make_pools(options, local, dtype, num_mtp_layers(config, speculation), num_drafts, rows, stream, parallel)
    form = form_policy(
        config.attention,
        deterministic=options.enable_deterministic_inference,
        break_even=options.absorbed_break_even,
        shares=backends.attention.capabilities.expanded_shared is not None,
    )
    windows = config.planned_windows
    make_runner = ModelRunner if config.pooling is None else partial(PoolingRunner, config.pooling)
    runner = make_runner(
        model, pool, rows, backends.attention, stream, form=form, sampling=backends.sampling, parallel=parallel,
        passes=LogitsPasses(options.logits_rows), windows=windows,
    )  # fmt: skip
    if options.host_tier_tokens:
        runner.kv_copies = make_copies(options, pool, parallel, stream, rows.states, storage)
    if options.lora is not None:
        assert isinstance(model, Decoder)
        runner.lora = LoraAdapters(model, config, options.lora, stream)
        rows.adapters = RowAdapters(options.max_rows, options.lora.num_slots, stream)
    _add_images(runner, model, options)
    if speculation is not None:
        drafts = options.kernels.draft
        draft_backends = kernels_for(drafts, options, regions) if drafts is not None else None
        add_speculation(runner, speculation, options, load, draft_backends)
    advance = None if runner.speculation is None else runner.speculation.advance_decodes
    expands = not options.enable_deterministic_inference
    if options.experts.returned:
        runner.routed = attach_routed(runner, config, options, parallel)
    else:
        runner.fused = fused_decode(model, rows, runner.sampler, pool.layers, windows, advance, expands)
    _warm(runner, backends, options)
    finish_regions(runner, regions)
    num_graphs = capture_graphs(runner, options.graphs, progress=progress)
    experts = attach_experts(runner, config, options.experts, parallel, backends.experts, mtp_layers(runner))
    if isinstance(model, Decoder):
        weight_bytes = model.weight_bytes
    else:
        weight_bytes = sizes.weight_bytes(config, dtype.itemsize, topology=parallel.topology)
    info = WorkerInfo(
        choices=backends.choices,
        weight_bytes=weight_bytes + draft_bytes(runner),
        kv_bytes=pool.num_bytes,
        num_graphs=num_graphs,
        load_seconds=loaded - began,
    )
    guard.ready()
    return runner, info, experts


def _load(
    options: WorkerOptions, load: LoadOptions, backends: Backends, parallel: ParallelContext, rows: RequestRows
) -> Model:
    """The model with its weights."""
    limits = {"max_positions": rows.width}
    if options.model.vision is not None:
        limits["max_image_tokens"] = options.shapes.tokens or rows.width
    return load_model(options.model_path, options.model, load, backends, parallel, **limits)


def _add_images(runner: ModelRunner, model: Any, options: WorkerOptions) -> None:
    """The parts of a runner that images need, if the model has a vision tower."""
    if (vision := options.model.vision) is None:
        return
    from moe_engine.worker.image_encoder import ImageEncoder

    axes, attention = bool(options.model.rope.axes), options.model.attention
    pool = 1 if isinstance(attention, CompressedConfig) or not axes else attention.pool
    drafts = options.speculation is not None
    runner.rows.keep_images(RowImages(options.max_rows, vision, has_axes=axes, keeps=drafts, pool=pool))
    group = model.parallel.attn_tp if options.mm_enable_dp_encoder and model.parallel.attn_tp.size > 1 else None
    runner.forward.images = ImageEncoder(model, options.image_cache_bytes, runner.stream, group)
    if runner.stream.asynchronous:
        runner.forward.images.warm_up()


def _make_pools(
    options: WorkerOptions,
    local: ModelConfig,
    dtype: torch.dtype,
    num_mtp: int,
    num_drafts: int,
    rows: RequestRows,
    stream: DeviceStream,
    parallel: ParallelContext,
) -> KVPool:
    """The KV pool of this rank's part of the model, with tables of windows and states of requests, which `rows` own."""
    if local.state_groups:
        nodes = 0 if options.speculation is None else options.speculation.num_draft_tokens
        rows.states = StatePool(local.state_groups, options.max_rows, dtype, stream, options.num_snapshots, nodes)
    head = None if options.draft_head is None else local_config(options.draft_head.layer, parallel)
    spec = kv_spec(local, options.kv_dtype, num_mtp, head, num_drafts)
    pool = KVPool(
        spec, options.num_slots, options.kernels.page_size, stream,
        windowed=(*local.windowed_layers, *local.windowed_drafts) if options.num_window_slots else (),
        num_window_slots=options.num_window_slots, states=rows.states, max_rows=options.max_rows,
    )  # fmt: skip
    if options.num_window_slots:
        rows.bound_windows(pool.num_slots, pool.page_size)
    return pool


def _warm(runner: ModelRunner, backends: Backends, options: WorkerOptions) -> None:
    """Warms up, so that nothing compiles, loads or starts while serving; collective on several ranks."""
    warm_up(runner, num_tokens=min(NUM_TOKENS, options.shapes.tokens or NUM_TOKENS))
    if runner.stream.asynchronous:  # CPU kernels are not compiled per size
        warm_sizes(runner, options.shapes.tokens, options.kernels.model.need.most_selected)
    compile_kernels(backends, options.shapes)


def kernels_for(plan: KernelPlan, options: WorkerOptions, regions: CompiledRegions | None) -> Backends:
    """The built kernels of the model, or of its draft model."""
    fused = not options.disable_shared_experts_fusion and options.lora is None  # adapters are joined to linear layers
    return replace(build_backends(plan), regions=regions, fuse_shared_experts=fused)
