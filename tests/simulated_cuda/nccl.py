"""``torch.distributed``'s backend "nccl" on simulated devices: gloo transfers their memory.

Operations are launches on the current stream, and on the group's own where ``async_op`` is asked for; the host waits
for them no more than for others, and graphs record them. A recording moves nothing: results are then what this rank
brought. A rank that dies is not noticed: who waits for it hangs, as a device does, until the watchdog ends the process.

Of the host's part one thing is not so: operations end before their launch returns, so that ranks wait for each other
there.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import distributed_c10d

from tests.simulated_cuda import streams
from tests.simulated_cuda.memory import MEMORY
from tests.simulated_cuda.operators import Launch

FP8 = {torch.float8_e4m3fn, torch.float8_e5m2}
MOVES = FP8 | {
    torch.float32, torch.float16, torch.float64, torch.bfloat16, torch.int8, torch.uint8, torch.int32, torch.int64,
    torch.bool,
}  # fmt: skip
"""Dtypes with an NCCL number."""
NO_TIMEOUT = timedelta(0)
launches: dict[str, int] = {}
"""Counts by operation; operations of graphs count at each replay."""


class ProcessGroupNCCL(dist.ProcessGroup):
    """The whole group: host tensors use gloo if the group has it in addition to "nccl"."""

    class Options:
        """``ProcessGroupNCCL.Options``."""

        is_high_priority_stream = False
        _timeout = timedelta(minutes=10)

    def __init__(self, store: Any, rank: int, size: int, options: Options) -> None:
        super().__init__(rank, size)
        self._timeout = options._timeout
        self._gloo = dist.ProcessGroupGloo(dist.PrefixStore("simulated", store), rank, size, self._timeout)
        self._register_backend(torch.device("cpu"), dist.ProcessGroup.BackendType.GLOO, self._gloo)
        self._stream: Any = None
        self._device: torch.device | None = None

    def _set_sequence_number_for_group(self) -> None:
        self._gloo._set_sequence_number_for_group()

    # -- used by libraries

    def _get_backend(self, device: torch.device) -> Any:
        return self if torch.device(device).type == "cuda" else self._gloo

    def _comm_ptr(self) -> int:
        """The communicator of the current device, created by its first collective."""
        made = self._device is not None and self._device.index == streams.index_of()
        return id(self) if made else 0

    # -- operations

    def allreduce(self, tensors: Sequence[Tensor], opts: Any = None) -> Any:
        opts = opts or dist.AllreduceOptions()
        return self._do("allreduce", tensors, tensors, opts, lambda x: None, sums=True)

    def broadcast(self, tensors: Sequence[Tensor], opts: Any = None) -> Any:
        opts = opts or dist.BroadcastOptions()
        return self._do("broadcast", tensors, tensors, opts, lambda x: None)

    def all_gather_single(self, out: Tensor, x: Tensor, opts: Any = None) -> Any:
        opts = opts or dist.AllgatherOptions()
        if out.numel() != x.numel() * self.size():
            raise ValueError("output tensor size must be equal to world_size times input tensor size")

        def alone(out: Tensor, x: Tensor) -> None:
            out.view(self.size(), -1).copy_(x.reshape(1, -1))

        return self._do("_allgather_base", [out], [x], opts, alone)

    def reduce_scatter_single(self, out: Tensor, x: Tensor, opts: Any = None) -> Any:
        opts = opts or dist.ReduceScatterOptions()
        if x.numel() != out.numel() * self.size():
            raise ValueError("input tensor must be the same size as output size times world size")

        def alone(out: Tensor, x: Tensor) -> None:
            out.view(-1).copy_(x.view(self.size(), -1)[self.rank()])

        return self._do("_reduce_scatter_base", [out], [x], opts, alone, sums=True)

    def all_to_all_single(
        self, out: Tensor, x: Tensor, out_rows: Sequence[int], x_rows: Sequence[int], opts: Any = None
    ) -> Any:
        opts = opts or dist.AllToAllOptions()
        for tensor, rows in ((out, out_rows), (x, x_rows)):
            if rows and (len(rows) != self.size() or sum(rows) != len(tensor)):
                raise RuntimeError("Split sizes doesn't match total dim 0 size")
            if not rows and len(tensor) % self.size():
                raise RuntimeError("Tensor's dim 0 does not divide equally across group size")

        def alone(out: Tensor, x: Tensor) -> None:
            common = min(len(out), len(x))
            out.zero_()[:common].copy_(x[:common])

        return self._do("alltoall_base", [out], [x], opts, alone, list(out_rows), list(x_rows))

    def allgather(self, out: Sequence[Sequence[Tensor]], x: Sequence[Tensor], opts: Any = None) -> Any:
        if self._takes(x, False):
            raise NotImplementedError("lists of tensors are gathered on the host alone")
        return self._gloo.allgather(out, x, opts or dist.AllgatherOptions())

    alltoall_base, _allgather_base, _reduce_scatter_base = all_to_all_single, all_gather_single, reduce_scatter_single

    def send(self, tensors: Sequence[Tensor], to: int, tag: int = 0) -> Any:
        return self._message("send", tensors[0], to, tag)

    def recv(self, tensors: Sequence[Tensor], source: int, tag: int = 0) -> Any:
        return self._message("recv", tensors[0], source, tag)

    def barrier(self, opts: Any = None) -> Any:
        opts = opts or dist.BarrierOptions()
        if opts.device is None or opts.device.type == "cpu":
            return self._gloo.barrier(opts)
        self.allreduce([torch.zeros(1, device=opts.device)])
        streams.note_wait("barrier")
        return _Done()

    def abort(self) -> None:
        self._gloo.abort()

    def shutdown(self) -> None:
        """No effect: no work continues after a launch."""

    # -- launches

    def _do(
        self, name: str, out: Sequence[Tensor], x: Sequence[Tensor], opts: Any, alone: Callable[..., None],
        *rows: list[int], sums: bool = False,
    ) -> Any:  # fmt: skip
        """Runs gloo's operation `name`."""
        together = out is x
        call = getattr(self._gloo, name)
        if not self._takes([*out, *x], sums):
            return call(out, opts) if together else call(out[0], x[0], *rows, opts)
        launch, stream = self._launch(name, out[0].device, opts.asyncOp)
        for tensor in x:
            launch.input_format(tensor)
        for tensor in out:
            launch.writes(tensor)
        there = [MEMORY.host(tensor) for tensor in (out if together else [out[0], x[0]])]

        def run() -> None:
            launches[name] = launches.get(name, 0) + 1
            self._wait(lambda: call(there, opts) if together else call(*there, *rows, opts))

        if launch.graph is None:
            run()
        else:
            alone(*there) if not together else alone(there[0])
            launch.graph.add(run)
        return self._work(stream, [*out, *x])

    def _message(self, name: str, x: Tensor, peer: int, tag: int) -> Any:
        call = getattr(self._gloo, name)
        if not self._takes([x], False):
            return call([x], peer, tag)
        launch, stream = self._launch(name, x.device, True)
        if launch.graph is not None:
            raise NotImplementedError("messages of a graph")
        launch.input_format(x) if name == "send" else launch.writes(x)
        launches[name] = launches.get(name, 0) + 1
        work = call([MEMORY.host(x)], peer, tag)
        return self._work(stream, [x], lambda: self._wait(lambda: work))

    def _takes(self, tensors: Sequence[Tensor], sums: bool) -> bool:
        """True if the tensors are on the device.

        Raises:
            RuntimeError, ValueError: as ProcessGroupNCCL's.
        """
        if not any(x.is_cuda for x in tensors):
            if "gloo" not in str(dist.get_backend(self)):
                raise RuntimeError("No backend type associated with device type cpu")
            return False
        for x in tensors:
            if not x.is_cuda or x.is_sparse:
                raise ValueError("Tensors must be CUDA and dense")
            if not x.is_contiguous():
                raise ValueError("Tensors must be contiguous")
            if x.dtype not in MOVES:
                raise RuntimeError(f"Input tensor data type is not supported for NCCL process group: {x.dtype}")
            if sums and x.dtype in FP8:
                raise RuntimeError("Unsupported Float8 type for NCCL reduction")
            if x.device != (self._device or tensors[0].device):
                raise RuntimeError(f"a communicator of {self._device or tensors[0].device} is given {x.device}")
        return True

    def _launch(self, name: str, device: torch.device, beside: bool) -> tuple[Launch, Any]:
        """Launches, on the group's stream if `beside`, which is then returned."""
        current = streams.current(device)
        if self._device is None:
            if current.capturing is not None:
                raise RuntimeError(
                    f"{name}: a group's first operation makes its communicator, which a graph cannot record"
                )
            self._device = device
        if not beside:
            return Launch(name, device), None
        if self._stream is None:
            self._stream = streams.Stream(device)
        self._stream.wait_stream(current)
        with streams.on_stream(self._stream):
            return Launch(name, device), self._stream

    def _work(self, stream: Any, tensors: list[Tensor], finish: Callable[[], None] = lambda: None) -> Any:
        return _Done() if stream is None else _Work(stream, tensors, finish)

    def _wait(self, start: Callable[[], Any]) -> None:
        """Waits for gloo; endlessly if gloo fails, because a device does not detect failures."""
        began = time.monotonic()
        try:
            start().wait()
        except RuntimeError as error:
            time.sleep(max(0.0, began + self._timeout.total_seconds() - time.monotonic()))
            print(f"Watchdog caught collective operation timeout: {error}", file=sys.stderr, flush=True)
            os.abort()


class _Done:
    """Work on the current stream, which needs no wait."""

    def wait(self, timeout: timedelta = NO_TIMEOUT) -> bool:
        return True

    def is_completed(self) -> bool:
        return True


class _Work:
    """Work on a group's stream: `wait` makes the current stream wait for it. Keeps its tensors until then."""

    def __init__(self, stream: streams.Stream, tensors: list[Tensor], finish: Callable[[], None]) -> None:
        self._device, self._event = stream.device, stream.record_event()
        self._tensors, self._finish = tensors, finish
        self._lock = threading.Lock()

    def wait(self, timeout: timedelta = NO_TIMEOUT) -> bool:
        with self._lock:
            self._finish()
            self._finish = lambda: None
        self._event.wait(streams.current(self._device))
        if timeout != NO_TIMEOUT:  # then the host also waits
            self._event.synchronize()
        self._tensors = []
        return True

    def is_completed(self) -> bool:
        return self._event.query()


def install() -> None:
    """Installs the backend for the whole process; idempotent."""
    distributed_c10d._NCCL_AVAILABLE = True
    distributed_c10d.default_pg_nccl_timeout = ProcessGroupNCCL.Options._timeout
    torch.cuda.nccl.version = lambda: (2, 27, 5)
    distributed_c10d.ProcessGroupNCCL = ProcessGroupNCCL
    dist.ProcessGroupNCCL = ProcessGroupNCCL
