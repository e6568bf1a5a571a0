"""Latency and throughput of a running server under load: ``python -m benchmarks.serving [options]``.

An open loop: requests are sent at `--request-rate` per second (Poisson; ``inf`` sends all at once) whether or not
earlier ones are finished, unless limited by `--max-concurrency`. Measured at the client: time to first token, time per
output token, inter-token latency, end to end; throughput; goodput, the rate of requests that met every `--goodput`
limit. Options, table and JSON keys are those of ``python -m sglang.bench_serving``.

    moe-engine serve --port 30000 &
    python -m benchmarks.serving --port 30000 --dataset-name random --num-prompts 100 \\
        --random-input-len 64 --random-output-len 32 --request-rate 8 --goodput ttft:500 tpot:50

`--dataset-name mooncake` sends the requests of a trace at its times. With `--gsp-num-turns` each request of
`generated-shared-prefix` begins a conversation: a turn follows the answer to the one before.
`--dataset-name agentic` is a closed loop of sessions: the next turn follows the previous answer and a pause.
`--max-concurrency` limits open sessions; several values measure a curve, with new text at each point.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import sys
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import httpx
import uvloop

from benchmarks import agent_report, report
from benchmarks.agent_sessions import Replay, TokenText, workload_of
from benchmarks.clients import BACKENDS, DEFAULT_PORTS, CallOptions
from benchmarks.conversations import converse, with_turns
from benchmarks.image_requests import NAME as IMAGE
from benchmarks.image_requests import add_image_arguments, image_requests
from benchmarks.load_options import (
    add_request_arguments,
    headers_of,
    profiled,
    sampling_of,
    wait_until_ready,
    with_adapters,
)
from benchmarks.trace_requests import NAME as MOONCAKE
from benchmarks.trace_requests import add_trace_arguments, check_trace_arguments, trace_requests
from moe_engine.cli.output_file import check_writable
from moe_engine.errors import ConfigError
from moe_engine.planning.inputs.checkpoint import embedded_model
from moe_engine.server.listen import url_host
from moe_engine.tuning import serving_report
from moe_engine.tuning.answer import Answer
from moe_engine.tuning.datasets import (
    BenchRequest,
    Vocabulary,
    add_dataset_arguments,
    check_dataset_arguments,
    check_memory,
    make_dataset,
)
from moe_engine.tuning.frozen_heap import frozen_heap
from moe_engine.tuning.simulator.agents import add_agent_arguments
from moe_engine.tuning.simulator.workload import Workload

AGENTIC = "agentic"
RECORDED_OPTIONS = (
    "tag", "backend", "dataset_name", "request_rate", "max_concurrency", "num_prompts", "seed", "sharegpt_output_len",
    "random_input_len", "random_output_len", "random_range_ratio",
)  # fmt: skip


def parse_arguments(argv: list[str] | None = None) -> argparse.Namespace:
    parser = report.command_parser("serving", __doc__)
    parser.add_argument("--backend", default="sglang", choices=sorted(BACKENDS))
    parser.add_argument("--base-url", help="server address, instead of --host and --port")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, help="default: 30000 (8000 for vllm backends)")
    parser.add_argument(
        "--model", "--served-model-name", help="name sent to the OpenAI endpoints (default: the server's model)"
    )
    parser.add_argument("--tokenizer", help="checkpoint directory or tokenizer.json (default: the server's model path)")
    add_dataset_arguments(parser, more_names=(IMAGE, AGENTIC, MOONCAKE))
    add_image_arguments(parser)
    add_trace_arguments(parser)
    add_agent_arguments(parser)
    load = parser.add_argument_group("load")
    load.add_argument(
        "--request-rate", type=float, default=float("inf"), help="requests per second, Poisson; inf: all at once"
    )
    load.add_argument(
        "--max-concurrency",
        type=int,
        nargs="+",
        metavar="N",
        help="max concurrent requests; agentic: sessions, a curve",
    )
    load.add_argument(
        "--gsp-num-turns",
        type=int,
        default=1,
        metavar="N",
        help="generated-shared-prefix: turns of each conversation, a question of --gsp-question-len each",
    )
    load.add_argument("--warmup-requests", type=int, default=1)
    load.add_argument("--skip-warmup", action="store_true", help="as --warmup-requests 0")
    load.add_argument("--flush-cache", action="store_true", help="empty the prefix cache after the warm-up")
    load.add_argument("--tokenize-prompt", action="store_true", help="send token ids even for text prompts")
    load.add_argument("--disable-ignore-eos", action="store_true")
    load.add_argument("--disable-stream", action="store_true")
    load.add_argument("--return-logprob", action="store_true")
    load.add_argument("--extra-request-body", default="{}", metavar="JSON", help="fields added to every request")
    load.add_argument("--api-key", help="sent as Authorization: Bearer")
    add_request_arguments(load)
    output = parser.add_argument_group("output")
    output.add_argument("--goodput", nargs="+", metavar="METRIC:MS", help="ttft:MS tpot:MS e2el:MS; all must be met")
    output.add_argument(
        "--output-file", help="jsonl to append to (default: {backend}_{MMDD}_{num_prompts}_{dataset}.jsonl)"
    )
    output.add_argument(
        "--output-details", action="store_true", help="also write every request's lengths, times and text"
    )
    output.add_argument("--plot", metavar="FILE.png", help="draw the latency distributions, or the curve")
    output.add_argument("--tag", help="tag in the result")
    output.add_argument("--disable-tqdm", action="store_true")
    parser.add_argument(
        "--check", action="store_true", help="only check the options and the files that they name, without a server"
    )
    args = parser.parse_args(argv)
    args.warmup_requests = 0 if args.skip_warmup else args.warmup_requests
    args.concurrencies = args.max_concurrency or [None]
    args.max_concurrency = args.concurrencies[0]
    if len(args.concurrencies) > 1 and args.dataset_name != AGENTIC:
        parser.error("--max-concurrency: several values need --dataset-name agentic")
    if any(limit is not None and limit < 1 for limit in args.concurrencies):
        parser.error("--max-concurrency must be at least 1")
    if not args.request_rate > 0:
        parser.error(f"--request-rate is {args.request_rate}; it must be above 0")
    if args.gsp_num_turns < 1 or (args.gsp_num_turns > 1 and args.dataset_name != "generated-shared-prefix"):
        parser.error("--gsp-num-turns must be at least 1, and needs --dataset-name generated-shared-prefix")
    try:
        check_dataset_arguments(args)
        check_memory(args)
        check_trace_arguments(args)
    except (ConfigError, ValueError) as error:
        parser.error(str(error))
    return args


async def arrivals(requests: list[BenchRequest], rate: float, rng: random.Random) -> AsyncIterator[BenchRequest]:
    """The requests at their own times, or at Poisson times of that rate. Times are absolute: a slow client does not
    lower the rate."""
    began = due = time.perf_counter()
    for request in requests:
        if request.at is not None:
            await asyncio.sleep(max(0.0, began + request.at - time.perf_counter()))
        yield request
        if request.at is None and rate != float("inf"):
            due += rng.expovariate(rate)
            await asyncio.sleep(max(0.0, due - time.perf_counter()))


async def run_load(
    requests: list[BenchRequest],
    options: CallOptions,
    *,
    backend: str,
    request_rate: float = float("inf"),
    max_concurrency: int | None = None,
    seed: int = 42,
    show_progress: bool = True,
    encode: Callable[[str], list[int]] | None = None,
) -> tuple[list[Answer], float]:
    """Sends all requests; returns the answers in request order and the seconds from the first request to the last
    answer.

    Args:
        max_concurrency: limits open requests, or conversations of several turns.
        encode: tokens of an answer, for further turns.
    """
    ask = BACKENDS[backend]
    gate = asyncio.Semaphore(max_concurrency) if max_concurrency else None
    bar = None
    if show_progress:
        from tqdm import tqdm

        bar = tqdm(total=sum(1 + len(request.questions) for request in requests), file=sys.stderr)

    async def send(request: BenchRequest) -> Answer:
        answer = await ask(request, options)
        if bar is not None:
            bar.update(1)
        return answer

    async def one(request: BenchRequest) -> list[Answer]:
        async with gate or nullcontext():
            if request.questions and encode is not None:
                return await converse(request, send, encode)
            return [await send(request)]

    began = time.perf_counter()
    tasks = [
        asyncio.create_task(one(request)) async for request in arrivals(requests, request_rate, random.Random(seed))
    ]
    answers = await asyncio.gather(*tasks)
    duration = time.perf_counter() - began
    if bar is not None:
        bar.close()
    return [answer for turns in answers for answer in turns], duration


async def server_facts(client: httpx.AsyncClient, base_url: str) -> dict[str, Any]:
    """/server_info and /model_info of servers that support them; empty otherwise."""
    facts: dict[str, Any] = {}
    for path in ("/server_info", "/model_info"):
        try:
            response = await client.get(base_url + path)
            if response.status_code == 200:
                facts[path[1:]] = response.json()
        except (httpx.HTTPError, ValueError):
            continue
    return facts


def accept_length_of(facts: dict[str, Any]) -> float | None:
    """Average tokens accepted per speculative step, as reported by the server; None without speculation."""
    for state in (facts.get("server_info") or {}).get("internal_states") or []:
        if state.get("avg_spec_accept_length"):
            return float(state["avg_spec_accept_length"])
    return None


async def _model_name(client: httpx.AsyncClient, base_url: str) -> str:
    try:
        return (await client.get(base_url + "/v1/models")).json()["data"][0]["id"]
    except (httpx.HTTPError, ValueError, LookupError):
        return "default"


@dataclass(frozen=True)
class _Connection:
    """The server's properties at the start of the run."""

    client: httpx.AsyncClient
    facts: dict[str, Any]
    vocabulary: Vocabulary
    options: CallOptions


def _vocabulary(args: argparse.Namespace, facts: dict[str, Any]) -> Vocabulary:
    model_info = facts.get("model_info") or {}
    path = args.tokenizer or model_info.get("tokenizer_path") or model_info.get("model_path")
    if not path:
        raise ValueError("the server does not report its tokenizer path; pass --tokenizer")
    return Vocabulary.from_path(path)


def _extra_body(args: argparse.Namespace) -> dict[str, Any]:
    """Raises ValueError: not a JSON object."""
    try:
        body = json.loads(args.extra_request_body)
    except ValueError as error:
        raise ValueError(f"--extra-request-body: not JSON: {error}") from None
    if not isinstance(body, dict):
        raise ValueError(f"--extra-request-body {args.extra_request_body}: not a JSON object")
    return body


def _check(args: argparse.Namespace) -> None:
    """What `--check` checks beyond `_check_options`: the requests are made, with the tokenizer of the embedded model
    unless one is given. Raises ConfigError or ValueError."""
    if args.dataset_name == AGENTIC:
        _agent_workload(args)
    else:
        _make_requests(args, Vocabulary.from_path(args.tokenizer or embedded_model()))


def _check_options(args: argparse.Namespace) -> None:
    """What needs no server, before waiting for one. Raises ConfigError or ValueError."""
    check_writable("--output-file", args.output_file or default_output_file(args))
    _extra_body(args)
    headers_of(args)
    serving_report.parse_goodput(args.goodput)


def _requests(args: argparse.Namespace, vocabulary: Vocabulary) -> list[BenchRequest]:
    """The requests of a run. Raises ValueError: there is none."""
    requests = _make_requests(args, vocabulary)
    if not requests:
        raise ValueError("the dataset has no request; see --num-prompts and the length limits")
    return requests


def _make_requests(args: argparse.Namespace, vocabulary: Vocabulary) -> list[BenchRequest]:
    makers = {IMAGE: image_requests, MOONCAKE: trace_requests}
    requests = makers.get(args.dataset_name, make_dataset)(args, vocabulary)
    if args.gsp_num_turns > 1:
        requests = with_turns(requests, args.gsp_num_turns, args.gsp_question_len, vocabulary, args.seed)
    if args.tokenize_prompt:
        requests = [
            replace(request, prompt=vocabulary.encode(request.prompt)) if isinstance(request.prompt, str) else request
            for request in requests
        ]
    return with_adapters(requests, args)


@asynccontextmanager
async def _connection(args: argparse.Namespace) -> AsyncIterator[_Connection]:
    port = args.port or DEFAULT_PORTS.get(args.backend, 30000)
    base_url = (args.base_url or f"http://{url_host(args.host)}:{port}").rstrip("/")
    headers = headers_of(args)
    async with httpx.AsyncClient(timeout=60, headers=headers) as client:
        await wait_until_ready(client, base_url, args.ready_check_timeout_sec)
        facts = await server_facts(client, base_url)
        vocabulary = _vocabulary(args, facts)
        options = CallOptions(
            base_url=base_url,
            model=args.model or await _model_name(client, base_url),
            stream=not args.disable_stream,
            ignore_eos=not args.disable_ignore_eos,
            return_logprob=args.return_logprob,
            sampling=sampling_of(args),
            extra_body=_extra_body(args),
            decode=vocabulary.decode,
            headers=headers,
        )
        with frozen_heap():
            yield _Connection(client, facts, vocabulary, options)


async def benchmark(args: argparse.Namespace) -> tuple[dict[str, Any], list[Answer]]:
    """A whole run: dataset, warm-up, load, metrics."""
    async with _connection(args) as server:
        requests = _requests(args, server.vocabulary)
        await _warm_up(server.client, requests[0], server.options, args)
        async with profiled(server.client, server.options.base_url, args):
            answers, duration = await run_load(
                requests,
                server.options,
                backend=args.backend,
                request_rate=args.request_rate,
                max_concurrency=args.max_concurrency,
                seed=args.seed,
                show_progress=not args.disable_tqdm,
                encode=server.vocabulary.encode,
            )
        return await _values(args, server, answers, duration), answers


async def _values(
    args: argparse.Namespace, server: _Connection, answers: list[Answer], duration: float
) -> dict[str, Any]:
    values = serving_report.figures(
        answers,
        duration,
        goodput=serving_report.parse_goodput(args.goodput),
        retokenized=sum(len(server.vocabulary.encode(answer.text)) for answer in answers if answer.success),
        accept_length=accept_length_of(await server_facts(server.client, server.options.base_url)),
    )
    values["server_info"] = server.facts.get("server_info")
    return values


async def agent_benchmark(
    args: argparse.Namespace, workload: Workload, concurrency: int | None
) -> tuple[dict[str, Any], list[Answer]]:
    """A run of sessions. The text depends on `--seed` and concurrency, so that no point reuses the KV of another."""
    async with _connection(args) as server:
        ask, vocabulary = BACKENDS[args.backend], server.vocabulary
        warm_up = BenchRequest(vocabulary.plain_ids[:8], len(vocabulary.plain_ids[:8]), 8)
        await _warm_up(server.client, warm_up, server.options, args)
        replay = Replay(
            workload,
            lambda request: ask(request, server.options),
            TokenText(vocabulary, f"{args.seed} {concurrency}"),
            vocabulary.encode,
            concurrency,
        )
        async with profiled(server.client, server.options.base_url, args):
            duration = await replay.run(show_progress=not args.disable_tqdm)
        answers = [turn.answer for turn in replay.turns]
        values = await _values(args, server, answers, duration)
    by_kind = {kind: [t.answer for t in replay.turns if t.kind == kind] for kind in agent_report.KINDS}
    sessions = len({turn.session for turn in replay.turns})
    return values | agent_report.figures(by_kind, sessions, replay.abandoned), answers


def run(args: argparse.Namespace) -> tuple[dict[str, Any], list[Answer]]:
    """`benchmark` on the event loop with the least overhead."""
    return uvloop.run(benchmark(args))


async def _warm_up(
    client: httpx.AsyncClient, request: BenchRequest, options: CallOptions, args: argparse.Namespace
) -> None:
    """Sends `--warmup-requests` copies of the first request, shortened; then optionally flushes the cache."""
    short = replace(request, output_len=min(request.output_len, 32), questions=())
    ask = BACKENDS[args.backend]
    answers = await asyncio.gather(*(ask(short, options) for _ in range(args.warmup_requests)))
    if answers and not any(answer.success for answer in answers):
        raise ValueError(f"the warm-up failed: {answers[0].error}")
    if args.flush_cache:
        (await client.post(options.base_url + "/flush_cache", params={"timeout": 10})).raise_for_status()


def default_output_file(args: argparse.Namespace) -> str:
    """bench_serving's file names."""
    parts = [args.backend, time.strftime("%m%d"), str(args.num_prompts)]
    if args.dataset_name.startswith("random"):
        parts += [str(args.random_input_len), str(args.random_output_len)]
    else:
        parts.append(args.dataset_name)
    return "_".join(parts) + ".jsonl"


def _write(args: argparse.Namespace, values: dict[str, Any], answers: list[Answer]) -> None:
    """Appends the record of a run to the output file."""
    record = {key: getattr(args, key) for key in RECORDED_OPTIONS} | {"machine": report.machine()}
    if args.dataset_name == AGENTIC:
        record |= {key: value for key, value in vars(args).items() if key.startswith("agent_")}
        record["dataset_path"] = args.dataset_path
    record |= values
    if args.output_details:
        record |= {
            "input_lens": [a.prompt_len for a in answers],
            "output_lens": [a.output_len for a in answers],
            "ttfts": [a.ttft for a in answers],
            "itls": [a.itl for a in answers],
            "generated_texts": [a.text for a in answers],
            "errors": [a.error for a in answers],
            "phases": [a.phases for a in answers],
        }
    report.append_jsonl("--output-file", args.output_file or default_output_file(args), record)


def _agent_workload(args: argparse.Namespace) -> Workload:
    """Raises ConfigError for invalid session options."""
    if args.apply_chat_template:
        raise ConfigError("--apply-chat-template needs prompts of text; --dataset-name agentic has token ids")
    return workload_of(args)


def _agent_points(args: argparse.Namespace) -> Iterator[tuple[dict[str, Any], list[Answer]]]:
    """A run for each concurrency. Raises ConfigError before the first request for invalid session options."""
    workload = _agent_workload(args)
    for index, concurrency in enumerate(args.concurrencies):
        args.max_concurrency = concurrency
        yield uvloop.run(agent_benchmark(args, workload if index == 0 else workload_of(args), concurrency))


def main(argv: list[str] | None = None) -> int:
    args = parse_arguments(argv)
    agentic = args.dataset_name == AGENTIC
    points: list[dict[str, Any]] = []
    failures: list[Answer] = []
    try:
        _check_options(args)
        if args.check:
            _check(args)
            return 0
        for values, answers in _agent_points(args) if agentic else iter([run(args)]):
            limit, rate = args.max_concurrency, args.request_rate
            print(serving_report.result_table(values, backend=args.backend, request_rate=rate, max_concurrency=limit))
            if agentic:
                print(agent_report.table_rows(values))
            _write(args, values, answers)
            points.append(values | {"max_concurrency": limit})
            failures += [answer for answer in answers if not answer.success]
    except (ConfigError, ValueError, FileNotFoundError, httpx.HTTPError) as error:
        print(f"moe-engine bench serving: error: {str(error) or type(error).__name__}", file=sys.stderr)
        return 2
    title = f"{args.backend}, {args.dataset_name}, {args.request_rate} requests/s"
    if len(points) > 1:
        print(agent_report.curve_table(points))
        if args.plot:
            agent_report.draw_curve(points, args.plot, title)
    elif args.plot:
        serving_report.draw_chart(answers, args.plot, title)
    if failures:
        print(f"{len(failures)} requests failed; the first: {failures[0].error}", file=sys.stderr)
    return 1 if failures else 0


if __name__ == "__main__":
    raise SystemExit(main())
