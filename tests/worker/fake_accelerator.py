"""A fake accelerator in host memory that records every synchronization, such as reading a value."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from moe_engine.worker.device_stream import DeviceStream, HostCopy

_READS = {
    Tensor.item, Tensor.tolist, Tensor.numpy, Tensor.cpu, Tensor.__bool__, Tensor.__int__, Tensor.__float__,
    Tensor.__index__, Tensor.nonzero, torch.nonzero, Tensor.unique, torch.unique, Tensor.masked_select,
    torch.masked_select, torch.equal, Tensor.equal,
}  # fmt: skip

waits: list[tuple[str, str]] = []
"""Synchronizations, with their threads."""


def note(what: str) -> None:
    waits.append((what, threading.current_thread().name))


class Remote(Tensor):
    """A tensor on the fake device; results computed from it are on the device too."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        picks = func is Tensor.__getitem__ and isinstance(args[1], Tensor) and args[1].dtype == torch.bool
        if func in _READS or picks:
            note(func.__name__)
        return super().__torch_function__(func, types, args, kwargs or {})


def remote(tensor: Tensor) -> Tensor:
    return tensor.as_subclass(Remote)


class _Event:
    def query(self) -> bool:
        return False

    def synchronize(self) -> None:
        note("wait")


class FakeAccelerator(DeviceStream):
    """Executes eagerly, but all its tensors are `Remote`."""

    def __init__(self) -> None:
        super().__init__("cpu")
        self.asynchronous = True

    def staging(self, num_int64: int) -> Tensor:
        return torch.empty(num_int64, dtype=torch.int64)

    def upload(self, staging: Tensor) -> Tensor:
        return remote(staging.clone())

    def read(self, tensor: Tensor) -> np.ndarray:
        note("read")
        return tensor.as_subclass(Tensor).numpy().copy()

    def download(self, tensors: Sequence[Tensor]) -> HostCopy:
        return HostCopy([tensor.as_subclass(Tensor).clone() for tensor in tensors], _Event())  # type: ignore[arg-type]

    def synchronize(self) -> None:
        note("synchronize")

    def lazy_zeros(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        return remote(torch.zeros(*shape, dtype=dtype))
