"""Start of DeepEP in a rank: environment and import before the first NCCL communicator, then the communicator.

The library reads its environment when it is imported. On import it refuses a process with two mappings named
``libnccl``; NCCL's network plugin (libnccl-net) is a second one, mapped with the first communicator. It takes torch's
communicator of the current device without a check, and that exists only after a collective on that device.
Source: deep_ep/__init__.py, deep_ep/utils/comm.py, deep_ep/utils/envs.py, csrc/kernels/backend/nccl.cu (2.1.0).
"""

from __future__ import annotations

import ctypes
import importlib
import importlib.util
import os
from collections.abc import MutableMapping
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from moe_engine.kernels.vendors import cuda_home

GIN = "EP_DISABLE_GIN"
NIC = "EP_NIC_NAME"
ADAPTERS = Path("/sys/class/infiniband")
BITS = 8


def load(num_nodes: int) -> ModuleType:
    """The installed library, with the environment of this launch. Before the first NCCL communicator.

    Raises:
        ValueError: the library does not load; with its reason.
    """
    set_environment(num_nodes, os.environ)
    try:
        cuda_home.provide()
        preload_nvshmem()
        return importlib.import_module("deep_ep")
    except (ImportError, OSError, AssertionError) as error:
        reason = str(error) or "an assertion; it needs nvcc or CUDA_HOME, and a single libnccl"
        raise ValueError(
            f"deep_ep does not load: {type(error).__name__}: {reason} (see moe-engine doctor, or use --moe-a2a-backend "
            "all_to_all)"
        ) from error


def set_environment(num_nodes: int, environ: MutableMapping[str, str], adapters: Path = ADAPTERS) -> None:
    """Settings that the library has no argument for. Variables that are set take precedence."""
    if num_nodes == 1:  # NVLink only: otherwise the library demands GIN, NCCL's network from the GPU
        environ.setdefault(GIN, "1")
    if adapter := adapter_of(environ.get("NCCL_IB_HCA", ""), adapters):
        environ.setdefault(NIC, adapter)


def adapter_of(hca: str, adapters: Path) -> str | None:
    """The first adapter of this machine that NCCL_IB_HCA selects: ``=name:port,...``, prefixes, or ``^`` and the
    excluded ones; empty: any."""
    present = sorted(path.name for path in adapters.iterdir()) if adapters.is_dir() else []
    excludes, exact = hca.startswith("^"), hca.lstrip("^").startswith("=")
    names = [name.partition(":")[0] for name in hca.lstrip("^=").split(",") if name]
    if not names:
        return next(iter(present), None)

    def matches(adapter: str, name: str) -> bool:
        return adapter == name if exact else adapter.startswith(name)

    if excludes:
        return next((adapter for adapter in present if not any(matches(adapter, name) for name in names)), None)
    return next((adapter for name in names for adapter in present if matches(adapter, name)), None)


def adapter_gbs(environ: MutableMapping[str, str] = os.environ, adapters: Path = ADAPTERS) -> float | None:
    """GB/s of the adapter that carries the tokens, from the kernel's file; None if it has no such file."""
    name = environ.get(NIC) or adapter_of("", adapters)
    for path in sorted((adapters / name / "ports").glob("*/rate")) if name else ():
        words = path.read_text().split()  # as in: 400 Gb/sec (4X NDR)
        if words and words[0].replace(".", "", 1).isdigit() and float(words[0]) > 0:
            return float(words[0]) / BITS
    return None


def preload_nvshmem() -> None:
    """Maps NVSHMEM's host library from its wheel: DeepEP's extension names it by a path of its build machine."""
    try:
        spec = importlib.util.find_spec("nvidia.nvshmem")
    except ModuleNotFoundError:
        return
    folders = (spec.submodule_search_locations or ()) if spec is not None else ()
    for folder in folders:
        for path in sorted(Path(folder, "lib").glob("libnvshmem_host.so*")):
            ctypes.CDLL(str(path), mode=ctypes.RTLD_GLOBAL)
            return


def connect(process_group: Any, device: torch.device) -> None:
    """Creates the group's NCCL communicator on this device, which the library uses. Collective.

    Raises:
        ValueError: torch has none for the current device: the library would read address 0.
    """
    process_group.allreduce([torch.ones(1, device=device)]).wait()
    backend = process_group._get_backend(torch.device("cuda"))
    if hasattr(backend, "_comm_ptr") and not backend._comm_ptr():
        raise ValueError(
            f"DeepEP needs the NCCL communicator of the current device; the ranks' group has its own on {device}"
        )
