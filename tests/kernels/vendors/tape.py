"""CUDA graphs without a GPU, as strict as they are: Python runs once, while launches are recorded.

A tape notes each torch operation and each library call with the very tensors it was given. Replaying runs these again
on the same memory and writes results where the first ones went; what the host decided stays as it was. So a plan that
was not renewed, a buffer that moved or a length that was read on the host shows as a wrong result.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

Result = TypeVar("Result")


class Tape(TorchDispatchMode):
    """Notes what runs inside `with`; implements `step_graphs.CapturedGraph`."""

    current: Tape | None = None

    def __init__(self) -> None:
        super().__init__()
        self._calls: list[tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any], list[Tensor]]] = []
        self._paused = False
        self.count = 0

    def __enter__(self) -> Tape:
        Tape.current = self
        return super().__enter__()

    def __exit__(self, *what: Any) -> None:
        Tape.current = None
        super().__exit__(*what)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if self._paused:
            return func(*args, **(kwargs or {}))
        if func is torch.ops.aten._local_scalar_dense.default:
            raise RuntimeError("operation not permitted when stream is capturing: a value is read")
        return self._note(func, args, kwargs or {})

    def launch(self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """A library call: recorded as one."""
        self._paused = True
        try:
            return self._note(function, args, kwargs)
        finally:
            self._paused = False

    def _note(self, function: Callable[..., Any], args: Any, kwargs: dict[str, Any]) -> Any:
        result = function(*args, **kwargs)
        self._calls.append((function, args, kwargs, _tensors(result)))
        return result

    def replay(self) -> None:
        self.count += 1
        for function, args, kwargs, kept in self._calls:
            for old, new in zip(kept, _tensors(function(*args, **kwargs)), strict=True):
                if old.shape != new.shape:
                    raise RuntimeError(f"{function} made {list(old.shape)} when recorded, {list(new.shape)} now")
                if old.numel() and old.data_ptr() != new.data_ptr():
                    old.copy_(new)


class TapeGraphs:
    """Implements `step_graphs.GraphBackend`. Capturing leaves no results, as on a GPU."""

    def __init__(self) -> None:
        self.recordings: list[Tape] = []

    def capture(self, run: Callable[[], None]) -> Tape:
        tape = Tape()
        with tape:
            run()
        self.recordings.append(tape)
        return tape

    @property
    def num_replays(self) -> int:
        return sum(tape.count for tape in self.recordings)


def recording() -> bool:
    """Whether launches are being recorded now."""
    return Tape.current is not None


def launched(function: Callable[..., Result]) -> Callable[..., Result]:
    """A function that stands for launches of a library: a tape records it as one call."""

    @wraps(function)
    def call(*args: Any, **kwargs: Any) -> Result:
        tape = Tape.current
        return function(*args, **kwargs) if tape is None else tape.launch(function, args, kwargs)

    return call


def _tensors(result: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(result) if isinstance(leaf, Tensor)]
