"""Buffers allocated once and reused by every call: fresh pages cost the CPU more than the copy into them."""

from __future__ import annotations

import torch
from torch import Tensor

from moe_engine.parallel.dispatch.protocol import NUM_LIVE


class Workspace:
    """Grow-only buffers by name and slot. A result is valid until the next `take` of its name and slot."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._buffers: dict[tuple[str, int], Tensor] = {}
        self._views: dict[tuple[str, int], Tensor] = {}  # decode takes the same shapes repeatedly

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
    """Allocates slots to pending results: the lowest free slot, so that a start without pending results is always the
    same. Ranks that replay graphs captured at different times then use the same slots."""

    def __init__(self) -> None:
        self._free = list(range(NUM_LIVE))

    def take(self) -> int:
        if not self._free:
            raise RuntimeError(f"{NUM_LIVE} dispatched batches are pending; combine one before the next dispatch")
        return self._free.pop(0)

    def release(self, slot: int) -> None:
        if slot in self._free:
            raise RuntimeError("this handle was already combined; a handle can be used once")
        self._free = sorted((*self._free, slot))
