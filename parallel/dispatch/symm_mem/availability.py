"""Availability of symmetric memory in torch. Imports neither torch nor Triton."""

from __future__ import annotations

import os
from collections.abc import MutableMapping
from ctypes.util import find_library
from importlib.util import find_spec
from pathlib import Path

from moe_engine.kernels.device import Device
from moe_engine.kernels.triton.availability import installed as triton_installed

MAX_NVSHMEM_RANKS = 16  # its kernel has 16 warps, one per rank
MAX_NVSHMEM_LOCAL = 16  # experts of a rank; the same limit when sending
MAX_WIDTH = 16384
"""A program holds a row in registers."""
MULTICAST = "TORCH_SYMM_MEM_DISABLE_MULTICAST"


def without_multicast(environ: MutableMapping[str, str] = os.environ) -> None:
    """Before a rendezvous of torch's symmetric memory: it also sets up multicast, which no kernel here uses, and fails
    or hangs where the driver refuses it (H20, confidential computing, a fabric manager in a bad state)."""
    environ.setdefault(MULTICAST, "1")


def why_not(device: Device, num_nodes: int) -> str | None:
    """The reason why ranks cannot write to each other's memory over plain pointers, or None."""
    if device.kind != "cuda":
        return f"symmetric memory is for GPUs; the device is {device.kind}"
    if num_nodes > 1:
        return f"plain pointers work inside one NVLink domain; there are {num_nodes} nodes (use nvshmem)"
    if device.elsewhere:
        return None
    if not triton_installed():
        return "needs triton, which is not installed (pip install triton)"
    if not (_torch_folder() / "distributed" / "_symmetric_memory").is_dir():
        return "this torch has no symmetric memory (torch.distributed._symmetric_memory)"
    return None


def why_not_width(hidden: int) -> str | None:
    """The reason why this project's kernels do not send rows of 16-bit numbers of this width, or None."""
    if hidden % 8 or hidden > MAX_WIDTH:
        return f"sends rows of 8 n channels up to {MAX_WIDTH}, not {hidden}"
    return None


def why_not_nvshmem(device_kind: str, num_ranks: int, num_experts: int = 0) -> str | None:
    """The reason why neither NVSHMEM's Python package nor torch's NVSHMEM operations are available, or None."""
    if device_kind != "cuda":
        return f"NVSHMEM is for GPUs; the device is {device_kind}"
    if find_spec("nvshmem") is not None and find_spec("cuda") is not None:
        return None
    if num_ranks > MAX_NVSHMEM_RANKS:
        return (
            f"torch's all_to_all_vdev_2d_offset supports at most {MAX_NVSHMEM_RANKS} ranks; there are {num_ranks} "
            "(pip install 'nvshmem4py-cu13>=0.4' for more)"
        )
    if num_experts > num_ranks * MAX_NVSHMEM_LOCAL:
        return (
            f"torch's all_to_all_vdev_2d_offset supports at most {MAX_NVSHMEM_LOCAL} experts per rank; there are "
            f"{num_experts} on {num_ranks} ranks (pip install 'nvshmem4py-cu13>=0.4' for more)"
        )
    if not (_torch_folder() / "lib" / "libtorch_nvshmem.so").exists():
        return "this torch was built without NVSHMEM (no libtorch_nvshmem.so)"
    if not _nvshmem_installed():
        return "NVSHMEM is not installed (pip install nvidia-nvshmem-cu12, or -cu13 as torch's CUDA)"
    return None


def _nvshmem_installed() -> bool:
    """True if found as a package, or by the linker."""
    try:
        packaged = find_spec("nvidia.nvshmem") is not None
    except ModuleNotFoundError:  # no NVIDIA package
        packaged = False
    return packaged or find_library("nvshmem_host") is not None


def _torch_folder() -> Path:
    spec = find_spec("torch")  # does not import
    return Path(spec.origin).parent if spec is not None and spec.origin else Path()
