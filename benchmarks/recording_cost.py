"""Overhead of the expert distribution recorder: ``python -m benchmarks.recording_cost [--models demo moe-390m]``.

One batch, in this process, without scheduler and server. Variants are interleaved: a worker without a recorder; a
second worker without one (the difference is the noise between workers); a worker with a recorder attached and off; and
the same worker while recording (`--mode`). Each turn restarts the batch, so that all variants compute the same steps. A
turn's ratio is its median step to that of the adjacent turn: *again* and *off* to the one without a recorder, *on* to
its own worker while off. Reported is the median of the ratios, with its standard error.

Differences of 0.1 % are not measurable on a shared machine, so the calls of a step are also counted: Python and C
functions called by the interpreter, which are constant between runs. Targets: off below 1 %, on below 5 %.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Callable
from typing import Any

from benchmarks import checkpoints, report
from benchmarks.step_driver import BatchDriver, create_worker
from moe_engine.config.args import EngineArgs
from moe_engine.planning.prepare import prepare
from moe_engine.planning.resolved_config import ResolvedConfig
from moe_engine.tuning.stats import median

TARGETS = {"off": 0.01, "on": 0.05}
COMPARED = {"again": "without", "off": "without", "on": "off"}
WAYS = ("without", *COMPARED)
INPUT_LEN = 16
WARM_STEPS = 2


class Subject:
    """A worker that runs the same batch repeatedly."""

    def __init__(self, config: ResolvedConfig, batch: int, length: int) -> None:
        self.worker = create_worker(config)
        self._config, self._length = config, length
        rng = random.Random(0)
        self._prompts = [rng.choices(range(config.model.vocab_size), k=INPUT_LEN) for _ in range(batch)]

    def turn(self, steps: int, prefills: int) -> dict[str, float]:
        """Median seconds of `steps` decode steps after the last of `prefills` prefills, and of the prefills."""
        seconds_of_prefills = []
        for _ in range(prefills + 1):
            driver = self._begin()
            seconds_of_prefills.append(driver.prefill())
            if len(seconds_of_prefills) <= prefills:
                driver.close()
        for _ in range(WARM_STEPS):
            driver.decode()
        decodes = [driver.decode() for _ in range(steps)]
        driver.close()
        return {"decode": median(decodes), "prefill": median(seconds_of_prefills[1:])}  # the first follows other work

    def calls(self) -> int:
        """Number of function calls in a decode step on the worker's thread."""
        driver = self._begin()
        driver.prefill()
        driver.decode()
        counter = CallCounter()
        self.worker.call(counter.begin).result()
        driver.decode()
        self.worker.call(counter.end).result()
        driver.close()
        return counter.calls

    def _begin(self) -> BatchDriver:
        return BatchDriver(self.worker, self._config, self._prompts, self._length)


class CallCounter:
    """Counts one thread's function calls; `begin` and `end` are called on that thread."""

    def __init__(self) -> None:
        self.calls = 0

    def begin(self) -> None:
        sys.setprofile(self._note)

    def end(self) -> None:
        sys.setprofile(None)

    def _note(self, frame: Any, event: str, argument: Any) -> None:
        self.calls += event in ("call", "c_call")


def measure(model: str, mode: str, batch: int, turns: int, steps: int, prefills: int) -> dict[str, Any]:
    """Medians of seconds and of ratios, for decode and prefill, and calls of a decode step."""
    length = INPUT_LEN + WARM_STEPS + steps + 2
    flags: dict[str, Any] = {"max_running_requests": batch, "max_total_tokens": 2 * batch * length + 1024}
    if model != "demo":
        flags |= {"model_path": str(checkpoints.ensure_checkpoint(model)), "skip_tokenizer_init": True}

    def subject(**more: Any) -> Subject:
        return Subject(prepare(EngineArgs.from_kwargs(**flags, **more)), batch, length)

    watched = subject(expert_distribution_recorder_mode=mode)
    subjects = {"without": subject(), "again": subject(), "off": watched, "on": watched}

    def run(way: str, ask: Callable[[Subject], Any]) -> Any:
        experts = watched.worker.experts
        if way == "on":
            watched.worker.call(experts.start).result()
        found = ask(subjects[way])
        if way == "on":
            watched.worker.call(experts.stop).result()
        return found

    times: dict[str, list[dict[str, float]]] = {way: [] for way in WAYS}
    rng = random.Random(1)
    for turn in range(turns + 1):
        for way in rng.sample(WAYS, len(WAYS)):  # random order, so that no variant has a fixed position
            seconds = run(way, lambda subject: subject.turn(steps, prefills))
            if turn:  # the first is a warm-up
                times[way].append(seconds)
    found: dict[str, Any] = {"model": model, "mode": mode, "batch": batch, "turns": turns, "steps": steps}
    found["calls"] = {way: run(way, Subject.calls) for way in WAYS}
    for phase in ("decode", "prefill"):
        own = {way: [seconds[phase] for seconds in times[way]] for way in WAYS}
        ratios = {way: [a / b - 1 for a, b in zip(own[way], own[beside])] for way, beside in COMPARED.items()}
        found[phase] = {
            "seconds": {way: median(own[way]) for way in WAYS},
            "cost": {way: median(ratios[way]) for way in COMPARED},
            "error": {way: standard_error(ratios[way]) for way in COMPARED},
        }
    for one in {id(one): one for one in subjects.values()}.values():
        one.worker.close()
    return found


def standard_error(values: list[float]) -> float:
    """Standard error of the median, from the median absolute deviation, for normal data."""
    middle = median(values)
    return 1.2533 * 1.4826 * median([abs(value - middle) for value in values]) / len(values) ** 0.5


def main(argv: list[str] | None = None) -> int:
    parser = report.command_parser("recording_cost", __doc__)
    parser.add_argument("--models", nargs="+", default=["demo", "moe-390m"], help="`demo`: the embedded model")
    parser.add_argument("--mode", default="stat", choices=("stat", "per_pass", "per_token"))
    parser.add_argument("--batch-size", type=int, nargs="+", default=[1, 16])
    parser.add_argument("--turns", type=int, default=40)
    parser.add_argument("--steps", type=int, default=16, help="decode steps of a turn")
    parser.add_argument("--prefills", type=int, default=3, help="prefills of a turn")
    report.add_result_options(parser)
    args = parser.parse_args(argv)

    lines = []
    for model in args.models:
        for batch in args.batch_size:
            lines.append(measure(model, args.mode, batch, args.turns, args.steps, args.prefills))
    rows = [
        [
            line["model"],
            str(line["batch"]),
            phase,
            f"{line[phase]['seconds']['without'] * 1e3:.3f}",
            *(f"{line[phase]['cost'][way]:+.1%} ± {line[phase]['error'][way]:.1%}" for way in COMPARED),
            " ".join(str(line["calls"][way]) for way in WAYS) if phase == "decode" else "",
        ]
        for line in lines
        for phase in ("decode", "prefill")
    ]
    print(report.table(["model", "requests", "step", "ms", *COMPARED, "calls: " + " ".join(WAYS)], rows))
    print("targets: " + ", ".join(f"{way} below {share:.0%}" for way, share in TARGETS.items()))
    report.write_if_asked(args, "recording_cost", {"lines": lines, "targets": TARGETS})
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
