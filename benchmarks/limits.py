"""This machine's limits, the reference of all fractions: ``python -m benchmarks.limits [--device cpu] [--json FILE]``.

Memory: GB/s of reading 700 MiB outside all caches, on all of torch's threads. Several methods are tried and the best
median counts, so that fractions are not inflated by a weak reference; with a C++ compiler one of them is a plain loop
of loads. Compute: GFLOP/s of a 4096 x 4096 x 4096 product in bf16 or float32, also the best of several methods: a CPU
without bf16 instructions multiplies float32 many times faster.
"""

from __future__ import annotations

import ctypes
import json
import shutil
import subprocess
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks import report
from benchmarks.step_work import MachineLimits
from moe_engine.tuning.stats import median

READ_MIB = 700
GEMM_SIZE = 4096
TRIAL_SIZE = 384
HOPELESS = 3
"""A product that takes this many times the fastest one's time at `TRIAL_SIZE` is not measured: torch's bf16 product on
a CPU without AVX512 would take a minute a round."""

_READ_SOURCE = """
#include <cstddef>
#include <cstdint>
typedef uint64_t block __attribute__((vector_size(64)));
extern "C" uint64_t read_all(const uint8_t *data, size_t num_bytes, int num_threads) {
  const size_t num_blocks = num_bytes / 64;
  const block *blocks = reinterpret_cast<const block *>(data);
  uint64_t total = 0;
#pragma omp parallel for num_threads(num_threads) schedule(static) reduction(^ : total)
  for (size_t chunk = 0; chunk < num_blocks / 512; ++chunk) {
    block a{}, b{}, c{}, d{};
    const block *p = blocks + chunk * 512;
    for (int i = 0; i < 512; i += 4) { a ^= p[i]; b ^= p[i + 1]; c ^= p[i + 2]; d ^= p[i + 3]; }
    a ^= b ^ c ^ d;
    for (int i = 0; i < 8; ++i) total ^= a[i];
  }
  return total;
}
"""


@dataclass(frozen=True)
class MeasuredLimits:
    """The best of each, its method, and the results of all methods."""

    memory_gb_per_second: float
    memory_method: str
    gemm_gflops: float
    gemm_method: str
    all_methods: dict[str, float]

    @property
    def machine(self) -> MachineLimits:
        return MachineLimits(self.memory_gb_per_second * 1e9, self.gemm_gflops * 1e9)


class Ruler:
    """Measures both limits on each call; the operands (800 MiB) are allocated once."""

    def __init__(self, device: str = "cpu", *, read_mib: int = READ_MIB, gemm_size: int = GEMM_SIZE) -> None:
        self._device = device
        self._reads, self._num_bytes = _reads(device, read_mib)
        trial = _medians(_gemms(device, min(TRIAL_SIZE, gemm_size))[0], device, 3)
        gemms, self._flops = _gemms(device, gemm_size)
        self._gemms = {way: run for way, run in gemms.items() if trial[way] < HOPELESS * min(trial.values())}

    def measure(self, repeats: int = 7) -> MeasuredLimits:
        """The best method of each kind, by the medians of `repeats` rounds."""
        reads = {way: self._num_bytes / s / 1e9 for way, s in _medians(self._reads, self._device, repeats).items()}
        gemms = {way: self._flops / s / 1e9 for way, s in _medians(self._gemms, self._device, repeats).items()}
        best_read, best_gemm = max(reads, key=reads.__getitem__), max(gemms, key=gemms.__getitem__)
        return MeasuredLimits(
            memory_gb_per_second=reads[best_read],
            memory_method=best_read,
            gemm_gflops=gemms[best_gemm],
            gemm_method=best_gemm,
            all_methods={name: round(value, 2) for name, value in {**reads, **gemms}.items()},
        )


def measure_limits(device: str = "cpu", repeats: int = 7) -> MeasuredLimits:
    """Both limits, once. Takes a few seconds and 800 MiB."""
    return Ruler(device).measure(repeats)


def combine(before: MeasuredLimits, after: MeasuredLimits) -> MeasuredLimits:
    """The better of two measurements, so that a disturbance of one does not inflate the engine's fraction."""
    read = max(before, after, key=lambda limits: limits.memory_gb_per_second)
    gemm = max(before, after, key=lambda limits: limits.gemm_gflops)
    methods = {name: max(value, after.all_methods.get(name, 0.0)) for name, value in before.all_methods.items()}
    return MeasuredLimits(read.memory_gb_per_second, read.memory_method, gemm.gemm_gflops, gemm.gemm_method, methods)


def _reads(device: str, read_mib: int) -> tuple[dict[str, Callable[[], Any]], int]:
    """Methods of reading, and the bytes read by each."""
    data = torch.ones(read_mib * 2**20 // 4, dtype=torch.float32, device=device)
    num_bytes = data.numel() * data.element_size()
    matrix = data.view(-1, 2**12)
    ways: dict[str, Callable[[], Any]] = {
        "read: torch.sum": lambda: data.sum(),
        "read: torch.amax": lambda: data.amax(),
        "read: torch.mv": lambda: matrix @ matrix[0],
    }
    native = _native_read() if device == "cpu" else None
    if native is not None:
        threads = torch.get_num_threads()
        ways["read: C++ loads"] = lambda: native(data.data_ptr(), num_bytes, threads)
    return ways, num_bytes


def _gemms(device: str, size: int) -> tuple[dict[str, Callable[[], Any]], int]:
    """Methods of multiplying, and the operations of each."""
    generator = torch.Generator().manual_seed(0)
    a, b = (torch.randn(size, size, generator=generator).to(device, torch.bfloat16) for _ in range(2))
    ways: dict[str, Callable[[], Any]] = {
        "gemm: torch.matmul": lambda: a @ b,
        "gemm: linear": lambda: torch.nn.functional.linear(a, b),
    }
    if device == "cpu":
        wide_a, wide_b = a.float(), b.float()
        ways["gemm: float32 matmul"] = lambda: wide_a @ wide_b
        if (packed := _packed_linear(a, b)) is not None:
            ways["gemm: packed linear"] = packed
    return ways, 2 * size**3


def _packed_linear(x: Tensor, weight: Tensor) -> Callable[[], Any] | None:
    """The product with a weight prepacked by oneDNN; None if this torch has no such operation."""
    try:
        with torch.no_grad():
            packed = torch.ops.mkldnn._reorder_linear_weight(weight, None)
        run = torch.ops.mkldnn._linear_pointwise
        run(x[:2], packed, None, "none", [], "")
    except (AttributeError, RuntimeError):
        return None
    return lambda: run(x, packed, None, "none", [], "")


def _medians(ways: dict[str, Callable[[], Any]], device: str, repeats: int) -> dict[str, float]:
    """Median seconds of each method, after a warm-up round. Interleaved, so that a disturbance affects all methods."""
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    with torch.no_grad():
        for turn in range(repeats + 1):
            for name, way in ways.items():
                began = time.perf_counter()
                way()
                if device.startswith("cuda"):
                    torch.cuda.synchronize()
                if turn:
                    seconds[name].append(time.perf_counter() - began)
    return {name: median(values) for name, values in seconds.items()}


def _native_read() -> Callable[[int, int, int], int] | None:
    """The compiled loop, or None without a compiler."""
    compiler = shutil.which("g++") or shutil.which("clang++")
    if compiler is None:
        return None
    with tempfile.TemporaryDirectory(prefix="moe-engine-read-") as folder:
        source, library = Path(folder) / "read.cpp", Path(folder) / "read.so"
        source.write_text(_READ_SOURCE)
        flags = ["-O3", "-march=native", "-fopenmp", "-shared", "-fPIC"]
        done = subprocess.run([compiler, *flags, "-o", str(library), str(source)], capture_output=True)
        if done.returncode:
            return None
        function = ctypes.CDLL(str(library)).read_all
    function.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    function.restype = ctypes.c_uint64
    return function


def limits_table(limits: MeasuredLimits) -> str:
    rows = [
        [name, f"{value:.1f}", "GB/s" if name.startswith("read") else "GFLOP/s",
         "<- limit" if name in (limits.memory_method, limits.gemm_method) else ""]
        for name, value in limits.all_methods.items()
    ]  # fmt: skip
    return report.table(["way", "median", "unit", ""], rows)


def main(argv: list[str] | None = None) -> int:
    parser = report.command_parser("limits", __doc__)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--json", type=Path, help="also write the result to this file")
    args = parser.parse_args(argv)
    limits = measure_limits(args.device, args.repeats)
    print(limits_table(limits))
    if args.json:
        report.write_result("limits", {"limits": asdict(limits)}, device=args.device, path=args.json)
    elif args.device == "cpu":
        memory, gemm = round(limits.memory_gb_per_second, 2), round(limits.gemm_gflops, 1)
        print(json.dumps({"memory_gb_per_second": memory, "gemm_gflops": gemm}))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
