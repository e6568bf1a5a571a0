"""Kernels for `test_dependent.py`, compiled in a process outside the interpreter; prints their reports as JSON.

``python -m tests.kernels.triton.dependent_kernels``
"""

from __future__ import annotations

import json

import torch
import triton.language as tl
from triton.compiler import compile

from moe_engine.kernels.triton.absent_device import absent_device
from moe_engine.kernels.triton.aot import AotCase, compile_case, compiler_input
from moe_engine.kernels.triton.dependent import KERNELS, announce_next, dependent_jit, wait_for_inputs
from moe_engine.kernels.triton.grid_barrier import COOPERATIVE


@dependent_jit
def waiting_kernel(x, out, SIZE: tl.constexpr):
    wait_for_inputs()
    place = tl.arange(0, SIZE)
    tl.store(out + place, tl.load(x + place) + 1.0)


@dependent_jit
def hasty_kernel(x, out, SIZE: tl.constexpr):
    place = tl.arange(0, SIZE)
    value = tl.load(x + place)
    wait_for_inputs()
    tl.store(out + place, value + 1.0)


@dependent_jit(do_not_specialize=["count"])
def forgetful_kernel(x, out, count, SIZE: tl.constexpr):
    place = tl.arange(0, SIZE)
    tl.store(out + place, tl.load(x + place, place < count, 0.0))


@dependent_jit
def late_kernel(x, out, SIZE: tl.constexpr):
    wait_for_inputs(announce=False)
    place = tl.arange(0, SIZE)
    value = tl.load(x + place)
    announce_next()
    tl.store(out + place, value + 1.0)


@dependent_jit
def silent_kernel(x, out, SIZE: tl.constexpr):
    wait_for_inputs(announce=False)
    place = tl.arange(0, SIZE)
    tl.store(out + place, tl.load(x + place) + 1.0)


def case(kernel, **more) -> AotCase:
    signature = {"x": "*fp32", "out": "*fp32"} | ({"count": "i32"} if kernel is forgetful_kernel else {})
    return AotCase(kernel.__name__, kernel, signature, {"SIZE": 128}, 1, 2, False, more)


def main() -> None:
    found = {}
    for kernel in (waiting_kernel, hasty_kernel, forgetful_kernel, silent_kernel):
        report = compile_case(case(kernel), 90)
        found[report.name] = report.dependent, report.before_wait, report.problems()
    texts: dict[str, dict[str, list[int]]] = {"waiting_kernel": {}, "late_kernel": {}}
    for kernel in (waiting_kernel, late_kernel):
        for arch, more in ((80, {}), (90, {}), (100, {}), (90, COOPERATIVE), (80, COOPERATIVE)):
            text = compile(**compiler_input(case(kernel, **more), arch)).asm["ptx"]
            name = f"sm_{arch}{' cooperative' * bool(more)}"
            texts[kernel.__name__][name] = [
                text.count(f"griddepcontrol.{part}") for part in ("wait", "launch_dependents")
            ]
    with absent_device(90) as compilations:
        rows = torch.empty(128, device="meta")
        waiting_kernel[(1,)](rows, rows, SIZE=128)
        waiting_kernel[(1,)](rows, rows, SIZE=128, **COOPERATIVE)
    launched = [report.dependent for report in compilations.reports]
    print(json.dumps({"kernels": found, "ptx": texts, "launched": launched, "declared": sorted(KERNELS)}))


if __name__ == "__main__":
    main()
