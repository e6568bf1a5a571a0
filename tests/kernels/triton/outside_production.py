"""Launches of a model's steps in production sizes, outside the interpreter on an absent H200, in a separate process:
``python -m tests.kernels.triton.outside_production FOLDER MODEL FORM``.

Prints the number of kernels (0: the model has no such form), and for each kernel, and for one with an error, the sums
and products of 32 bits in its addresses that exceed them with the largest grid and arguments of its launches. A grid
that no device launches is an error.
"""

from __future__ import annotations

import inspect
import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import triton
from triton.backends.compiler import GPUTarget
from triton.runtime.jit import JITFunction

from benchmarks.gpu_suite.served_models import CHUNK, forms_of, launch_of, run_steps
from moe_engine.kernels.triton.absent_device import absent_device
from tests.kernels.triton import grid_limits
from tests.kernels.triton.address_bounds import (
    ACCEPTED,
    KNOWN,
    LIMIT,
    Bounds,
    first_representation,
    narrow_kernel,
    too_large,
)
from tests.kernels.triton.cache_keys import Key, key_of, there


@dataclass
class Seen:
    """The compiler's input, the largest grid, and the largest integers by argument.

    narrow: the kernel multiplies slots in 32 bits, since the elements of the caches are fewer.
    """

    given: dict[str, Any]
    grid: tuple[int, ...]
    values: dict[str, int]
    narrow: bool = False

    def bounds(self, known: Bounds) -> Bounds:
        """Those of the launches."""
        strides = [
            value for name, value in self.values.items() if name in ("cache_stride", "key_stride", "value_stride")
        ]
        loaded = min(known.loaded, (LIMIT - 1) // max(strides)) if self.narrow else known.loaded
        return known._replace(loaded=loaded, grid=self.grid, values=self.values)


@contextmanager
def seen(arch: int) -> Iterator[dict[Key, Seen]]:
    """Inside, launches are added, and neither compile nor run. Raises GridError."""
    found: dict[Key, Seen] = {}
    run, own = JITFunction.run, Seen({}, (), {})

    def launched(kernel: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> Any:
        names = inspect.getfullargspec(kernel.fn).args
        known = {name: value for name, value in options.items() if name in names}
        given = inspect.getcallargs(kernel.fn, *args, **known)
        places = tuple(grid(given) if callable(grid) else grid)
        grid_limits.check(kernel.fn.__name__, places)
        own.grid = places + (1,) * (3 - len(places))
        own.narrow = given.get("WIDE") is False
        own.values = {name: abs(value) for name, value in given.items() if type(value) is int}
        return run(kernel, *args, grid=grid, warmup=warmup, **options)

    def note(src: Any, target: GPUTarget, options: dict[str, Any], **rest: Any) -> None:
        given = {"src": src, "target": target, "options": options}
        before = found.setdefault(key_of(src, target, options), replace(own, given=given))
        before.grid = tuple(map(max, before.grid, own.grid))
        before.values = {name: max(value, before.values[name]) for name, value in own.values.items()}

    with (
        absent_device(arch),
        patch.object(triton.compiler, "compile", note),
        patch.object(JITFunction, "run", launched),
    ):
        yield found


def main() -> None:
    folder, model, form = Path(sys.argv[1]), *sys.argv[2:]
    config = launch_of(folder, model, form) if form in forms_of(model) else None
    with seen(90) as launches:
        if config is not None:
            run_steps(config)
        narrow_kernel[(CHUNK,)](there(1), CHUNK, WIDTH=CHUNK)
    found: dict[str, list[str]] = {}
    for one in launches.values():
        kernel = one.given["src"].fn.__name__
        bounds = one.bounds(KNOWN.get(kernel, Bounds()))
        wrong = too_large(first_representation(one.given), bounds) - ACCEPTED.get(kernel, set())
        found[kernel] = sorted({*found.get(kernel, ()), *wrong})
    print(json.dumps([len(launches) - 1, found]))


if __name__ == "__main__":
    main()
