"""The sampling rows against each other and against their lower bound, measured in one run.

    python -m benchmarks.cpu_sampling [--json FILE] [--quick] [--threads N] [--vocab 32000,129280] [--rows 1,256]

`limit` is one read of the logits at memory speed plus one exponential of each, computed by torch in the core's cache; a
greedy row needs only the read. Logits are normal with a standard deviation of 2 (*flat*: a nucleus of thousands of
tokens) or also have twenty outstanding tokens, like a model's (*peaked*). Repetitions of a line's candidates are
interleaved; a value is the lower quartile of its times. With one thread the clock is that thread's CPU time, so a busy
machine hardly affects the results.
"""

from __future__ import annotations

import sys
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from benchmarks.interleaved_calls import Call, alternate
from benchmarks.report import command_parser, write_result
from moe_engine.kernels.cpu.library import load
from moe_engine.kernels.device import cpu_device
from moe_engine.kernels.sampling.cpu import CpuSampling
from moe_engine.kernels.sampling.protocol import Draw, SamplingKernel, SamplingParameters
from moe_engine.kernels.sampling.reference import TorchSampling


@dataclass(frozen=True)
class Mode:
    name: str
    temperature: float = 0.8
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0


MODES = (
    Mode("greedy", 0.0),
    Mode("temperature"),
    Mode("top_p 0.95", top_p=0.95),
    Mode("top_k 50", top_k=50),
    Mode("top_p 0.95, min_p 0.02", top_p=0.95, min_p=0.02),
    Mode("top_k 2000, top_p 0.95", top_k=2000, top_p=0.95),
)


@dataclass
class Line:
    rows: int
    vocab: int
    logits: str
    mode: str
    cpu_us: float
    torch_us: float | None
    limit_us: float


def parameters(mode: Mode, rows: int, vocab: int) -> SamplingParameters:
    top_k = mode.top_k if 0 < mode.top_k < vocab else vocab
    draw = Draw.of(mode.temperature == 0, top_k, mode.top_p, vocab)

    def column(value: float, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.full((rows,), value, dtype=dtype)

    return SamplingParameters(
        draws=np.full(rows, draw, dtype=np.uint8),
        temperature=column(mode.temperature),
        top_p=column(mode.top_p),
        min_p=column(mode.min_p),
        top_k=column(top_k, torch.int64),
    )


def call_of(kernel: SamplingKernel, mode: Mode, logits: Tensor) -> Call:
    if mode.temperature == 0:
        return lambda: kernel.greedy(logits)
    given, uniform = parameters(mode, *logits.shape), torch.rand(len(logits))
    return lambda: kernel.sample(logits, given, uniform)


def measure_limits() -> tuple[float, float]:
    """Bytes read from memory per second by all threads, and exponentials per second computed in their caches."""
    threads = torch.get_num_threads()
    memory = torch.zeros((256 << 20) // 8, dtype=torch.int64)
    read = alternate([memory.amax], 1.0)[0]
    torch.set_num_threads(1)
    values, out = torch.linspace(-20, 0, 1 << 14), torch.empty(1 << 14)
    exp = alternate([lambda: torch.exp(values, out=out)], 0.2)[0]
    torch.set_num_threads(threads)
    return memory.numel() * 8 / read, threads * values.numel() / exp


def show(line: Line) -> None:
    against = "" if line.torch_us is None else f"  torch {line.torch_us:.0f} us (x{line.torch_us / line.cpu_us:.1f})"
    print(
        f"{line.rows:4d} x {line.vocab:6d} {line.logits:6s} {line.mode:24s} {line.cpu_us:10.1f} us  "
        f"limit {line.limit_us:9.1f} (x{line.cpu_us / line.limit_us:5.2f}){against}",
        flush=True,
    )


def main(arguments: list[str]) -> int:
    parser = command_parser("cpu_sampling", __doc__)
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the results to this file")
    parser.add_argument("--quick", action="store_true", help="a tenth of the time per line")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads(), help="default: torch's")
    parser.add_argument("--vocab", default="1280,32000,129280", help="vocabulary sizes, separated by commas")
    parser.add_argument("--rows", default="1,32,256", help="rows, separated by commas")
    parser.add_argument("--alone", action="store_true", help="without the torch row, which is slow in large shapes")
    options = parser.parse_args(arguments)
    torch.manual_seed(0)
    torch.set_num_threads(options.threads)
    kernels: list[SamplingKernel] = [CpuSampling()] if options.alone else [CpuSampling(), TorchSampling()]
    bytes_per_second, exps_per_second = measure_limits()
    print(f"{cpu_device().name}, {torch.get_num_threads()} threads, {load().path}")
    print(f"limits of this machine: read {bytes_per_second / 1e9:.1f} GB/s, {exps_per_second / 1e9:.2f} G exp/s")
    lines: list[Line] = []
    for vocab in map(int, options.vocab.split(",")):
        for rows in map(int, options.rows.split(",")):
            threads = min(rows, torch.get_num_threads()) / torch.get_num_threads()
            for shape in ("flat", "peaked"):
                logits = torch.randn(rows, vocab) * 2
                if shape == "peaked":
                    logits[:, torch.randperm(vocab)[:20]] += torch.rand(rows, 20) * 20
                for mode in MODES:
                    calls = [call_of(kernel, mode, logits) for kernel in kernels]
                    times = alternate(calls, 0.03 if options.quick else 0.3)
                    read, exp = logits.numel() * 4 / bytes_per_second, logits.numel() / exps_per_second
                    limit = read if mode.temperature == 0 else read + exp
                    ours, theirs = times[0] * 1e6, None if options.alone else times[1] * 1e6
                    lines.append(Line(rows, vocab, shape, mode.name, ours, theirs, limit / threads * 1e6))
                    show(lines[-1])
    if options.json is not None:
        values = {
            "read_bytes_per_second": bytes_per_second,
            "exps_per_second": exps_per_second,
            "lines": [asdict(line) for line in lines],
        }
        write_result("cpu_sampling", values, path=options.json)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
