"""The kernels that a GPU would compile: Triton compiles one for each combination of types, alignments, values of 1 and
constants of a launch. The interpreter compiles nothing; a launch of a new combination counts as a compilation."""

from __future__ import annotations

from functools import cache
from typing import Any

from triton.backends.compiler import GPUTarget
from triton.compiler.compiler import make_backend
from triton.runtime import interpreter
from triton.runtime.jit import JITFunction, create_function_from_signature

from moe_engine.kernels.triton import guard

_run = interpreter.InterpretedFunction.run
_reset = guard.reset
_seen: set[tuple[str, str]] = set()
late: list[str] = []
"""Kernels that were compiled after READY, with what was new."""


@cache
def _binder(kernel: Any) -> tuple[Any, JITFunction[Any]]:
    """Triton's own function from arguments to their specialization."""
    function = JITFunction(kernel.fn, **kernel.kwargs)
    backend = make_backend(GPUTarget("cuda", 90, 32))
    return create_function_from_signature(function.signature, function.params, backend), function


def specialization_of(kernel: Any, args: tuple[Any, ...], options: dict[str, Any]) -> str:
    """What the compiled kernel of a launch depends on."""
    bind, function = _binder(kernel)
    _, found, rest = bind(*args, **options)
    named = {parameter.name: key for parameter, key in zip(function.params, found)}
    return str(sorted({**rest, **named}.items()))


def run(self: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> Any:
    """Replaces `InterpretedFunction.run`."""
    name, key = self.fn.__name__, specialization_of(self, args, options)
    if (name, key) not in _seen:
        if guard._counts.is_ready:
            late.append(f"{name}: {_nearest(name, key)}")
        _seen.add((name, key))
        guard.note(f"Triton kernel {name}", 0.0, False)
    return _run(self, *args, grid=grid, warmup=warmup, **options)


def _nearest(name: str, key: str) -> str:
    """The difference from the most similar kernel."""
    parts = set(key.split("), ("))
    others = [set(other.split("), (")) for of, other in _seen if of == name]
    return "; ".join(sorted(min((parts - other for other in others), key=len, default=parts)))


def reset() -> None:
    """Replaces `guard.reset`: a new engine starts in a process that has compiled nothing."""
    _seen.clear()
    late.clear()
    _reset()


def install() -> None:
    """Idempotent."""
    interpreter.InterpretedFunction.run, guard.reset = run, reset
