"""Buffers that are made once and used by every call: fresh pages cost the CPU more than the copy into them."""

from __future__ import annotations

import torch
from torch import Tensor

from moe_engine.parallel.dispatch.protocol import NUM_LIVE


class Workspace:
    """Grow-only buffers by name and slot. What `take` returned is valid until that name and slot are taken again."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._buffers: dict[tuple[str, int], Tensor] = {}
        self._views: dict[tuple[str, int], Tensor] = {}  # decode asks for the same shapes again and again

    def take(self, name: str, slot: int, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """An uninitialised tensor."""
        view = self._views.get((name, slot))
        if view is not None and view.shape == shape and view.dtype == dtype:
            return view
        num_bytes = torch.Size(shape).numel() * dtype.itemsize
        buffer = self._buffers.get((name, slot))
        if buffer is None or buffer.numel() < num_bytes:
            buffer = torch.empty(num_bytes, dtype=torch.uint8, device=self._device)
            self._buffers[name, slot] = buffer
        view = self._views[name, slot] = buffer[:num_bytes].view(dtype).view(shape)
        return view


class Slots:
    """Hands out the numbers of the results that are alive: the lowest that is free, so that whoever begins with none
    alive begins alike. Ranks that replay graphs recorded at different times then meet in the same slots."""

    def __init__(self) -> None:
        self._free = list(range(NUM_LIVE))

    def take(self) -> int:
        if not self._free:
            raise RuntimeError(f"{NUM_LIVE} dispatched batches are alive; combine one before the next dispatch")
        return self._free.pop(0)

    def give_back(self, slot: int) -> None:
        if slot in self._free:
            raise RuntimeError("this handle was combined before; a handle is used once")
        self._free = sorted((*self._free, slot))
