"""Ahead-of-time compilation of Triton kernels for an absent GPU, with the compiler's resource report.

Triton lowers to PTX and cubin without a GPU; the cubin gives registers and stack, the metadata shared memory, the PTX
the selected tensor-core instructions. Sources: triton/tools/compile.py; CUDA C programming guide, "Technical
specifications per compute capability".
"""

from __future__ import annotations

import re
import subprocess
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import triton
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from moe_engine.kernels.triton.availability import version
from moe_engine.kernels.triton.dependent import KERNELS, OLDEST_ARCH, OPTION, is_dependent

if hasattr(knobs.language, "default_fp_fusion"):
    knobs.language.default_fp_fusion = True  # the default up to Triton 3.9, announced to change in 3.10

NAMES_CONSTANTS = (3, 7)
"""First Triton version whose launches list constants among the argument attributes."""

SHARED_LIMIT = {90: 232448, 100: 232448}
"""Max shared memory bytes of a block, by architecture (227 KiB of the SM's 228)."""

TENSOR_MEMORY_LIMIT = 512
"""Columns of tensor memory of an sm_100 SM."""

_INSTRUCTIONS = {"wgmma": "wgmma.mma_async", "tcgen05": "tcgen05.mma", "mma.sync": "mma.sync.aligned"}

_USAGE = re.compile(r"REG:(\d+) STACK:(\d+)")

_WAIT, _ANNOUNCEMENT = "griddepcontrol.wait", "griddepcontrol.launch_dependents"
_ACCESS = re.compile(
    r"^\s+(?:@%p\d+ )?((?:ld|st|atom|red|cp|prefetch|tensormap)\.(?!param|shared|async\.bulk\.prefetch)\S+)",
    re.MULTILINE,
)
"""An access to global memory; "cp.async" also copies to shared memory, from there. Prefetches read no value."""


@dataclass(frozen=True)
class AotCase:
    """One specialization of a kernel.

    signature: Triton type by name of every argument that is not constexpr: ``*bf16``, ``*fp8e4nv``,
    ``*i32``, ``i32``, ``i64``, ``fp32``. Pointers count as 16-byte aligned, as torch's allocations are, unless
    written ``*bf16:1``; integers count as divisible by 16 only where written ``i32:16``.
    Arguments that are slices of one upload (positions, slots, parameters of rows) have an alignment that depends on the
    step's counts: a kernel must list them in ``do_not_specialize_on_alignment``, and counts that vary by step in
    ``do_not_specialize``; otherwise requests wait for the compiler.
    constants: value by name of every constexpr argument, and of arguments known to be 1 or None.
    matrix: the kernel has matrix products, so tensor-core instructions must appear.
    options: further launch options that are part of the compiled kernel.
    """

    name: str
    kernel: Any
    signature: Mapping[str, str]
    constants: Mapping[str, Any]
    num_warps: int
    num_stages: int
    matrix: bool
    options: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class AotReport:
    """Result of a case on one architecture. `spill_bytes` is a thread's stack frame, where ptxas spills."""

    name: str
    arch: int
    shared_bytes: int
    tensor_memory_columns: int
    registers: int
    spill_bytes: int
    num_warps: int
    instructions: tuple[str, ...]
    matrix: bool
    seconds: float
    dependent: bool = False
    """Launched with `dependent.OPTION`."""
    before_wait: tuple[str, ...] = ()
    """Accesses to global memory before the wait of a dependent launch; all, without a wait."""
    silent: bool = False
    """The kernel should announce the next launch and does not."""

    def faults(self) -> list[str]:
        """Reasons why the device cannot run the kernel."""
        found = []
        if self.shared_bytes > SHARED_LIMIT[self.arch]:
            found.append(f"{self.shared_bytes} bytes of shared memory, limit per block {SHARED_LIMIT[self.arch]}")
        if self.tensor_memory_columns > TENSOR_MEMORY_LIMIT:
            found.append(f"{self.tensor_memory_columns} tensor memory columns of {TENSOR_MEMORY_LIMIT}")
        return found

    def problems(self) -> list[str]:
        """Reasons why the kernel must not ship: faults, and properties that make it slow; empty if it may ship."""
        found = self.faults()
        if self.spill_bytes:
            found.append(f"spills: {self.spill_bytes} bytes of stack per thread")
        if self.matrix and not self.instructions:
            found.append("matrix products without tensor cores")
        if self.before_wait:
            found.append(f"does not wait for its inputs before {self.before_wait[0]} (wait_for_inputs)")
        if self.silent:
            found.append("does not announce the next launch (wait_for_inputs, announce_next)")
        return found


def source_of(case: AotCase) -> ASTSource:
    """The case as Triton's compiler input, arguments in the kernel's order.

    Raises:
        TypeError: under the interpreter (TRITON_INTERPRET=1), where kernels are not compilable objects.
        ValueError: naming arguments that are neither in `signature` nor in `constants`, or unknown ones.
    """
    if not isinstance(case.kernel, triton.runtime.JITFunction):
        raise TypeError(f"{case.name}: the kernel was imported under the interpreter; compile in a process without it")
    names = case.kernel.arg_names
    given = set(case.signature) | set(case.constants)
    if given != set(names):
        raise ValueError(f"{case.name}: missing {sorted(set(names) - given)}, unknown {sorted(given - set(names))}")
    signature: dict[str, str] = {}
    attrs: dict[tuple[int, ...], list[list[Any]]] = {}
    for parameter in case.kernel.params:  # the same dictionaries as a launch: they are part of the cache key
        name, place = parameter.name, (parameter.num,)
        if name in case.constants:
            signature[name] = "constexpr"
            if version() >= NAMES_CONSTANTS:
                attrs[place] = []
            continue
        signature[name], _, divisor = case.signature[name].partition(":")
        pointer = signature[name].startswith("*")
        if divisor == "16" or (pointer and divisor != "1"):
            attrs[place] = [["tt.divisibility", 16]]
        elif pointer or (signature[name].startswith("i") and not parameter.do_not_specialize):
            attrs[place] = []
    return ASTSource(case.kernel, signature, dict(case.constants), attrs)


def compiler_input(case: AotCase, arch: int) -> dict[str, Any]:
    """The arguments of `triton.compile`."""
    options = {"num_warps": case.num_warps, "num_stages": case.num_stages, **case.options}
    if is_dependent(case.kernel, arch, options):
        options[OPTION] = True
    return {"src": source_of(case), "target": GPUTarget("cuda", arch, 32), "options": options}


def compile_case(case: AotCase, arch: int) -> AotReport:
    """Compiles for compute capability `arch` (90: H100, H200; 100: B200), or loads it from Triton's cache.

    Raises what the compiler raises, with the case's name as a note.
    """
    begin = time.perf_counter()
    try:
        kernel = triton.compile(**compiler_input(case, arch))
    except Exception as error:
        error.add_note(f"while compiling {case.name} for sm_{arch}")
        raise
    return report_of(case.name, kernel, arch, case.matrix, time.perf_counter() - begin)


def report_of(name: str, kernel: Any, arch: int, matrix: bool, seconds: float) -> AotReport:
    """The report of a `triton.compile` result."""
    registers, stack = resource_usage(kernel.asm["cubin"])
    ptx = kernel.asm["ptx"]
    dependent = bool(getattr(kernel.metadata, OPTION, False))
    return AotReport(
        name=name,
        arch=arch,
        shared_bytes=kernel.metadata.shared,
        tensor_memory_columns=getattr(kernel.metadata, "tmem_size", None) or 0,
        registers=registers,
        spill_bytes=stack,
        num_warps=kernel.metadata.num_warps,
        instructions=tuple(short for short, text in _INSTRUCTIONS.items() if text in ptx),
        matrix=matrix,
        seconds=seconds,
        dependent=dependent,
        before_wait=tuple(_ACCESS.findall(ptx.partition(_WAIT)[0])) if dependent else (),
        silent=arch >= OLDEST_ARCH and kernel.metadata.name in KERNELS and _ANNOUNCEMENT not in ptx,
    )


def resource_usage(cubin: bytes) -> tuple[int, int]:
    """(registers, stack bytes) per thread of the single kernel in a cubin, from cuobjdump."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "kernel.cubin")
        file.write_bytes(cubin)
        command = [knobs.nvidia.cuobjdump.path, "-res-usage", str(file)]
        text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    found = _USAGE.search(text)
    if found is None:
        raise RuntimeError(f"cuobjdump printed no resource usage:\n{text}")
    return int(found[1]), int(found[2])
