"""Times of calls on a GPU, and the two limits they are compared with: copying and multiplying.

A call is timed by CUDA events, after a large write that evicts the call's operands from the L2 cache, as the rest of a
model does. After the write the GPU is kept busy for longer than the host needs for all launches of the call, so that
launch overhead does not count: in a model a graph launches them.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from moe_engine.tuning.stats import median

FLUSH_BYTES = 512 << 20
COPY_BYTES = 1 << 30
GEMM_SIZE = 8192
REPEATS = 15
LONG_S = 0.02
LONG_REPEATS = 3
"""Repeats of longer calls: they vary little, and time is limited."""
CYCLES_PER_S = 2e9
"""At least the SM count of any GPU."""


@dataclass(frozen=True)
class Limits:
    """Measured limits of this GPU: bytes/s of a copy (read and write both count), flops/s of products."""

    copy_bytes_per_s: float
    bf16_flops_per_s: float
    fp8_flops_per_s: float | None


class Clock:
    """Measures calls on the current device. On a CPU, and in `tiny` sizes, the numbers are meaningless."""

    def __init__(self, kind: str = "cuda", tiny: bool = False, repeats: int = REPEATS) -> None:
        self._repeats, self._device = 2 if tiny else repeats, kind
        self._shrink = 64 if tiny else 1
        self._flush = torch.empty(FLUSH_BYTES // self._shrink**2, dtype=torch.int8, device=kind)

    def seconds(self, call: Callable[[], Any]) -> float:
        """The median of several calls, after three warm-up calls."""
        if self._device != "cuda":
            return min(_host_seconds(call) for _ in range(3))
        call()
        torch.cuda.synchronize()
        began = time.perf_counter()
        host_seconds = min(_host_seconds(call) for _ in range(2))
        torch.cuda.synchronize()
        is_long = time.perf_counter() - began > 2 * LONG_S
        return self._cuda_seconds(call, host_seconds, min(self._repeats, LONG_REPEATS) if is_long else self._repeats)

    def _cuda_seconds(self, call: Callable[[], Any], host_seconds: float, repeats: int) -> float:
        pairs = []
        for _ in range(repeats):
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            self._flush.zero_()
            torch.cuda._sleep(int(2 * host_seconds * CYCLES_PER_S))
            begin.record()
            call()
            end.record()
            pairs.append((begin, end))
        torch.cuda.synchronize()
        return median([begin.elapsed_time(end) for begin, end in pairs]) / 1e3

    def copy_bytes_per_s(self) -> float:
        """Bytes read and written per second by a large copy."""
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
        """None if torch has no FP8 products on this device."""
        x, y = a.to(torch.float8_e4m3fn), b.to(torch.float8_e4m3fn).t()
        one = torch.ones((), device=self._device)
        try:
            product = self.seconds(lambda: torch._scaled_mm(x, y, scale_a=one, scale_b=one, out_dtype=torch.bfloat16))
        except RuntimeError:
            return None
        return 2 * size**3 / product


def _host_seconds(call: Callable[[], Any]) -> float:
    """Host time of the call; the device may still be running."""
    began = time.perf_counter()
    call()
    return time.perf_counter() - began
