"""Throughput of the offline engine on many requests at once: ``python -m benchmarks.offline_throughput [options]``.

All requests are submitted in one call, without a server. Takes every flag of the engine; options, table and JSON keys
are those of ``sglang.bench_offline_throughput``. Without `--model-path` the embedded model runs.

    python -m benchmarks.offline_throughput --model-path M --dataset-name random --num-prompts 64 \\
        --random-input-len 128 --random-output-len 64
"""

from __future__ import annotations

import argparse
import sys
import time
from typing import Any

from benchmarks import report
from moe_engine import Engine
from moe_engine.cli.output_file import check_writable
from moe_engine.errors import ConfigError, MoeEngineError
from moe_engine.tuning.datasets import (
    BenchRequest,
    Vocabulary,
    add_dataset_arguments,
    check_dataset_arguments,
    check_memory,
    make_dataset,
)
from moe_engine.tuning.serving_report import WIDTH, row

WARMUP_REQUESTS = 16
WARMUP_LEN = 16


def parse_arguments(argv: list[str] | None = None) -> tuple[argparse.Namespace, dict[str, Any]]:
    """The benchmark's own options, and the engine's flags as keywords."""
    parser = report.command_parser("offline_throughput", __doc__, epilog=report.ENGINE_FLAGS, allow_abbrev=False)
    parser.add_argument("--backend", default="engine", choices=["engine"])
    add_dataset_arguments(parser)
    parser.add_argument("--result-filename", default="", help="jsonl to append to")
    parser.add_argument("--disable-ignore-eos", action="store_true")
    parser.add_argument("--skip-warmup", action="store_true")
    own, flags = report.parse_with_engine_flags(parser, argv)
    check_dataset_arguments(own)
    check_memory(own)
    return own, flags


def generate(engine: Engine, requests: list[BenchRequest], ignore_eos: bool) -> list[dict[str, Any]]:
    """All requests in one call, greedy."""
    sampling = [
        {"temperature": 0.0, "max_new_tokens": request.output_len, "ignore_eos": ignore_eos} for request in requests
    ]
    if isinstance(requests[0].prompt, str):
        answers = engine.generate([str(request.prompt) for request in requests], sampling)
    else:
        answers = engine.generate(sampling_params=sampling, input_ids=[list(request.prompt) for request in requests])  # type: ignore[arg-type]
    assert isinstance(answers, list)
    return answers


def measure(engine: Engine, requests: list[BenchRequest], ignore_eos: bool) -> dict[str, Any]:
    """The results of one call with all requests; keys are bench_offline_throughput's."""
    began = time.perf_counter()
    answers = generate(engine, requests, ignore_eos)
    seconds = time.perf_counter() - began
    inputs = sum(answer["meta_info"]["prompt_tokens"] for answer in answers)
    outputs = sum(answer["meta_info"]["completion_tokens"] for answer in answers)
    states = engine.get_server_info()["internal_states"]
    return {
        "backend": "engine",
        "successful_requests": len(answers),
        "total_latency": seconds,
        "total_input_tokens": inputs,
        "total_output_tokens": outputs,
        "total_cached_tokens": sum(answer["meta_info"].get("cached_tokens", 0) for answer in answers),
        "last_gen_throughput": states[0].get("last_gen_throughput", 0.0) if states else 0.0,
        "request_throughput": len(answers) / seconds,
        "input_throughput": inputs / seconds,
        "output_throughput": outputs / seconds,
        "total_throughput": (inputs + outputs) / seconds,
    }


def result_table(values: dict[str, Any]) -> str:
    rows = (
        ("Backend:", "backend", ""),
        ("Successful requests:", "successful_requests", ""),
        ("Benchmark duration (s):", "total_latency", ".2f"),
        ("Total input tokens:", "total_input_tokens", ""),
        ("Total generated tokens:", "total_output_tokens", ""),
        ("Last generation throughput (tok/s):", "last_gen_throughput", ".2f"),
        ("Request throughput (req/s):", "request_throughput", ".2f"),
        ("Input token throughput (tok/s):", "input_throughput", ".2f"),
        ("Output token throughput (tok/s):", "output_throughput", ".2f"),
        ("Total token throughput (tok/s):", "total_throughput", ".2f"),
    )
    title = f"{' Offline Throughput Benchmark Result ':=^{WIDTH}}"
    return "\n".join(["", title, *(row(label, format(values[key], form)) for label, key, form in rows), "=" * WIDTH])


def main(argv: list[str] | None = None) -> int:
    try:
        own, flags = parse_arguments(argv)
        if own.result_filename:
            check_writable("--result-filename", own.result_filename)
        with Engine(**flags) as engine:
            requests = make_dataset(own, Vocabulary.from_path(engine.config.tokenizer_path))
            if not requests:
                raise ValueError("the dataset has no request; see --num-prompts and the length limits")
            if not own.skip_warmup:
                short = [BenchRequest(r.prompt, r.prompt_len, min(r.output_len, WARMUP_LEN)) for r in requests]
                generate(engine, short[:WARMUP_REQUESTS], True)
                engine.flush_cache()
            values = measure(engine, requests, not own.disable_ignore_eos)
        print(result_table(values))
        if own.result_filename:
            report.append_jsonl("--result-filename", own.result_filename, values | {"machine": report.machine()})
    except (ConfigError, ValueError, FileNotFoundError) as error:
        print(f"moe-engine bench offline_throughput: error: {error}", file=sys.stderr)
        return 2
    except MoeEngineError as error:
        print(f"moe-engine bench offline_throughput: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
