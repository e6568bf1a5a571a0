"""Programmatic dependent launch: the programs of a launch start while the launch before it in its stream still runs.

A kernel of `dependent_jit` calls `wait_for_inputs` before its first access to memory. On GPUs that have dependent
launches it is launched with ``launch_pdl``: the device starts its programs as soon as all programs of the launch before
have ended or announced it, and the call waits until that launch is complete and its writes are visible. The call then
announces the next launch. Everything before an announcing launch is complete, so at most two launches of a stream
overlap, and a kernel that waits may read results of any earlier one. A captured graph keeps the dependency as a
programmatic edge.

A kernel that waits for other ranks, or for programs of its own launch, announces the next launch after that wait
(`announce_next`): before it, programs of the next launch would occupy multiprocessors that another stream can use.

Without ``launch_pdl`` (older GPUs, the interpreter, cooperative launches) the wait compiles to nothing; cooperative
launches still announce. The report of `aot.py` checks that no access to memory comes before the wait, and that each
kernel announces the next launch.
Sources: CUDA programming guide, "Programmatic Dependent Launch and Synchronization"; PTX ISA, "griddepcontrol";
triton/language/extra/cuda/gdc.py.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import lru_cache
from typing import Any

import triton
import triton.language as tl
from triton import knobs
from triton.language.extra import cuda
from triton.runtime import JITFunction
from triton.runtime.driver import driver

from moe_engine.kernels.triton.grid_barrier import COOPERATIVE

OPTION = "launch_pdl"
"""Triton's launch option, part of the compiled kernel's key."""
OLDEST_ARCH = 90
"""Compute capability, in Triton's notation."""

KERNELS: set[str] = set()
"""Names of the kernels of `dependent_jit`."""


class DependentKernel(JITFunction):
    """A kernel whose launches carry `OPTION` where the current device has it."""

    def run(self, *args: Any, grid: Any, warmup: bool, **options: Any) -> Any:
        if is_dependent(self, _arch(driver.active), options):
            options[OPTION] = True
        return super().run(*args, grid=grid, warmup=warmup, **options)


def is_dependent(kernel: Any, arch: int, options: Mapping[str, Any]) -> bool:
    """Whether launches of a kernel with these options carry `OPTION` on a GPU of compute capability `arch`."""
    return isinstance(kernel, DependentKernel) and arch >= OLDEST_ARCH and not COOPERATIVE.items() <= options.items()


@lru_cache
def _arch(active: Any) -> int:
    target = active.get_current_target()
    return int(target.arch) if target.backend == "cuda" else 0


def dependent_jit(function: Callable[..., Any] | None = None, **options: Any) -> Any:
    """`triton.jit`, for a kernel that calls `wait_for_inputs` first."""
    if function is None:
        return lambda declared: dependent_jit(declared, **options)
    KERNELS.add(function.__name__)
    return triton.jit(**options)(function) if knobs.runtime.interpret else DependentKernel(function, **options)


if knobs.runtime.interpret:

    def wait_for_inputs(announce: bool = True) -> None:
        """No effect: launches run one after the other."""

    def announce_next() -> None:
        """No effect, as above."""
else:

    @tl.core.builtin
    def wait_for_inputs(announce: bool = True, _semantic: Any = None) -> None:
        """Waits for the launch before this one, then announces the next, if `announce`. In a kernel: before any load,
        store or atomic operation."""
        if getattr(_semantic.builder.options, OPTION, False):
            cuda.gdc_wait(_semantic=_semantic)
            if getattr(announce, "value", announce):
                cuda.gdc_launch_dependents(_semantic=_semantic)

    @tl.core.builtin
    def announce_next(_semantic: Any = None) -> None:
        """Announces the next launch. In a kernel that has called ``wait_for_inputs(announce=False)``: after the last
        wait for ranks or programs."""
        options = _semantic.builder.options
        has_dependents = int(options.arch.removeprefix("sm")) >= OLDEST_ARCH
        if getattr(options, OPTION, False) or (options.launch_cooperative_grid and has_dependents):
            cuda.gdc_launch_dependents(_semantic=_semantic)
