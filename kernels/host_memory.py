"""RAM that this process may use: the machine's, or its container's limit (cgroups of both versions). The one place that
measures host memory. Imports no torch.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

CGROUP_ROOT = Path("/sys/fs/cgroup")
UNLIMITED = 1 << 60


@dataclass(frozen=True)
class Memory:
    total_bytes: int
    available_bytes: int
    source: str


def host_memory(meminfo: str | None = None, cgroup: Path | None = None) -> Memory:
    """RAM of this process: the machine's, or its container's limit if that is lower.

    Args:
        meminfo: text of /proc/meminfo (read from there when None).
        cgroup: folder of this process's cgroup (found when None).
    """
    try:
        text = Path("/proc/meminfo").read_text() if meminfo is None else meminfo
    except OSError:
        total, available, source = _memory_without_proc()
    else:
        total, available = _parse(text)
        source = "/proc/meminfo"
    limit, used = _cgroup_memory(cgroup or own_cgroup())
    if limit < total or limit - used < available:
        total, available, source = min(total, limit), min(available, max(0, limit - used)), "container limit"
    return Memory(total, available, source)


def _parse(meminfo: str) -> tuple[int, int]:
    """Total and available bytes."""
    sizes = {}
    for line in meminfo.splitlines():
        key, _, value = line.partition(":")
        if value.strip().endswith("kB"):
            sizes[key] = int(value.split()[0]) * 1024
    return sizes["MemTotal"], sizes.get("MemAvailable", sizes.get("MemFree", 0))


def _memory_without_proc() -> tuple[int, int, str]:
    """Total and available bytes, and their source: the system call, which hardened containers permit; it counts the
    page cache as used."""
    names = ("SC_PHYS_PAGES", "SC_AVPHYS_PAGES")
    if all(name in os.sysconf_names for name in names):
        total, available = (os.sysconf(name) * os.sysconf("SC_PAGE_SIZE") for name in names)
        return total, available, "sysconf"
    import psutil  # macOS

    memory = psutil.virtual_memory()
    return memory.total, memory.available, "psutil"


def own_cgroup(controller: str = "memory") -> Path:
    """The folder of this process's cgroup for a controller; inside a container usually the root itself."""
    unified = CGROUP_ROOT
    try:
        for line in Path("/proc/self/cgroup").read_text().splitlines():
            number, controllers, path = line.split(":", 2)
            if controller in controllers.split(","):
                folder = CGROUP_ROOT / controller / path.lstrip("/")
                return folder if folder.exists() else CGROUP_ROOT / controller
            if number == "0" and (folder := CGROUP_ROOT / path.lstrip("/")).exists():
                unified = folder
    except (OSError, ValueError):
        pass
    return unified


def _cgroup_memory(folder: Path) -> tuple[int, int]:
    """(limit, bytes in use that cannot be reclaimed) of the tightest of a cgroup and its ancestors."""
    best = (UNLIMITED, 0)
    for level in (folder, *folder.parents):
        if level in CGROUP_ROOT.parents:
            break  # above the cgroup file system
        for limit_name, used_name in (
            ("memory.max", "memory.current"),
            ("memory.limit_in_bytes", "memory.usage_in_bytes"),
        ):
            limit = read_int(level / limit_name)
            if limit is None or limit >= UNLIMITED:
                continue
            used = max(0, (read_int(level / used_name) or 0) - _inactive_file(level))
            if limit - used < best[0] - best[1]:
                best = (limit, used)
    return best


def _inactive_file(folder: Path) -> int:
    """Reclaimable page cache; the cgroup's figure counts it as used."""
    try:
        for line in (folder / "memory.stat").read_text().splitlines():
            key, _, value = line.partition(" ")
            if key in ("inactive_file", "total_inactive_file"):
                return int(value)
    except (OSError, ValueError):
        pass
    return 0


def read_int(path: Path) -> int | None:
    try:
        text = path.read_text().strip()
        return None if text == "max" else int(text)
    except (OSError, ValueError):
        return None
