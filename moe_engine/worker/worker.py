"""The worker of one rank: a thread that owns torch and runs the steps in order.

`execute` returns a future at once, so that the scheduler plans step N+1 while step N runs: on the CPU torch's operators
release the interpreter lock; on an accelerator the thread only launches kernels, and a second thread waits for the
sampled tokens.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, TypeVar

import psutil
import torch

from moe_engine.kernels.backends import Backends, KernelPlan
from moe_engine.kernels.indexer.in_place import decode_planner
from moe_engine.kernels.registry import Choice
from moe_engine.kernels.torch_regions import CompiledRegions
from moe_engine.kernels.triton import guard
from moe_engine.models import sizes
from moe_engine.models.batch import Model
from moe_engine.models.config import ModelConfig
from moe_engine.models.loader import LoadOptions, load_model
from moe_engine.models.sharding import local_config
from moe_engine.parallel.context import SINGLE, ParallelContext
from moe_engine.token_masks import LaunchedStep, StepMasks
from moe_engine.types import StepPlan, StepResult
from moe_engine.worker.batch.mla_form import form_policy
from moe_engine.worker.batch.request_rows import RequestRows
from moe_engine.worker.batch.row_adapters import RowAdapters
from moe_engine.worker.batch.row_images import RowImages
from moe_engine.worker.device_stream import DeviceStream, make_weight_stream
from moe_engine.worker.eplb.expert_control import ExpertControl
from moe_engine.worker.kv_cache.kv_copies import Listener
from moe_engine.worker.kv_cache.kv_pool import KVPool, kv_spec
from moe_engine.worker.kv_cache.make_copies import make_copies
from moe_engine.worker.kv_cache.state_pool import StatePool
from moe_engine.worker.kv_cache.storage_io import Reporter
from moe_engine.worker.lora_adapters import LoraAdapters
from moe_engine.worker.model_runner import ModelRunner
from moe_engine.worker.options import WorkerOptions
from moe_engine.worker.pending_step import PendingResult
from moe_engine.worker.pooling import PoolingRunner
from moe_engine.worker.rank_methods import NO_ARGS, rank_methods, run_method
from moe_engine.worker.sampling.logits_passes import LogitsPasses
from moe_engine.worker.startup.compile_setup import finish_regions, start_regions
from moe_engine.worker.startup.expert_setup import attach_experts, with_experts
from moe_engine.worker.startup.graph_setup import capture_graphs
from moe_engine.worker.startup.kernel_choice import build_backends
from moe_engine.worker.startup.load_options import load_options
from moe_engine.worker.startup.offload_setup import NOT_REPLACED, note_offload
from moe_engine.worker.startup.speculation_setup import add_speculation, draft_bytes, mtp_layers, num_mtp_layers
from moe_engine.worker.startup.warmup import NUM_TOKENS, compile_kernels, warm_sizes, warm_up
from moe_engine.worker.weight_update import WeightUpdate

logger = logging.getLogger(__name__)

T = TypeVar("T")


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


class Worker:
    """Runs plans in order of submission. `execute`, `launch` and `sample` may be called from one other thread.

    Args:
        experts: expert recording and EPLB.
        options: options with which the runner was built; None: its weights cannot be replaced.
    """

    def __init__(
        self,
        runner: ModelRunner,
        thread: ThreadPoolExecutor | None = None,
        info: WorkerInfo | None = None,
        experts: ExpertControl | None = None,
        options: WorkerOptions | None = None,
    ) -> None:
        self.runner = runner
        self.info = info or WorkerInfo(kv_bytes=runner.kv_pool.num_bytes)
        self.experts = experts or ExpertControl()
        self._thread = thread or step_thread(runner.stream, None)
        self._launched: LaunchedStep | None = None
        self._collector = ThreadPoolExecutor(1, "worker-results") if runner.stream.asynchronous else None
        self.weights = None if options is None else WeightUpdate(runner, options, self.experts)
        if self.weights is not None and options is not None and options.offloaded_layers:
            self.weights.refuse(NOT_REPLACED)
        self._methods = rank_methods(runner, self.experts, self.weights)

    @classmethod
    def create(
        cls,
        options: WorkerOptions,
        *,
        parallel: ParallelContext = SINGLE,
        progress: bool = False,
    ) -> Worker:
        """Builds kernels, loads the model, allocates the KV pool, warms up. Returns a ready worker.

        Args:
            progress: show a progress bar of weight loading on stderr.

        Raises:
            ConfigError: a named backend is not available, or the checkpoint does not fit the config.
        """
        stream = DeviceStream(options.device)
        thread = step_thread(stream, options.cpu_threads)
        try:
            runner, info, experts = thread.submit(_prepare, options, stream, parallel, progress).result()
        except BaseException:
            thread.shutdown(wait=False)
            raise
        return cls(runner, thread, info, experts, options)

    def execute(self, plan: StepPlan, masks: LaunchedStep | None = None) -> Future[StepResult]:
        """A future of the step's result, or of its `StepError`. `masks`: the masks of a plan with masked rows."""
        if self._collector is None:
            return self._thread.submit(self._execute, plan, masks)
        future: Future[StepResult] = Future()
        self._thread.submit(self._launch, plan, masks, future, self._collector)
        return future

    def launch(self, plan: StepPlan, *, reports_drafts: bool = True) -> LaunchedStep:
        """Runs a step with `StepPlan.masked` rows; its sampling waits for `sample`.

        Args:
            reports_drafts: whether `LaunchedStep.drafts` gets the draft trees.
        """
        launched = self._launched = LaunchedStep(plan.number, reports_drafts=reports_drafts)
        launched.follow(self.execute(plan, launched))
        return launched

    def sample(self, masks: StepMasks) -> None:
        """Passes the masks to the launched step. Masks of a step that has been abandoned are ignored."""
        launched = self._launched
        if launched is not None and launched.number == masks.number:
            launched.prepared = self.runner.rows.edits.masks.prepare(masks)
            launched.sample(masks)

    def abandon(self) -> None:
        """The launched step, if any, fails instead of waiting for `sample`."""
        if self._launched is not None:
            self._launched.abandon()

    def call(self, function: Callable[..., T], *args: Any) -> Future[T]:
        """Runs a function on the worker's thread, between steps."""
        return self._thread.submit(function, *args)

    def run_call(self, method: str, args: Mapping[str, Any] = NO_ARGS) -> Future[Any]:
        """Runs one of `rank_methods` on the worker's thread, between steps; its result is a plain value."""
        return self.call(run_method, self._methods, method, args)

    def on_kv_done(self, listener: Listener, reporter: Reporter | None = None) -> None:
        """Reports loads that are done after their step's result, and progress of the storage. Both are called from
        other threads."""
        copies = self.runner.kv_copies
        if copies is None:
            return
        copies.listener = listener
        if reporter is not None:
            self.report_storage(reporter)

    def report_storage(self, reporter: Reporter) -> Callable[[], int] | None:
        """`on_kv_done` of a follower. Returns the number of operations in progress; None without storage."""
        storage = getattr(self.runner.kv_copies, "storage", None)
        if storage is None:
            return None
        storage.report_to(reporter)
        return lambda: storage.num_open

    def state(self) -> dict[str, Any]:
        """Values that change while serving, for metrics."""
        return self.experts.state() | {"compilations_after_ready": guard.compilations_after_ready()}

    def close(self) -> None:
        """Ends the threads after the submitted steps."""
        self.abandon()
        self._thread.shutdown()
        self.experts.close()
        if self.runner.kv_copies is not None:
            self.runner.kv_copies.close()
        if self._collector is not None:
            self._collector.shutdown()

    def _execute(self, plan: StepPlan, masks: LaunchedStep | None) -> StepResult:
        self.runner.rows.edits.masks.begin(masks)
        return self.runner.execute(plan)

    def _launch(
        self, plan: StepPlan, masks: LaunchedStep | None, future: Future[StepResult], collector: ThreadPoolExecutor
    ) -> None:
        try:
            self.runner.rows.edits.masks.begin(masks)
            pending = self.runner.launch(plan)
        except Exception as error:
            future.set_exception(error)
        else:
            collector.submit(_collect, pending, future, self.runner.shared.parallel)


def step_thread(stream: DeviceStream, num_threads: int | None) -> ThreadPoolExecutor:
    """The thread that runs a worker's steps. torch's number of operator threads is per calling thread: set here."""

    def begin() -> None:
        torch.set_num_threads(num_threads or physical_cores())
        stream.bind_thread()

    return ThreadPoolExecutor(1, "worker-steps", initializer=begin)


def physical_cores() -> int:
    """Cores this process may use, without hyper-threads."""
    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else (os.cpu_count() or 1)
    return max(1, min(usable, psutil.cpu_count(logical=False) or usable))


def kernels_for(plan: KernelPlan, options: WorkerOptions, regions: CompiledRegions | None = None) -> Backends:
    """The built kernels of the model, or of its draft model."""
    fused = not options.disable_shared_experts_fusion and options.lora is None  # adapters are joined to linear layers
    return replace(build_backends(plan), regions=regions, fuse_shared_experts=fused)


def _prepare(
    options: WorkerOptions,
    stream: DeviceStream,
    parallel: ParallelContext,
    progress: bool,
) -> tuple[ModelRunner, WorkerInfo, ExpertControl]:
    """Startup of the worker before READY; runs on the step thread."""
    from moe_engine.models.layers.decoder import Decoder

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
    load = load_options(options, stream.device, parallel, progress)
    model = _load(options, load, backends, parallel, rows)
    loaded = time.perf_counter()
    if weight_stream is not None:
        note_offload(weight_stream, model)
    pool = _make_pools(options, local, dtype, num_mtp_layers(config, speculation), rows, stream, parallel)
    form = form_policy(
        config.attention,
        deterministic=options.enable_deterministic_inference,
        break_even=options.absorbed_break_even,
        shares=backends.attention.capabilities.expanded_shared is not None,
    )
    make_runner = ModelRunner if config.pooling is None else partial(PoolingRunner, config.pooling)
    runner = make_runner(
        model, pool, rows, backends.attention, stream, form=form, sampling=backends.sampling, parallel=parallel,
        passes=LogitsPasses(options.logits_rows), windows=tuple(group.window for group in config.cache_groups),
    )  # fmt: skip
    if options.host_tier_tokens:
        runner.kv_copies = make_copies(options, pool, parallel, stream, rows.states)
    if options.lora is not None:
        assert isinstance(model, Decoder)
        runner.lora = LoraAdapters(model, config, options.lora, stream)
        rows.adapters = RowAdapters(options.max_rows, stream)
    _add_images(runner, model, options)
    if speculation is not None:
        drafts = options.kernels.draft
        draft_backends = kernels_for(drafts, options, regions) if drafts is not None else None
        add_speculation(runner, speculation, options, load, draft_backends)
    _warm(runner, backends, options)
    finish_regions(runner, regions)
    planner, index = None, options.kernels.model.need.index
    if index is not None and backends.indexer is not None:
        planner = decode_planner(backends.attention, backends.indexer, index)  # type: ignore[arg-type]
    num_graphs = capture_graphs(runner, options.graphs, planner, progress=progress)
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

    axes = bool(options.model.rope.axes)
    drafts = options.speculation is not None
    runner.rows.images = RowImages(options.max_rows, vision, has_axes=axes, keeps=drafts)
    group = model.parallel.attn_tp if options.mm_enable_dp_encoder and model.parallel.attn_tp.size > 1 else None
    runner.images = ImageEncoder(model, options.image_cache_bytes, runner.stream, group)
    if runner.stream.asynchronous:
        runner.images.warm_up()


def _make_pools(
    options: WorkerOptions,
    local: ModelConfig,
    dtype: torch.dtype,
    num_mtp: int,
    rows: RequestRows,
    stream: DeviceStream,
    parallel: ParallelContext,
) -> KVPool:
    """The KV pool of this rank's part of the model, with tables of windows and states of requests, which `rows` own."""
    if local.state_groups:
        nodes = 0 if options.speculation is None else options.speculation.num_draft_tokens
        rows.states = StatePool(local.state_groups, options.max_rows, dtype, stream, options.num_snapshots, nodes)
    head = None if options.draft_head is None else local_config(options.draft_head.layer, parallel)
    pool = KVPool(
        kv_spec(local, options.kv_dtype, num_mtp, head), options.num_slots, options.kernels.page_size, stream,
        windowed=local.windowed_layers if options.num_window_slots else (), num_window_slots=options.num_window_slots,
        states=rows.states,
    )  # fmt: skip
    if options.num_window_slots:
        rows.bound_windows(pool.num_slots, pool.page_size)
    return pool


def _warm(runner: ModelRunner, backends: Backends, options: WorkerOptions) -> None:
    """Warms up, so that nothing compiles, loads or starts while serving; collective on several ranks."""
    warm_up(runner, num_tokens=min(NUM_TOKENS, options.shapes.tokens or NUM_TOKENS))
    if runner.stream.asynchronous:  # CPU kernels are not compiled per size
        index = options.kernels.model.need.index
        warm_sizes(runner, options.shapes.tokens, 0 if index is None else index.top_k)
    compile_kernels(backends, options.shapes)


def _collect(pending: PendingResult, future: Future[StepResult], parallel: ParallelContext) -> None:
    try:
        result = pending.take()
        parallel.check_peers()  # rejects the result of a graph that was replayed without a lost peer
        future.set_result(result)
    except Exception as error:
        future.set_exception(error)
