"""Launching kernels for an absent GPU: everything happens except execution.

Triton specializes kernels by launch arguments (types, alignments, values of 1). The surest way to compile the kernels
that a GPU will request is therefore to make the same launches: the driver below stands in for a GPU of an architecture,
kernels are compiled for it into Triton's cache under the same keys, and execution does nothing. Tensors may be on
torch's ``meta`` device. Not under the interpreter (TRITON_INTERPRET=1).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.backends.driver import DriverBase
from triton.compiler import CompiledKernel
from triton.runtime.driver import driver

from moe_engine.kernels.triton.aot import SHARED_LIMIT, AotReport, report_of


class _Utilities:
    """The device functions that Triton calls when it loads a kernel."""

    def __init__(self, arch: int) -> None:
        self._arch = arch

    def get_device_properties(self, device: int) -> dict[str, int]:
        return {"max_shared_mem": SHARED_LIMIT[self._arch], "multiprocessor_count": 132}

    def load_binary(self, name: str, kernel: bytes, shared: int, device: int) -> tuple[None, None, int, int, int]:
        return None, None, 0, 0, 1024

    def unload_module(self, module: Any) -> None:
        """No-op: nothing was loaded."""


class AbsentDevice(DriverBase):
    """A CUDA device of compute capability `arch` on which launches have no effect."""

    def __init__(self, arch: int) -> None:
        self._arch = arch
        self.utils = _Utilities(arch)

    @classmethod
    def is_active(cls) -> bool:
        return False

    def map_python_to_cpp_type(self, ty: str) -> str:
        return ty

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", self._arch, 32)

    def get_active_torch_device(self) -> str:
        return "meta"

    def get_current_device(self) -> int:
        return self._arch  # kernels are cached per device index: keeps two architectures apart

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_benchmarker(self) -> Any:
        raise RuntimeError("an absent device cannot be benchmarked; give kernels fixed configurations")

    def launcher_cls(self, source: Any, metadata: Any) -> Any:
        return lambda *arguments: None


class Compilations:
    """The kernels compiled, or found in the cache, in the order of their first launches. Forwards to `following`."""

    def __init__(self, following: Any = None) -> None:
        self._following = following
        self.reports: list[AotReport] = []
        self.num_cached = 0

    def note(
        self, src: Any, metadata: dict[str, Any], metadata_group: dict[str, str], times: Any, cache_hit: bool
    ) -> None:
        """Triton's compilation listener."""
        kernel = CompiledKernel(src, metadata_group, metadata["hash"])
        arch = kernel.metadata.target.arch
        self.reports.append(report_of(kernel.name, kernel, arch, False, 0.0 if cache_hit else times.total / 1e6))
        self.num_cached += cache_hit
        if self._following is not None:
            self._following(src=src, metadata=metadata, metadata_group=metadata_group, times=times, cache_hit=cache_hit)


@contextmanager
def listed(arch: int) -> Iterator[set[tuple[str, str]]]:
    """Inside, launches for an absent device neither compile nor run: the needed (kernel, specialization) pairs are
    added to the set. Compares a warm-up's kernels with those of all possible steps, in seconds."""
    needed: set[tuple[str, str]] = set()

    def note(*, key: Any, fn: Any, **rest: Any) -> bool:
        needed.add((fn.name, str(key)))
        return True  # nothing to launch

    before = knobs.runtime.jit_cache_hook
    with absent_device(arch):
        knobs.runtime.jit_cache_hook = note
        try:
            yield needed
        finally:
            knobs.runtime.jit_cache_hook = before


@contextmanager
def absent_device(arch: int, cache: str | Path | None = None) -> Iterator[Compilations]:
    """Inside, launches only compile for `arch` into the folder `cache` (default: Triton's cache)."""
    before, listener = driver._active, knobs.compilation.listener
    compilations = Compilations(listener)
    with knobs.cache.scope():
        if cache is not None:
            knobs.cache.dir = str(cache)
        driver.set_active(AbsentDevice(arch))
        knobs.compilation.listener = compilations.note
        try:
            yield compilations
        finally:
            driver._active, knobs.compilation.listener = before, listener
