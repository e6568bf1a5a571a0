"""Memory, cores and device of this machine. Probed once, without torch on a CPU."""

from __future__ import annotations

import os
from dataclasses import dataclass
from importlib import metadata
from itertools import permutations
from pathlib import Path
from typing import Any

from moe_engine.errors import ConfigError
from moe_engine.kernels.device import Device, cpu_device
from moe_engine.kernels.host_memory import host_memory, own_cgroup, read_int


@dataclass(frozen=True)
class Machine:
    """Memory of the device that holds weights and KV, in bytes; `source` is the origin of the figures.

    `available_bytes` is free memory. On a CPU both respect a container's limit. `unlinked`: GPUs that cannot access
    each other's memory; None if all can. `num_devices`: the number of GPUs that torch sees; None if unknown.
    `host_bytes`: available host memory with a GPU, None if unknown.
    """

    device: Device
    total_bytes: int
    available_bytes: int
    cores: int
    source: str = ""
    device_reason: str = ""
    unlinked: str | None = None
    num_devices: int | None = None
    host_bytes: int | None = None

    @property
    def on_cpu(self) -> bool:
        return self.device.kind == "cpu"


def probe_machine(device: str | None = None) -> Machine:
    """Probes this machine for an engine on `device` (None: cuda if torch can use one, else cpu).

    Raises:
        ConfigError: `device` is cuda and torch sees none.
    """
    reason = "given"
    if device is None:
        device, reason = _choose_device()
    cores = usable_cores()
    if device == "cuda":
        return _probe_cuda(cores, reason)
    memory = host_memory()
    return Machine(cpu_device(), memory.total_bytes, memory.available_bytes, cores, memory.source, reason)


def _choose_device() -> tuple[str, str]:
    """cuda only with a driver, a torch built for it and a visible device; cheap tests first."""
    if not Path("/dev/nvidiactl").exists():
        return "cpu", "no NVIDIA driver on this machine"
    try:
        version = metadata.version("torch")
    except metadata.PackageNotFoundError:
        return "cpu", "torch is not installed"
    if version.endswith("+cpu"):
        return "cpu", f"torch {version} is built for the CPU only"
    import torch

    if torch.cuda.is_available():
        return "cuda", "torch sees a CUDA device"
    return "cpu", "torch sees no CUDA device"


def _probe_cuda(cores: int, reason: str) -> Machine:
    import torch

    if not torch.cuda.is_available():
        raise ConfigError("--device cuda: torch sees no CUDA device; use --device cpu or check the driver")
    free, total = torch.cuda.mem_get_info(0)
    device = Device("cuda", torch.cuda.get_device_name(0), torch.cuda.get_device_capability(0))
    unlinked, count = _unlinked(torch.cuda), torch.cuda.device_count()
    return Machine(
        device, total, free, cores, "CUDA driver", reason, unlinked, count, host_memory().available_bytes
    )  # fmt: skip


def _unlinked(cuda: Any) -> str | None:
    """A pair of GPUs without peer access, as text, or None."""
    pairs = permutations(range(cuda.device_count()), 2)
    apart = next((pair for pair in pairs if not cuda.can_device_access_peer(*pair)), None)
    return (
        None if apart is None else f"GPU {apart[0]} cannot reach the memory of GPU {apart[1]} (nvidia-smi topo -p2p r)"
    )


def usable_cores(cgroup: Path | None = None) -> int:
    """Physical cores this process may use: its affinity without hyper-threads, or a container's CPU quota."""
    try:
        allowed = os.sched_getaffinity(0)
    except AttributeError:  # not on Linux
        allowed = set(range(os.cpu_count() or 1))
    cores = len({_core_of(cpu) for cpu in allowed})
    quota = _cpu_quota(cgroup or own_cgroup("cpu"))
    return max(1, cores if quota is None else min(cores, quota))


def _core_of(cpu: int) -> str:
    """Key of the core: hyper-threads of one core have the same text."""
    try:
        return Path(f"/sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list").read_text().strip()
    except OSError:
        return str(cpu)


def _cpu_quota(folder: Path) -> int | None:
    """Whole cores a container may use, or None without a limit."""
    try:
        quota, period = (folder / "cpu.max").read_text().split()
        return None if quota == "max" else int(quota) // int(period)
    except (OSError, ValueError):
        pass
    limit, period_us = read_int(folder / "cpu.cfs_quota_us"), read_int(folder / "cpu.cfs_period_us")
    return limit // period_us if limit and limit > 0 and period_us else None


def available_gb(device: str) -> float:
    """Free memory of a device in GiB, for the log lines."""
    return probe_machine(device).available_bytes / (1 << 30)
