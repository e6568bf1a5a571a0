"""Minimum bytes and operations of each kernel of a model, and on a GPU the share of that limit reached.

    python -m benchmarks.kernels [--model-path DIR] [--only TEXT] [--tokens 1 128 4096] [--rows NAME ...] [--json FILE]

Without --model-path: DeepSeek-V3 (FP8, one of 16 ranks' experts) and DeepSeek-V2-Lite (bf16). A floor is the larger of
bytes over memory bandwidth and operations over the tensor cores' peak, measured on this GPU, or from the H200's data
sheet. `of floor` is the floor's share of a row's time: at most 1.00. Unavailable rows are listed with the reason.
`moe-engine bench kernels` is the same.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.report import command_parser, table, write_result
from moe_engine.errors import MoeEngineError

if TYPE_CHECKING:
    from benchmarks.kernel_cases import KernelCase

H200 = (4.8e12, 989e12, 1979e12)
"""Bytes per second, bf16 and FP8 flops per second, by the data sheet."""


def cases_of(model_path: str | None, tokens: Sequence[int] | None, only: str) -> list[KernelCase]:
    """The named shapes, or the shapes of a model on one GPU."""
    from benchmarks import attention_cases, kernel_cases

    if model_path is None:
        cases = [*kernel_cases.all_cases(), *attention_cases.attention_cases()]
    else:
        from benchmarks.model_shapes import model_cases
        from moe_engine.models.config_file import load_model_config

        cases = list(model_cases(load_model_config(Path(model_path)), tokens or (1, 128, 4096)))
    return [case for case in cases if only in case.name]


def floors(cases: Iterable[KernelCase], limits: tuple[float, float, float]) -> Iterator[dict[str, Any]]:
    """A line per case: bytes, flops, and lower bound in microseconds."""
    bandwidth, bf16, fp8 = limits
    for case in cases:
        peak = fp8 if case.fp8 else bf16
        seconds = case.floor_seconds(bandwidth, peak)
        bound = "memory" if case.bytes / bandwidth >= case.flops / peak else "compute"
        yield {
            "kernel": case.name, "family": case.family, "bytes": case.bytes, "flops": case.flops, "bound": bound,
            "floor_us": seconds * 1e6,
        }  # fmt: skip


def print_floors(lines: Sequence[dict[str, Any]]) -> None:
    rows = [
        (n["kernel"], f"{n['bytes'] / 1e6:.2f}", f"{n['flops'] / 1e9:.2f}", n["bound"], f"{n['floor_us']:.1f}")
        for n in lines
    ]
    print(table(("kernel", "MB", "GFLOP", "bound", "floor us"), rows))


def main(argv: Sequence[str] | None = None) -> int:
    parser = command_parser("kernels", __doc__)
    parser.add_argument("--model-path", metavar="DIR", help="folder with a config.json")
    parser.add_argument("--tokens", type=int, nargs="+", help="with --model-path: tokens of a step (1 128 4096)")
    parser.add_argument("--only", default="", metavar="TEXT", help="shapes with this in their name")
    parser.add_argument("--rows", nargs="+", metavar="NAME", help="backends to time (default: all that can run)")
    parser.add_argument("--json", type=Path, metavar="FILE")
    options = parser.parse_args(argv)
    try:
        cases = cases_of(options.model_path, options.tokens, options.only)
    except MoeEngineError as error:
        parser.error(str(error))
    import torch

    if not torch.cuda.is_available():
        lines = list(floors(cases, H200))
        print_floors(lines)
        print("no CUDA device: floors are from the H200's data sheet, nothing was timed", file=sys.stderr)
        if options.json:
            write_result("kernels", {"floors": lines}, path=options.json)
        return 0
    from benchmarks.gpu_suite import kernel_times

    values = kernel_times.measure(cases, rows=options.rows)
    print(kernel_times.as_text(values))
    if options.json:
        write_result("kernels", values, device="cuda", path=options.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
