"""What a node is and what is wrong with it; where nodes differ that must be alike."""

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
"""Packages in whose versions nodes must agree: they compute or carry the same tokens."""
LEAST_MEMORY_BYTES = 1 << 30
LEAST_SHARED_BYTES = 64 << 20
MOST_CLOCK_SECONDS = 5.0
"""More than that, and log lines of different nodes cannot be put in order; SLURM's tickets need it, too."""


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
    """For each node that is unlike the most: in what. With a tie, node 0's side is right."""
    found: dict[int, list[str]] = {}
    for package in sorted({name for facts in nodes.values() for name in facts.versions}):
        versions = {rank: facts.versions.get(package, "none") for rank, facts in nodes.items()}
        # `most_common` takes the first one met of those that are equally common
        usual = Counter(versions[rank] for rank in sorted(versions)).most_common(1)[0][0]
        for rank, version in versions.items():
            if version != usual:
                found.setdefault(rank, []).append(f"{package} {version}, the others have {usual}")
    return found


def clock_problem(facts: NodeFacts, now: float) -> list[str]:
    """Args: now: the leader's clock when the facts came."""
    ahead = facts.time - now
    if abs(ahead) < MOST_CLOCK_SECONDS:
        return []
    return [f"its clock is {abs(ahead):.1f} s {'ahead of' if ahead > 0 else 'behind'} node 0's"]


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None
