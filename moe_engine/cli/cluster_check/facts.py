"""Facts and problems of a node; differences between nodes that must be equal."""

from __future__ import annotations

import platform
import shutil
import socket
import time
from collections import Counter
from collections.abc import Mapping
from importlib import metadata
from pathlib import Path

from moe_engine.cli.cluster_check.wire import NodeFacts
from moe_engine.planning.ledger import gb
from moe_engine.planning.machine import host_memory, usable_cores

ALIKE = ("moe-engine", "torch", "numpy", "pyzmq", "msgspec", "transformers", "tokenizers", "triton")
"""Packages whose versions must be equal on all nodes: they compute or transport tokens."""
LEAST_MEMORY_BYTES = 1 << 30
LEAST_SHARED_BYTES = 64 << 20
MOST_CLOCK_SECONDS = 5.0
"""Max clock difference: larger ones garble the order of log lines of different nodes and break SLURM's tickets."""


def gather() -> NodeFacts:
    memory, shared = host_memory(), Path("/dev/shm")
    shared_bytes = shutil.disk_usage(shared).free if shared.is_dir() else None
    problems = []
    if memory.available_bytes < LEAST_MEMORY_BYTES:
        problems.append(f"only {gb(memory.available_bytes)} of memory available ({memory.source})")
    if shared_bytes is not None and shared_bytes < LEAST_SHARED_BYTES:
        problems.append(f"only {gb(shared_bytes)} free in /dev/shm")
    versions = {name: version for name in ALIKE if (version := _version(name)) is not None}
    return NodeFacts(
        host=socket.gethostname(),
        versions={"python": platform.python_version(), **versions},
        time=time.time(),
        cores=usable_cores(),
        available_bytes=memory.available_bytes,
        shared_bytes=shared_bytes,
        problems=problems,
    )


def differences(nodes: Mapping[int, NodeFacts]) -> dict[int, list[str]]:
    """Deviations of nodes from the majority, by rank. In a tie, node 0's side counts as the majority."""
    found: dict[int, list[str]] = {}
    for package in sorted({name for facts in nodes.values() for name in facts.versions}):
        versions = {rank: facts.versions.get(package, "none") for rank, facts in nodes.items()}
        # in a tie, `most_common` returns the first one encountered
        usual = Counter(versions[rank] for rank in sorted(versions)).most_common(1)[0][0]
        for rank, version in versions.items():
            if version != usual:
                found.setdefault(rank, []).append(f"{package} {version}, the others have {usual}")
    return found


def clock_problem(facts: NodeFacts, now: float) -> list[str]:
    """Args: now: the leader's clock when the facts arrived."""
    ahead = facts.time - now
    if abs(ahead) < MOST_CLOCK_SECONDS:
        return []
    return [f"its clock is {abs(ahead):.1f} s {'ahead of' if ahead > 0 else 'behind'} node 0's"]


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None
