"""The advice of `moe-engine doctor --log`, followed: ``python -m benchmarks.doctor_advice [--scenarios NAME ...]``.

Each scenario starts a server, mostly of the embedded model, with flags that trigger a rule, sends a load, and reads the
server's own log. The flag that the doctor recommends is then changed, and the same load is sent to the new server. Both
run in turn; the result is the ratio of the medians (above 1: better after the change), and whether the rule still
holds. Rules of GPUs (CUDA graphs, free GPU memory, out of memory, JIT) cannot be triggered on a CPU, where the ledger
refuses launches without memory.
"""

from __future__ import annotations

import asyncio
import json
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks import report
from benchmarks.checkpoints import ensure_checkpoint
from benchmarks.clients import CallOptions, ask_native
from benchmarks.server_process import ServerProcess
from moe_engine.tuning.answer import Answer
from moe_engine.tuning.datasets import BenchRequest
from moe_engine.tuning.stats import median

IDS = range(300, 1200)
"""Ordinary tokens of the embedded model."""
Flags = dict[str, Any]
RANDOM_WEIGHTS: Flags = {"--model-path": "moe_engine/demo/checkpoint", "--load-format": "dummy"}
"""Sampled tokens are nearly uniform, and no draft is accepted."""


def ids(draw: random.Random, count: int) -> list[int]:
    return draw.choices(IDS, k=count)


def requests(draw: random.Random, count: int, prompt: int, output: int) -> list[BenchRequest]:
    return [BenchRequest(ids(draw, prompt), prompt, output) for _ in range(count)]


def shared(draw: random.Random, groups: int, each: int, prefix: int, own: int, output: int) -> list[BenchRequest]:
    """Groups of prompts with a common prefix, in random order."""
    heads = [ids(draw, prefix) for _ in range(groups)]
    made = [BenchRequest(head + ids(draw, own), prefix + own, output) for head in heads for _ in range(each)]
    draw.shuffle(made)
    return made


async def at_once(url: str, load: Sequence[BenchRequest], **more: Any) -> tuple[list[Answer], float]:
    """All requests together. Returns the answers and the seconds."""
    options = CallOptions(url, **more)
    began = time.perf_counter()
    answers = await asyncio.gather(*(ask_native(request, options) for request in load))
    return list(answers), time.perf_counter() - began


async def until_stopped(url: str, load: Sequence[BenchRequest]) -> tuple[list[Answer], float]:
    """Sampled answers that end at one of a few stop tokens, long before max_new_tokens."""
    stops = random.Random(3).sample(IDS, 30)
    sampling = {"temperature": 1.0, "max_new_tokens": load[0].output_len, "stop_token_ids": stops}
    return await at_once(url, load, extra_body={"sampling_params": sampling})


async def one_by_one(url: str, load: Sequence[BenchRequest]) -> tuple[list[Answer], float]:
    began, answers = time.perf_counter(), []
    for request in load:
        answers += (await at_once(url, [request]))[0]
    return answers, time.perf_counter() - began


async def beside_long_prompts(url: str, load: Sequence[BenchRequest]) -> tuple[list[Answer], float]:
    """The first four requests decode while the others, long prompts, arrive one after another."""
    began = time.perf_counter()
    decoding = asyncio.create_task(at_once(url, load[:4]))
    await asyncio.sleep(0.3)
    for request in load[4:]:
        await at_once(url, [request])
    answers, _ = await decoding
    return answers, time.perf_counter() - began


def seconds(answers: list[Answer], took: float) -> float:
    return took


def each_token(answers: list[Answer], took: float) -> float:
    """Seconds for each generated token."""
    return took / sum(answer.output_len for answer in answers)


def ttft(answers: list[Answer], took: float) -> float:
    return median([answer.ttft for answer in answers])


def worst_gaps(answers: list[Answer], took: float) -> float:
    """Mean over the requests of their longest time between tokens: a retracted or stalled request generates nothing in
    that time."""
    return sum(max(answer.itl) for answer in answers) / len(answers)


@dataclass(frozen=True)
class Scenario:
    """`flags` trigger the rule; `metric` is in seconds, lower is better; `also`: further flags of the change;
    `shape`: a generated checkpoint instead of the embedded model, where steps must take longer than the front end."""

    rule: str
    flags: Flags
    load: Callable[[random.Random], list[BenchRequest]]
    send: Callable[..., Any] = at_once
    metric: Callable[[list[Answer], float], float] = seconds
    also: Callable[[Flags], Flags] = lambda flags: flags
    shape: str = ""


def replicas(flags: Flags) -> Flags:
    return {**flags, "--tp-size": 1}


SCENARIOS = (
    Scenario(
        "too_conservative",
        {**RANDOM_WEIGHTS, "--random-seed": 1, "--max-total-tokens": 4096, "--schedule-conservativeness": 1.4,
         "--decode-log-interval": 4},
        lambda draw: requests(draw, 192, 32, 1500),
        send=until_stopped,
        metric=each_token,
    ),
    Scenario(
        "running_limit",
        {"--max-running-requests": 2, "--decode-log-interval": 10},
        lambda draw: requests(draw, 48, 32, 48),
    ),
    Scenario(
        "retractions",
        {"--max-total-tokens": 4096, "--schedule-conservativeness": 0.3, "--decode-log-interval": 10},
        lambda draw: requests(draw, 48, 32, 400),
        metric=worst_gaps,
    ),
    Scenario(
        "prefix_order",
        {"--max-total-tokens": 4096, "--max-running-requests": 4, "--decode-log-interval": 4},
        lambda draw: shared(draw, 6, 12, 1200, 16, 8),
    ),
    Scenario(
        "page_size",
        {"--page-size": 512, "--decode-log-interval": 4},
        lambda draw: shared(draw, 4, 24, 1000, 4, 8),
        send=one_by_one,
        metric=ttft,
    ),
    Scenario(
        "long_prompts",
        {"--chunked-prefill-size": 32, "--decode-log-interval": 1},
        lambda draw: requests(draw, 12, 1800, 4),
        send=one_by_one,
        metric=ttft,
    ),
    Scenario(
        "stalled_decodes",
        {"--chunked-prefill-size": 512, "--decode-log-interval": 4},
        lambda draw: requests(draw, 4, 32, 1600) + requests(draw, 12, 1900, 2),
        send=beside_long_prompts,
        metric=worst_gaps,
    ),
    Scenario(
        "drafts_do_not_pay",
        {**RANDOM_WEIGHTS, "--speculative-algorithm": "NEXTN",
         "--speculative-num-steps": 6, "--speculative-eagle-topk": 1,
         "--speculative-num-draft-tokens": 7, "--decode-log-interval": 10},
        lambda draw: requests(draw, 24, 200, 160),
    ),
    Scenario(
        "dp_imbalance",
        {"--dp-size": 2, "--cpu-threads": 1, "--load-balance-method": "round_robin", "--decode-log-interval": 4},
        lambda draw: [r for _ in range(8) for r in (*requests(draw, 1, 64, 100), *requests(draw, 1, 8, 2))],
        shape="moe-390m",
    ),
    Scenario(
        "tp_or_dp",
        {"--tp-size": 2, "--max-running-requests": 8, "--decode-log-interval": 10},
        lambda draw: requests(draw, 32, 64, 48),
        also=replicas,
    ),
)  # fmt: skip


def run(flags: Flags, scenario: Scenario, seed: int) -> tuple[float, dict[str, Any]]:
    """A server with these flags under the load: the metric, and the doctor's report on its log."""
    words = [str(word) for pair in flags.items() for word in pair if word is not True]
    words += ["--model-path", str(ensure_checkpoint(scenario.shape))] if scenario.shape else []
    load = scenario.load(random.Random(seed))
    with ServerProcess(words) as server:
        server.wait_ready()
        asyncio.run(at_once(server.base_url, requests(random.Random(0), 1, 8, 4)))
        answers, took = asyncio.run(scenario.send(server.base_url, load))
        failed = [answer.error for answer in answers if not answer.success]
        if failed:
            raise RuntimeError(f"{scenario.rule}: {len(failed)} requests failed: {failed[0]}")
        log = "\n".join(line for _, line in server.lines)
    return scenario.metric(answers, took), doctor(log)


def doctor(log: str) -> dict[str, Any]:
    """The command on a log."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "server.log")
        path.write_text(log)
        command = [sys.executable, "-m", "moe_engine.cli.main", "doctor", "--log", str(path), "--json"]
        done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode not in (0, 1):
        raise RuntimeError(done.stderr)
    return json.loads(done.stdout)


def finding_of(found: dict[str, Any], rule: str) -> dict[str, Any] | None:
    return next((finding for finding in found["findings"] if finding["name"] == rule), None)


def followed(flags: Flags, finding: dict[str, Any], scenario: Scenario) -> Flags:
    """The flags after the recommended change."""
    kept = {name: value for name, value in flags.items() if name != finding["flag"]}
    if finding["flag"] == "--speculative-num-steps":  # it determines the shape of the tree
        kept = {name: value for name, value in kept.items() if "topk" not in name and "draft-tokens" not in name}
    changed = kept if finding["value"] is None else {**kept, finding["flag"]: finding["value"]}
    return scenario.also(changed)


def measure(scenario: Scenario, rounds: int, seed: int) -> dict[str, Any]:
    """Both servers in turn, `rounds` times."""
    first, found = run(scenario.flags, scenario, seed)
    finding = finding_of(found, scenario.rule)
    if finding is None:
        names = [other["name"] for other in found["findings"]]
        return {"rule": scenario.rule, "flags": scenario.flags, "held": False, "others": names}
    flags = followed(scenario.flags, finding, scenario)
    before, after, still = [first], [], False
    for number in range(rounds):
        if number:
            before.append(run(scenario.flags, scenario, seed + number)[0])
        value, then = run(flags, scenario, seed + number)
        after.append(value)
        still |= finding_of(then, scenario.rule) is not None
    return {
        "rule": scenario.rule,
        "model": scenario.shape or "embedded",
        "flags": scenario.flags,
        "advice": f"{finding['flag']} {finding['value']}",
        "evidence": finding["evidence"],
        "memory": finding["memory"],
        "metric": scenario.metric.__name__,
        "before_s": before,
        "after_s": after,
        "ratio": median(before) / median(after),
        "held": True,
        "holds_after": still,
        "date": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
    }


def main(argv: Sequence[str] | None = None) -> int:
    parser = report.command_parser("doctor_advice", __doc__)
    names = [scenario.rule for scenario in SCENARIOS]
    parser.add_argument("--scenarios", nargs="+", choices=names, default=names, help="rules to trigger (all)")
    parser.add_argument("--rounds", type=int, default=3, help="runs of each server, in turn (3)")
    parser.add_argument("--seed", type=int, default=1, help="of the prompts (1)")
    report.add_result_options(parser)
    options = parser.parse_args(argv)
    report.wait_until_quiet(options)
    results: list[dict[str, Any]] = []
    for scenario in SCENARIOS:
        if scenario.rule in options.scenarios:
            result = measure(scenario, options.rounds, options.seed)
            results.append(result)
            print(json.dumps(result), file=sys.stderr, flush=True)
    print(report.table(("rule", "advice", "before s", "after s", "ratio", "still holds"), map(_row, results)))
    results = [*_others(options.json, results), *results]
    values = {"machine_was_shared": options.busy, "rounds": options.rounds, "scenarios": results}
    report.write_if_asked(options, "doctor_advice", values)
    return 0


def _others(path: Path | None, results: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Scenarios of an earlier run in the same file that this run did not repeat."""
    if path is None or not path.exists():
        return []
    measured = {result["rule"] for result in results}
    return [result for result in json.loads(path.read_text())["scenarios"] if result["rule"] not in measured]


def _row(result: dict[str, Any]) -> tuple[str, ...]:
    if not result["held"]:
        return result["rule"], "not provoked", "", "", "", ""
    times = [f"{median(result[key]):.4g}" for key in ("before_s", "after_s")]
    return result["rule"], result["advice"], *times, f"{result['ratio']:.2f}", "yes" if result["holds_after"] else "no"


if __name__ == "__main__":
    sys.exit(main())
