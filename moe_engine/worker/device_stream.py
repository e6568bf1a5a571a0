"""Copies between host and device: uploads of host buffers, downloads of results. The only worker file with code per
device.

On the CPU both directions are views of the same memory. On CUDA, buffers are pinned, copies are asynchronous, and
downloads are awaited on an event, so that the launching thread never waits.
"""

from __future__ import annotations

import itertools
import math
import mmap
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import numpy as np
import torch
from torch import Tensor

from moe_engine.kernels.host_memory import host_memory
from moe_engine.kernels.weight_stream import WeightStream
from moe_engine.parallel.overlap import CommStream, CommThread


class HostCopy:
    """Tensors being downloaded. `wait` returns them on the host; arrays are on the host already."""

    def __init__(self, tensors: Sequence[Tensor] | Sequence[np.ndarray], event: torch.cuda.Event | None = None) -> None:
        self._tensors = tensors
        self._event = event

    @property
    def ready(self) -> bool:
        return self._event is None or self._event.query()

    def wait(self) -> Sequence[Any]:
        if self._event is not None:
            self._event.synchronize()
        return self._tensors


class StepClock:
    """Times at which an accelerator reaches points of a step: the launching thread is far ahead of it.

    Args:
        stream: an asynchronous device.
    """

    def __init__(self, stream: DeviceStream) -> None:
        assert stream.asynchronous
        self._marks: list[torch.cuda.Event] = []
        self.mark()

    def mark(self) -> None:
        """Marks the point after all work launched so far."""
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        self._marks.append(event)

    def seconds(self) -> list[float]:
        """Seconds between neighboring marks; waits until the last one is reached."""
        self._marks[-1].synchronize()
        return [a.elapsed_time(b) / 1e3 for a, b in itertools.pairwise(self._marks)]


class DeviceStream:
    """The device of one rank and its copies.

    `asynchronous`: torch calls only launch work and return before it is done; reading a value stalls.
    """

    def __init__(self, device: str | torch.device) -> None:
        self.device = torch.device(device)
        self.asynchronous = self.device.type != "cpu"
        if self.device.type == "cuda" and self.device.index is None:
            self.device = torch.device("cuda", torch.cuda.current_device())

    def bind_thread(self) -> None:
        """Call once on the thread that runs the steps."""
        if self.device.type == "cuda":
            torch.cuda.set_device(self.device)

    def staging(self, num_int64: int) -> Tensor:
        """A host buffer to fill and pass to `upload`; new each time, so a copy in flight is never overwritten."""
        if not self.asynchronous:
            return torch.from_numpy(np.empty(num_int64, dtype=np.int64))
        return torch.empty(num_int64, dtype=torch.int64, pin_memory=True)

    def upload(self, staging: Tensor) -> Tensor:
        """A host tensor on the device. Memory that is not pinned is copied first: its upload might wait for a step."""
        if not self.asynchronous:
            return staging
        pinned = staging if staging.is_pinned() else staging.pin_memory()
        return pinned.to(self.device, non_blocking=True)

    def arrays(self, *tensors: Tensor) -> tuple[Any, ...]:
        """The tensors, or arrays over the same memory on the CPU: for arithmetic in code common to both."""
        return tensors if self.asynchronous else tuple(tensor.numpy() for tensor in tensors)

    def upload_parts(self, staging: Tensor, parts: Sequence[np.ndarray]) -> list[Tensor]:
        """`upload`, split: one tensor for each contiguous array over the memory of `staging`."""
        if not self.asynchronous:
            return [torch.from_numpy(part) for part in parts]
        base, there = staging.data_ptr(), self.upload(staging).view(torch.uint8)
        begins = [part.ctypes.data - base for part in parts]
        return [
            there[begin : begin + part.nbytes].view(torch.from_numpy(part[:0]).dtype).view(part.shape)
            for begin, part in zip(begins, parts)
        ]

    def from_array(self, array: np.ndarray) -> Tensor:
        """`upload` of an array."""
        return self.upload(torch.from_numpy(array))

    def from_list(self, values: Sequence[Any], dtype: torch.dtype) -> Tensor:
        """A small device tensor of host values or lists of them, for values that change rarely."""
        return self.upload(torch.tensor(values, dtype=dtype))

    def rows_of(self, tensor: Tensor, indices: Sequence[int]) -> Tensor:
        """Some rows of a device tensor, as new memory. Indexing with a list would synchronize with an accelerator."""
        return tensor.index_select(0, self.from_list(indices, torch.int64))

    def read(self, tensor: Tensor) -> np.ndarray:
        """A tensor's values on the host; synchronizes with an accelerator."""
        return tensor.cpu().numpy() if self.asynchronous else tensor.numpy()

    def host_view(self, tensor: Tensor) -> np.ndarray | None:
        """A contiguous tensor as an array over the same memory, None on an accelerator; bfloat16 as raw int16.

        For the small bookkeeping of a step: numpy operators take a fraction of torch's time, and do not release the
        interpreter lock to the scheduler's thread, which would keep it until its own work is done.
        """
        if self.asynchronous:
            return None
        return (tensor.view(torch.int16) if tensor.dtype == torch.bfloat16 else tensor).numpy()

    def download(self, tensors: Sequence[Tensor]) -> HostCopy:
        """Starts copying tensors to the host; on the CPU there is nothing to copy."""
        if not self.asynchronous:
            return HostCopy(tensors)
        copies = [torch.empty(t.shape, dtype=t.dtype, pin_memory=True) for t in tensors]
        for copy, tensor in zip(copies, tensors):
            copy.copy_(tensor, non_blocking=True)
        event = torch.cuda.Event()
        event.record()
        return HostCopy(copies, event)

    def synchronize(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def wait_for_copies(self) -> None:
        """Waits for the work launched on the calling thread's stream."""
        if self.device.type == "cuda":
            torch.cuda.current_stream(self.device).synchronize()

    def lazy_zeros(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Zeros whose memory is committed at the first write, if the system supports it.

        `torch.zeros` on the CPU writes every page immediately (observed with torch 2.13); an anonymous mapping is
        zeroed by the kernel and costs nothing until used.
        """
        if self.asynchronous or not hasattr(mmap, "MAP_ANONYMOUS"):
            return torch.zeros(*shape, dtype=dtype, device=self.device)
        if not (numel := math.prod(shape)):
            return torch.zeros(*shape, dtype=dtype)
        mapping = mmap.mmap(-1, numel * dtype.itemsize, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        return torch.frombuffer(mapping, dtype=dtype).view(*shape)

    def host_bytes(self, num_rows: int, width: int) -> Tensor:
        """Host memory [num_rows, width] for copies from and to the device; pinned on an accelerator."""
        if not self.asynchronous:
            return self.lazy_zeros((num_rows, width), torch.uint8)
        return torch.zeros(num_rows, width, dtype=torch.uint8, pin_memory=True)

    def empty_cache(self) -> None:
        """Returns freed memory of torch's allocator to the device."""
        if self.device.type == "cuda":
            torch.cuda.empty_cache()

    def free_bytes(self) -> int:
        """Free memory of the device, with what torch's allocator has cached (on the CPU: of the machine)."""
        if self.device.type == "cuda":
            self.empty_cache()
            return torch.cuda.mem_get_info(self.device)[0]
        return host_memory().available_bytes


class DeviceCommStream:
    """Implements `parallel.overlap.CommStream` by a second stream of an accelerator."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)

    def run(self, call: Callable[..., Any], *args: Any) -> StreamPending:
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            result = call(*args)
        return StreamPending(self._device, self._stream.record_event(), result, args)


class StreamPending:
    """A call whose work runs on another stream.

    Args:
        kept: tensors that the call reads. If they were freed before `wait`, the first stream could reuse their memory
            while the other stream still reads it.
    """

    def __init__(self, device: torch.device, done: Any, result: Any, kept: Any) -> None:
        self._device, self._done, self._result, self._kept = device, done, result, kept

    def wait(self) -> Any:
        torch.cuda.current_stream(self._device).wait_event(self._done)
        self._kept = None
        return self._result


class CopyStream:
    """A thread with a stream of its own, for copies while steps run. Calls run in order. A call begins when the work
    launched before it by the calling thread is done; its future is done when its own work is.

    Args:
        stream: the device of the steps.
    """

    def __init__(self, stream: DeviceStream) -> None:
        self._device = stream.device
        self._stream = torch.cuda.Stream(stream.device)
        self._thread = ThreadPoolExecutor(1, "worker-kv-copies", initializer=stream.bind_thread)

    def run(self, call: Callable[..., None], *args: Any) -> Future[None]:
        before = torch.cuda.Event()
        before.record()
        return self._thread.submit(self._run, before, call, args)

    def _run(self, before: torch.cuda.Event, call: Callable[..., None], args: tuple[Any, ...]) -> None:
        with torch.inference_mode(), torch.cuda.stream(self._stream):
            self._stream.wait_event(before)
            call(*args)
            self._stream.synchronize()

    def close(self) -> None:
        self._thread.shutdown()


class DevicePrefetch:
    """Implements `kernels.weight_stream.PrefetchStream`."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)

    def follow(self) -> None:
        self._stream.wait_stream(torch.cuda.current_stream(self._device))

    def copy(self, pairs: Sequence[tuple[Tensor, Tensor]]) -> torch.cuda.Event:
        with torch.cuda.stream(self._stream):
            for there, host in pairs:
                there.copy_(host, non_blocking=True)
        return self._stream.record_event()

    def wait(self, event: torch.cuda.Event) -> None:
        torch.cuda.current_stream(self._device).wait_event(event)


class CudaGraphs:
    """Implements `step_graphs.GraphBackend`. All graphs share one memory pool, which only one of them uses at a
    time."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._pool = torch.cuda.graph_pool_handle()

    def capture(self, run: Callable[[], None]) -> torch.cuda.CUDAGraph:
        graph = torch.cuda.CUDAGraph()
        torch.cuda.synchronize(self._device)
        # another thread waits for results meanwhile; only this thread is restricted to capturable calls
        with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
            run()
        return graph


def make_graphs(device: torch.device) -> CudaGraphs | None:
    """The graph backend of a device; None on a CPU, which has no kernel launches to save."""
    return CudaGraphs(device) if device.type == "cuda" else None


def make_weight_stream(stream: DeviceStream, layers: Sequence[int]) -> WeightStream | None:
    """Keeps the weights of some layers in host memory; None without such layers."""
    if not layers:
        return None

    def pinned(num_bytes: int) -> Tensor:
        return torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True)

    return WeightStream(layers, DevicePrefetch(stream.device), pinned, stream.device)


def make_copy_stream(stream: DeviceStream) -> CopyStream | None:
    """The stream for copies while steps run; None on a CPU, where a copy takes as long during a step as in it."""
    return CopyStream(stream) if stream.asynchronous else None


def make_comm_stream(device: torch.device) -> CommStream:
    """A comm stream in addition to the stream or thread that runs steps on a device."""
    return CommThread() if device.type == "cpu" else DeviceCommStream(device)
