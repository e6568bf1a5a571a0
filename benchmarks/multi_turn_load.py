"""Sessions of many turns at 0.5 to 4 times the KV cache: ``python -m benchmarks.multi_turn_load [--quick]``.

Sessions in a closed loop: each sends its history and a few new tokens, reads the answer, pauses, and begins a new
conversation after some turns. Three variants, each measured in turn at every load:

- recompute: no tier, and no KV is held for sessions (``--session-hold 0``)
- hold: the KV of sessions that fit is held (the default)
- tier: the default, and a host-RAM tier of `--ratio` times the KV cache

Reported: output tokens per second; time to first token of returning turns; cached tokens by tier; gaps between tokens
(p99, ratio of with the tier to without). Targets: the tier answers returning turns at least 5x sooner than
recomputation at 2 and 4 times the KV cache; with hold and with the tier the throughput never falls below 0.95 of its
peak at a larger load. ``--model-path moe-390m`` writes and measures the 390 M checkpoint.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks import checkpoints, report
from moe_engine import Engine
from moe_engine.tuning.stats import median, percentile

WAYS: dict[str, dict[str, Any]] = {
    "recompute": {"session_hold": 0.0},
    "hold": {},
    "tier": {"enable_hierarchical_cache": True},
}


@dataclass(frozen=True)
class Shape:
    """Lengths in tokens, `pause` in seconds."""

    pool: int
    prompt: int
    turn: int
    output: int
    turns: int
    pause: float

    @property
    def footprint(self) -> float:
        """Tokens of a session halfway through its turns."""
        return self.prompt + (self.turn + self.output) * (self.turns + 1) / 2

    def num_sessions(self, load: float) -> int:
        return max(1, round(load * self.pool / self.footprint))


EMBEDDED = Shape(pool=4096, prompt=600, turn=12, output=12, turns=6, pause=0.1)
LARGER = Shape(pool=8192, prompt=1200, turn=24, output=16, turns=6, pause=0.5)


@dataclass
class Measured:
    """Measurements of turns that ended in the measured interval."""

    num_tokens: int = 0
    first: list[float] = field(default_factory=list)
    """Seconds to the first token, of first and of returning turns."""
    returning: list[float] = field(default_factory=list)
    gaps: list[float] = field(default_factory=list)
    tiers: dict[str, int] = field(default_factory=dict)
    prompt_tokens: int = 0


class Sessions:
    """Sessions over one engine; `run` measures them for some seconds."""

    def __init__(self, engine: Engine, shape: Shape, count: int, rng: random.Random) -> None:
        self._engine, self._shape, self._count, self._rng = engine, shape, count, rng
        self._measured = Measured()

    async def run(self, warm: float, seconds: float) -> tuple[Measured, float]:
        tasks = [asyncio.create_task(self._session(number)) for number in range(self._count)]
        await self._sleep(tasks, warm)
        self._measured, began = Measured(), time.perf_counter()
        await self._sleep(tasks, seconds)
        measured, spent = self._measured, time.perf_counter() - began
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        return measured, spent

    async def _sleep(self, tasks: list[asyncio.Task[None]], seconds: float) -> None:
        """Ends early with the error of a session, if one fails."""
        done, _ = await asyncio.wait(tasks, timeout=seconds, return_when=asyncio.FIRST_EXCEPTION)
        for task in done:
            task.result()

    async def _session(self, number: int) -> None:
        shape = self._shape
        fits = number * shape.footprint <= shape.pool
        begin = self._rng.randrange(shape.turns) if fits else 0  # sessions that fit start at a random turn
        await asyncio.sleep(self._rng.uniform(0, 2 * shape.pause))
        while True:
            text = self._tokens(shape.prompt + begin * (shape.turn + shape.output))
            for turn in range(begin, shape.turns):
                text += await self._turn(text, returning=turn > begin)
                text += self._tokens(shape.turn)
                await asyncio.sleep(shape.pause * self._rng.uniform(0.5, 1.5))
            begin = 0

    async def _turn(self, text: list[int], returning: bool) -> list[int]:
        began = time.perf_counter()
        sampling = {"temperature": 0.0, "max_new_tokens": self._shape.output, "ignore_eos": True}
        last, chunk, arrivals = began, dict[str, Any](), list[float]()
        chunks: Any = await self._engine.async_generate(input_ids=text, sampling_params=sampling, stream=True)
        async for part in chunks:
            arrivals.append(time.perf_counter() - last)
            last, chunk = time.perf_counter(), part
        measured, meta = self._measured, chunk["meta_info"]
        (measured.returning if returning else measured.first).append(arrivals[0])
        measured.gaps += arrivals[1:]
        measured.num_tokens += len(chunk["output_ids"])
        measured.prompt_tokens += len(text)
        found = meta.get("cached_tokens_details") or {"device": meta["cached_tokens"]}
        for tier, count in found.items():
            if isinstance(count, int):
                measured.tiers[tier] = measured.tiers.get(tier, 0) + count
        return list(chunk["output_ids"])

    def _tokens(self, count: int) -> list[int]:
        return [self._rng.randrange(10, self._engine.info.vocab_size) for _ in range(count)]


def point(way: str, load: float, shape: Shape, args: argparse.Namespace, model: str | None) -> dict[str, Any]:
    """One variant at one load, in a separate engine."""
    flags: dict[str, Any] = {
        "max_total_tokens": shape.pool,
        "max_running_requests": args.max_running_requests,
        "chunked_prefill_size": 512,
        "random_seed": 1,
        "log_level": "error",
        **WAYS[way],
    }
    if way == "tier":
        flags["hicache_ratio"] = args.ratio
    count = shape.num_sessions(load)
    with Engine(model_path=model, **flags) as engine:
        rng = random.Random(args.seed)
        measured, spent = asyncio.run(Sessions(engine, shape, count, rng).run(args.warm, args.seconds))
    return {
        "way": way,
        "load": load,
        "sessions": count,
        "seconds": spent,
        "tokens_per_second": measured.num_tokens / spent,
        "turns": len(measured.first) + len(measured.returning),
        "ttft_first": summary(measured.first),
        "ttft_returning": summary(measured.returning),
        "gaps": summary(measured.gaps),
        "cached_share": sum(measured.tiers.values()) / max(measured.prompt_tokens, 1),
        "cached_tokens": measured.tiers,
    }


def summary(values: list[float]) -> dict[str, float] | None:
    """Seconds; None without values."""
    if not values:
        return None
    return {
        "median": median(values),
        "p90": percentile(values, 90),
        "p99": percentile(values, 99),
        "count": len(values),
    }


def verdicts(points: list[dict[str, Any]]) -> dict[str, Any]:
    """Throughput of the larger loads over the peak, and times to first token against recomputation."""
    found: dict[str, Any] = {}
    for way in dict.fromkeys(each["way"] for each in points):
        rates = [each["tokens_per_second"] for each in points if each["way"] == way]
        peak = rates.index(max(rates))
        found[f"{way}: least throughput behind the peak"] = min(rates[peak:]) / max(rates[peak], 1e-9)
    at = {(each["way"], each["load"]): each for each in points}
    for (way, load), each in at.items():
        plain = at.get(("recompute", load))
        if way == "recompute" or plain is None:
            continue
        for key, name in (("ttft_returning", "time to first token of returning turns"), ("gaps", "p99 gap of tokens")):
            part = "p99" if key == "gaps" else "median"
            if each[key] and plain[key]:
                value = plain[key][part] / each[key][part] if key != "gaps" else each[key][part] / plain[key][part]
                found[f"{way}, load {load:g}: {name}, {'better by' if key != 'gaps' else 'ratio'}"] = value
    return found


def draw(points: list[dict[str, Any]], path: Path, title: str) -> None:
    """Throughput and time to first token over the offered load."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (rates, times) = pyplot.subplots(1, 2, figsize=(11, 4.5), layout="constrained")
    figure.suptitle(title)
    for way in dict.fromkeys(each["way"] for each in points):
        mine = [each for each in points if each["way"] == way]
        loads = [each["load"] for each in mine]
        rates.plot(loads, [each["tokens_per_second"] for each in mine], marker="o", label=way)
        known = [each for each in mine if each["ttft_returning"]]
        times.plot([e["load"] for e in known], [e["ttft_returning"]["median"] for e in known], marker="o", label=way)
    top = 1.1 * max(each["tokens_per_second"] for each in points)
    rates.set(xlabel="sessions, in units of the KV cache", ylabel="output tokens/s", ylim=(0, top))
    times.set(
        xlabel="sessions, in units of the KV cache", ylabel="time to first token, returning turns, s", yscale="log"
    )
    for axis in (rates, times):
        axis.grid(alpha=0.3)
        axis.legend()
    figure.savefig(path, dpi=110)
    pyplot.close(figure)


def parse_arguments(argv: list[str] | None) -> argparse.Namespace:
    parser = report.command_parser("multi_turn_load", __doc__, allow_abbrev=False)
    parser.add_argument("--model-path", metavar="DIR", help="a checkpoint or a shape of benchmarks.checkpoints")
    parser.add_argument("--loads", type=float, nargs="+", default=[0.5, 1, 2, 4], metavar="TIMES")
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=list(WAYS))
    parser.add_argument(
        "--seconds", type=float, default=None, help="measured seconds of a point (20; --model-path: 60)"
    )
    parser.add_argument("--warm", type=float, default=None, help="warm-up seconds (half of --seconds)")
    parser.add_argument("--ratio", type=float, default=4.0, help="size of the host tier over that of the KV cache")
    parser.add_argument("--max-running-requests", type=int, default=8)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--quick", action="store_true", help="smoke test: loads 1 and 2 for 2 seconds each")
    parser.add_argument("--plot", type=Path, metavar="FILE.png")
    report.add_result_options(parser)
    args = parser.parse_args(argv)
    if args.quick:
        args.loads, args.seconds = [1, 2], args.seconds or 2.0
    args.seconds = args.seconds or (60.0 if args.model_path else 20.0)
    args.warm = args.seconds / 2 if args.warm is None else args.warm
    return args


def main(argv: list[str] | None = None) -> int:
    args = parse_arguments(argv)
    report.wait_until_quiet(args)
    model = args.model_path
    if model in checkpoints.SHAPES:
        model = str(checkpoints.ensure_checkpoint(model))
    shape = LARGER if model else EMBEDDED
    points = []
    for load in args.loads:
        for way in args.ways:
            points.append(point(way, load, shape, args, model))
            print(f"{way} at {load:g}: {points[-1]['tokens_per_second']:.1f} tokens/s", file=sys.stderr, flush=True)
    rows = [
        [
            each["way"],
            f"{each['load']:g}",
            each["sessions"],
            f"{each['tokens_per_second']:.1f}",
            f"{each['ttft_returning']['median']:.3f}" if each["ttft_returning"] else "-",
            f"{each['ttft_returning']['p90']:.3f}" if each["ttft_returning"] else "-",
            f"{each['cached_share']:.2f}",
        ]
        for each in points
    ]
    head = ["way", "load", "sessions", "tokens/s", "TTFT returning, s", "p90", "cached"]
    print(report.table(head, rows))
    found = verdicts(points)
    for name, value in found.items():
        print(f"{name}: {value:.2f}")
    title = f"multi-turn sessions, {args.model_path or 'embedded model'}, KV cache of {shape.pool} tokens"
    if args.plot:
        draw(points, args.plot, title)
    name = "multi_turn_load_" + ("390m" if args.model_path == "moe-390m" else "model" if model else "embedded")
    report.write_if_asked(args, name, {"points": points, "verdicts": found, "shape": vars(shape)})
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
