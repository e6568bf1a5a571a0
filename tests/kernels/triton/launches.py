"""Triton kernels launched in a block under the interpreter."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from triton.runtime.interpreter import InterpretedFunction


@contextmanager
def launches() -> Iterator[list[str]]:
    """A list that receives the names of the kernels launched in the block, in order."""
    names: list[str] = []
    run = InterpretedFunction.run

    def counted(kernel: Any, *args: Any, **options: Any) -> Any:
        names.append(kernel.__name__)
        return run(kernel, *args, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(InterpretedFunction, "run", counted)
        yield names
