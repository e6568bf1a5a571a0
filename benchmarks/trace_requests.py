"""Requests at the times of a recorded trace: the dataset ``mooncake`` of `serving`, with bench_serving's options.

No command.

The file is in Mooncake's format (`moe_engine.tuning.simulator.traces`). Prompts are random token ids: the same ids for
the same block of the trace, so that lengths and shared prefixes are those of the trace.
"""

from __future__ import annotations

import argparse
import math
from dataclasses import replace

from benchmarks.agent_sessions import TokenText
from moe_engine.tuning.datasets import BenchRequest, Vocabulary
from moe_engine.tuning.simulator.traces import read_trace

NAME = "mooncake"
PLACEHOLDERS_FROM = 1 << 58
"""Numbers of the text that replaces answers."""


def add_trace_arguments(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("mooncake dataset: requests of the trace --dataset-path")
    group.add_argument(
        "--use-trace-timestamps",
        action="store_true",
        help="send at the times of the trace; the default without --request-rate",
    )
    group.add_argument(
        "--mooncake-slowdown-factor", type=float, default=1.0, metavar="FACTOR", help="of the trace's times"
    )
    group.add_argument(
        "--mooncake-num-rounds",
        type=int,
        default=1,
        metavar="N",
        help="requests for each one of the trace, at its time: each has the text of the one before, a placeholder for "
        "its answer, and the prompt again",
    )


def check_trace_arguments(args: argparse.Namespace) -> None:
    """Raises ValueError for options that are impossible, or that the dataset does not use."""
    if args.dataset_name != NAME:
        if args.use_trace_timestamps or args.mooncake_num_rounds != 1 or args.mooncake_slowdown_factor != 1:
            raise ValueError(f"--use-trace-timestamps and --mooncake-* need --dataset-name {NAME}")
        return
    if not args.dataset_path:
        raise ValueError(f"--dataset-name {NAME} needs --dataset-path FILE.jsonl (nothing is downloaded)")
    if args.use_trace_timestamps and not math.isinf(args.request_rate):
        raise ValueError("--use-trace-timestamps sends at the times of the trace; leave out --request-rate")
    factor = args.mooncake_slowdown_factor
    if not 0 <= factor < math.inf:
        raise ValueError(f"--mooncake-slowdown-factor is {factor}; it must be a number of at least 0")
    if factor != 1 and not math.isinf(args.request_rate):
        raise ValueError("--mooncake-slowdown-factor scales the times of the trace; leave out --request-rate")
    if args.mooncake_num_rounds < 1:
        raise ValueError(f"--mooncake-num-rounds is {args.mooncake_num_rounds}; it must be at least 1")


def trace_requests(args: argparse.Namespace, vocabulary: Vocabulary) -> list[BenchRequest]:
    """The first `--num-prompts` requests of the trace, in the order of their times. Raises ConfigError for an
    unreadable trace."""
    text = TokenText(vocabulary, str(args.seed))
    found = []
    for number, arrival in enumerate(sorted(read_trace(args.dataset_path, args.num_prompts), key=lambda a: a.seconds)):
        prompt = text.tokens(arrival.prompt_ids)
        request = BenchRequest(prompt, len(prompt), arrival.output_len)
        if math.isinf(args.request_rate):
            request = replace(request, at=arrival.seconds * args.mooncake_slowdown_factor)
        found.append(request)
        for turn in range(1, args.mooncake_num_rounds):
            first = PLACEHOLDERS_FROM + (number << 32) + turn * arrival.output_len
            answer = text.tokens(list(range(first, first + arrival.output_len)))
            prompt = [*prompt, *answer, *text.tokens(arrival.prompt_ids)]
            found.append(replace(request, prompt=prompt, prompt_len=len(prompt)))
    return found
