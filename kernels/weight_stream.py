"""Weights of some layers in host memory, copied to the device layer by layer, ahead of the steps' use.

Two device buffers take turns: while one layer computes from its buffer, a second stream copies the next layer's weights
into the other. A layer always uses the same buffer, so its tensors keep their addresses, and a CUDA graph may contain
the copies: every pass begins and ends them itself.

Source of the scheme: vLLM's ``--cpu-offload-gb`` and SGLang's offloader with prefetch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from moe_engine.kernels.workspaces import WEIGHT_BUFFERS

ALIGNMENT = 512
"""Alignment in bytes of each storage in a buffer, as torch's allocator aligns them."""
PINNED_PART = 64 << 20
LEAST_PART = 1 << 20
"""Page-locked memory is allocated in powers of two between these, as torch rounds each allocation up to one."""


class PrefetchStream(Protocol):
    """A second stream of the device."""

    def follow(self) -> None:
        """Copies started from now on begin after all work launched so far on the steps' stream."""

    def copy(self, pairs: Sequence[tuple[Tensor, Tensor]]) -> Any:
        """Starts copies (device, page-locked host memory); returns their event."""

    def wait(self, event: Any) -> None:
        """Work launched from now on on the steps' stream begins after the event."""


@dataclass(frozen=True)
class _View:
    """A tensor over a layer's storages, with its place in the buffer in bytes."""

    tensor: Tensor
    offset: int
    size: torch.Size
    stride: tuple[int, ...]

    def put(self, buffer: Tensor) -> None:
        tensor = self.tensor
        tensor.set_(buffer.untyped_storage(), self.offset // tensor.element_size(), self.size, self.stride)


@dataclass(frozen=True)
class _Stored:
    """A layer's weights: its tensors, and the host memory of all its storages, in parts."""

    views: list[_View]
    parts: list[Tensor]
    num_bytes: int


class WeightStream:
    """The streamed layers of one model, by their places among each other.

    Args:
        layers: indices of the model's layers that are streamed, in order.
        pinned: allocates page-locked host memory, uint8 [n].
    """

    def __init__(
        self, layers: Sequence[int], stream: PrefetchStream, pinned: Callable[[int], Tensor], device: torch.device
    ) -> None:
        self.layers = tuple(layers)
        self._stream, self._pinned, self._device = stream, pinned, device
        self._stored: list[_Stored] = []
        self._buffers: list[Tensor] = []
        self._ready: list[Any] = []

    @property
    def host_bytes(self) -> int:
        return sum(layer.num_bytes for layer in self._stored)

    @property
    def buffer_bytes(self) -> int:
        """Device memory."""
        return sum(buffer.nbytes for buffer in self._buffers)

    def owns(self, tensor: Tensor) -> bool:
        """True if a tensor is in one of the buffers."""
        return any(tensor.untyped_storage().data_ptr() == buffer.data_ptr() for buffer in self._buffers)

    def add(self, tensors: Sequence[Tensor]) -> int:
        """Moves a layer's tensors to host memory; returns its place. Their values are undefined outside of
        `enter` and `leave` from now on. The tensors' storages belong to no other layer."""
        offsets: dict[int, int] = {}
        storages, end = [], 0
        for tensor in tensors:
            storage = tensor.untyped_storage()
            if storage.nbytes() and storage.data_ptr() not in offsets:
                offsets[storage.data_ptr()] = end
                storages.append((end, _bytes_of(tensor)))
                end += -(-storage.nbytes() // ALIGNMENT) * ALIGNMENT
        views = {
            id(tensor): _View(
                tensor,
                offsets[tensor.untyped_storage().data_ptr()] + int(tensor.storage_offset()) * tensor.element_size(),
                tensor.size(),
                tensor.stride(),
            )
            for tensor in tensors
            if tensor.untyped_storage().nbytes()
        }
        self._reserve(end)
        place = len(self._stored)
        buffer = self._buffers[place % WEIGHT_BUFFERS]
        for offset, content in storages:
            buffer[offset : offset + len(content)].copy_(content)
        parts = [self._pinned(size) for size in pinned_sizes(end)]
        for part, there in zip(parts, _cut(buffer, parts)):
            part.copy_(there)  # waits: the buffer is free for the next layer
        self._stored.append(_Stored(list(views.values()), parts, end))
        for view in views.values():
            view.put(buffer)
        return place

    def begin(self) -> None:
        """Begins a pass over all layers: starts the copies of the first ones."""
        self._stream.follow()
        self._ready = [self._copy(place) for place in range(min(WEIGHT_BUFFERS, len(self._stored)))]

    def enter(self, place: int) -> None:
        """To be called before a layer's forward: work launched from now on finds its weights."""
        self._stream.wait(self._ready[place])

    def leave(self, place: int) -> None:
        """To be called after a layer's forward: its buffer gets the weights of a later layer."""
        if (later := place + WEIGHT_BUFFERS) < len(self._stored):
            self._stream.follow()
            self._ready.append(self._copy(later))

    def _copy(self, place: int) -> Any:
        parts = self._stored[place].parts
        return self._stream.copy(list(zip(_cut(self._buffers[place % WEIGHT_BUFFERS], parts), parts)))

    def _reserve(self, num_bytes: int) -> None:
        """Buffers of at least this size. Tensors of earlier layers move to larger ones."""
        if self._buffers and len(self._buffers[0]) >= num_bytes:
            return
        for index in range(WEIGHT_BUFFERS):
            buffer = torch.empty(num_bytes, dtype=torch.uint8, device=self._device)
            for layer in self._stored[index::WEIGHT_BUFFERS]:
                for view in layer.views:
                    view.put(buffer)
            self._buffers[index : index + 1] = [buffer]


def pinned_sizes(num_bytes: int) -> list[int]:
    """Sizes of parts with `num_bytes` in total, each but the last a power of two: little memory is lost to rounding."""
    sizes = [PINNED_PART] * (num_bytes // PINNED_PART)
    rest, size = num_bytes % PINNED_PART, PINNED_PART // 2
    while rest >= LEAST_PART:
        if rest >= size:
            sizes.append(size)
            rest -= size
        size //= 2
    return sizes + [rest] * (rest > 0)


def _cut(buffer: Tensor, parts: Sequence[Tensor]) -> list[Tensor]:
    """The beginning of a buffer [n], cut like `parts`."""
    total = sum(len(part) for part in parts)
    return list(buffer[:total].split([len(part) for part in parts]))


def _bytes_of(tensor: Tensor) -> Tensor:
    """All bytes of a tensor's storage."""
    storage = tensor.untyped_storage()
    return torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(storage, 0, (storage.nbytes(),), (1,))
