"""Installs simulated devices in torch and Triton, for the rest of this process.

Must run before torch creates its first CUDA tensor, and with TRITON_INTERPRET=1 before Triton is imported.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

COUNT = "SIMULATED_CUDA_DEVICES"
"""Environment variable: number of devices."""
SKIP = "MOE_SKIP_SIMULATED_CUDA"
"""Environment variable: skips the tests that need them."""
MULTIPROCESSORS = 8
"""A small number, because persistent kernels start this number of programs."""
CAPABILITY = (9, 0)

_kept: list[Any] = []


def why_not() -> str | None:
    """The missing requirement of simulated devices, or None."""
    if not shutil.which("g++"):
        return "g++, for the devices' part in C++"
    return None if find_spec("triton") else "triton, whose kernels its interpreter runs (make test installs it)"


def require() -> None:
    """For a test: fails if a requirement is missing, and skips only on another system or if SKIP is set."""
    import pytest

    if os.environ.get(SKIP):
        pytest.skip(f"{SKIP} is set")
    if sys.platform != "linux":
        pytest.skip("devices are simulated on Linux only")
    if missing := why_not():
        pytest.fail(f"simulated GPUs need {missing}; {SKIP}=1 leaves their tests out")


def installed() -> bool:
    """True if this process has simulated devices."""
    return bool(_kept)


def install() -> None:
    """Idempotent."""
    if _kept:
        return
    os.environ["TRITON_INTERPRET"] = "1"
    import torch

    device = ctypes.CDLL(str(_device(torch)))
    _kept.append(device)
    from tests.simulated_cuda import operators, order, streams
    from tests.simulated_cuda.memory import MEMORY

    MEMORY.attach(device)
    MEMORY.on_take, MEMORY.on_free = order.taken, order.freed
    MEMORY.current_stream = streams.current
    library = torch.library.Library("_", "IMPL")
    library.fallback(operators.fallback, "CUDA")
    _kept.append(library)
    if torch.version.cuda is not None:
        from tests.simulated_cuda import cuda_build

        _kept.append(cuda_build.take_kernels_away())
    library = torch.library.Library("aten", "IMPL")  # composites that need a kernel of the device
    library.impl("copy_", operators.copy, "CUDA", allow_override=True)
    library.impl("_foreach_copy_", operators.copy_lists, "CUDA", allow_override=True)
    _kept.append(library)
    _runtime(torch)
    _tensors(torch)
    if torch.distributed.is_available():
        from tests.simulated_cuda import nccl, symmetric

        nccl.install()
        symmetric.install()
    try:
        import triton  # noqa: F401
    except ImportError:
        return
    from tests.kernels.triton import interpreter
    from tests.simulated_cuda import kernels, specializations

    interpreter.install()
    kernels.install()
    specializations.install()


def _device(torch: Any) -> Path:
    """The library, compiled once per torch version."""
    root, source = Path(torch.__file__).parent, Path(__file__).with_name("device.cpp")
    digest = hashlib.sha256(source.read_bytes()).hexdigest()[:12]
    built = Path(tempfile.gettempdir()) / f"simulated-cuda-{os.getuid()}-{torch.__version__}-{digest}.so"
    if not built.exists():
        partial = built.with_suffix(f".{os.getpid()}")
        command = ["g++", "-std=c++20", "-O1", "-shared", "-fPIC", f"-I{root}/include", str(source), "-o", str(partial)]
        abi = f"-D_GLIBCXX_USE_CXX11_ABI={int(torch._C._GLIBCXX_USE_CXX11_ABI)}"
        subprocess.run([*command, abi, f"-L{root}/lib", "-lc10"], check=True)
        partial.rename(built)
    return built


def _runtime(torch: Any) -> None:
    """``torch.cuda``."""
    from moe_engine.kernels import host_calls
    from tests.simulated_cuda import failures, forks, graphs, operators, profiler, streams
    from tests.simulated_cuda.memory import MEMORY

    cuda = torch.cuda
    count = streams.count_devices = int(os.environ.get(COUNT, "1"))
    properties = SimpleNamespace(
        name="NVIDIA H200 (simulated)", major=CAPABILITY[0], minor=CAPABILITY[1], total_memory=MEMORY.total,
        multi_processor_count=MULTIPROCESSORS,
        max_threads_per_multi_processor=2048, shared_memory_per_block_optin=232448, warp_size=32,
        L2_cache_size=50 << 20,
    )  # fmt: skip

    def used(device: Any = None) -> int:
        return MEMORY.used[streams.index_of(device)]

    def free(device: Any = None) -> int:
        return MEMORY.free(streams.index_of(device))

    def empty_cache() -> None:
        failures.raise_broken()
        MEMORY.empty_cache()

    def nothing(*args: Any, **kwargs: Any) -> None:
        """No effect."""

    replaced = {
        "is_available": lambda: True, "is_initialized": lambda: True, "init": nothing, "_lazy_init": nothing,
        "device_count": lambda: count, "current_device": streams.index_of, "set_device": streams.set_device,
        "device": streams.on_device, "get_device_properties": lambda device=None: properties,
        "get_device_name": lambda device=None: properties.name, "get_device_capability": lambda device=None: CAPABILITY,
        "mem_get_info": lambda device=None: (free(device), MEMORY.total), "memory_allocated": used,
        "max_memory_allocated": used, "memory_reserved": lambda device=None: MEMORY.total - free(device),
        "reset_peak_memory_stats": nothing, "empty_cache": empty_cache, "ipc_collect": nothing,
        "can_device_access_peer": lambda a, b: True,
        "is_bf16_supported": lambda *a, **k: True,
        "synchronize": streams.synchronize, "current_stream": streams.current, "default_stream": streams.default,
        "Stream": streams.Stream, "Event": streams.Event, "stream": streams.on_stream, "set_stream": streams.set_stream,
        "CUDAGraph": graphs.Graph, "graph_pool_handle": graphs.pool_handle, "manual_seed_all": nothing,
        "manual_seed": nothing, "get_arch_list": lambda: ["sm_90"],
        "_sleep": lambda cycles: nothing(streams.current().launch()),
        "is_current_stream_capturing": lambda: streams.current().capturing is not None,
    }  # fmt: skip
    torch._C._host_emptyCache = nothing
    host_calls.call_in_order = operators.call_in_order
    torch.profiler.profile = profiler.profile

    def own(name: str, value: Any) -> Any:
        """One object for each name: torch.compile finds its rules by object."""
        if isinstance(value, type):
            return value
        if name not in (*forks.LOOKS, *forks.USES):
            return lambda *args, **kwargs: value(*args, **kwargs)

        def call(*args: Any, **kwargs: Any) -> Any:
            forks.called(name)
            return value(*args, **kwargs)

        return call

    for name, value in replaced.items():
        setattr(cuda, name, own(name, value))
    torch.accelerator.is_available = lambda: True
    torch.accelerator.device_count = lambda: count
    torch.accelerator.current_accelerator = lambda check_available=False: torch.device("cuda")
    cuda.graphs.is_current_stream_capturing = replaced["is_current_stream_capturing"]


def _tensors(torch: Any) -> None:
    """Parts of pinned memory and streams that bypass the dispatcher."""
    from tests.simulated_cuda import operators, streams
    from tests.simulated_cuda.memory import MEMORY

    def pinned_too(make: Any) -> Any:
        def makes(*args: Any, pin_memory: bool = False, **kwargs: Any) -> Any:
            made = make(*args, **kwargs)
            if not pin_memory:
                return made
            if made.is_cuda:
                raise RuntimeError("Only dense CPU tensors can be pinned")
            if make is empty and made.numel():
                made.view(torch.uint8).fill_(0xFF) if made.dim() else made.fill_(-1)
            return operators.pin(made)

        return makes

    empty = torch.empty

    def pin_memory(self: Any, device: Any = None) -> Any:
        if self.is_cuda:
            raise RuntimeError("cannot pin a CUDA tensor: only dense CPU tensors can be pinned")
        return self if operators.is_pinned(self) else operators.pin(self.clone())

    def record_stream(self: Any, stream: Any) -> None:
        MEMORY.block(self).recorded.add(stream)

    resize = torch.UntypedStorage.resize_

    def resize_(self: Any, num_bytes: int) -> Any:
        if self.device.type != "cuda":
            return resize(self, num_bytes)
        MEMORY.resize(self, num_bytes)
        return self

    torch.Event = streams.AnyEvent
    for make in (empty, torch.zeros, torch.ones, torch.full, torch.tensor, torch.rand, torch.randn):
        setattr(torch, make.__name__, pinned_too(make))
    torch.Tensor.pin_memory = pin_memory
    torch.Tensor.is_pinned = lambda self, device=None: operators.is_pinned(self)
    torch.Tensor.record_stream = record_stream
    torch.UntypedStorage.resize_ = resize_
