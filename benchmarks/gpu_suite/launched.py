"""The Triton launches of a case, recorded on meta tensors without a device: the kernels that it reaches, and its work
by the cost functions of `step_costs`.

Bytes between two launches of a case count: a floor is that of its launches, not of a fused kernel.
"""

from __future__ import annotations

import inspect
import string
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial, wraps
from types import SimpleNamespace
from typing import Any, Concatenate, ParamSpec
from unittest.mock import patch

from benchmarks.gpu_suite.rows import triton_row
from benchmarks.kernel_cases import Call, KernelCase
from benchmarks.step_costs.costs import Routing, Setting, kernel_cost
from benchmarks.step_costs.hardware import Hardware

HARDWARE = Hardware.named("H200")
NO_EXPERTS = Routing(0, 0, 0, 0)
Sizes = ParamSpec("Sizes")


@dataclass(frozen=True)
class Launch:
    """A kernel, and its arguments and options by name, with its `grid`."""

    kernel: str
    arguments: SimpleNamespace


@dataclass(frozen=True)
class Counted:
    """Work of some launches."""

    bytes: int
    flops: int


@contextmanager
def recorded() -> Iterator[list[Launch]]:
    """Inside, launches are appended to the list and do nothing else, compiled or interpreted."""
    from triton.runtime.interpreter import InterpretedFunction
    from triton.runtime.jit import JITFunction

    from moe_engine.kernels.triton.dependent import DependentKernel

    found: list[Launch] = []

    def run(kernel: Any, *args: Any, grid: Any, warmup: bool = False, **options: Any) -> None:
        names = inspect.getfullargspec(kernel.fn).args
        known = {name: value for name, value in options.items() if name in names}
        given = options | inspect.getcallargs(kernel.fn, *args, **known)
        places = grid(given) if callable(grid) else grid
        found.append(Launch(kernel.fn.__name__, SimpleNamespace(**given, grid=tuple(places))))

    with ExitStack() as patches:
        for kind in (JITFunction, DependentKernel, InterpretedFunction):
            patches.enter_context(patch.object(kind, "run", run))
        yield found


def launches_of(case: KernelCase) -> list[Launch]:
    """Those of a call of the case on Triton's row."""
    with recorded() as found:
        call = case.prepare(triton_row(case.family), "meta")
        found.clear()
        call()
    return found


def work_of(case: KernelCase, setting: Setting) -> Counted:
    """Bytes and operations of the case's launches."""
    from benchmarks.step_costs import exchange_costs, family_costs, sampling_costs, triton_costs  # noqa: F401

    costs = [kernel_cost(launch.kernel, launch.arguments, setting) for launch in launches_of(case)]
    return Counted(round(sum(cost.bytes for cost in costs)), round(sum(cost.total_flops for cost in costs)))


def counted(
    family: str, name: str, prepare: Callable[[Any, str], Call], context: int = 0, routing: Routing = NO_EXPERTS,
    fp8: bool = False, compared: Callable[[Any], Any] = lambda found: found,
) -> KernelCase:  # fmt: skip
    """A case whose work is counted. context, routing: those of the cost functions' `Setting`."""
    work = partial(work_of, setting=Setting(context, routing, HARDWARE))
    return KernelCase(family, name, work, fp8, prepare, compared)


class _Names(string.Formatter):
    def format_field(self, value: Any, text: str) -> str:
        return str(value) if not text else text if value else ""


def kernel_case(
    family: str, name: str, *, context: str = "context", fp8: bool = False
) -> Callable[[Callable[Concatenate[Any, str, Sizes], Call]], Callable[Sizes, KernelCase]]:
    """Turns a function of a row, a device and sizes, which prepares a call, into one of the sizes that makes a
    `counted` case.

    Args:
        name: of a case, by its sizes: `{tokens}` is the size, `{late:.late}` the text if it is true.
        context: the size that is the cost functions' context, if there is one of this name.
    """

    def decorate(prepare: Callable[Concatenate[Any, str, Sizes], Call]) -> Callable[Sizes, KernelCase]:
        signature = inspect.signature(prepare)

        @wraps(prepare)
        def make(*args: Sizes.args, **options: Sizes.kwargs) -> KernelCase:
            sizes = signature.bind(None, "", *args, **options)
            sizes.apply_defaults()
            known = sizes.arguments

            def prepared(row: Any, device: str) -> Call:
                return prepare(row, device, *args, **options)

            return counted(family, _Names().format(name, **known), prepared, known.get(context, 0), fp8=fp8)

        return make

    return decorate
