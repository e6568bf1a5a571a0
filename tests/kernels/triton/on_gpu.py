"""Launches of the tests' CPU tensors on a GPU: the memory of a launch's arguments is copied there, and back after it.
So the tests of this folder, which compare kernels with references on the CPU, run there as they are.
"""

from __future__ import annotations

import dataclasses
import os
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

GPU = "MOE_TEST_GPU"
"""Environment variable: run the kernels on a GPU."""


def is_there() -> bool:
    """Asks another process, since forked ones cannot use CUDA once this one has looked for devices."""
    look = "import sys, torch; sys.exit(not torch.cuda.is_available())"
    return subprocess.run([sys.executable, "-c", look], check=False).returncode == 0


def require() -> None:
    """Ends the run without a GPU: thousands of tests would fail."""
    if not is_there():
        pytest.exit(f"{GPU}=1: torch sees no CUDA device; check the driver and the build of torch", returncode=2)


class _Memory:
    """The storages of a launch's arguments: on the host, and on the GPU."""

    def __init__(self) -> None:
        self._pairs: dict[int, tuple[Tensor, Tensor]] = {}

    def there(self, value: Any) -> Any:
        """The argument, with tensors over the GPU's memory."""
        from triton.runtime.jit import TensorWrapper
        from triton.tools.tensor_descriptor import TensorDescriptor

        if isinstance(value, tuple):
            return tuple(map(self.there, value))
        if isinstance(value, TensorDescriptor):
            return dataclasses.replace(value, base=self.there(value.base))
        if isinstance(value, TensorWrapper):
            return TensorWrapper(self.there(value.base), value.dtype)
        if not isinstance(value, Tensor) or value.device.type != "cpu":
            return value
        storage = value.untyped_storage()
        if storage.data_ptr() not in self._pairs:
            host = torch.empty(0, dtype=torch.uint8).set_(storage, 0, (storage.nbytes(),), (1,))
            self._pairs[storage.data_ptr()] = host, host.to("cuda")
        there = self._pairs[storage.data_ptr()][1].untyped_storage()
        place = value.storage_offset(), value.size(), value.stride()
        return torch.empty(0, dtype=value.dtype, device="cuda").set_(there, *place)

    def bring_back(self) -> None:
        """Waits for the launch. A lost GPU ends the process: the test has failed, and only a new process has a GPU."""
        try:
            torch.cuda.synchronize()
        except RuntimeError as error:
            print(f"the GPU is lost: {error}", file=sys.__stderr__, flush=True)
            os._exit(3)
        for host, there in self._pairs.values():
            host.copy_(there)


def _moved(run: Callable[..., Any]) -> Callable[..., Any]:
    @torch.inference_mode()
    def launch(kernel: Any, *args: Any, **options: Any) -> Any:
        memory = _Memory()
        result = run(kernel, *map(memory.there, args), **{key: memory.there(x) for key, x in options.items()})
        memory.bring_back()
        return result

    return launch


def install() -> None:
    """For the whole process, before it imports kernels."""
    from triton.runtime.interpreter import InterpretedFunction
    from triton.runtime.jit import JITFunction

    from moe_engine.kernels.triton import grid_barrier

    own = grid_barrier.resident_programs

    def resident_programs(device: torch.device) -> int:
        """Those of the GPU for tensors on the CPU."""
        return own(torch.device("cuda", 0) if device.type == "cpu" else device)

    grid_barrier.resident_programs = resident_programs
    for kind in (JITFunction, InterpretedFunction):  # the latter on simulated devices
        kind.run = _moved(kind.run)
