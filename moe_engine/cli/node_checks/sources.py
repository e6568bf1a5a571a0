"""Output of a node's tools and contents of its files, as text. The checks are functions of these texts; no check runs a
program."""

from __future__ import annotations

import glob
import os
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

SECONDS = 20
"""Timeout of each program: nvidia-smi waits for a GPU that hangs."""

COMMANDS: dict[str, tuple[str, ...]] = {
    "smi": ("nvidia-smi", "-q", "-x"),
    "topology": ("nvidia-smi", "topo", "-m"),
    "peers": ("nvidia-smi", "topo", "-p2p", "r"),
    "fabric_manager": ("systemctl", "is-active", "nvidia-fabricmanager"),
    "fabric_manager_version": ("nv-fabricmanager", "--version"),
    "kernel_log": ("dmesg",),
}
FILES: dict[str, str] = {
    "modules": "/proc/modules",
    "driver": "/proc/driver/nvidia/version",
    "parameters": "/proc/driver/nvidia/params",
    "kernel": "/proc/sys/kernel/osrelease",
    "governor": "/sys/devices/system/cpu/cpu0/cpufreq/scaling_governor",
}
ADAPTERS = "/sys/class/infiniband/*/ports/*"
ADAPTER_FILES = ("state", "phys_state", "rate", "link_layer")


@dataclass(frozen=True)
class Absent:
    """A missing text, with the reason."""

    reason: str


Text = str | Absent


@dataclass(frozen=True)
class Node:
    """One node.

    Attributes:
        texts: output by name of `COMMANDS`, content by name of `FILES`.
        ports: by ``adapter/port``, content of `ADAPTER_FILES` by name.
        devices: existing paths below /dev, of those that the checks use.
        locked_bytes: limit of locked memory; None: unlimited. shared_bytes: size of /dev/shm; None: there is none.
        versions: of installed packages. pins: of constraints-gpu.txt.
    """

    texts: Mapping[str, Text]
    ports: Mapping[str, Mapping[str, str]]
    devices: frozenset[str] = frozenset()
    locked_bytes: int | None = None
    shared_bytes: int | None = None
    versions: Mapping[str, str] | None = None
    pins: Mapping[str, str] | None = None

    def text(self, name: str) -> Text:
        return self.texts.get(name, Absent(f"{name} was not read"))


DEVICES = ("/dev/gdrdrv", "/dev/nvidia-nvswitchctl")


def read_node() -> Node:
    """This node. Programs run only if nvidia-smi is installed."""
    texts = {name: _read(path) for name, path in FILES.items()}
    has_gpus = shutil.which("nvidia-smi") is not None
    for name, command in COMMANDS.items():
        texts[name] = _run(command) if has_gpus else Absent("nvidia-smi is not installed")
    ports = {}
    for folder in sorted(glob.glob(ADAPTERS)):
        parts = Path(folder).parts
        own = {name: _read(f"{folder}/{name}") for name in ADAPTER_FILES}
        ports[f"{parts[-3]}/{parts[-1]}"] = {name: text for name, text in own.items() if isinstance(text, str)}
    devices = frozenset(path for path in DEVICES if os.path.exists(path))
    pins = _pins()
    return Node(texts, ports, devices, _locked_bytes(), _shared_bytes(), _versions(pins), pins)


def _read(path: str) -> Text:
    try:
        return Path(path).read_text(errors="replace").strip()
    except OSError as error:
        return Absent(f"{path}: {error.strerror}")


def _run(command: Sequence[str]) -> Text:
    if shutil.which(command[0]) is None:
        return Absent(f"{command[0]} is not installed")
    try:
        done = subprocess.run(command, capture_output=True, text=True, errors="replace", timeout=SECONDS)
    except subprocess.TimeoutExpired:
        return Absent(f"{' '.join(command)}: no answer within {SECONDS} s")
    except OSError as error:
        return Absent(f"{command[0]}: {error.strerror}")
    if done.returncode and not done.stdout.strip():
        lines = done.stderr.strip().splitlines()
        return Absent(f"{' '.join(command)}: {lines[-1] if lines else f'exit status {done.returncode}'}")
    return done.stdout


def _locked_bytes() -> int | None:
    import resource

    limit = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    return None if limit == resource.RLIM_INFINITY else limit


def _shared_bytes() -> int | None:
    try:
        return shutil.disk_usage("/dev/shm").total
    except OSError:
        return None


def _pins() -> dict[str, str]:
    """Exact versions of constraints-gpu.txt; empty outside a source checkout."""
    path = Path(__file__).resolve().parents[3] / "constraints-gpu.txt"
    lines = path.read_text().splitlines() if path.is_file() else []
    pairs = (line.split("==", 1) for line in lines if "==" in line and not line.startswith("#"))
    return {name.strip(): version.strip() for name, version in pairs}


def _versions(pins: Mapping[str, str]) -> dict[str, str]:
    from importlib import metadata

    return {name: found.version for name in pins for found in metadata.distributions(name=name)}
