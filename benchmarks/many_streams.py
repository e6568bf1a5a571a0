"""Many concurrent streams: cost of the HTTP layer, evenness of tokens: ``python -m benchmarks.many_streams``.

Each round measures in turn: the offline engine with all requests at once; the server with the same requests as streams;
the server again with a further client that reads its stream slowly. Both engines have the same flags and the embedded
model; the idle one uses no processor time.

The comparison: the offline engine has the whole machine; the server shares its cores with all clients (in this process,
see `benchmarks.stream_clients`). `share_of_engine` includes the clients' work, which counts against the server;
`client_cpu_seconds` is its size. All requests arrive within some hundred milliseconds, and all gaps count, also during
the ramp (from the first token of the first request to the first token of the last one); `steady_p99_over_median`
excludes the ramp. A gap is the time between two reads of a stream that end an event; a read may contain several tokens
if they arrived together (`events_per_token`). Results until 2026-11-26 were measured with clients that took three times
the processor time (asyncio, a line at a time).
"""

from __future__ import annotations

import argparse
import itertools
import json
import random
import resource
import time
from typing import Any

import psutil

from benchmarks import report
from benchmarks.server_process import ServerProcess
from benchmarks.stream_clients import ReadStream, read_streams
from moe_engine import Engine
from moe_engine.tuning.stats import median, percentile, spread

PROMPT_TOKENS = 16
VOCABULARY = range(100, 1200)
SLOW_TOKENS = 900
"""Tokens of the slow client's answer: long, so that buffers fill."""


def parse_arguments(argv: list[str] | None = None) -> argparse.Namespace:
    parser = report.command_parser("many_streams", __doc__)
    parser.add_argument("--streams", type=int, default=256)
    parser.add_argument("--tokens", type=int, default=64, help="of each answer")
    parser.add_argument("--rounds", type=int, default=3)
    report.add_result_options(parser)
    return parser.parse_args(argv)


def flags_of(streams: int, tokens: int) -> dict[str, Any]:
    slots = streams * (PROMPT_TOKENS + tokens + 16) + PROMPT_TOKENS + SLOW_TOKENS
    return {"max_running_requests": streams + 1, "max_total_tokens": slots, "context_length": 1024}


def prompts(rng: random.Random, count: int) -> list[list[int]]:
    """New prompts each time: no prompt is in the prefix cache."""
    return [rng.choices(VOCABULARY, k=PROMPT_TOKENS) for _ in range(count)]


def run_engine(engine: Engine, asked: list[list[int]], tokens: int) -> dict[str, float]:
    sampling = {"temperature": 0.0, "max_new_tokens": tokens, "ignore_eos": True}
    began = time.perf_counter()
    answers = engine.generate(sampling_params=sampling, input_ids=asked)
    seconds = time.perf_counter() - began
    assert isinstance(answers, list)
    counted = sum(answer["meta_info"]["completion_tokens"] for answer in answers)
    assert counted == len(asked) * tokens
    return {"seconds": seconds, "tokens_per_second": counted / seconds}


def request_bytes(port: int, prompt: list[int], tokens: int) -> bytes:
    body = {"model": "default", "prompt": prompt, "max_tokens": tokens, "temperature": 0, "stream": True,
            "ignore_eos": True, "stream_options": {"include_usage": True}}  # fmt: skip
    data = json.dumps(body).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nHost: 127.0.0.1:{port}\r\nContent-Type: application/json\r\n"
    return f"{head}Content-Length: {len(data)}\r\nConnection: close\r\n\r\n".encode() + data


def run_streams(server: ServerProcess, asked: list[list[int]], tokens: int, slow: bool) -> dict[str, float]:
    requests = [request_bytes(server.port, prompt, tokens) for prompt in asked]
    slowly = request_bytes(server.port, asked[0][::-1], SLOW_TOKENS) if slow else None
    cpu, own = cpu_of(server.pid), own_cpu()
    seconds, streams = read_streams(server.port, requests, slowly)
    assert all(stream.num_tokens == tokens for stream in streams), "a stream lost tokens"
    gaps = [gap for stream in streams for gap in stream.gaps]
    return {
        "seconds": seconds,
        "tokens_per_second": len(asked) * tokens / seconds,
        "median_ttft_seconds": median([stream.moments[0] for stream in streams]),
        "last_ttft_seconds": max(stream.moments[0] for stream in streams),
        "median_gap_seconds": median(gaps),
        "p99_gap_seconds": percentile(gaps, 99),
        "p99_over_median": percentile(gaps, 99) / median(gaps),
        "steady_p99_over_median": steady_ratio(streams),
        "events_per_token": sum(stream.num_events - 2 for stream in streams) / (len(asked) * tokens),
        "front_end_cpu_seconds": cpu_of(server.pid) - cpu,
        "client_cpu_seconds": own_cpu() - own,
    }


def steady_ratio(streams: list[ReadStream]) -> float:
    """99th percentile of the gaps over their median, from the first token of the last stream on."""
    begin = max(stream.moments[0] for stream in streams)
    gaps = [
        later - earlier
        for stream in streams
        for earlier, later in itertools.pairwise(stream.moments)
        if earlier >= begin
    ]
    return percentile(gaps, 99) / median(gaps) if gaps else float("nan")


def cpu_of(pid: int) -> float:
    times = psutil.Process(pid).cpu_times()
    return times.user + times.system


def own_cpu() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def summary(rounds: list[dict[str, dict[str, float]]]) -> dict[str, Any]:
    """Medians over the rounds. `share_of_engine`: streams / engine, tokens per second of the same round."""
    kinds = rounds[0].keys()
    found: dict[str, Any] = {
        kind: {name: median([one[kind][name] for one in rounds]) for name in rounds[0][kind]} for kind in kinds
    }
    for kind in ("streams", "streams_and_slow_reader"):
        ratios = [one[kind]["tokens_per_second"] / one["engine"]["tokens_per_second"] for one in rounds]
        found[kind] |= {"share_of_engine": median(ratios), "share_spread": spread(ratios)}
    return found


def main(argv: list[str] | None = None) -> int:
    own = parse_arguments(argv)
    report.wait_until_quiet(own)
    flags = flags_of(own.streams, own.tokens)
    rng, rounds = random.Random(), []
    words = [part for name, value in flags.items() for part in (f"--{name.replace('_', '-')}", str(value))]
    with Engine(**flags) as engine, ServerProcess(words) as server:
        server.wait_ready()
        for number in range(own.rounds + 1):
            asked = prompts(rng, own.streams)
            found = {
                "engine": run_engine(engine, asked, own.tokens),
                "streams": run_streams(server, asked, own.tokens, False),
                "streams_and_slow_reader": run_streams(server, prompts(rng, own.streams), own.tokens, True),
            }
            if number:  # the first round warms up
                rounds.append(found)
                print(json.dumps({kind: round(one["tokens_per_second"]) for kind, one in found.items()}), flush=True)
    values = {"options": {"streams": own.streams, "tokens": own.tokens}, "summary": summary(rounds), "rounds": rounds}
    print(json.dumps(values["summary"], indent=1))
    report.write_if_asked(own, "many_streams", values)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
