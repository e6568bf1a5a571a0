"""Python time of a decode step: ``python -m benchmarks.host_time [--num-requests 256]``.

The engine's own loop (inbox, scheduler, worker, events, message encoding) with a model that takes no time and this
machine's sampling kernel: measures the host overhead of every step. Two runs: with overlap, where one step is planned
while another runs, the time between two outputs (and the CPU time of the process, which is less sensitive to other
load); and without overlap, where the parts of a step can be separated. Target: under 1 ms.
"""

from __future__ import annotations

import argparse
import gc
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

from benchmarks import report
from benchmarks.stub_model import stub_runner
from moe_engine.core import messages
from moe_engine.core.loop import EngineCore, LoopSettings
from moe_engine.core.rank_calls import SingleRank
from moe_engine.core.shared_status import SharedStatus
from moe_engine.core.step_reporter import StepReporter
from moe_engine.kernels import tables
from moe_engine.kernels.device import Need, cpu_device
from moe_engine.kernels.registry import select
from moe_engine.kernels.sampling.protocol import SamplingKernel
from moe_engine.scheduler.config import SchedulerConfig
from moe_engine.scheduler.scheduler import Scheduler
from moe_engine.tuning.stats import median, percentile
from moe_engine.worker.worker import Worker

TARGET_MS = 1.0
WARMUP_STEPS = 20


class _Port:
    """Delivers the requests once, encodes and drops the core's messages, and records the time of each full output."""

    def __init__(self, requests: list[messages.Message], num_steps: int) -> None:
        self._inbox = requests
        self._num_requests = len(requests)
        self._num_steps = num_steps
        self.times: list[float] = []
        self.cpu: list[float] = []
        self.num_bytes = 0

    def receive(self, timeout: float) -> list[messages.Message]:
        if self._inbox:
            inbox, self._inbox = self._inbox, []
            return inbox
        if len(self.times) >= self._num_steps:
            return [messages.Shutdown(drain=False)]
        return []

    def wake(self) -> None:
        """No effect: `receive` never waits."""

    def send(self, message: messages.Message) -> None:
        encoded = messages.encode(message)
        if not isinstance(message, messages.StepOutput):
            return
        if len(message.deltas) == self._num_requests:
            self.times.append(time.perf_counter())
            self.cpu.append(time.process_time())
            self.num_bytes = len(encoded)
        failed = [delta for delta in message.deltas if delta.finish is not None]
        if failed and len(self.times) < self._num_steps:
            raise RuntimeError(f"a request finished before the measurement: {failed[0].finish}")


@dataclass
class _Part:
    """Seconds of each call of one part of a step."""

    seconds: list[float] = field(default_factory=list)

    def around(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*args: Any, **kwargs: Any) -> Any:
            began = time.perf_counter()
            try:
                return function(*args, **kwargs)
            finally:
                self.seconds.append(time.perf_counter() - began)

        return timed


def sampling_kernel() -> SamplingKernel:
    """The kernel that an engine selects on this machine."""
    return select("sampling", tables.SAMPLING, "auto", cpu_device(), Need("float32")).build()


def run_core(args: argparse.Namespace, *, overlap: bool, parts: dict[str, _Part] | None = None) -> _Port:
    """Runs the loop until enough decode steps have been output."""
    num_steps = args.steps + WARMUP_STEPS
    needed = args.num_requests * (args.input_len + num_steps + 64)
    context = args.input_len + num_steps + 64
    runner = stub_runner(
        max_rows=args.num_requests,
        context_len=context,
        vocab_size=args.vocab_size,
        num_slots=needed + 1024,
        sampling=sampling_kernel(),
    )
    worker = Worker(runner)
    scheduler = Scheduler(
        SchedulerConfig(
            num_slots=needed,
            context_len=context,
            max_rows=args.num_requests,
            chunked_prefill_size=context,  # no more tokens per step than the stub has hidden states for
            disable_radix_cache=args.no_cache,
        )
    )
    sampling: dict[str, Any] = {"temperature": 0.0, "ignore_eos": True}
    if args.sampled:
        sampling = {"temperature": 0.8, "top_p": 0.95, "ignore_eos": True}
    requests: list[messages.Message] = [
        messages.AddRequest(
            rid=f"{index:032x}",
            prompt_ids=[(index * 7919 + i) % args.vocab_size for i in range(args.input_len)],
            sampling=sampling,
            max_new_tokens=num_steps + 32,
            seed=index,
        )
        for index in range(args.num_requests)
    ]
    port = _Port(requests, num_steps)
    if parts is not None:
        scheduler.schedule = parts["plan the step"].around(scheduler.schedule)  # type: ignore[method-assign]
        scheduler.update = parts["process the result"].around(scheduler.update)  # type: ignore[method-assign]
        runner.launch = parts["worker: rows, batch, sampling"].around(runner.launch)  # type: ignore[method-assign]
        port.send = parts["encode the output"].around(port.send)  # type: ignore[method-assign]
    with tempfile.TemporaryDirectory() as folder:
        board = SharedStatus(Path(folder) / "board", create=True)
        core = EngineCore(
            scheduler, SingleRank(worker), port, board, StepReporter(), LoopSettings(frozenset((0,)), overlap)
        )
        gc.collect()
        gc.freeze()
        core.run()
        gc.unfreeze()
        board.close()
    worker.close()
    return port


def differences_ms(seconds: list[float]) -> list[float]:
    """Milliseconds between readings, without warm-up."""
    kept = seconds[WARMUP_STEPS:]
    return [(after - before) * 1e3 for before, after in pairwise(kept)]


def figures(values: list[float]) -> dict[str, float]:
    return {"median_ms": median(values), "p90_ms": percentile(values, 90), "p99_ms": percentile(values, 99)}


def main(argv: list[str] | None = None) -> int:
    parser = report.command_parser("host_time", __doc__)
    parser.add_argument("--num-requests", type=int, default=256)
    parser.add_argument("--steps", type=int, default=300, help="decode steps measured in each run")
    parser.add_argument("--runs", type=int, default=3, help="runs with overlap; the median of their medians counts")
    parser.add_argument("--input-len", type=int, default=128)
    parser.add_argument("--vocab-size", type=int, default=1024, help="sampling time grows with it and is device work")
    parser.add_argument("--sampled", action="store_true", help="temperature 0.8, top-p 0.95 instead of greedy")
    parser.add_argument("--no-cache", action="store_true", help="without the prefix cache")
    report.add_result_options(parser)
    args = parser.parse_args(argv)

    ports = [run_core(args, overlap=True) for _ in range(args.runs)]
    overlapped = [figures(differences_ms(port.times)) for port in ports]
    cpu = [figures(differences_ms(port.cpu)) for port in ports]
    parts = {
        name: _Part()
        for name in ("plan the step", "worker: rows, batch, sampling", "process the result", "encode the output")
    }
    alone = differences_ms((port := run_core(args, overlap=False, parts=parts)).times)
    values: dict[str, Any] = {
        "num_requests": args.num_requests,
        "steps": args.steps,
        "sampled": args.sampled,
        "step": {key: median([run[key] for run in overlapped]) for key in overlapped[0]},
        "step_cpu_time": {key: median([run[key] for run in cpu]) for key in cpu[0]},
        "step_without_overlap": figures(alone),
        "parts": {name: figures([s * 1e3 for s in part.seconds[-args.steps :]]) for name, part in parts.items()},
        "message_bytes": port.num_bytes,
        "target_ms": TARGET_MS,
    }
    values["passed"] = values["step"]["median_ms"] < TARGET_MS
    names = [
        ("step, overlapped", values["step"]),
        ("  its CPU time, both threads", values["step_cpu_time"]),
        ("step, without overlap", values["step_without_overlap"]),
    ]
    names += [(f"  {name}", part) for name, part in values["parts"].items()]
    rest = values["step_without_overlap"]["median_ms"] - sum(part["median_ms"] for part in values["parts"].values())
    print(f"Python time of a decode step, {args.num_requests} running requests, with a stub model (ms)")
    rows = [[name, *(f"{part[key]:.3f}" for key in ("median_ms", "p90_ms", "p99_ms"))] for name, part in names]
    rows.append(["  rest: events, shared status, thread switches", f"{rest:.3f}", "", ""])
    print(report.table(["", "median", "p90", "p99"], rows))
    verdict = "pass" if values["passed"] else "short"
    print(f"target: median under {TARGET_MS:.0f} ms: {verdict}; {port.num_bytes} bytes per step to the frontend")
    report.write_if_asked(args, "host_time", values)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
