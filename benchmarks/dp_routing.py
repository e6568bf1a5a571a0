"""Cached tokens and times to first token by --load-balance-method: ``python -m benchmarks.dp_routing [--quick]``.

The embedded model with two schedulers (replicas, or attention groups with ``--attention-groups``), each with half the
KV cache of the one scheduler that it is compared with. Two workloads, the same for every method:

- sessions: each turn sends all earlier text and some new tokens, after a pause; some sessions share a system prompt
- prefixes: single requests, each with one of several long prefixes

Reported: cached share of the prompt tokens, over that of one scheduler; median and p90 of the time to first token;
output tokens per second. Target: ``cache_aware`` reaches 0.95 of the cached tokens of one scheduler.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import sys
import time
from dataclasses import dataclass, field
from typing import Any

from benchmarks import report
from moe_engine import Engine
from moe_engine.tuning.stats import median, percentile

METHODS = ("one", "cache_aware", "total_tokens", "round_robin")
TARGET = 0.95
POOL = 16384
SYSTEM, TURN, OUTPUT = 160, 64, 16


@dataclass
class Counts:
    prompt_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0
    first: list[float] = field(default_factory=list)
    by_rank: dict[int, int] = field(default_factory=dict)


class Clients:
    """Sends the requests of a workload, which depend on `seed` and on the answers only."""

    def __init__(self, engine: Engine, seed: int, scale: float) -> None:
        self._engine, self._seed, self._scale, self.counts = engine, seed, scale, Counts()

    async def sessions(self) -> None:
        """Sessions of six turns; four sessions share a system prompt."""
        await asyncio.gather(*(self._session(number) for number in range(round(16 * self._scale))))

    async def prefixes(self) -> None:
        """Eight prefixes of 512 tokens, requests in random order at random times."""
        rng = random.Random(self._seed)
        prefixes = [self._tokens(rng, 512) for _ in range(8)]
        tasks = []
        for _ in range(round(192 * self._scale)):
            prompt = rng.choice(prefixes) + self._tokens(rng, 32)
            tasks.append(asyncio.create_task(self._send(prompt)))
            await asyncio.sleep(rng.expovariate(20.0))
        await asyncio.gather(*tasks)

    async def _session(self, number: int) -> None:
        rng = random.Random(f"{self._seed} {number}")
        text = self._tokens(random.Random(f"{self._seed} system {number // 4}"), SYSTEM)
        await asyncio.sleep(rng.uniform(0, 1))
        for _ in range(6):
            text += self._tokens(rng, rng.randint(TURN // 2, TURN * 3 // 2))
            text += await self._send(text[:])
            await asyncio.sleep(rng.expovariate(2.0))

    async def _send(self, prompt: list[int]) -> list[int]:
        began, first, last = time.perf_counter(), 0.0, dict[str, Any]()
        sampling = {"temperature": 0.0, "max_new_tokens": OUTPUT, "ignore_eos": True}
        chunks: Any = await self._engine.async_generate(input_ids=prompt, sampling_params=sampling, stream=True)
        async for chunk in chunks:
            first, last = first or time.perf_counter() - began, chunk
        counts, meta = self.counts, last["meta_info"]
        counts.first.append(first)
        counts.prompt_tokens += len(prompt)
        counts.cached_tokens += meta["cached_tokens"]
        counts.output_tokens += len(last["output_ids"])
        rank = meta.get("dp_rank") or 0
        counts.by_rank[rank] = counts.by_rank.get(rank, 0) + 1
        return list(last["output_ids"])

    def _tokens(self, rng: random.Random, count: int) -> list[int]:
        return [rng.randrange(10, self._engine.info.vocab_size) for _ in range(count)]


def measure(method: str, workload: str, args: argparse.Namespace) -> dict[str, Any]:
    """One method on one workload, in a separate engine."""
    flags: dict[str, Any] = {
        "max_running_requests": 16, "chunked_prefill_size": 512, "random_seed": 1, "log_level": "error",
        "context_length": 1024, "cpu_threads": 1, "max_total_tokens": POOL,
    }  # fmt: skip
    if method != "one":
        flags |= {"load_balance_method": method, "max_total_tokens": POOL // 2}
        flags |= {"tp_size": 2, "attn_dp_size": 2} if args.attention_groups else {"dp_size": 2}
    with Engine(model_path=args.model_path, **flags) as engine:
        clients = Clients(engine, args.seed, 0.5 if args.quick else 1.0)
        began = time.perf_counter()
        asyncio.run(getattr(clients, workload)())
        seconds = time.perf_counter() - began
    counts = clients.counts
    return {
        "workload": workload,
        "method": method,
        "cached_share": counts.cached_tokens / counts.prompt_tokens,
        "ttft_median": median(counts.first),
        "ttft_p90": percentile(counts.first, 90),
        "tokens_per_second": counts.output_tokens / seconds,
        "requests_by_rank": counts.by_rank,
    }


def verdicts(points: list[dict[str, Any]]) -> dict[str, float]:
    """Cached tokens of each method over those of one scheduler."""
    one = {point["workload"]: point["cached_share"] for point in points if point["method"] == "one"}
    return {
        f"{point['workload']}, {point['method']}: cached tokens over one scheduler's": point["cached_share"]
        / one[point["workload"]]
        for point in points
        if point["method"] != "one"
    }


def main(argv: list[str] | None = None) -> int:
    parser = report.command_parser("dp_routing", __doc__, allow_abbrev=False)
    parser.add_argument("--model-path", help="a checkpoint (default: the embedded model)")
    parser.add_argument("--attention-groups", action="store_true", help="two attention groups instead of two replicas")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--quick", action="store_true", help="half the requests")
    report.add_result_options(parser)
    args = parser.parse_args(argv)
    points = []
    for workload in ("sessions", "prefixes"):
        for method in METHODS:
            points.append(measure(method, workload, args))
            print(f"{workload} {method}: {points[-1]['cached_share']:.3f} of the prompts cached", file=sys.stderr)
    head = ["workload", "method", "cached", "TTFT ms", "p90", "tokens/s", "requests"]
    rows = [
        [
            point["workload"],
            point["method"],
            f"{point['cached_share']:.3f}",
            f"{point['ttft_median'] * 1e3:.0f}",
            f"{point['ttft_p90'] * 1e3:.0f}",
            f"{point['tokens_per_second']:.0f}",
            "/".join(str(count) for _, count in sorted(point["requests_by_rank"].items())),
        ]
        for point in points
    ]
    print(report.table(head, rows))
    found = verdicts(points)
    for name, value in found.items():
        print(f"{name}: {value:.3f}")
    options = {"seed": args.seed, "quick": args.quick, "attention_groups": args.attention_groups}
    report.write_if_asked(args, "dp_routing", {"points": points, "verdicts": found, "options": options})
    return 0 if all(value >= TARGET for name, value in found.items() if "cache_aware" in name) else 1


if __name__ == "__main__":
    raise SystemExit(main())
