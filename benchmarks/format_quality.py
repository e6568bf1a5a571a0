"""Answers of the embedded model to its held-out questions, with weights in several formats.

The embedded checkpoint (FP8) is dequantized to bf16 once and served with each value of --quantization, or as a GGUF
file of each block type (`benchmarks.gguf_blocks`; matrices without whole blocks of 256 columns get a smaller type). An
answer is correct if all its greedy tokens are the expected ones. Prints the share of each format, the difference to the
first format in points, and the number of different answers.

    python -m benchmarks.format_quality                                   all questions: minutes on two cores
    python -m benchmarks.format_quality --every 10 --formats none int4 Q4_K Q5_K Q4_1 Q5_0
"""

from __future__ import annotations

import json
import shutil
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer

from benchmarks import report
from benchmarks.gguf_export import export
from moe_engine import Engine
from moe_engine.demo import CHECKPOINT_DIR
from moe_engine.demo.training.checkpoint import dequantize, read_tensors
from moe_engine.demo.training.corpus import Example, held_out
from moe_engine.models.checkpoint.tensor_header import BLOCK_TYPES

BATCH = 256


def plain_copy(source: Path, folder: Path) -> Path:
    """The checkpoint with its values in bf16."""
    tensors = {
        name: tensor.to(torch.bfloat16).contiguous() for name, tensor in dequantize(read_tensors(source)).items()
    }
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((source / "config.json").read_text(encoding="utf-8"))
    del config["quantization_config"]
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    for file in source.glob("*token*"):
        shutil.copy(file, folder / file.name)
    return folder


def engine_flags(path: Path, name: str) -> dict[str, Any]:
    """Serves the checkpoint in a format; writes a GGUF file beside it for a block type."""
    if name in BLOCK_TYPES:
        return {"model_path": str(export(path, path / f"{name}.gguf", name))}
    return {"model_path": str(path)} | ({} if name == "none" else {"quantization": name})


def answers(path: Path, name: str, prompts: list[list[int]], wanted: list[list[int]]) -> list[bool]:
    """True for each expected answer."""
    good: list[bool] = []
    flags = engine_flags(path, name)
    with Engine(device="cpu", random_seed=0, skip_tokenizer_init=True, **flags) as engine:
        for start in range(0, len(prompts), BATCH):
            ids, expected = prompts[start : start + BATCH], wanted[start : start + BATCH]
            params = [{"temperature": 0.0, "max_new_tokens": len(answer), "ignore_eos": True} for answer in expected]
            found: Any = engine.generate(input_ids=ids, sampling_params=params)
            good += [list(one["output_ids"]) == answer for one, answer in zip(found, expected)]
    return good


def table(results: dict[str, list[bool]]) -> list[str]:
    """A line for each format."""
    base = next(iter(results.values()))
    lines = [f"{'format':12} {'right':>8} {'points':>8} {'differ':>8}"]
    for name, good in results.items():
        share, points = 100 * sum(good) / len(good), 100 * (sum(good) - sum(base)) / len(good)
        differ = sum(a != b for a, b in zip(good, base))
        lines.append(f"{'bf16' if name == 'none' else name:12} {share:7.2f}% {points:+8.2f} {differ:8}")
    return lines


def questions(every: int) -> tuple[list[Example], list[list[int]], list[list[int]]]:
    """Examples, token ids of the prompts and of the expected answers."""
    examples = list(held_out())[::every]
    tokenizer = Tokenizer.from_file(str(CHECKPOINT_DIR / "tokenizer.json"))
    encoded = [
        [list(tokenizer.encode(text, add_special_tokens=False).ids) for text in (one.prompt, one.answer)]
        for one in examples
    ]
    return examples, [prompt for prompt, _ in encoded], [answer for _, answer in encoded]


def main(argv: Sequence[str] | None = None) -> int:
    parser = report.command_parser("format_quality", __doc__)
    known = "of --quantization, or block types of GGUF files; none: bf16"
    parser.add_argument("--formats", nargs="+", default=["none", "int8", "int4"], help=known)
    parser.add_argument("--every", type=int, default=1, help="use every n-th question only")
    own = parser.parse_args(argv)
    examples, prompts, wanted = questions(own.every)
    results = {}
    with tempfile.TemporaryDirectory() as folder:
        path = plain_copy(CHECKPOINT_DIR, Path(folder))
        for name in own.formats:
            results[name] = answers(path, name, prompts, wanted)
    print(f"{len(examples)} held-out questions in {len({one.task for one in examples})} tasks")
    print("\n".join(table(results)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
