"""Step times with KV tiers: ``python -m benchmarks.tier_steps [--quick]``.

Decodes while new prompts arrive, with three variants: no tier; a host tier; a host tier and a storage, both with
write-through. Two measurements:

- scheduler: the production scheduler without a model. CPU time of its thread for each step (arrivals, plan, result),
  with prompts of `--prompt-len` tokens, and steps of `--step-ms` for the ratio.
- engine: the embedded model with a storage whose reads and writes take 20 ms longer. Gaps between tokens of running
  requests, and CPU time of the engine process for each token; one engine for each variant, measured in turn. A prompt
  arrives each time the running requests have a certain number of tokens, so that the same share of the gaps contains
  prompts in each variant. Figures are medians over the rounds.

Target: p99 of the step time within 5% of no tier. In the scheduler's part that of steps of `--step-ms`, to which the
scheduler's time adds as without overlap.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import random
import tempfile
import time
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import psutil

from benchmarks import report
from moe_engine import Engine
from moe_engine.scheduler.config import SchedulerConfig
from moe_engine.scheduler.scheduler import NEEDS_RESULT, Scheduler
from moe_engine.storage.file_storage import FileStorage
from moe_engine.tuning.stats import median, percentile
from moe_engine.types import KVReport, Request, SamplingParams, StepPlan, StepResult
from moe_engine.types.step_settings import StorageSettings

WAYS = ("no tier", "host", "storage")
TARGET = 1.05
DECODES, PROMPTS = 3, 6
"""Running requests, and prompts that arrive meanwhile, in a round of the engine's part."""
SLOW_SECONDS = 0.02
DELAY_STEPS = 3
"""Steps until the simulated storage reports."""


class SlowStorage(FileStorage):
    """Files whose reads and writes take longer: `--hicache-storage-backend benchmarks.tier_steps:SlowStorage`."""

    def __init__(self, settings: StorageSettings, rank: int) -> None:
        super().__init__(settings.directory)

    def get(self, names: Sequence[str], targets: Sequence[memoryview]) -> list[bool]:
        time.sleep(SLOW_SECONDS)
        return super().get(names, targets)

    def put(self, names: Sequence[str], pages: Sequence[memoryview]) -> list[bool]:
        time.sleep(SLOW_SECONDS)
        return super().put(names, pages)


class SimulatedTiers:
    """The workers' part of loads and storage operations: they end some steps later."""

    def __init__(self) -> None:
        self._stored: set[bytes] = set()
        self._late: list[tuple[int, list[int], list[KVReport]]] = []

    def begin(self, plan: StepPlan, step: int) -> None:
        ops = plan.kv_ops
        if ops is None:
            return
        reports = [KVReport(number, 0, True) for number in ops.stops]
        for fetch in ops.fetches:
            found = next((i for i, key in enumerate(fetch.keys) if key not in self._stored), len(fetch.keys))
            reports.append(KVReport(fetch.id, found, True))
        for backup in ops.backups:
            self._stored.update(backup.keys)
            reports.append(KVReport(backup.id, len(backup.keys), True))
        self._late.append((step + DELAY_STEPS, [load.id for load in ops.loads], reports))

    def ended(self, step: int) -> tuple[list[int], list[KVReport]]:
        loads, reports = list[int](), list[KVReport]()
        while self._late and self._late[0][0] <= step:
            _, ids, found = self._late.pop(0)
            loads += ids
            reports += found
        return loads, reports


def scheduler_seconds(way: str, args: argparse.Namespace) -> dict[str, list[float]]:
    """CPU seconds of the scheduler's thread for each step, by kind of step."""
    rng = random.Random(args.seed)
    pool = 6 * args.prompt_len
    storage = StorageSettings("file", threshold=256) if way == "storage" else None
    config = SchedulerConfig(
        num_slots=pool - pool % 64, context_len=2 * args.prompt_len, max_rows=args.decodes + 4, page_size=64,
        chunked_prefill_size=8192, host_tier_tokens=0 if way == "no tier" else 2 * pool - 2 * pool % 64,
        hicache_write_policy="write_through", storage=storage, session_hold=0.0,
    )  # fmt: skip
    scheduler, tiers = Scheduler(config), SimulatedTiers()
    sampling = SamplingParams(max_new_tokens=None)
    for number in range(args.decodes):
        prompt = [rng.randrange(1 << 17) for _ in range(64)]
        scheduler.add(Request(f"decode {number}", prompt, sampling, args.steps * 2))
    texts: list[list[int]] = []
    found: dict[str, list[float]] = {"decode": [], "prefill": []}
    gc.collect()
    gc.freeze()
    for step in range(args.steps + 20):
        arrival = None
        if step >= 20 and step % args.every == 0:
            shared = rng.choice(texts)[: args.prompt_len * 3 // 4] if texts else []
            texts.append(shared + [rng.randrange(1 << 17) for _ in range(args.prompt_len - len(shared))])
            arrival = Request(f"prompt {step}", texts[-1], sampling, 4)
            texts = texts[-12:]
        loads, reports = tiers.ended(step)
        began = time.thread_time()
        if arrival is not None:
            scheduler.add(arrival)
        if loads or reports:
            scheduler.kv_arrived(loads, reports)
        plan = scheduler.schedule()
        spent = time.thread_time() - began
        if not isinstance(plan, StepPlan) or plan is NEEDS_RESULT:
            continue
        tiers.begin(plan, step)
        rows = [row for row, samples in zip(plan.rows, plan.samples) if samples]
        result = StepResult(plan.number, rows, [[rng.randrange(9, 1 << 17)] for _ in rows])
        began = time.thread_time()
        scheduler.update(result)
        spent += time.thread_time() - began
        if step >= 20:
            found["prefill" if plan.num_decodes < len(plan.rows) else "decode"].append(spent)
    return found


def measure_scheduler(args: argparse.Namespace) -> dict[str, Any]:
    """Each variant `--rounds` times in turn; the median over the rounds of each figure."""
    runs: dict[str, list[dict[str, float]]] = {way: [] for way in WAYS}
    for _ in range(args.rounds):
        for way in WAYS:
            seconds = scheduler_seconds(way, args)
            runs[way].append({
                "decode_p50_us": median(seconds["decode"]) * 1e6,
                "decode_p99_us": percentile(seconds["decode"], 99) * 1e6,
                "decode_max_us": max(seconds["decode"]) * 1e6,
                "prefill_p50_us": median(seconds["prefill"]) * 1e6 if seconds["prefill"] else 0.0,
                "mean_us": sum(map(sum, seconds.values())) / sum(map(len, seconds.values())) * 1e6,
            })  # fmt: skip
    return {way: {key: median([run[key] for run in each]) for key in each[0]} for way, each in runs.items()}


class Rounds:
    """One engine for each variant; `run` measures all in turn."""

    def __init__(self, args: argparse.Namespace, folder: str) -> None:
        self._args, self._rng = args, random.Random(args.seed)
        base: dict[str, Any] = {
            "max_total_tokens": 4096, "max_running_requests": 8, "chunked_prefill_size": 256, "context_length": 1024,
            "random_seed": 1, "log_level": "error", "cpu_threads": 1,
        }  # fmt: skip
        tier: dict[str, Any] = {
            "enable_hierarchical_cache": True,
            "hicache_ratio": 3.0,
            "hicache_write_policy": "write_through",
        }
        storage = {"hicache_storage_backend": "benchmarks.tier_steps:SlowStorage", "hicache_storage_dir": folder}
        flags: dict[str, dict[str, Any]] = {
            "no tier": {"page_size": 64},
            "host": {"page_size": 64, **tier},
            "storage": {**tier, **storage},
        }
        self._engines = {way: Engine(**base, **flags[way]) for way in WAYS}
        self.found: dict[str, list[dict[str, float]]] = {way: [] for way in WAYS}

    def run(self, rounds: int) -> None:
        for number in range(rounds + 1):
            for way, engine in self._engines.items():
                before = self._cpu(engine)
                gaps = asyncio.run(self._round(engine))
                if number:  # the first round warms up
                    self.found[way].append({
                        "p50_ms": median(gaps) * 1e3,
                        "p99_ms": percentile(gaps, 99) * 1e3,
                        "cpu_ms_per_token": (self._cpu(engine) - before) / len(gaps) * 1e3,
                    })  # fmt: skip

    def close(self) -> None:
        for engine in self._engines.values():
            engine.shutdown()

    @staticmethod
    def _cpu(engine: Engine) -> float:
        times = [psutil.Process(core.pid).cpu_times() for core in engine._cores]
        return sum(each.user + each.system for each in times)

    async def _round(self, engine: Engine) -> list[float]:
        total, prompts = DECODES * self._args.tokens, list[asyncio.Task[None]]()
        due = [total * (number + 1) // (PROMPTS + 2) for number in range(PROMPTS)]
        num_tokens = 0

        async def decode() -> list[float]:
            nonlocal num_tokens
            arrivals = []
            async for _ in await self._stream(engine, 16, self._args.tokens):
                arrivals.append(time.perf_counter())
                num_tokens += 1
                if len(prompts) < PROMPTS and num_tokens >= due[len(prompts)]:
                    prompts.append(asyncio.create_task(self._prompt(engine)))
            return [after - before for before, after in pairwise(arrivals)]

        gaps = [gap for each in await asyncio.gather(*(decode() for _ in range(DECODES))) for gap in each]
        await asyncio.gather(*prompts)
        return gaps

    async def _prompt(self, engine: Engine) -> None:
        async for _ in await self._stream(engine, 512, 1):
            pass

    async def _stream(self, engine: Engine, length: int, tokens: int) -> Any:
        prompt = [self._rng.randrange(10, engine.info.vocab_size) for _ in range(length)]
        sampling = {"temperature": 0.0, "max_new_tokens": tokens, "ignore_eos": True}
        return await engine.async_generate(input_ids=prompt, sampling_params=sampling, stream=True)


def measure_engine(args: argparse.Namespace) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        rounds = Rounds(args, folder)
        try:
            rounds.run(args.rounds)
        finally:
            rounds.close()
    return {way: {key: median([run[key] for run in each]) for key in each[0]} for way, each in rounds.found.items()}


def verdicts(scheduler: dict[str, Any], engine: dict[str, Any] | None, step_ms: float) -> dict[str, float]:
    """p99 of a step over that without a tier."""
    found = {}
    for way in WAYS[1:]:
        times = [step_ms + scheduler[each]["decode_p99_us"] / 1e3 for each in (way, "no tier")]
        found[f"{way}: p99 of decodes of {step_ms:g} ms, over no tier"] = times[0] / times[1]
        if engine is not None:
            found[f"{way}: p99 of the gaps, over no tier"] = engine[way]["p99_ms"] / engine["no tier"]["p99_ms"]
            ratio = engine[way]["cpu_ms_per_token"] / engine["no tier"]["cpu_ms_per_token"]
            found[f"{way}: CPU time per token, over no tier"] = ratio
    return found


def main(argv: list[str] | None = None) -> int:
    parser = report.command_parser("tier_steps", __doc__, allow_abbrev=False)
    parser.add_argument("--prompt-len", type=int, default=32768)
    parser.add_argument("--decodes", type=int, default=32, help="running requests")
    parser.add_argument("--every", type=int, default=25, help="steps between two prompts")
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--step-ms", type=float, default=20.0, help="device time of a decode step")
    parser.add_argument("--tokens", type=int, default=400, help="tokens of an answer in the engine's part")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--only-scheduler", action="store_true")
    parser.add_argument("--quick", action="store_true", help="one round, 300 steps")
    parser.add_argument("--seed", type=int, default=1)
    report.add_result_options(parser)
    args = parser.parse_args(argv)
    if args.quick:
        args.rounds, args.steps, args.tokens = 1, min(args.steps, 300), 100
    scheduler = measure_scheduler(args)
    engine = None if args.only_scheduler else measure_engine(args)
    for name, part in (("scheduler", scheduler), ("engine", engine)):
        if part is not None:
            keys = list(part["no tier"])
            print(report.table([name, *keys], [[way, *(f"{part[way][key]:.2f}" for key in keys)] for way in part]))
    found = verdicts(scheduler, engine, args.step_ms)
    for label, value in found.items():
        print(f"{label}: {value:.3f}")
    options = {name: value for name, value in vars(args).items() if name not in ("json", "no_json")}
    values = {"scheduler": scheduler, "engine": engine, "verdicts": found, "options": options}
    report.write_if_asked(args, "tier_steps", values)
    return 0 if all(value <= TARGET for label, value in found.items() if "p99" in label) else 1


if __name__ == "__main__":
    raise SystemExit(main())
