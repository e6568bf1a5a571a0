"""Traces of a rank's steps by torch's profiler (`/start_profile`, `/stop_profile`)."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec
from torch.profiler import ProfilerActivity, profile, record_function

from moe_engine.errors import MoeEngineError
from moe_engine.types import StepPlan
from moe_engine.worker.model_runner import ModelRunner
from moe_engine.worker.pending_step import PendingResult

logger = logging.getLogger("moe_engine")


class ProfileArgs(msgspec.Struct, forbid_unknown_fields=True):
    """`prefix`: beginning of the file's name. `num_steps`: steps until the trace ends by itself; None: at
    `/stop_profile`. `activities`: CPU, GPU; None: all that the device has."""

    output_dir: str
    prefix: str
    num_steps: int | None = None
    activities: list[str] | None = None
    record_shapes: bool = False
    with_stack: bool = False


class Profiler:
    """One trace at a time. Runs on the worker's thread; without a trace a step has no overhead."""

    def __init__(self, runner: ModelRunner, rank: int) -> None:
        self._runner, self._rank = runner, rank
        self._running: profile | None = None
        self._path = Path()
        self._steps_left: int | None = None

    def start(self, args: ProfileArgs) -> str:
        """Returns the path of the trace.

        Raises:
            MoeEngineError: a trace is running, or the folder cannot be written.
        """
        if self._running is not None:
            raise MoeEngineError("profiling is in progress already; call /stop_profile first")
        path = Path(args.output_dir) / f"{args.prefix}-TP-{self._rank}.trace.json.gz"
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.touch()
        except OSError as error:
            raise MoeEngineError(f"{path}: cannot be written ({error.strerror})") from None
        activities = self._activities(args.activities)
        running = profile(activities=activities, record_shapes=args.record_shapes, with_stack=args.with_stack)
        running.start()
        self._running, self._path, self._steps_left = running, path, args.num_steps
        self._runner.launch = self._traced(self._runner.launch)  # type: ignore[assignment, method-assign]
        return str(path)

    def stop(self) -> str | None:
        """Writes the trace; returns its path, or None if no trace is running.

        Raises:
            MoeEngineError: the file cannot be written; nothing is left of it.
        """
        running, self._running = self._running, None
        if running is None:
            return None
        del self._runner.launch  # the class's own again
        running.stop()
        try:
            running.export_chrome_trace(str(self._path))
        except (OSError, RuntimeError) as error:
            self._path.unlink(missing_ok=True)
            raise MoeEngineError(f"{self._path}: cannot be written ({error})") from None
        logger.info("Profile of rank %d: %s", self._rank, self._path)
        return str(self._path)

    def _activities(self, names: Sequence[str] | None) -> list[ProfilerActivity]:
        kinds = {"CPU": ProfilerActivity.CPU}
        if self._runner.stream.asynchronous:
            kinds["GPU"] = ProfilerActivity.CUDA
        return [kind for name, kind in kinds.items() if names is None or name in names] or [ProfilerActivity.CPU]

    def _traced(self, launch: Callable[[StepPlan], PendingResult]) -> Callable[[StepPlan], PendingResult]:
        def run(plan: StepPlan) -> PendingResult:
            with record_function(f"step {plan.number}: {len(plan.rows)} requests, {plan.num_tokens} tokens"):
                pending = launch(plan)
            if self._steps_left is not None:
                self._steps_left -= 1
                if not self._steps_left:
                    self._stop_alone()
            return pending

        return run

    def _stop_alone(self) -> None:
        try:
            self.stop()
        except MoeEngineError as error:
            logger.error("Profiling: %s", error)
