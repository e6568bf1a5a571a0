"""Times of calls on a GPU, and the two limits they are held against: copying and multiplying.

A call is timed by events around it, with a large write before it: the write empties the L2 cache of the call's
operands, as the rest of a model does, and keeps the GPU busy while the host launches, so that launches do not count.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from benchmarks.stats import median

FLUSH_BYTES = 512 << 20
COPY_BYTES = 1 << 30
GEMM_SIZE = 8192
REPEATS = 15


@dataclass(frozen=True)
class Limits:
    """Of this GPU as measured: bytes a second of a copy (read and write both count), flops a second of products."""

    copy_bytes_per_s: float
    bf16_flops_per_s: float
    fp8_flops_per_s: float | None


class Clock:
    """Measures calls on the current CUDA device; with ``cpu`` in sizes and with a clock that mean nothing."""

    def __init__(self, repeats: int = REPEATS, device: str = "cuda") -> None:
        self._repeats, self._device = repeats, device
        self._shrink = 1 if device == "cuda" else 64
        self._flush = torch.empty(FLUSH_BYTES // self._shrink**2, dtype=torch.int8, device=device)

    def seconds(self, call: Callable[[], Any]) -> float:
        """The median of several calls, after three that do not count."""
        for _ in range(3):
            call()
        return self._cuda_seconds(call) if self._device == "cuda" else self._host_seconds(call)

    def _host_seconds(self, call: Callable[[], Any]) -> float:
        began = time.perf_counter()
        call()
        return time.perf_counter() - began

    def _cuda_seconds(self, call: Callable[[], Any]) -> float:
        pairs = []
        for _ in range(self._repeats):
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            self._flush.zero_()
            begin.record()
            call()
            end.record()
            pairs.append((begin, end))
        torch.cuda.synchronize()
        return median([begin.elapsed_time(end) for begin, end in pairs]) / 1e3

    def copy_bytes_per_s(self) -> float:
        """Bytes read and written a second by a large copy."""
        num_bytes = COPY_BYTES // self._shrink**2
        source = torch.empty(num_bytes, dtype=torch.int8, device=self._device)
        target = torch.empty_like(source)
        return 2 * num_bytes / self.seconds(lambda: target.copy_(source))

    def limits(self) -> Limits:
        size, copy = GEMM_SIZE // self._shrink, self.copy_bytes_per_s()
        a, b = (torch.randn(size, size, dtype=torch.bfloat16, device=self._device) for _ in range(2))
        bf16 = 2 * size**3 / self.seconds(lambda: a @ b)
        return Limits(copy, bf16, self._fp8(a, b, size))

    def _fp8(self, a: torch.Tensor, b: torch.Tensor, size: int) -> float | None:
        """None where torch cannot multiply FP8 here."""
        x, y = a.to(torch.float8_e4m3fn), b.to(torch.float8_e4m3fn).t()
        one = torch.ones((), device=self._device)
        try:
            product = self.seconds(lambda: torch._scaled_mm(x, y, scale_a=one, scale_b=one, out_dtype=torch.bfloat16))
        except RuntimeError:
            return None
        return 2 * size**3 / product
