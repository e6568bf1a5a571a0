"""``moe-engine quantize``: a quantized copy of a checkpoint, and its perplexity before and after."""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from moe_engine.cli.output_file import writing
from moe_engine.config.flags import Parser
from moe_engine.errors import ConfigError
from moe_engine.planning.inputs.checkpoint import locate

FORMATS = ("fp8", "int8", "int4", "mxfp4")
WINDOW = 512
"""Tokens of a piece of text whose perplexity is measured at once."""


def main(argv: Sequence[str], prog: str) -> int:
    own = _arguments(argv, prog)
    source, output = locate(own.model_path), Path(own.output)
    text = _read(own.text)
    from tqdm import tqdm

    from moe_engine.models.quantized_copy.checkpoint import quantize_checkpoint
    from moe_engine.models.quantized_copy.target import Target

    files = [file for ending in ("safetensors", "bin", "pt") for file in source.glob(f"*.{ending}")]
    total = sum(file.stat().st_size for file in files if file.suffix == files[0].suffix)
    scale: dict[str, Any] = {"total": total, "unit": "B", "unit_scale": True, "unit_divisor": 1024}
    progress = tqdm(**scale, desc="Quantizing", file=sys.stderr, delay=0.5)  # refusals come before the bar
    with progress as bar, writing("--output", output, "folder"):
        target = Target(own.format, own.group_size)
        left_out = quantize_checkpoint(source, output, target, bar.update)
    size = sum(file.stat().st_size for file in output.glob("*.safetensors"))
    print(f"{output}: {size / 2**20:.1f} MiB, {size / max(total, 1):.1%} of {source}")
    if left_out:
        hint = "; a smaller --group-size takes more" if own.format == "int4" else ""
        print(
            f"not quantized, without {target.needs} or joined with such by other engines{hint}: {', '.join(left_out)}"
        )
    if text is not None:
        before, after = perplexity(source, text), perplexity(output, text)
        print(f"perplexity of {own.text}: {before:.4f} before, {after:.4f} after ({after / before - 1:+.2%})")
    return 0


def perplexity(model: Path, text: str) -> float:
    """exp of the mean negative log-probability of the text's tokens, in windows of `WINDOW`, by the engine."""
    from moe_engine.frontend.engine import Engine
    from moe_engine.tokenizer.tokenizer import load_tokenizer

    ids = load_tokenizer(str(model)).encode(text, add_special_tokens=False)
    if len(ids) < 2:
        raise ConfigError("--text: needs at least two tokens")
    sampling = {"temperature": 0.0, "max_new_tokens": 1}
    with Engine(model_path=str(model)) as engine:
        size = min(WINDOW, engine.config.context_len - 8)
        windows = [part for i in range(0, len(ids), size) if len(part := ids[i : i + size]) > 1]
        answers = engine.generate(input_ids=windows, sampling_params=sampling, return_logprob=True, logprob_start_len=0)
    assert isinstance(answers, list)
    found = [entry[0] for answer in answers for entry in answer["meta_info"]["input_token_logprobs"][1:]]
    return math.exp(-sum(found) / len(found))


def _arguments(argv: Sequence[str], prog: str) -> argparse.Namespace:
    parser = Parser(
        prog=prog,
        description="Writes a quantized copy of a checkpoint that moe-engine, vLLM and transformers load. Repeat the "
        "command after an interruption: it continues.",
        epilog="example:\n  moe-engine quantize --model-path /models/DeepSeek-V2-Lite --output /models/V2-Lite-int4 "
        "--format int4",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--model-path", required=True, metavar="IN", help="folder or hub id of the checkpoint")
    parser.add_argument("--output", required=True, metavar="OUT", help="folder to write")
    parser.add_argument(
        "--format",
        required=True,
        choices=FORMATS,
        help="fp8: DeepSeek's blocks of 128 x 128; int8, int4: compressed-tensors; mxfp4: gpt-oss only",
    )
    parser.add_argument(
        "--group-size", type=int, default=128, choices=(32, 64, 128, 256), help="int4: columns that share a scale (128)"
    )
    parser.add_argument("--text", metavar="FILE", help="a text whose perplexity is measured before and after")
    return parser.parse_args(list(argv))


def _read(path: str | None) -> str | None:
    if path is None:
        return None
    try:
        return Path(path).read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--text {path}: cannot be read ({error})") from None
