"""Facts of a node, and their differences from node 0's."""

from __future__ import annotations

import platform
import shutil
import socket
import time
from importlib import metadata
from pathlib import Path

import msgspec

from moe_engine.cli.cluster_check.report import Finding
from moe_engine.cli.node_checks.node import check_node
from moe_engine.kernels.host_memory import host_memory
from moe_engine.planning.inputs.machine import usable_cores
from moe_engine.planning.memory.ledger import gb

PACKAGES = ("moe-engine", "torch", "numpy", "pyzmq", "msgspec", "transformers", "tokenizers", "triton")
"""Packages whose versions must be equal on all nodes: they compute or transport tokens."""
LEAST_MEMORY_BYTES = 1 << 30
LEAST_SHARED_BYTES = 64 << 20
MOST_CLOCK_SECONDS = 5.0
"""Max clock difference: larger ones garble the order of log lines of different nodes and break SLURM's tickets."""


class Reference(msgspec.Struct):
    """Versions and clock of node 0, and the findings of all nodes that joined."""

    versions: dict[str, str]
    time: float
    nodes: dict[int, Finding]


def own_facts(address: str) -> Finding:
    """Args: address: where this node echoes blocks."""
    host, memory, shared = socket.gethostname(), host_memory(), Path("/dev/shm")
    cells = {"node": host, "cores": str(usable_cores()), "memory": gb(memory.available_bytes)}
    problems = []
    if memory.available_bytes < LEAST_MEMORY_BYTES:
        problems.append(f"{host}: only {gb(memory.available_bytes)} of memory available ({memory.source})")
    if shared.is_dir() and (free := shutil.disk_usage(shared).free) < LEAST_SHARED_BYTES:
        problems.append(f"{host}: only {gb(free)} free in /dev/shm")
    problems += [f"{host}: {check.sentence}" for check in check_node() if check.status == "problem"]
    return Finding(cells, problems, address)


def versions() -> dict[str, str]:
    found = {name: distribution.version for name in PACKAGES for distribution in metadata.distributions(name=name)}
    driver = Path("/sys/module/nvidia/version")
    gpus = {"NVIDIA driver": driver.read_text().strip()} if driver.is_file() else {}
    return {"python": platform.python_version(), **gpus, **found}


def differences(reference: Reference) -> list[str]:
    """Problems of this node's versions and clock. Call it as soon as the reference arrives."""
    ahead, own, other = time.time() - reference.time, versions(), reference.versions
    found = [
        f"{name} {own.get(name, 'none')}, node 0 has {other.get(name, 'none')}"
        for name in sorted({*own, *other})
        if own.get(name) != other.get(name)
    ]
    if abs(ahead) > MOST_CLOCK_SECONDS:
        found.append(f"its clock is {abs(ahead):.1f} s {'ahead of' if ahead > 0 else 'behind'} node 0's")
    return [f"{socket.gethostname()}: {text}" for text in found]
