"""Servers over several nodes, started as a user starts them; each node is a process group of this machine."""

from __future__ import annotations

import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil

from tests.e2e.server_process import ServerProcess

FAMILIES = ("attention", "moe-runner", "linear", "ops", "sampling")
QUICK = [part for family in FAMILIES for part in (f"--{family}-backend", "torch")]
"""Torch's kernels: quick to load, and nothing is compiled first."""
FLAGS = (*QUICK, "--cpu-threads", "1", "--context-length", "2048", "--max-total-tokens", "8192", "--dtype", "float32")


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class Node:
    """A node without the HTTP server."""

    def __init__(self, folder: Path, rank: int, flags: tuple[str, ...]) -> None:
        self._log_path = folder / f"node-{rank}.log"
        command = [sys.executable, "-m", "moe_engine.launch_server", "--node-rank", str(rank), *flags]
        with open(self._log_path, "wb") as log:
            self.process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT)

    @property
    def log(self) -> str:
        return self._log_path.read_text(errors="replace")

    @property
    def ranks(self) -> list[psutil.Process]:
        """Its cores and other ranks."""
        return ranks_below(self.process.pid)

    def kill(self) -> None:
        for process in self.ranks:
            process.kill()
        self.process.kill()
        self.process.wait()


def ranks_below(pid: int) -> list[psutil.Process]:
    try:
        children = psutil.Process(pid).children(recursive=True)
        return [child for child in children if any("moe_engine.engine." in part for part in child.cmdline())]
    except psutil.Error:
        return []


class Cluster:
    """Node 0's `server`, and the other `nodes` from 1 on."""

    def __init__(self, server: ServerProcess, nodes: list[Node]) -> None:
        self.server, self.nodes = server, nodes

    def node(self, rank: int) -> Node:
        return self.nodes[rank - 1]

    @property
    def logs(self) -> str:
        return "\n".join([self.server.log, *(node.log for node in self.nodes)])


@contextmanager
def cluster(folder: Path, num_nodes: int, *flags: str) -> Iterator[Cluster]:
    """Until all are ready; leaves nothing behind. Every other node starts before node 0."""
    flags = (*FLAGS, *flags, "--nnodes", str(num_nodes), "--dist-init-addr", f"127.0.0.1:{free_port()}")
    nodes = [Node(folder, rank, flags) for rank in range(1, num_nodes)]
    server = ServerProcess(folder, *flags)
    try:
        with server:
            yield Cluster(server, nodes)
    finally:
        for node in nodes:
            print(f"--- {node.process.args}\n{node.log}")
            node.kill()
