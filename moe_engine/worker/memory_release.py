"""Releases the memory of a rank's weights and KV pool to the system, and allocates it again later.

On the CPU the pages are dropped and the addresses stay, because whole-layer calls hold them; the weights are kept in a
file. On an accelerator the storages become empty and get new memory later, so no object may hold an address; the
weights are kept in host memory. KV is zeros afterwards.
"""

from __future__ import annotations

import ctypes
import os
import socket
import sys
import tempfile
from collections.abc import Iterable
from typing import Annotated, Any, Literal

import msgspec
import psutil
import torch
from torch import Tensor, UntypedStorage

from moe_engine.errors import MoeEngineError
from moe_engine.kernels.host_memory import host_memory
from moe_engine.models.footprint import weights_of
from moe_engine.worker.device_stream import DeviceStream
from moe_engine.worker.model_runner import ModelRunner
from moe_engine.worker.weight_parts import parts_of
from moe_engine.worker.weight_update import WeightUpdate

KV, WEIGHTS = "kv_cache", "weights"
Tag = Literal["kv_cache", "weights"]
RELEASED = "the weights are released; call /resume_memory_occupation first"
_DONT_NEED = 4  # MADV_DONTNEED of Linux: pages of private memory are freed, and read as zeros
_IN_MEMORY = ("tmpfs", "ramfs")


class ReleaseArgs(msgspec.Struct, forbid_unknown_fields=True):
    tags: Annotated[list[Tag], msgspec.Meta(min_length=1)]


class MemoryRelease:
    """Runs on the worker's thread, between steps, without a request in a row.

    Args:
        weights: updates and reads are refused while the weights are released.
    """

    def __init__(self, runner: ModelRunner, weights: WeightUpdate) -> None:
        self._runner, self._weights = runner, weights
        self._away: dict[str, _Away] = {}

    def release(self, args: ReleaseArgs) -> dict[str, int]:
        """Releases memory; returns bytes by tag, 0 for memory already released.

        Raises:
            MoeEngineError: the memory cannot be released; it is unchanged.
        """
        stream = self._runner.stream
        if (why := _obstacle(self._runner)) is not None:
            raise MoeEngineError(why)
        released: dict[str, int] = {}
        for tag in args.tags:
            if tag in self._away:
                released[tag] = 0
                continue
            if tag == WEIGHTS and self._weights.refusal is not None:
                raise MoeEngineError(self._weights.refusal)
            storages = distinct(self._kv() if tag == KV else self._all_weights())
            away = (_PagesAway if not stream.asynchronous else _StoragesAway)(stream, storages, keeps=tag == WEIGHTS)
            self._away[tag] = away
            released[tag] = away.num_bytes
            if self._runner.fused is not None:
                self._runner.fused.forget_prefix()
            if tag == WEIGHTS:
                self._weights.refuse(RELEASED)
        return released

    def resume(self, args: ReleaseArgs) -> None:
        """Allocates the memory again. Memory that is not released is unchanged.

        Raises:
            MoeEngineError: the system has too little memory; the tags are still released.
        """
        for tag in args.tags:
            if tag in self._away:
                self._away[tag].back()
                del self._away[tag]
                if tag == WEIGHTS:
                    self._weights.refuse(None)

    def _kv(self) -> Iterable[Tensor]:
        runner = self._runner
        yield from runner.kv_pool.tensors()
        if runner.rows.states is not None:
            yield from runner.rows.states.tensors()

    def _all_weights(self) -> list[Tensor]:
        self._weights.settle()
        try:
            return [tensor for part in parts_of(self._runner, exported=True) for tensor in weights_of(part)]
        except TypeError as error:
            raise MoeEngineError(str(error)) from None


def _obstacle(runner: ModelRunner) -> str | None:
    if runner.stream.asynchronous:
        if runner.forward.graphs is not None:
            return "CUDA graphs hold the addresses of weights and KV cache; start with --disable-cuda-graph"
        return None
    if sys.platform != "linux":
        return f"{sys.platform}: memory of a process can be given back on Linux only"
    return None


def distinct(tensors: Iterable[Tensor]) -> list[UntypedStorage]:
    """The memory of the tensors, each once."""
    found: dict[int, UntypedStorage] = {}
    for tensor in tensors:
        storage = tensor.untyped_storage()
        if storage.nbytes():
            found.setdefault(storage.data_ptr(), storage)
    return list(found.values())


class _Away:
    """Memory that has been released.

    Args:
        keeps: `back` restores its content; otherwise zeros.
    """

    num_bytes = 0

    def __init__(self, stream: DeviceStream, storages: list[UntypedStorage], keeps: bool) -> None: ...

    def back(self) -> None: ...


class _PagesAway(_Away):
    """Host memory: whole pages inside each storage, which keep their addresses."""

    def __init__(self, stream: DeviceStream, storages: list[UntypedStorage], keeps: bool) -> None:
        self._storages = storages
        self._file: Any = _saved(storages) if keeps else None
        page = os.sysconf("SC_PAGE_SIZE")
        libc = ctypes.CDLL(None, use_errno=True)
        for storage in storages:
            first = -(-storage.data_ptr() // page) * page
            length = (storage.data_ptr() + storage.nbytes()) // page * page - first
            if length <= 0:
                continue
            if libc.madvise(ctypes.c_void_p(first), ctypes.c_size_t(length), _DONT_NEED):
                error = os.strerror(ctypes.get_errno())
                self.back()
                raise MoeEngineError(f"{length} bytes of memory cannot be given back: {error}")
            self.num_bytes += length
        if not keeps:
            for storage in storages:
                _zero_edges(storage, page)

    def back(self) -> None:
        if self._file is None:
            return  # pages are zeros until they are written
        needed, available = self.num_bytes, host_memory().available_bytes
        if needed > available:
            raise MoeEngineError(
                f"{socket.gethostname()}: {needed / 2**30:.2f} GiB of weights, and {available / 2**30:.2f} GiB are "
                "available"
            )
        begin = 0
        for storage in self._storages:
            _read(self._file.fileno(), begin, _bytes_of(storage).numpy().data)
            begin += storage.nbytes()
        self._file.close()


class _StoragesAway(_Away):
    """Memory of an accelerator: storages of size 0."""

    def __init__(self, stream: DeviceStream, storages: list[UntypedStorage], keeps: bool) -> None:
        self._stream, self._storages = stream, storages
        self.num_bytes = sum(storage.nbytes() for storage in storages)
        available = host_memory().available_bytes
        if keeps and self.num_bytes > available:
            raise MoeEngineError(
                f"{socket.gethostname()}: the weights wait in host memory: {self.num_bytes / 2**30:.2f} GiB, and "
                f"{available / 2**30:.2f} GiB are available"
            )
        self._sizes = [storage.nbytes() for storage in storages]
        self._copies = [_host_copy(storage) for storage in storages] if keeps else None
        stream.synchronize()
        for storage in storages:
            storage.resize_(0)
        stream.empty_cache()

    def back(self) -> None:
        free = self._stream.free_bytes()
        if self.num_bytes > free:
            raise MoeEngineError(
                f"{self._stream.device}: {self.num_bytes / 2**30:.2f} GiB were released, and {free / 2**30:.2f} GiB "
                "are free; end the other user of the device first"
            )
        for i, (storage, size) in enumerate(zip(self._storages, self._sizes)):
            storage.resize_(size)
            if self._copies is None:
                _bytes_of(storage).zero_()
            else:
                _bytes_of(storage).copy_(self._copies[i])
        self._stream.synchronize()


def _bytes_of(storage: UntypedStorage) -> Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


def _host_copy(storage: UntypedStorage) -> Tensor:
    return torch.empty(storage.nbytes(), dtype=torch.uint8).copy_(_bytes_of(storage))


def _zero_edges(storage: UntypedStorage, page: int) -> None:
    """Zeros the start and end of a storage, which share pages with other memory and are not dropped."""
    data, begin = _bytes_of(storage), storage.data_ptr()
    data[: min(storage.nbytes(), -begin % page)].zero_()
    data[max(0, storage.nbytes() - (begin + storage.nbytes()) % page) :].zero_()


def _saved(storages: list[UntypedStorage]) -> Any:
    """An unnamed file with the storages, one after the other.

    Raises:
        MoeEngineError: no space for it, or the folder is itself in memory.
    """
    folder, needed = tempfile.gettempdir(), sum(storage.nbytes() for storage in storages)
    if (kind := _file_system(folder)) in _IN_MEMORY:
        raise MoeEngineError(f"the weights wait in a file, and {folder} is in memory ({kind}); set TMPDIR to a disk")
    free = psutil.disk_usage(folder).free
    if needed > free:
        raise MoeEngineError(f"the weights wait in a file of {needed} bytes, and {folder} has {free}; set TMPDIR")
    file = tempfile.TemporaryFile(dir=folder, buffering=0)  # noqa: SIM115  # open until the weights are back
    try:
        for storage in storages:
            data = _bytes_of(storage).numpy().data
            while data:
                data = data[file.write(data) :]
    except OSError as error:
        file.close()
        raise MoeEngineError(f"the weights cannot be written to {folder}: {error.strerror}") from None
    return file


def _file_system(folder: str) -> str:
    """Type of the file system."""
    real = os.path.realpath(folder)
    mounts = [
        item
        for item in psutil.disk_partitions(all=True)
        if os.path.commonpath([real, item.mountpoint]) == item.mountpoint
    ]
    return str(max(mounts, key=lambda item: len(item.mountpoint)).fstype) if mounts else ""


def _read(file: int, begin: int, buffer: memoryview) -> None:
    while buffer:
        count = os.preadv(file, [buffer], begin)
        if not count:
            raise MoeEngineError("the file with the weights has become shorter")
        buffer, begin = buffer[count:], begin + count
