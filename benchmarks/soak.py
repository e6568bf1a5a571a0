"""A long mixed load with clients that vanish: ``python -m benchmarks.soak [--requests 2000] [--url URL]``.

Requests of every kind (native and OpenAI endpoints, streamed or not, batches, n = 2, log-probabilities, shared
prefixes, requests that must be refused, control calls) in random order; a part of the clients closes its connection
in the middle of the answer. Afterwards the KV pool must be as empty as at the start, nobody may run or wait, the
server must still answer, and its processes must not have grown. Starts a server itself (the embedded model by
default) unless `--url` names one.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import sys
import time
from collections import Counter
from typing import Any
from urllib.parse import urlsplit

import httpx

from benchmarks import report
from benchmarks.server_process import ServerProcess, memory_of, process_on_port
from benchmarks.soak_requests import KINDS, Outcome, SoakContext, perform

SETTLE_SECONDS = 60.0
POOL_KEYS = ("num_running", "num_waiting", "num_used", "num_free", "num_evictable", "num_protected")
BASELINE_SHARE = 0.25
"""Memory is compared with what it was after this share of the requests: caches and arenas have filled by then."""
MIB = 1 << 20


async def pool_state(client: httpx.AsyncClient, url: str) -> dict[str, int]:
    """The scheduler's counts, from /server_info. Raises RuntimeError when the engine does not tell."""
    states = (await client.get(url + "/server_info")).json().get("internal_states") or []
    if not states:
        raise RuntimeError("/server_info shows no internal state: the engine does not answer")
    return {key: sum(state.get(key, 0) for state in states) for key in POOL_KEYS}


async def settle(client: httpx.AsyncClient, url: str) -> dict[str, int]:
    """Waits until nothing runs or waits, flushes the cache, and returns the pool's state then."""
    deadline = time.monotonic() + SETTLE_SECONDS
    while True:
        state = await pool_state(client, url)
        idle = not state["num_running"] and not state["num_waiting"]
        if idle and (await client.post(url + "/flush_cache")).status_code == 200:
            return await pool_state(client, url)
        if time.monotonic() > deadline:
            return state
        await asyncio.sleep(0.2)


async def run_soak(args: argparse.Namespace, url: str, pid: int | None) -> dict[str, Any]:
    """The whole soak against a ready server; `pid` is the process whose family's memory is watched."""
    rng = random.Random(args.seed)
    limits = httpx.Limits(max_connections=args.concurrency + 8, max_keepalive_connections=args.concurrency)
    headers = {"Authorization": f"Bearer {args.api_key}"} if args.api_key else {}
    async with httpx.AsyncClient(timeout=httpx.Timeout(args.timeout), limits=limits, headers=headers) as client:
        info = (await client.get(url + "/model_info")).json()
        context = SoakContext(
            client, url, info.get("vocab_size", 256), info.get("max_context_length", 512), args.disconnect_share
        )
        before = await settle(client, url)
        counts: Counter[tuple[str, str]] = Counter()
        problems: list[str] = []
        memory: dict[str, dict[str, int]] = {"start": memory_of(pid) if pid else {}}
        order = rng.choices(list(KINDS), weights=[kind.weight for kind in KINDS.values()], k=args.requests)
        seeds = [rng.getrandbits(32) for _ in order]
        pending = list(zip(order, seeds))[::-1]
        baseline_left = args.requests - int(args.requests * BASELINE_SHARE)
        began = time.perf_counter()

        async def client_loop() -> None:
            while pending:
                kind, seed = pending.pop()
                outcome = await perform(context, kind, random.Random(seed))
                counts[kind, outcome.result] += 1
                if outcome.result == "failed" and len(problems) < 20:
                    problems.append(f"{kind}: {outcome.detail}")
                if len(pending) <= baseline_left and "baseline" not in memory and pid:
                    memory["baseline"] = memory_of(pid)

        await asyncio.gather(*(client_loop() for _ in range(args.concurrency)))
        seconds = time.perf_counter() - began
        after = await settle(client, url)
        memory["end"] = memory_of(pid) if pid else {}
        answers = await perform(context, "generate", random.Random(0), disconnect=False)
    return {
        "requests": args.requests,
        "seconds": seconds,
        "outcomes": {f"{kind}: {result}": count for (kind, result), count in sorted(counts.items())},
        "problems": problems,
        "pool_before": before,
        "pool_after": after,
        "memory_bytes": memory,
        "still_answers": answers.result == Outcome.ANSWERED,
    }


def judge(values: dict[str, Any], max_growth_mib: float, log_lines: list[str]) -> dict[str, bool]:
    """What must hold; a check without data is left out."""
    memory = values["memory_bytes"]
    checks = {
        "no request failed unexpectedly": not values["problems"],
        "the KV pool is as empty as at the start": values["pool_after"] == values["pool_before"],
        "the server still answers": values["still_answers"],
    }
    if memory.get("baseline") and memory.get("end"):
        values["memory_growth_bytes"] = {
            name: size - memory["baseline"].get(name, size) for name, size in memory["end"].items()
        }
        grown = sum(values["memory_growth_bytes"].values())
        checks[f"memory grew by less than {max_growth_mib:.0f} MiB"] = grown < max_growth_mib * MIB
        checks["no process has come or gone"] = set(memory["end"]) == set(memory["baseline"])
    if log_lines:
        values["log_errors"] = [line for line in log_lines if "Traceback" in line or " failed:" in line][:10]
        checks["no error in the server's log"] = not values["log_errors"]
    return checks


def print_report(values: dict[str, Any], checks: dict[str, bool]) -> None:
    rows = [[name, count] for name, count in values["outcomes"].items()]
    print(report.table(["requests", "count"], rows))
    print(f"{values['requests']} requests in {values['seconds']:.1f} s")
    names = sorted({name for moment in values["memory_bytes"].values() for name in moment})
    if names:
        moments = [moment for moment in ("start", "baseline", "end") if values["memory_bytes"].get(moment)]
        cells = [[n, *(f"{values['memory_bytes'][m].get(n, 0) / MIB:.1f}" for m in moments)] for n in names]
        print(report.table(["memory (MiB)", *moments], cells))
    print(f"pool before: {values['pool_before']}\npool after:  {values['pool_after']}")
    for problem in values["problems"]:
        print(f"  {problem}")
    for line in values.get("log_errors", []):
        print(f"  log: {line}")
    for name, held in checks.items():
        print(f"{'pass ' if held else 'SHORT'} {name}")


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="moe-engine bench soak",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog="All further options go to `moe-engine serve`.",
        allow_abbrev=False,
    )
    parser.add_argument("--requests", type=int, default=2000)
    parser.add_argument("--concurrency", type=int, default=32)
    parser.add_argument("--disconnect-share", type=float, default=0.25, help="of the generating requests")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--timeout", type=float, default=120.0, help="seconds a request may take")
    parser.add_argument("--max-growth-mib", type=float, default=48.0, help="of all processes together")
    parser.add_argument("--url", help="a running server, instead of starting one")
    parser.add_argument("--api-key", help="of the server behind --url")
    report.add_result_options(parser)
    args, flags = parser.parse_known_args(argv)
    try:
        if args.url:
            if flags:
                parser.error(f"{flags[0]}: flags of the server are of no use with --url")
            url = args.url.rstrip("/")
            values = asyncio.run(run_soak(args, url, process_on_port(urlsplit(url).port or 80)))
            lines: list[str] = []
        else:
            with ServerProcess(flags) as server:
                server.wait_ready()
                values = asyncio.run(run_soak(args, server.base_url, server.pid))
                lines = [line for _, line in server.lines]
    except (RuntimeError, httpx.HTTPError) as error:
        print(f"benchmarks.soak: {type(error).__name__}: {error}", file=sys.stderr)
        return 1
    checks = judge(values, args.max_growth_mib, lines)
    print_report(values, checks)
    if not args.no_json:
        print(report.write_result("soak", {**values, "checks": checks}, path=args.json), file=sys.stderr)
    return 0 if all(checks.values()) else 1


if __name__ == "__main__":
    raise SystemExit(main())
