"""Cost of LoRA adapters in a batch: ``python -m benchmarks.lora [--model moe-390m] [--adapters 8] [--batch-size 16]``.

Three variants, interleaved in random order in every turn: an engine without LoRA; requests of the base model in an
engine with LoRA; and a batch of the same engine with the same number of requests for every adapter. Each variant
generates the same number of tokens from new random prompts. Reported are the medians of tokens per second, and the
medians of each turn's ratio to the engine without LoRA. Target: adapters at 0.7 of the engine without LoRA on a CPU.
"""

from __future__ import annotations

import argparse
import json
import random
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks import checkpoints, report
from moe_engine import Engine
from moe_engine.models.config_file import load_model_config
from moe_engine.models.lora_adapter import CONFIG_FILE, WEIGHTS_FILE, linear_shapes
from moe_engine.tuning.stats import median

TARGET = 0.7
WAYS = ("without", "base", "adapters")


def write_adapter(folder: Path, shapes: dict[str, tuple[int, int]], rank: int, seed: int) -> Path:
    """A random adapter of these modules in PEFT's format."""
    import torch
    from safetensors.torch import save_file

    folder.mkdir()
    config = {"peft_type": "LORA", "r": rank, "lora_alpha": 2 * rank, "bias": "none"}
    (folder / CONFIG_FILE).write_text(json.dumps(config))
    generator, tensors = torch.Generator().manual_seed(seed), {}
    for name, (rows, columns) in shapes.items():
        prefix = f"base_model.model.{name}.lora_"
        tensors[f"{prefix}A.weight"] = 0.01 * torch.randn(rank, columns, generator=generator)
        tensors[f"{prefix}B.weight"] = 0.01 * torch.randn(rows, rank, generator=generator)
    save_file(tensors, folder / WEIGHTS_FILE)
    return folder


def measure(engine: Engine, names: list[str | None], rng: random.Random, args: argparse.Namespace) -> float:
    """Generated tokens per second of one batch."""
    vocab = engine.info.vocab_size
    prompts = [[rng.randrange(vocab) for _ in range(args.input_len)] for _ in names]
    sampling = {"temperature": 0.0, "max_new_tokens": args.output_len, "ignore_eos": True}
    began = time.perf_counter()
    engine.generate(input_ids=prompts, sampling_params=sampling, lora_path=names)
    return len(names) * args.output_len / (time.perf_counter() - began)


def run(args: argparse.Namespace, folder: Path) -> dict[str, Any]:
    path = checkpoints.ensure_checkpoint(args.model)
    shapes = linear_shapes(load_model_config(path))
    if args.targets:
        shapes = {name: shape for name, shape in shapes.items() if name.rpartition(".")[2] in args.targets}
    adapters = [write_adapter(folder / f"a{i}", shapes, args.rank, i) for i in range(args.adapters)]
    flags: dict[str, Any] = {"max_running_requests": args.batch_size, "skip_tokenizer_init": True}
    flags |= {"max_total_tokens": args.batch_size * 2 * (args.input_len + args.output_len)}
    lora = {"lora_paths": [f"{a.name}={a}" for a in adapters], "max_loras_per_batch": args.adapters}
    rng, speeds = random.Random(0), {way: list[float]() for way in WAYS}
    with Engine(str(path), **flags) as plain, Engine(str(path), **flags, **lora) as adapted:
        plain_names: list[str | None] = [None] * args.batch_size
        mixed: list[str | None] = [adapters[i % len(adapters)].name for i in range(args.batch_size)]
        cases = {"without": (plain, plain_names), "base": (adapted, plain_names), "adapters": (adapted, mixed)}
        for turn in range(args.turns + 1):
            for way in rng.sample(WAYS, len(WAYS)):
                found = measure(*cases[way], rng, args)
                if turn:  # the first is a warm-up
                    speeds[way].append(found)
    ratios = {way: [a / b for a, b in zip(speeds[way], speeds["without"])] for way in WAYS[1:]}
    return {
        "model": args.model, "adapters": args.adapters, "rank": args.rank, "batch": args.batch_size,
        "modules": sorted({name.rpartition(".")[2] for name in shapes}), "turns": args.turns,
        "input_len": args.input_len, "output_len": args.output_len,
        "tokens_per_second": {way: median(values) for way, values in speeds.items()},
        "ratio": {way: median(values) for way, values in ratios.items()},
        "ratio_least_and_largest": {way: [min(values), max(values)] for way, values in ratios.items()},
        "target": TARGET,
    }  # fmt: skip


def main(argv: list[str] | None = None) -> int:
    parser = report.command_parser("lora", __doc__)
    parser.add_argument("--model", default="moe-390m")
    parser.add_argument("--adapters", type=int, default=8)
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--targets", nargs="*", help="adapted modules (default: all modules that can have adapters)")
    parser.add_argument("--batch-size", type=int, default=16)
    parser.add_argument("--input-len", type=int, default=64)
    parser.add_argument("--output-len", type=int, default=32)
    parser.add_argument("--turns", type=int, default=9)
    report.add_result_options(parser)
    args = parser.parse_args(argv)
    report.wait_until_quiet(args)
    with tempfile.TemporaryDirectory() as folder:
        found = run(args, Path(folder))
    rows = [
        [way, f"{found['tokens_per_second'][way]:.1f}", f"{found['ratio'].get(way, 1.0):.2f}"]
        for way in WAYS
    ]  # fmt: skip
    print(report.table(["way", "tokens/s", "of the engine without LoRA"], rows))
    report.write_if_asked(args, "lora", found)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
