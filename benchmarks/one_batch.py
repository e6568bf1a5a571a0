"""Latency of one static batch, without scheduler and server: ``python -m benchmarks.one_batch [options]``.

For each batch size, input and output length: the latency of the prefill and of every decode step, measured by the
worker's caller. Takes every flag of the engine; options, lines and JSON keys are those of
``sglang.bench_one_batch``. `--fraction-of-limits` measures this machine's limits first and adds the reached share of
them.

    python -m benchmarks.one_batch --model-path M --batch-size 1 16 --input-len 128 --output-len 32
    python -m benchmarks.one_batch --model-path M --correctness-test
"""

from __future__ import annotations

import argparse
import json
import random
import sys
from collections.abc import Iterator
from itertools import product
from typing import Any

from benchmarks import report
from benchmarks.step_driver import BatchDriver, check_batch, create_worker
from benchmarks.step_work import MachineLimits, ModelWork
from moe_engine.cli.output_file import check_writable
from moe_engine.config.args import EngineArgs
from moe_engine.errors import ConfigError, MoeEngineError
from moe_engine.planning.prepare import prepare
from moe_engine.planning.resolved_config import ResolvedConfig
from moe_engine.tuning.datasets import Vocabulary
from moe_engine.tuning.stats import median

FIRST_DECODES_SHOWN = 5
WARMUP_OUTPUT_LEN = 8
CORRECTNESS_PROMPTS = (
    "The capital of France is",
    "The capital of the United Kingdom is",
    "Today is a sunny day and I like",
)


def parse_arguments(argv: list[str] | None = None) -> tuple[argparse.Namespace, EngineArgs]:
    """The benchmark's own options, and the engine's flags."""
    parser = report.command_parser("one_batch", __doc__, epilog=report.ENGINE_FLAGS, allow_abbrev=False)
    parser.add_argument("--run-name", default="default")
    parser.add_argument(
        "--batch-size", type=int, nargs="+", default=[1], help="requests of a batch, one or several values (1)"
    )
    parser.add_argument(
        "--input-len", type=int, nargs="+", default=[1024], help="tokens of a prompt, one or several values (1024)"
    )
    parser.add_argument(
        "--output-len", type=int, nargs="+", default=[16], help="tokens of an answer, one or several values (16)"
    )
    parser.add_argument("--result-filename", default="result.jsonl", help="jsonl to append to; empty: none")
    parser.add_argument("--correctness-test", "--correct", action="store_true", help="print three prompts' output")
    parser.add_argument("--cut-len", type=int, default=4, help="tokens of the first of two prefills (correctness test)")
    parser.add_argument("--log-decode-step", type=int, default=0, help="print every n-th decode step; 0: the first 5")
    parser.add_argument("--seed", type=int, default=42)
    parser.add_argument("--fraction-of-limits", action="store_true")
    own, rest = parser.parse_known_args(argv)
    for name in ("batch_size", "input_len", "output_len"):
        if (least := min(getattr(own, name))) < 1:
            raise ConfigError(f"--{name.replace('_', '-')} {least}: must be at least 1")
    return own, EngineArgs.from_cli(rest)


def random_prompts(batch: int, length: int, vocab_size: int, seed: int) -> list[list[int]]:
    rng = random.Random(seed)
    return [rng.choices(range(vocab_size), k=length) for _ in range(batch)]


def run_once(
    driver: BatchDriver, batch: int, input_len: int, output_len: int, log_every: int = 0, quiet: bool = False
) -> dict[str, Any]:
    """A prefill and output_len - 1 decode steps; prints bench_one_batch's lines and returns its keys."""
    say = (lambda line: None) if quiet else print
    prefill = driver.prefill()
    throughput = batch * input_len / prefill
    say(f"Prefill. latency: {prefill:6.5f} s, throughput: {throughput:9.2f} token/s")
    decodes: list[float] = []
    for step in range(output_len - 1):
        seconds = driver.decode()
        decodes.append(seconds)
        if step < FIRST_DECODES_SHOWN or (log_every and step % log_every == 0):
            say(
                f"Decode {step}. Batch size: {batch}, latency: {seconds:6.5f} s, "
                f"throughput: {batch / seconds:9.2f} token/s"
            )
    values: dict[str, Any] = {"prefill_latency": prefill, "prefill_throughput": throughput}
    if decodes:
        middle = median(decodes)
        say(f"Decode.  median latency: {middle:6.5f} s, median throughput: {batch / middle:9.2f} token/s")
        values |= {"median_decode_latency": middle, "median_decode_throughput": batch / middle}
    total = prefill + sum(decodes)
    overall = (input_len + output_len) * batch / total
    say(f"Total. latency: {total:6.3f} s, throughput: {overall:9.2f} token/s")
    return values | {"total_latency": total, "overall_throughput": overall}


def limit_fractions(
    work: ModelWork, limits: MachineLimits, values: dict[str, Any], batch: int, input_len: int, output_len: int
) -> dict[str, float]:
    """Fraction of the machine's limit reached by the prefill and the median decode step."""
    found = {"prefill_fraction": work.prefill([(input_len, 0)] * batch).seconds(limits) / values["prefill_latency"]}
    if "median_decode_latency" in values:
        step = work.decode_step([input_len + output_len // 2] * batch)
        found["decode_fraction"] = step.seconds(limits) / values["median_decode_latency"]
    return found


def latency_test(own: argparse.Namespace, config: ResolvedConfig) -> Iterator[dict[str, Any]]:
    """One result for each combination of batch size, input and output length."""
    for sizes in product(own.batch_size, own.input_len, own.output_len):
        check_batch(config, sizes[0], sizes[1] + sizes[2])
    limits = None
    if own.fraction_of_limits:
        from benchmarks.limits import measure_limits

        limits = measure_limits(config.device).machine
    worker = create_worker(config)

    def run(batch: int, input_len: int, output_len: int, quiet: bool) -> dict[str, Any]:
        prompts = random_prompts(batch, input_len, config.model.vocab_size, own.seed)
        driver = BatchDriver(worker, config, prompts, input_len + output_len)
        values = run_once(driver, batch, input_len, output_len, own.log_decode_step, quiet)
        driver.close()
        return values

    run(own.batch_size[0], own.input_len[0], min(WARMUP_OUTPUT_LEN, own.output_len[0]), True)
    work = ModelWork.from_checkpoint(config.model_path)
    for batch in own.batch_size:
        for input_len in own.input_len:
            for output_len in own.output_len:
                print(f"Benchmark. batch size {batch}, input {input_len}, output {output_len}")
                values = run(batch, input_len, output_len, False)
                if limits is not None:
                    fractions = limit_fractions(work, limits, values, batch, input_len, output_len)
                    print("  ".join(f"{name}: {value:.1%} of the limit" for name, value in fractions.items()))
                    values |= fractions
                shape = {"batch_size": batch, "input_len": input_len, "output_len": output_len}
                yield {"run_name": own.run_name, **shape, **values}
    worker.close()


def correctness_test(own: argparse.Namespace, config: ResolvedConfig) -> None:
    """Prefills three prompts in two chunks, decodes, and prints the text: a quick sanity check."""
    vocabulary = Vocabulary.from_path(config.tokenizer_path)
    prompts = [vocabulary.encode(text) for text in CORRECTNESS_PROMPTS]
    worker = create_worker(config)
    longest = max(map(len, prompts)) + own.output_len[0]
    driver = BatchDriver(worker, config, prompts, longest)
    driver.prefill(min(own.cut_len, min(map(len, prompts)) - 1))
    driver.prefill()
    for _ in range(own.output_len[0] - 1):
        driver.decode()
    for index, (prompt, tokens) in enumerate(zip(prompts, driver.tokens)):
        print(f"========== Prompt {index} ==========\n{vocabulary.decode(prompt + tokens)}\n")
    worker.close()


def main(argv: list[str] | None = None) -> int:
    try:
        own, args = parse_arguments(argv)
        if own.result_filename:
            check_writable("--result-filename", own.result_filename)
        config = prepare(args)
        if own.correctness_test:
            correctness_test(own, config)
            return 0
        for values in latency_test(own, config):
            if own.result_filename:
                report.append_jsonl("--result-filename", own.result_filename, values)
            else:
                print(json.dumps(values))
    except (ConfigError, ValueError) as error:
        print(f"moe-engine bench one_batch: error: {error}", file=sys.stderr)
        return 2
    except MoeEngineError as error:
        print(f"moe-engine bench one_batch: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
