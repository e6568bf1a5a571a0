"""Memory of simulated devices: blocks of host memory behind tensors with the device ``cuda:N``."""

from __future__ import annotations

import ctypes
import mmap
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, UntypedStorage

from tests.simulated_cuda import observer

POISON = 0xFF  # NaN in every float format, -1 in integers
TOTAL = 8 << 30
"""Bytes of a device."""
MAPPED = 1 << 18
"""Min bytes of zero blocks with a separate mapping: an allocator would write zeros into reused memory."""
_CUDA = 2  # DLPack's number
_BYTES = (1, 8, 1)  # DLPack's uint8: code, bits, lanes


class _DLTensor(ctypes.Structure):
    _fields_ = [
        ("data", ctypes.c_void_p), ("device_type", ctypes.c_int), ("device_id", ctypes.c_int), ("ndim", ctypes.c_int),
        ("code", ctypes.c_uint8), ("bits", ctypes.c_uint8), ("lanes", ctypes.c_uint16),
        ("shape", ctypes.POINTER(ctypes.c_int64)), ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("byte_offset", ctypes.c_uint64),
    ]  # fmt: skip


class _Managed(ctypes.Structure):
    _fields_ = [("tensor", _DLTensor), ("context", ctypes.c_void_p), ("deleter", ctypes.c_void_p)]


_capsule = ctypes.pythonapi.PyCapsule_New
_capsule.restype, _capsule.argtypes = ctypes.py_object, [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p]


@dataclass(eq=False)
class Block:
    """An allocation. `host` [bytes] uint8 exists longer than the device's tensors if the simulation needs it."""

    host: Tensor
    device: int
    stream: Any = None
    """The current stream at the allocation: the memory may be reused after that stream's work."""
    accesses: list[Any] = field(default_factory=list)
    """For `order`."""
    recorded: set[Any] = field(default_factory=set)
    """Streams named by ``Tensor.record_stream``."""
    pooled: bool = False
    """True if it permanently belongs to a pool of graphs."""
    shared: bool = False
    """True if other processes write to it."""
    managed: Any = None
    """The object held by torch's tensors; None after their release."""

    @property
    def address(self) -> int:
        return self.host.data_ptr()


class Memory:
    """All blocks of device tensors, by address."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._blocks: dict[int, Block] = {}
        self._library: Any = None
        self._given_back = (ctypes.c_void_p * 256)()
        self._by_managed: dict[int, Block] = {}
        self.used = [0] * 64  # bytes, by device
        self._reserved = [0] * 64
        self.total = TOTAL
        self.on_take: Callable[[Block], None] = lambda block: None
        self.on_free: Callable[[Block], None] = lambda block: None
        self.current_stream: Callable[[int], Any] = lambda device: None

    def attach(self, library: ctypes.CDLL) -> None:
        """Attaches the compiled ``device.cpp``."""
        self._library = library

    def new(self, num_bytes: int, device: int) -> Tensor:
        """uint8 [num_bytes] on the device, poisoned."""
        size = max(num_bytes, 1)
        if observer.observer is not None and size < MAPPED:
            host = torch.zeros(size, dtype=torch.uint8)
        elif observer.observer is not None:  # untouched pages take no memory and no time
            pages = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
            host = torch.frombuffer(pages, dtype=torch.uint8)
        else:
            host = torch.full((size,), POISON, dtype=torch.uint8)
        made = self.adopt(host, device)
        return made if size == num_bytes else made[:num_bytes]

    def adopt(self, host: Tensor, device: int) -> Tensor:
        """Makes bytes [n] of the host memory of the device; only device tensors should use it from now on."""
        managed = self._managed(host, device)
        return torch.from_dlpack(_capsule(ctypes.addressof(managed), b"dltensor", None))

    def resize(self, storage: UntypedStorage, num_bytes: int) -> None:
        """``UntypedStorage.resize_``: new memory with the content of the old one, which is released. Tensors over the
        storage stay."""
        device, old, address, managed = storage.device.index, self._blocks.get(storage.data_ptr()), None, None
        if num_bytes:
            host = torch.full((num_bytes,), POISON, dtype=torch.uint8)
            managed, address = ctypes.byref(self._managed(host, device)), host.data_ptr()
            if old is not None:
                kept = min(num_bytes, old.host.nbytes)
                host[:kept].copy_(old.host[:kept])
        pointers = ctypes.c_void_p(storage._cdata), ctypes.c_void_p(address)
        self._library.replace_memory(*pointers, ctypes.c_int64(num_bytes), managed, device)

    def _managed(self, host: Tensor, device: int) -> _Managed:
        """A block over host memory."""
        self.collect()
        if self.used[device] + host.nbytes > self.total:
            raise torch.OutOfMemoryError(f"CUDA out of memory: simulated device {device} has {self.total >> 20} MiB")
        block = Block(host, device, self.current_stream(device))
        self.on_take(block)
        managed = _Managed(
            _DLTensor(host.data_ptr(), _CUDA, device, 1, *_BYTES, (ctypes.c_int64 * 1)(host.numel()), None, 0),
            None,
            ctypes.cast(self._library.give_back, ctypes.c_void_p),
        )
        block.managed = managed
        with self._lock:
            self._blocks[block.address] = block
            self._by_managed[ctypes.addressof(managed)] = block
            self.used[device] += host.nbytes
            self._reserved[device] = max(self._reserved[device], self.used[device])
        return managed

    @torch.inference_mode()
    def collect(self) -> None:
        """Handles the memory released since the last call."""
        with self._lock:
            while count := self._library.take_given_back(self._given_back, len(self._given_back)):
                for managed in self._given_back[:count]:
                    block = self._by_managed.pop(managed)
                    del self._blocks[block.address]
                    self.used[block.device] -= block.host.nbytes
                    block.managed = None
                    self.on_free(block)
                    poison(block)

    def free(self, device: int) -> int:
        """Bytes that the device has beside torch's, whose allocator keeps what tensors give back."""
        return self.total - self._reserved[device]

    def empty_cache(self) -> None:
        """``torch.cuda.empty_cache``."""
        self.collect()
        self._reserved[:] = self.used

    def block(self, tensor: Tensor) -> Block:
        return self._blocks[tensor.untyped_storage().data_ptr()]

    def blocks(self) -> list[Block]:
        with self._lock:
            return list(self._blocks.values())

    def host(self, tensor: Tensor) -> Tensor:
        """A CPU tensor over the memory of a device tensor."""
        there = torch.empty(0, dtype=tensor.dtype)
        if not tensor.numel() and not tensor.untyped_storage().data_ptr():
            return there.expand(tensor.shape) if tensor.dim() == 1 else there.new_empty(tensor.shape)
        storage = self.block(tensor).host.untyped_storage()
        return there.set_(storage, tensor.storage_offset(), tensor.size(), tensor.stride())

    def device(self, host: Tensor, device: int) -> Tensor:
        """A device tensor over the memory of a CPU tensor, whose whole storage becomes the device's."""
        size = host.untyped_storage().nbytes()
        if not size:
            return self.strided(host.shape, host.stride(), host.dtype, device)
        raw = self.adopt(torch.empty(0, dtype=torch.uint8).set_(host.untyped_storage(), 0, (size,), (1,)), device)
        return _shaped(raw, host.shape, host.stride(), host.dtype, host.storage_offset())

    def strided(self, size: Sequence[int], stride: Sequence[int], dtype: torch.dtype, device: int) -> Tensor:
        """``torch.empty_strided``."""
        last = sum((n - 1) * step for n, step in zip(size, stride))
        elements = 0 if 0 in size else last + 1
        return _shaped(self.new(elements * dtype.itemsize, device), size, stride, dtype, 0)


def _shaped(raw: Tensor, size: Sequence[int], stride: Sequence[int], dtype: torch.dtype, offset: int) -> Tensor:
    """A tensor over all bytes of a storage."""
    if rest := raw.numel() % dtype.itemsize:
        raw = raw[:-rest]
    return raw.view(dtype).as_strided(size, stride, offset)


def poison(block: Block) -> None:
    """Overwrites memory that must not be read any more."""
    if observer.observer is None:
        block.host.fill_(POISON)


MEMORY = Memory()
