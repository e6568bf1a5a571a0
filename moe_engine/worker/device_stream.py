"""How the worker meets its device: host buffers that go there, results that come back. The only file here that asks
which device it is.

On the CPU both directions are views of the same memory. On CUDA buffers are pinned, copies are asynchronous, and what
comes back is awaited on an event, so that the launching thread never waits.
"""

from __future__ import annotations

import mmap
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor


class HostCopy:
    """Tensors on their way to the host. `wait` returns them there."""

    def __init__(self, tensors: Sequence[Tensor], event: torch.cuda.Event | None = None) -> None:
        self._tensors = tensors
        self._event = event

    @property
    def ready(self) -> bool:
        return self._event is None or self._event.query()

    def wait(self) -> Sequence[Tensor]:
        if self._event is not None:
            self._event.synchronize()
        return self._tensors


class DeviceStream:
    """The device of one rank and its copies.

    `asynchronous`: work is only launched by torch calls and goes on after they return; reading a value stalls it.
    """

    def __init__(self, device: str | torch.device) -> None:
        self.device = torch.device(device)
        self.asynchronous = self.device.type != "cpu"
        if self.device.type == "cuda" and self.device.index is None:
            self.device = torch.device("cuda", torch.cuda.current_device())

    def bind_thread(self) -> None:
        """Called once by the thread that will run the steps."""
        if self.device.type == "cuda":
            torch.cuda.set_device(self.device)

    def staging(self, num_int64: int) -> Tensor:
        """A host buffer to fill and give to `upload`; fresh each time, so a copy under way is never overwritten."""
        return torch.empty(num_int64, dtype=torch.int64, pin_memory=self.asynchronous)

    def upload(self, staging: Tensor) -> Tensor:
        return staging.to(self.device, non_blocking=True) if self.asynchronous else staging

    def from_list(self, values: Sequence[int] | Sequence[float], dtype: torch.dtype) -> Tensor:
        """A small device tensor of host values, for things that change rarely."""
        return torch.tensor(values, dtype=dtype, device=self.device)

    def read(self, tensor: Tensor) -> np.ndarray:
        """A tensor's values on the host, now: an accelerator is waited for."""
        return tensor.cpu().numpy()

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

    def lazy_zeros(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Zeros whose memory is taken only when first written, where the system can do that.

        `torch.zeros` on the CPU writes every page at once (tried on torch 2.13); an anonymous mapping is zero by
        itself and costs nothing until used.
        """
        if self.asynchronous or not hasattr(mmap, "MAP_ANONYMOUS"):
            return torch.zeros(*shape, dtype=dtype, device=self.device)
        numel = 1
        for size in shape:
            numel *= size
        if numel == 0:
            return torch.zeros(*shape, dtype=dtype)
        mapping = mmap.mmap(-1, numel * dtype.itemsize, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        return torch.frombuffer(mapping, dtype=dtype).view(*shape)

    def free_bytes(self) -> int:
        """Memory that can still be taken on the device (on the CPU: of the machine)."""
        if self.device.type == "cuda":
            return torch.cuda.mem_get_info(self.device)[0]
        import psutil

        return int(psutil.virtual_memory().available)
