"""FlashInfer's wrapper objects: planned on the host once a step, run at each layer.

A wrapper holds one plan at a time, in a page-locked buffer that the device copies from. So a wrapper is planned again
only when the plan before is gone and some others were used since: the copy of a step in flight is left alone.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

WORKSPACE_BYTES = 128 << 20
"""What the library recommends."""

SPARE = 2
"""Free wrappers that rest before the one freed first is planned again."""


@lru_cache
def workspace(device: torch.device) -> Tensor:
    """The buffer for partial results, one for all that run on a device, one behind the other."""
    return torch.zeros(WORKSPACE_BYTES, dtype=torch.uint8, device=device)


class Planned:
    """A wrapper with a plan in it, and what its owner wants to remember beside it."""

    def __init__(self, wrapper: Any, detail: Any = None) -> None:
        self.wrapper = wrapper
        self.detail = detail


class Wrappers:
    """A supply of wrappers of one class."""

    def __init__(self, make: Callable[[], Any]) -> None:
        self._make = make
        self._free: deque[Any] = deque()

    def plan(self, *args: Any, detail: Any = None, **kwargs: Any) -> Planned:
        """A wrapper planned with these arguments; it comes back here when the result is no longer referred to."""
        wrapper = self._free.popleft() if len(self._free) > SPARE else self._make()
        wrapper.plan(*args, **kwargs)
        planned = Planned(wrapper, detail)
        weakref.finalize(planned, self._free.append, wrapper)
        return planned
