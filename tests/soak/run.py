"""A load of mixed clients, with a check of every answer: ``python -m tests.soak.run``.

Each form of the engine is started with the embedded model in float32. First a reference server of one rank answers a
set of random questions, one at a time. Then ordinary clients load the form under test (the quiet phase), then mixed
clients: some disconnect, abort, retry with the same id, read slowly, send large or wrong bodies. Every answer must be
the known one, none may be lost, the KV pool must be complete afterwards, and the gaps of the neighbors' streams are
compared between the two phases. With ``--elastic`` forms a rank is killed in the middle.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
from tqdm import tqdm

from tests.e2e.server_process import ServerProcess, runs
from tests.soak import answers, questions
from tests.soak.clients import BEHAVIORS, ORDINARY, Client, Known, Tally
from tests.soak.http import Connection
from tests.soak.neighbors import Neighbors, quantile
from tests.waiting import until

COMMON = ("--dtype", "float32", "--random-seed", "7", "--log-level", "warning")
TIGHT = ("--max-total-tokens", "6000", "--chunked-prefill-size", "128", "--max-running-requests", "24")
"""Small enough that requests wait, chunks mix with decodes, and requests are retracted."""
RANKS = ("--tp-size", "2", "--ep-size", "2", "--cpu-threads", "1")
FORMS: dict[str, tuple[str, ...]] = {
    "one": (),
    "speculation": ("--speculative-algorithm", "NEXTN", "--speculative-num-steps", "auto"),
    "ngram": ("--speculative-algorithm", "NGRAM"),
    "tp": ("--tp-size", "2", "--cpu-threads", "1"),
    "dp": ("--dp-size", "2", "--cpu-threads", "1"),
    "ep": (*RANKS, "--attn-dp-size", "2", "--moe-a2a-backend", "all_to_all"),
    "ep-low-latency": (*RANKS, "--moe-a2a-backend", "all_to_all", "--deepep-mode", "low_latency"),
    "ep-overlap-speculation": (
        *(*RANKS, "--attn-dp-size", "2", "--moe-a2a-backend", "all_to_all", "--enable-two-batch-overlap"),
        *("--speculative-algorithm", "NEXTN"),
    ),
    "elastic": (
        *("--tp-size", "3", "--attn-dp-size", "3", "--ep-size", "3", "--cpu-threads", "1"),
        *("--moe-a2a-backend", "all_to_all", "--elastic-ep", "--ep-num-redundant-experts", "34"),
        *("--enable-dp-lm-head", "--moe-dense-tp-size", "1"),
    ),
}
SETTLE_SECONDS = 60.0
ALLOWED_OPEN = 32
"""Files and threads that pools and helper processes may open on demand under load."""
LEAST_GAPS = 100
"""Min number of gaps for a p99."""
ALLOWED_GAP_RATIO = 5.0
"""Limit of the largest gap of a neighbor's stream with mixed clients, in p99 gaps with ordinary ones."""


@dataclass(frozen=True)
class Plan:
    """The load. `quiet_share`: share of the requests that ordinary clients send first."""

    num_requests: int
    num_clients: int = 24
    num_neighbors: int = 4
    quiet_share: float = 0.2
    seed: int = 0


def ask_reference(drawn: Sequence[questions.Question], port: int) -> list[Known]:
    """The set of known answers: each question with the answer of an otherwise idle server. A refused question is an
    error."""

    async def ask_all() -> list[Known]:
        connection, bank = Connection(port), []
        for question in tqdm(drawn, desc="reference answers", disable=None):
            status, content = await connection.fetch("POST", question.path, question.body)
            if status != 200:
                raise RuntimeError(f"the reference server refuses {question.body}: {status} {content[:500]!r}")
            bank.append(Known(question, answers.whole(json.loads(content))))
        connection.drop()
        return bank

    return asyncio.run(ask_all())


def reference(folder: Path, count: int, seed: int) -> list[Known]:
    """A set of `count` questions, answered by a server of one rank without prefix cache and overlap."""
    with ServerProcess(folder, *COMMON, "--disable-radix-cache", "--disable-overlap-schedule") as server:
        return ask_reference(questions.draw(seed, count), server.port)


async def load(
    port: int, bank: Sequence[Known], plan: Plan, count: int, behaviors: dict[str, int], tally: Tally
) -> None:
    """`count` requests by concurrent clients; a third of the clients use one id for all of their requests."""
    rng = random.Random(plan.seed + count)
    clients = [
        Client(port, bank, rng.getrandbits(32), tally, f"client-{i}." if i % 3 == 0 else None)
        for i in range(plan.num_clients)
    ]
    end = tally.total + count

    async def work(client: Client) -> None:
        while (before := tally.total) < end:
            await client.ask_next(behaviors)
            bar.update(tally.total - before)
        client.close()

    with tqdm(total=count, desc="mixed" if behaviors is BEHAVIORS else "quiet", disable=None) as bar:
        await asyncio.gather(*map(work, clients))


def soak(server: ServerProcess, bank: Sequence[Known], plan: Plan, *, strikes: bool = False) -> dict[str, Any]:
    """Both phases against a ready server. With `strikes`, the last rank is killed during the mixed phase."""
    tally, empty, files = Tally(), settle(server), num_open(server)
    neighbors = Neighbors(server.port, plan.num_neighbors)
    began = time.monotonic()
    asyncio.run(load(server.port, bank, plan, int(plan.num_requests * plan.quiet_share), ORDINARY, tally))
    quiet = neighbors.gaps(LEAST_GAPS)
    rest = plan.num_requests - tally.total
    memory = _memory(server)
    for part in (rest // 2, rest - rest // 2):
        asyncio.run(load(server.port, bank, plan, part, BEHAVIORS, tally))
        if strikes:
            _ranks(server)[-1].kill()
            strikes = False
    mixed = neighbors.gaps(LEAST_GAPS)
    problems = neighbors.finish()
    left_open = num_open(server)
    seconds = time.monotonic() - began
    return {
        "requests": tally.total,
        "seconds": seconds,
        "wrong": tally.wrong,
        "lost": tally.lost,
        "problems": tally.problems,
        "neighbor_problems": problems,
        "counts": dict(tally.counts),
        "gaps": {"quiet": _summary(quiet), "mixed": _summary(mixed), "ratio": mixed[-1] / quantile(quiet, 0.99)},
        "pool": settle(server),
        "pool_before": empty,
        "open": left_open,
        "open_before": files,
        "memory_growth_bytes": _memory(server) - memory,
        "tracebacks": server.log.count("Traceback"),
    }


def settle(server: ServerProcess) -> list[dict[str, int]]:
    """Each scheduler's pool once no request runs and the prefix cache is flushed."""
    deadline = time.monotonic() + SETTLE_SECONDS
    with server.client() as client:
        while time.monotonic() < deadline:
            if client.post("/flush_cache").status_code == 200:
                break
            time.sleep(0.2)
        states = client.get("/server_info").json()["internal_states"]
    keys = ("num_running", "num_waiting", "num_used", "num_protected", "num_free")
    return [{key: state[key] for key in keys} for state in states]


def _summary(gaps: Sequence[float]) -> dict[str, float]:
    """Summary of sorted gaps, in milliseconds."""
    shares = {"p50": 0.5, "p99": 0.99, "p99.9": 0.999, "max": 1.0}
    return {"count": len(gaps)} | {name: quantile(gaps, share) * 1e3 for name, share in shares.items()}


def _memory(server: ServerProcess) -> int:
    processes = [psutil.Process(server.process.pid), *server.children()]
    return sum(process.memory_info().rss for process in processes)


def num_open(server: ServerProcess) -> dict[str, int]:
    """Open files and threads of the server and of its computing processes, once no client is connected."""
    front = psutil.Process(server.process.pid)

    def has_no_client() -> bool:
        states = (c.status for c in front.net_connections("tcp") if c.laddr.port == server.port)
        return psutil.CONN_ESTABLISHED not in states

    until(has_no_client, "clients are still connected")
    processes = [front, *(child for child in server.children() if runs(child, "core_main", "rank_main"))]
    return {
        "files": sum(process.num_fds() for process in processes),
        "threads": sum(process.num_threads() for process in processes),
    }


def _ranks(server: ServerProcess) -> list[psutil.Process]:
    """The computing processes, oldest first."""
    found = [child for child in server.children() if any("rank_main" in part for part in child.cmdline())]
    return sorted(found, key=lambda process: (process.create_time(), process.pid))


def verdicts(result: dict[str, Any]) -> dict[str, bool]:
    """Conditions on a result; the gaps are meaningful only on a quiet machine."""
    return {
        "no wrong answer": not result["wrong"],
        "no lost request": not result["lost"],
        "neighbors got the same answer each time": not result["neighbor_problems"],
        "the KV pool is as empty as before": all(pool in result["pool_before"] for pool in result["pool"]),
        "no file or thread is left open": all(
            count <= result["open_before"][name] + ALLOWED_OPEN for name, count in result["open"].items()
        ),
        "no traceback in the log": not result["tracebacks"],
    }


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tests.soak.run", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--requests", type=int, default=2000, help="of each form")
    parser.add_argument("--forms", nargs="+", choices=FORMS, default=list(FORMS))
    parser.add_argument("--questions", type=int, default=400, help="number of known answers")
    parser.add_argument("--clients", type=int, default=24)
    parser.add_argument("--seed", type=int, default=int(time.time()) % 100_000)
    parser.add_argument("--folder", type=Path, default=Path("/tmp"), help="folder of the servers' logs")
    parser.add_argument("--json", type=Path, help="file of the results")
    args = parser.parse_args(argv)
    print(f"seed {args.seed}")
    bank = reference(args.folder, args.questions, args.seed)
    results, held = {}, True
    for form in args.forms:
        plan = Plan(args.requests, args.clients, seed=args.seed)
        with ServerProcess(args.folder, *COMMON, *TIGHT, *FORMS[form]) as server:
            result = results[form] = soak(server, bank, plan, strikes=form == "elastic")
            server.terminate()
        checks = verdicts(result)
        held &= all(checks.values())
        gaps = result["gaps"]
        print(f"\n{form}: {result['requests']} requests in {result['seconds']:.0f} s, {result['counts']}")
        print(f"  gaps (ms): quiet {gaps['quiet']}, mixed {gaps['mixed']}")
        print(f"  largest gap / quiet p99: {gaps['ratio']:.1f} (allowed {ALLOWED_GAP_RATIO:.0f})")
        print(f"  open: {result['open_before']} before, {result['open']} at the end")
        print(f"  memory grew by {result['memory_growth_bytes'] / 2**20:.0f} MiB")
        for name, fine in checks.items():
            print(f"  {'pass ' if fine else 'SHORT'} {name}")
        for problem in result["problems"] + result["neighbor_problems"]:
            print(f"    {problem}")
    if args.json:
        args.json.write_text(json.dumps({"seed": args.seed, "forms": results}, indent=1))
    return 0 if held else 1


if __name__ == "__main__":
    sys.exit(main())
