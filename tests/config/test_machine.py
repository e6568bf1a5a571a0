"""Memory and cores, including a container's limits."""

from __future__ import annotations

import errno
import sys
from pathlib import Path

from moe_engine.kernels.host_memory import host_memory
from moe_engine.planning.inputs.machine import _unlinked, probe_machine, usable_cores

MEMINFO = "MemTotal:       16000000 kB\nMemFree:         1000000 kB\nMemAvailable:   12000000 kB\n"


def cgroup(folder: Path, **files: str) -> Path:
    folder.mkdir(exist_ok=True)
    for name, text in files.items():
        (folder / name.replace("__", ".")).write_text(text)
    return folder


def test_machine_without_limit(tmp_path):
    memory = host_memory(MEMINFO, cgroup(tmp_path, memory__max="max\n"))
    assert memory.total_bytes == 16000000 * 1024 and memory.available_bytes == 12000000 * 1024
    assert memory.source == "/proc/meminfo"


def test_container_limit_counts_and_page_cache_does_not(tmp_path):
    folder = cgroup(
        tmp_path,
        memory__max="4000000000",
        memory__current="3000000000",
        memory__stat="anon 5\ninactive_file 2000000000\n",
    )
    memory = host_memory(MEMINFO, folder)
    assert memory.total_bytes == 4_000_000_000 and memory.available_bytes == 3_000_000_000
    assert memory.source == "container limit"


def test_first_version_of_cgroups_and_ancestors(tmp_path):
    cgroup(tmp_path, memory__limit_in_bytes="8000000000", memory__usage_in_bytes="1000000000")
    inner = tmp_path / "inner"
    inner.mkdir()
    cgroup(inner, memory__limit_in_bytes=str(1 << 62), memory__usage_in_bytes="5")
    assert host_memory(MEMINFO, inner).available_bytes == 7_000_000_000


def test_cpu_quota(tmp_path):
    assert usable_cores(cgroup(tmp_path, cpu__max="100000 100000")) == 1
    assert usable_cores(cgroup(tmp_path, cpu__max="50000 100000")) == 1
    assert usable_cores(cgroup(tmp_path, cpu__max="max 100000")) >= 1
    (tmp_path / "cpu.max").unlink()
    assert usable_cores(cgroup(tmp_path, cpu__cfs_quota_us="100000", cpu__cfs_period_us="100000")) == 1


def test_this_machine():
    machine = probe_machine("cpu")
    assert 0 < machine.available_bytes <= machine.total_bytes and machine.cores >= 1 and machine.device.name


class Gpus:
    """torch.cuda of a machine where only the GPUs of each half have peer access."""

    def __init__(self, count: int, half: int) -> None:
        self._count, self._half = count, half

    def device_count(self) -> int:
        return self._count

    def can_device_access_peer(self, one: int, other: int) -> bool:
        return one // self._half == other // self._half


def test_gpus_that_cannot_reach_each_other_are_named():
    assert _unlinked(Gpus(4, 4)) is None and _unlinked(Gpus(1, 1)) is None
    assert "GPU 0 cannot reach the memory of GPU 2" in (_unlinked(Gpus(4, 2)) or "")


def test_memory_is_found_where_proc_cannot_be_read(monkeypatch, tmp_path):
    """A hardened container: psutil reads the same file, and failed with a traceback."""
    read = Path.read_text

    def refuse(path, *args, **kwargs):
        if str(path) == "/proc/meminfo":
            raise PermissionError(errno.EACCES, "Permission denied", str(path))
        return read(path, *args, **kwargs)

    real = host_memory(cgroup=cgroup(tmp_path, memory__max="max\n"))
    monkeypatch.setattr(Path, "read_text", refuse)
    monkeypatch.setitem(sys.modules, "psutil", None)
    memory = host_memory(cgroup=cgroup(tmp_path / "a", memory__max="max\n"))
    assert memory.source == "sysconf" and memory.total_bytes == real.total_bytes
    assert 0 < memory.available_bytes <= memory.total_bytes
    limited = host_memory(cgroup=cgroup(tmp_path / "b", memory__max="1000000\n", memory__current="0\n"))
    assert limited.source == "container limit" and limited.total_bytes == 1_000_000
