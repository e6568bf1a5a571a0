"""The worker of one rank: a thread that owns torch and runs the steps in order.

`execute` returns a future immediately, so that the scheduler plans step N+1 while step N runs: on the CPU torch's
operators release the interpreter lock; on an accelerator the thread only launches kernels, and a second thread waits
for the sampled tokens.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, TypeVar

import psutil
import torch

from moe_engine.kernels.triton import guard
from moe_engine.parallel.context import SINGLE, ParallelContext
from moe_engine.types import StepPlan, StepResult
from moe_engine.types.token_masks import LaunchedStep, StepMasks
from moe_engine.worker.device_stream import DeviceStream
from moe_engine.worker.eplb.expert_control import ExpertControl
from moe_engine.worker.kv_cache.kv_copies import Listener
from moe_engine.worker.kv_cache.storage_io import Reporter
from moe_engine.worker.model_runner import ModelRunner
from moe_engine.worker.options import WorkerOptions
from moe_engine.worker.pending_step import PendingResult
from moe_engine.worker.rank_methods import NO_ARGS, rank_methods, run_method
from moe_engine.worker.startup.build_runner import WorkerInfo, build_runner
from moe_engine.worker.startup.offload_setup import NOT_REPLACED
from moe_engine.worker.weight_update import WeightUpdate

T = TypeVar("T")


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
    def create(cls, options: WorkerOptions, *, parallel: ParallelContext = SINGLE, progress: bool = False) -> Worker:
        """Builds kernels, loads the model, allocates the KV pool, warms up. Returns a ready worker.

        Args:
            progress: show a progress bar of weight loading on stderr.

        Raises:
            ConfigError: a named backend is not available, or the checkpoint does not fit the config.
        """
        stream = DeviceStream(options.device)
        thread = step_thread(stream, options.cpu_threads)
        try:
            runner, info, experts = thread.submit(build_runner, options, stream, parallel, progress).result()
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

    def report_storage(self, reporter: Reporter) -> None:
        """`on_kv_done` of a follower."""
        storage = getattr(self.runner.kv_copies, "storage", None)
        if storage is not None:
            storage.report_to(reporter)

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


def _collect(pending: PendingResult, future: Future[StepResult], parallel: ParallelContext) -> None:
    try:
        result = pending.take()
        parallel.check_peers()  # rejects the result of a graph that was replayed without a lost peer
        future.set_result(result)
    except Exception as error:
        future.set_exception(error)
