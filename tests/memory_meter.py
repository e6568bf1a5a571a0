"""Memory of torch operators: live bytes of all storages created while the meter is on, and their peak.

Temporary memory inside an operator is not counted.
"""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class MemoryMeter(TorchDispatchMode):
    """`live` and `peak` in bytes since the meter was entered or `restart` was called; `largest` storage of all."""

    def __init__(self) -> None:
        super().__init__()
        self.live = self.peak = self.largest = 0
        self._known: dict[int, Any] = {}
        self.calls = 0

    def restart(self) -> None:
        """Restarts the peak, relative to the current live bytes."""
        self.peak, self.largest, self.calls = self.live, 0, 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.calls += 1
        before = {_storage(leaf)._cdata for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)}
        out = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(out):
            if isinstance(leaf, Tensor) and _storage(leaf)._cdata not in before:
                self._note(_storage(leaf))
        return out

    def _note(self, storage: torch.UntypedStorage) -> None:
        key, num_bytes = storage._cdata, storage.nbytes()
        if key in self._known:
            return
        self.live += num_bytes
        self.peak, self.largest = max(self.peak, self.live), max(self.largest, num_bytes)
        self._known[key] = weakref.finalize(storage, self._freed, key, num_bytes)

    def _freed(self, key: int, num_bytes: int) -> None:
        del self._known[key]
        self.live -= num_bytes


def _storage(tensor: Tensor) -> torch.UntypedStorage:
    return tensor.untyped_storage()
