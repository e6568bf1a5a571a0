"""What recording the experts' choices costs a step: ``python -m benchmarks.recording_cost [--models demo moe-390m]``.

Three ways take turns on one batch each, in this process, without scheduler and server: no recorder at all; one that is
attached and off; one that records (`--mode`). The ratio of a turn is its median step to that of the turn without
beside it, and the median of the ratios counts. Targets: off below 1 %, on below 5 %.
"""

from __future__ import annotations

import argparse
import random
from typing import Any

from benchmarks import checkpoints, report
from benchmarks.stats import median
from benchmarks.step_driver import BatchDriver, create_worker
from moe_engine.config.args import EngineArgs
from moe_engine.config.launch_plan import prepare
from moe_engine.config.resolve import ResolvedConfig

TARGETS = {"off": 0.01, "on": 0.05}
INPUT_LEN = 16


class Subject:
    """A worker with one batch after another: the batch begins anew when its requests have become long."""

    def __init__(self, config: ResolvedConfig, batch: int, length: int) -> None:
        self.worker = create_worker(config)
        self._config, self._length = config, length
        rng = random.Random(0)
        self._prompts = [rng.choices(range(config.model.vocab_size), k=INPUT_LEN) for _ in range(batch)]
        self._driver = self._begin()
        self._left = 0

    def steps(self, count: int) -> float:
        """Median seconds of so many decode steps."""
        if self._left < count:
            self._driver.close()
            self._driver = self._begin()
            self._driver.prefill()
            self._driver.decode()
            self._left = self._length - INPUT_LEN - 2
        self._left -= count
        return median([self._driver.decode() for _ in range(count)])

    def prefills(self, count: int) -> float:
        """Median seconds of so many prefills of the batch."""
        seconds = []
        for _ in range(count):
            self._driver.close()
            self._driver = self._begin()
            seconds.append(self._driver.prefill())
        self._left = 0
        return median(seconds)

    def _begin(self) -> BatchDriver:
        return BatchDriver(self.worker, self._config, self._prompts, self._length, self._config.max_prefill_tokens)


def measure(model: str, mode: str, batch: int, turns: int, steps: int) -> dict[str, Any]:
    """Medians of seconds and of ratios to the turn without a recorder, for decode and prefill."""
    length = INPUT_LEN + 4 * steps + 2
    flags: dict[str, Any] = {"max_running_requests": batch, "max_total_tokens": 2 * batch * length + 1024}
    if model != "demo":
        flags |= {"model_path": str(checkpoints.ensure_checkpoint(model)), "skip_tokenizer_init": True}
    plain = Subject(prepare(EngineArgs.from_kwargs(**flags)), batch, length)
    watched = Subject(prepare(EngineArgs.from_kwargs(**flags, expert_distribution_recorder_mode=mode)), batch, length)
    found: dict[str, Any] = {"model": model, "mode": mode, "batch": batch}
    for phase, count in (("decode", steps), ("prefill", max(steps // 8, 2))):
        times: dict[str, list[float]] = {"without": [], "off": [], "on": []}
        for turn in range(turns + 1):
            order = list(times) if turn % 2 else list(times)[::-1]  # whoever comes first has no advantage of it
            for way in order:
                subject = plain if way == "without" else watched
                if way == "on":
                    watched.worker.call(watched.worker.experts.start).result()
                run = subject.steps if phase == "decode" else subject.prefills
                seconds = run(count)
                if way == "on":
                    watched.worker.call(watched.worker.experts.stop).result()
                if turn:  # the first is a warm-up
                    times[way].append(seconds)
        ratios = {way: [a / b - 1 for a, b in zip(times[way], times["without"])] for way in TARGETS}
        found[phase] = {
            "seconds": {way: median(own) for way, own in times.items()},
            "cost": {way: median(own) for way, own in ratios.items()},
        }
    plain.worker.close()
    watched.worker.close()
    return found


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.recording_cost",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--models", nargs="+", default=["demo", "moe-390m"], help="`demo`: the embedded model")
    parser.add_argument("--mode", default="stat", choices=("stat", "per_pass", "per_token"))
    parser.add_argument("--batch-size", type=int, nargs="+", default=[1, 16])
    parser.add_argument("--turns", type=int, default=15)
    parser.add_argument("--steps", type=int, default=32, help="decode steps of a turn")
    report.add_result_options(parser)
    args = parser.parse_args(argv)

    lines = []
    for model in args.models:
        for batch in args.batch_size:
            lines.append(measure(model, args.mode, batch, args.turns, args.steps))
    rows = [
        [
            line["model"],
            str(line["batch"]),
            phase,
            f"{line[phase]['seconds']['without'] * 1e3:.3f}",
            *(f"{line[phase]['cost'][way]:+.1%}" for way in TARGETS),
        ]
        for line in lines
        for phase in ("decode", "prefill")
    ]
    print(report.table(["model", "requests", "step", "ms", "off", "on"], rows))
    print("targets: " + ", ".join(f"{way} below {share:.0%}" for way, share in TARGETS.items()))
    if not args.no_json:
        print(report.write_result("recording_cost", {"lines": lines, "targets": TARGETS}, path=args.json))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
