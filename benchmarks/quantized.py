"""Decodes and prompts of one checkpoint in bf16, int8 and int4, interleaved: ``python -m benchmarks.quantized``.

One worker for each format of --quantization in this process; each round runs every format once, so that all run under
the same conditions. Prints seconds and the ratio to the first format: medians of the rounds, and the least and largest
ratio.

    python -m benchmarks.quantized --formats none int8 int4 --batch-size 1 16 --rounds 5
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks import report
from benchmarks.checkpoints import SHAPES, ensure_checkpoint
from benchmarks.one_batch import random_prompts
from benchmarks.step_driver import BatchDriver, create_worker
from moe_engine.config.args import EngineArgs
from moe_engine.planning.prepare import prepare
from moe_engine.tuning.stats import median

Times = dict[str, list[tuple[float, float]]]


def measure(path: Path, formats: Sequence[str], batch: int, input_len: int, output_len: int, rounds: int) -> Times:
    """Seconds of the prompts, and of a decode step (median of a round), of each round by format."""
    sides = []
    for name in formats:
        asked: dict[str, Any] = {} if name == "none" else {"quantization": name}
        tokens = max(4096, batch * (input_len + output_len + 1))
        config = prepare(
            EngineArgs.from_kwargs(model_path=str(path), device="cpu", max_total_tokens=tokens, random_seed=0, **asked)
        )
        sides.append((name, config, create_worker(config)))
    found: Times = {name: [] for name in formats}
    for turn in range(rounds + 1):  # the first one warms up
        for name, config, worker in sides:
            prompts = random_prompts(batch, input_len, config.model.vocab_size, turn)
            driver = BatchDriver(worker, config, prompts, input_len + output_len)
            prefill = driver.prefill()
            decode = median([driver.decode() for _ in range(output_len - 1)])
            driver.close()
            if turn:
                found[name].append((prefill, decode))
    for _, _, worker in sides:
        worker.close()
    return found


def rows(times: Times) -> list[dict[str, Any]]:
    """A row for each format: medians, and ratios to the first format."""
    base = next(iter(times.values()))
    table = []
    for name, found in times.items():
        row: dict[str, Any] = {"format": name}
        for index, part in enumerate(("prefill", "decode")):
            ratios = [first[index] / other[index] for first, other in zip(base, found)]
            row[f"{part}_seconds"] = median([seconds[index] for seconds in found])
            row[f"{part}_ratio"] = [median(ratios), min(ratios), max(ratios)]
        table.append(row)
    return table


def main(argv: list[str] | None = None) -> int:
    parser = report.command_parser("quantized", __doc__)
    parser.add_argument("--model-path", help="an unquantized checkpoint; default: a random one of --shape")
    parser.add_argument("--shape", default="moe-390m", choices=tuple(SHAPES))
    parser.add_argument("--formats", nargs="+", default=["none", "int8", "int4"])
    parser.add_argument("--batch-size", nargs="+", type=int, default=[1, 16])
    parser.add_argument("--input-len", type=int, default=128)
    parser.add_argument("--output-len", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--result-file", help="JSON lines")
    own = parser.parse_args(argv)
    path = Path(own.model_path) if own.model_path else ensure_checkpoint(own.shape)
    for batch in own.batch_size:
        print(f"batch size {batch}, input {own.input_len}, output {own.output_len}, {own.rounds} rounds")
        table = rows(measure(path, own.formats, batch, own.input_len, own.output_len, own.rounds))
        for row in table:
            parts = [f"{row['format']:12}"]
            for part in ("prefill", "decode"):
                middle, least, most = row[f"{part}_ratio"]
                parts.append(
                    f"{part} {1e3 * row[f'{part}_seconds']:8.2f} ms  {middle:.2f}x ({least:.2f} to {most:.2f})"
                )
            print("  ".join(parts))
            if own.result_file:
                with open(own.result_file, "a") as file:
                    file.write(json.dumps({"batch_size": batch, "input_len": own.input_len, **row}) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
