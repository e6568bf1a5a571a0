"""Triton kernels launched in a block, interpreted or compiled."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from triton.runtime.interpreter import InterpretedFunction
from triton.runtime.jit import JITFunction


@contextmanager
def launches() -> Iterator[list[str]]:
    """A list that receives the names of the kernels launched in the block, in order."""
    names: list[str] = []
    with pytest.MonkeyPatch.context() as patch:
        for kind in (InterpretedFunction, JITFunction):
            patch.setattr(kind, "run", _counted(kind.run, names))
        yield names


def _counted(run: Any, names: list[str]) -> Any:
    def counted(kernel: Any, *args: Any, **options: Any) -> Any:
        names.append(kernel.fn.__name__)
        return run(kernel, *args, **options)

    return counted
