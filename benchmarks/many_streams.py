"""Many concurrent streams: cost of the HTTP layer, evenness of tokens: ``python -m benchmarks.many_streams``.

Each round measures in turn: the offline engine with all requests at once; the server with the same requests as streams;
the server again with a further client that reads its stream slowly. Both engines have the same flags and the embedded
model; the idle one uses no processor time. The clients run in this process, on the same cores: `client_cpu_seconds` is
their part. A gap is the time between two events of a stream; an event may hold several tokens if they arrived together.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import resource
import socket
import time
from typing import Any

import psutil

from benchmarks import report
from benchmarks.server_process import ServerProcess
from moe_engine import Engine
from moe_engine.tuning.stats import median, percentile, spread

PROMPT_TOKENS = 16
VOCABULARY = range(100, 1200)
SLOW_BYTES, SLOW_PAUSE, SLOW_TOKENS = 512, 0.1, 900
"""The slow client reads so many bytes, and waits so many seconds; its answer is long, so that buffers fill."""


def parse_arguments(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="moe-engine bench many_streams",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--streams", type=int, default=256)
    parser.add_argument("--tokens", type=int, default=64, help="of each answer")
    parser.add_argument("--rounds", type=int, default=3)
    report.add_result_options(parser)
    return parser.parse_args(argv)


def flags_of(streams: int, tokens: int) -> dict[str, Any]:
    slots = streams * (PROMPT_TOKENS + tokens + 16) + PROMPT_TOKENS + SLOW_TOKENS
    return {"max_running_requests": streams + 1, "max_total_tokens": slots, "context_length": 1024}


def prompts(rng: random.Random, count: int) -> list[list[int]]:
    """New ones each time: no prompt is in the prefix cache."""
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


async def read_stream(port: int, prompt: list[int], tokens: int) -> tuple[int, float, list[float]]:
    """Tokens by the server's count; seconds to the first event; gaps between events."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(request_bytes(port, prompt, tokens))
    began, last, first, gaps, counted = time.perf_counter(), 0.0, 0.0, [], 0
    try:
        async for line in reader:
            if not line.startswith(b"data: {"):
                continue
            now = time.perf_counter()
            if b'"choices":[]' in line:
                counted = json.loads(line[6:])["usage"]["completion_tokens"]
                break
            if last:
                gaps.append(now - last)
            else:
                first = now - began
            last = now
    finally:
        writer.close()
    return counted, first, gaps


async def read_slowly(port: int, prompt: list[int], tokens: int) -> None:
    """A client with a small receive buffer, until it is cancelled."""
    sock = socket.socket()
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    sock.setblocking(False)
    loop = asyncio.get_running_loop()
    try:
        await loop.sock_connect(sock, ("127.0.0.1", port))
        await loop.sock_sendall(sock, request_bytes(port, prompt, tokens))
        while await loop.sock_recv(sock, SLOW_BYTES):
            await asyncio.sleep(SLOW_PAUSE)
    finally:
        sock.close()


async def run_streams(server: ServerProcess, asked: list[list[int]], tokens: int, slow: bool) -> dict[str, float]:
    cpu, own = front_end_cpu(server.pid), own_cpu()
    beside = asyncio.create_task(read_slowly(server.port, asked[0][::-1], SLOW_TOKENS)) if slow else None
    began = time.perf_counter()
    found = await asyncio.gather(*(read_stream(server.port, prompt, tokens) for prompt in asked))
    seconds = time.perf_counter() - began
    if beside is not None:
        beside.cancel()
        await asyncio.gather(beside, return_exceptions=True)
    assert all(count == tokens for count, _, _ in found), "a stream lost tokens"
    gaps = [gap for _, _, stream in found for gap in stream]
    return {
        "seconds": seconds,
        "tokens_per_second": len(asked) * tokens / seconds,
        "median_ttft_seconds": median([first for _, first, _ in found]),
        "median_gap_seconds": median(gaps),
        "p99_gap_seconds": percentile(gaps, 99),
        "p99_over_median": percentile(gaps, 99) / median(gaps),
        "events_per_token": (len(gaps) + len(asked)) / (len(asked) * tokens),
        "front_end_cpu_seconds": front_end_cpu(server.pid) - cpu,
        "client_cpu_seconds": own_cpu() - own,
    }


def front_end_cpu(pid: int) -> float:
    times = psutil.Process(pid).cpu_times()
    return times.user + times.system


def own_cpu() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def summary(rounds: list[dict[str, dict[str, float]]]) -> dict[str, Any]:
    """Medians over the rounds. `http_share`: 1 - streams / engine, tokens per second of the same round."""
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
                "streams": asyncio.run(run_streams(server, asked, own.tokens, False)),
                "streams_and_slow_reader": asyncio.run(
                    run_streams(server, prompts(rng, own.streams), own.tokens, True)
                ),
            }
            if number:  # the first round warms up
                rounds.append(found)
                print(json.dumps({kind: round(one["tokens_per_second"]) for kind, one in found.items()}), flush=True)
    values = {"options": {"streams": own.streams, "tokens": own.tokens}, "summary": summary(rounds), "rounds": rounds}
    print(json.dumps(values["summary"], indent=1))
    if not own.no_json:
        print(report.write_result("many_streams", values, path=own.json))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
