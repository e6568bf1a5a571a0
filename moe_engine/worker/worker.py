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
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

import psutil
import torch

from moe_engine.kernels.attention.protocol import SharesContext
from moe_engine.kernels.backends import Backends
from moe_engine.kernels.device import probe
from moe_engine.kernels.registry import Choice
from moe_engine.kernels.torch_regions import Regions
from moe_engine.kernels.triton import guard
from moe_engine.kernels.vendors.warming import StepShapes
from moe_engine.models import sizes
from moe_engine.models.config import ModelConfig
from moe_engine.models.needs import need_of_model
from moe_engine.models.sharding import local_config
from moe_engine.parallel.context import SINGLE, ParallelContext
from moe_engine.parallel.expert_settings import ExpertSettings
from moe_engine.types import CompileSettings, GraphSettings, SpeculationConfig, StepPlan, StepResult
from moe_engine.worker.batch.mla_form import form_policy
from moe_engine.worker.batch.request_rows import RequestRows
from moe_engine.worker.device_stream import DeviceStream
from moe_engine.worker.eplb.expert_control import ExpertControl
from moe_engine.worker.eplb.expert_setup import attach_experts, with_experts
from moe_engine.worker.graphs.compile_setup import finish_regions, start_regions
from moe_engine.worker.graphs.graph_setup import capture_graphs
from moe_engine.worker.kv_cache.kv_pool import KVPool, kv_spec
from moe_engine.worker.model_runner import ModelRunner, PendingResult
from moe_engine.worker.sampling.logits_passes import LogitsPasses
from moe_engine.worker.speculation.build import DraftOptions, add_speculation, mtp_layers, num_mtp_layers
from moe_engine.worker.startup.kernel_choice import build_backends
from moe_engine.worker.startup.warmup import NUM_TOKENS, compile_kernels, warm_sizes, warm_up

logger = logging.getLogger(__name__)

T = TypeVar("T")


@dataclass(frozen=True)
class WorkerOptions:
    """Options of a worker; every "auto" except the kernels' is resolved.

    Args:
        dtype: name of the activation dtype; `kv_dtype`: of the KV cache (`kv_format`), ``auto`` for the same.
        num_slots: tokens of the KV pool, a multiple of `page_size`.
        max_rows: max running requests.
        backends: row by family (attention, experts, linear, ops); missing ones are ``auto``.
        dummy_seed: seed of the random weights of load_format ``dummy``.
        num_threads: threads of torch's operators; None: one per physical core this process may use.
        deterministic: a token is computed the same way alone and in a chunk (see `MLAFormPolicy`).
        absorbed_break_even: measured value of the policy; None derives it from the model's widths.
        draft_config: config of the model in `speculation.draft_model_path`, if there is one.
        experts: placement, EPLB and expert distribution recording.
        graphs: steps that are captured as CUDA graphs.
        compiled: steps that torch.compile compiles.
        shapes: the largest sizes of a step, for kernels that compile at first use.
        logits_rows: max rows of logits at once; a step with more computes several passes.
    """

    model_path: str
    model_config: ModelConfig
    dtype: str
    num_slots: int
    context_len: int
    max_rows: int
    page_size: int = 1
    device: str = "cpu"
    kv_dtype: str = "auto"
    backends: Mapping[str, str] = field(default_factory=dict)
    load_format: str = "auto"
    dummy_seed: int = 0
    num_threads: int | None = None
    deterministic: bool = False
    absorbed_break_even: float | None = None
    speculation: SpeculationConfig | None = None
    draft_config: ModelConfig | None = None
    experts: ExpertSettings = field(default_factory=ExpertSettings)
    graphs: GraphSettings = field(default_factory=GraphSettings)
    compiled: CompileSettings = field(default_factory=CompileSettings)
    shapes: StepShapes = field(default_factory=lambda: StepShapes(0))
    logits_rows: int = sizes.MAX_LOGITS_ROWS


@dataclass(frozen=True)
class WorkerInfo:
    """Facts of a ready worker."""

    choices: tuple[Choice, ...] = ()
    weight_bytes: int = 0
    kv_bytes: int = 0
    draft_bytes: int = 0
    """Weights and KV cache of the drafter, in addition to the two above."""
    num_threads: int = 0
    num_graphs: int = 0
    """Captured decode steps."""
    load_seconds: float = 0.0
    warmup_seconds: float = 0.0


class Worker:
    """Runs plans in order of submission. `execute` may be called from one other thread.

    Args:
        experts: expert recording and EPLB.
    """

    def __init__(
        self,
        runner: ModelRunner,
        thread: ThreadPoolExecutor | None = None,
        info: WorkerInfo | None = None,
        experts: ExpertControl | None = None,
    ) -> None:
        self.runner = runner
        self.info = info or WorkerInfo(kv_bytes=runner.kv_pool.num_bytes)
        self.experts = experts or ExpertControl()
        self._thread = thread or step_thread(runner.stream, None)
        self._collector = ThreadPoolExecutor(1, "worker-results") if runner.stream.asynchronous else None

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
        thread = step_thread(stream, options.num_threads)
        try:
            runner, info, experts = thread.submit(_prepare, options, stream, parallel, progress).result()
        except BaseException:
            thread.shutdown(wait=False)
            raise
        return cls(runner, thread, info, experts)

    def execute(self, plan: StepPlan) -> Future[StepResult]:
        """A future of the step's result, or of its `StepError`."""
        if self._collector is None:
            return self._thread.submit(self.runner.execute, plan)
        future: Future[StepResult] = Future()
        self._thread.submit(self._launch, plan, future, self._collector)
        return future

    def call(self, function: Callable[..., T], *args: Any) -> Future[T]:
        """Runs a function on the worker's thread, between steps."""
        return self._thread.submit(function, *args)

    def call_all(self, method: str) -> Future[list[Any]]:
        """Calls one of `calls` on every rank, here the only one; results by rank."""
        return self.call(lambda: [self.calls[method]()])

    @property
    def calls(self) -> dict[str, Callable[[], Any]]:
        """Methods for `call_all`, run on the worker's thread between steps. Results are plain values, and no call waits
        for other ranks."""
        experts = self.experts
        return {
            "start_experts": experts.start,
            "stop_experts": experts.stop,
            "dump_experts": experts.dump_part,
            "view_experts": experts.snapshot,
        }

    def state(self) -> dict[str, Any]:
        """Values that change while serving, for metrics."""
        return self.experts.state() | {"compilations_after_ready": guard.compilations_after_ready()}

    def close(self) -> None:
        """Ends the threads after the submitted steps."""
        self._thread.shutdown()
        self.experts.close()
        if self._collector is not None:
            self._collector.shutdown()

    def _launch(self, plan: StepPlan, future: Future[StepResult], collector: ThreadPoolExecutor) -> None:
        try:
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


def kernels_for(options: WorkerOptions, config: ModelConfig, regions: Regions | None = None) -> Backends:
    """The kernels of the model, or of its draft model; the config has one rank's heads."""
    need = need_of_model(config, options.dtype, options.kv_dtype, options.page_size, options.deterministic)
    return replace(build_backends(probe(options.device), need, options.backends), regions=regions)


def _prepare(
    options: WorkerOptions,
    stream: DeviceStream,
    parallel: ParallelContext,
    progress: bool,
) -> tuple[ModelRunner, WorkerInfo, ExpertControl]:
    """Startup of the worker before READY; runs on the step thread."""
    from moe_engine.models.loader import load_model

    began = time.perf_counter()
    guard.reset()
    if stream.asynchronous:  # Triton is for accelerators only, and its import takes a second
        guard.watch()
    regions = start_regions(options.compiled)
    config = options.model_config
    local = local_config(config, parallel)
    dtype = getattr(torch, options.dtype)
    kv_dtype = options.dtype if options.kv_dtype == "auto" else options.kv_dtype
    backends = kernels_for(options, local, regions)
    parallel = with_experts(parallel, config, options.experts, stream.device)
    speculation = options.speculation
    num_drafts = speculation.num_slots(speculation.num_steps) if speculation is not None else 0
    rows = RequestRows(options.max_rows, options.context_len, config.vocab_size, stream, num_drafts=num_drafts)
    model = load_model(
        options.model_path,
        config,
        dtype=dtype,
        device=stream.device,
        backends=backends,
        parallel=parallel,
        load_format=options.load_format,
        progress=progress,
        seed=options.dummy_seed,
        max_positions=rows.width,
    )
    loaded = time.perf_counter()
    spec = kv_spec(local, kv_dtype, num_mtp_layers(config, speculation))
    pool = KVPool(spec, options.num_slots, options.page_size, stream)
    form = form_policy(
        config.attention,
        deterministic=options.deterministic,
        break_even=options.absorbed_break_even,
        shares=isinstance(backends.attention, SharesContext),
    )
    runner = ModelRunner(
        model, pool, rows, backends.attention, stream, form=form, sampling=backends.sampling, parallel=parallel,
        passes=LogitsPasses(options.logits_rows),
    )  # fmt: skip
    draft_bytes = 0
    if speculation is not None:
        draft_options = _draft_options(options, dtype, kv_dtype, progress, regions)
        draft_bytes = add_speculation(runner, speculation, draft_options)
    _warm(runner, backends, options)
    finish_regions(runner, regions)
    num_graphs = capture_graphs(runner, options.graphs, progress=progress)
    experts = attach_experts(runner, config, options.experts, parallel, backends.experts, mtp_layers(runner))
    info = WorkerInfo(
        choices=backends.choices,
        weight_bytes=getattr(model, "weight_bytes", 0)
        or sizes.weight_bytes(config, dtype.itemsize, topology=parallel.topology),
        kv_bytes=pool.num_bytes,
        draft_bytes=draft_bytes,
        num_threads=torch.get_num_threads(),
        num_graphs=num_graphs,
        load_seconds=loaded - began,
        warmup_seconds=time.perf_counter() - loaded,
    )
    guard.ready()
    return runner, info, experts


def _draft_options(
    options: WorkerOptions, dtype: torch.dtype, kv_dtype: str, progress: bool, regions: Any
) -> DraftOptions:
    draft_config = options.draft_config
    return DraftOptions(
        model_path=options.model_path,
        model_config=options.model_config,
        dtype=dtype,
        kv_dtype=kv_dtype,
        load_format=options.load_format,
        dummy_seed=options.dummy_seed,
        progress=progress,
        deterministic=options.deterministic,
        draft_config=draft_config,
        draft_backends=kernels_for(options, draft_config, regions) if draft_config is not None else None,
    )


def _warm(runner: ModelRunner, backends: Backends, options: WorkerOptions) -> None:
    """Warms up, so that nothing compiles, loads or starts while serving; collective on several ranks."""
    warm_up(runner, num_tokens=min(NUM_TOKENS, options.shapes.tokens or NUM_TOKENS))
    if runner.stream.asynchronous:  # CPU kernels are not compiled per size
        warm_sizes(runner, options.shapes.tokens)
    compile_kernels(backends, options.shapes)


def _collect(pending: PendingResult, future: Future[StepResult], parallel: ParallelContext) -> None:
    try:
        result = pending.take()
        parallel.check_peers()  # rejects the result of a graph that was replayed without a lost peer
        future.set_result(result)
    except Exception as error:
        future.set_exception(error)
