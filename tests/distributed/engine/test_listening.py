"""A server on two nodes of this machine: listening sockets, admitted peers, and places where the secret must not
appear."""

from __future__ import annotations

import re
import secrets
import socket
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest

from moe_engine.processes.addresses import free_port
from moe_engine.processes.dist_secret import SECRET_VARIABLE
from tests.distributed.ranks.drill import PATIENCE
from tests.e2e.server_process import ServerProcess, start_server
from tests.fork_server import children

pytestmark = pytest.mark.usefixtures("forked_processes")

DOCS = Path(__file__).resolve().parents[3] / "docs" / "security.md"
HOST = "127.0.0.3"
"""A loopback address without default listeners."""
FAMILIES = ("attention", "moe-runner", "linear", "ops", "sampling")
QUICK = [part for family in FAMILIES for part in (f"--{family}-backend", "torch")]
FLAGS = (
    "--tp",
    "2",
    "--attn-dp-size",
    "2",
    "--nnodes",
    "2",
    "--max-total-tokens",
    "2048",
    "--cpu-threads",
    "1",
    *QUICK,
)
GREETING = b"\xff" + b"\0" * 8 + b"\x7f" + b"\3\0"
"""ZMTP's signature and version: the peer replies with its mechanism."""


def documented() -> dict[str, str]:
    """The table in docs/security.md: authentication by name of the socket."""
    rows = re.findall(r"^\| (`[a-z`, ]+`) \|.*\| ([^|]+) \|$", DOCS.read_text(), re.M)
    return {name: how for names, how in rows for name in re.findall("[a-z]+", names)}


@dataclass(frozen=True)
class Listener:
    pid: int
    role: str
    ip: str
    port: int
    mechanism: str
    """Mechanism of ZeroMQ sockets: ``NULL`` or ``CURVE``; empty for others."""


def mechanism(ip: str, port: int) -> str:
    """The mechanism in the greeting of a socket, if it uses ZMTP."""
    with socket.create_connection((ip, port), timeout=5) as raw:
        raw.settimeout(5)
        try:
            raw.sendall(GREETING)
            found = b""
            while len(found) < 64 and (more := raw.recv(64)):
                found += more
        except OSError:
            return ""
    return found[12:32].rstrip(b"\0").decode() if found[:1] == b"\xff" and len(found) >= 64 else ""


def role(process: psutil.Process) -> str:
    line = " ".join(process.cmdline())
    return next((name for name in ("core_main", "rank_main") if name in line), "launcher")


def listeners(pids: list[int]) -> list[Listener]:
    roots = [psutil.Process(pid) for pid in pids]
    sockets = [
        (process, item.laddr.ip, item.laddr.port)
        for process in (found for root in roots for found in (root, *children(root, recursive=True)))
        for item in process.net_connections("tcp")
        if item.status == psutil.CONN_LISTEN
    ]
    with ThreadPoolExecutor(len(sockets)) as threads:  # torch's sockets run into the time limit
        kinds = list(threads.map(lambda found: mechanism(*found[1:]), sockets))
    return [Listener(process.pid, role(process), ip, port, kind) for (process, ip, port), kind in zip(sockets, kinds)]


@contextmanager
def two_nodes(
    folder: Path, secret: str | None, monkeypatch: pytest.MonkeyPatch
) -> Iterator[tuple[ServerProcess, int, int]]:
    """The server, the process of node 1, and the port of --dist-init-addr."""
    if secret is not None:
        monkeypatch.setenv(SECRET_VARIABLE, secret)
    else:
        monkeypatch.delenv(SECRET_VARIABLE, raising=False)
    port = free_port()
    flags = (*FLAGS, "--dist-init-addr", f"{HOST}:{port}")
    node = start_server(folder / "node1.log", *flags, "--node-rank", "1")
    try:
        with ServerProcess(folder, *flags, "--node-rank", "0") as server:
            yield server, node.pid, port
    finally:
        end(node)


def end(node: Any) -> None:
    """Kills a node's launcher and its processes."""
    for child in children(psutil.Process(node.pid), recursive=True) if node.poll() is None else []:
        with suppress(psutil.NoSuchProcess):
            child.kill()
    node.kill()
    node.wait()


@pytest.mark.drawn(1)
@pytest.mark.parametrize("secret", [None, secrets.token_hex(16)], ids=["without", "secret"])
def test_every_listening_socket_is_documented_and_bound_to_one_address(
    tmp_path: Path, secret: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    with two_nodes(tmp_path, secret, monkeypatch) as (server, node, port):
        body = {"text": "The capital of France is", "sampling_params": {"temperature": 0, "max_new_tokens": 4}}
        with server.client() as client:
            assert "Paris" in client.post("/generate", json=body).json()["text"]
            server_info = client.get("/server_info").text
        found = listeners([server.process.pid, node])
        processes = [psutil.Process(server.process.pid), *server.children(), psutil.Process(node)]
        lines = "\n".join(" ".join(process.cmdline()) for process in processes)
        logs = server.log + (tmp_path / "node1.log").read_text()
    print(*found, sep="\n")
    assert {item.ip for item in found} <= {HOST, "127.0.0.1"}  # the route from this machine to HOST starts at 127.0.0.1
    by_role: dict[tuple[str, str], list[Listener]] = {}
    for item in found:
        by_role.setdefault((item.role, "zmq" if item.mechanism else "other"), []).append(item)
    names = {  # the rows of the table for this launch
        ("launcher", "other"): ["http"],
        ("launcher", "zmq"): ["answers"],
        ("core_main", "zmq"): ["control", "plans", "steps"],
        ("rank_main", "zmq"): ["requests", "plans", "steps"],
    }
    for key, expected in names.items():
        assert len(by_role.pop(key)) == len(expected), (key, expected)
    # the remaining sockets are torch's: the store and gloo's groups
    assert {role for role, _ in by_role} <= {"core_main", "rank_main"}
    table = documented()
    assert {name for expected in names.values() for name in expected} | {"store", "gloo"} <= set(table)
    for name in {*names["launcher", "zmq"], *names["core_main", "zmq"], *names["rank_main", "zmq"]}:
        assert "CURVE" in table[name]
    zmq_sockets = [item for item in found if item.mechanism]
    assert {item.mechanism for item in zmq_sockets} == {"NULL" if secret is None else "CURVE"}
    assert port in {item.port for item in zmq_sockets}
    warned = logs.count("Sockets between nodes have no secret")
    assert warned == (secret is None)
    if secret is not None:
        assert secret not in server_info and secret not in lines and secret not in logs


def test_node_with_another_secret_fails_and_node_0_logs_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    address = f"{HOST}:{free_port()}"
    logs = [tmp_path / f"node{rank}.log" for rank in range(2)]
    nodes: list[Any] = []
    try:
        for rank in range(2):
            if rank == 0:
                monkeypatch.setenv(SECRET_VARIABLE, "a" * 16)
            else:
                monkeypatch.delenv(SECRET_VARIABLE)
            command = [*FLAGS, "--port", "0", "--dist-init-addr", address, "--node-rank", str(rank)]
            nodes.append(start_server(logs[rank], *command))
        assert nodes[1].wait(PATIENCE) == 2
        text = logs[1].read_text()
        assert (
            "refuses the connection: --dist-secret-file or MOE_ENGINE_DIST_SECRET" in text and "Traceback" not in text
        )
        deadline = time.monotonic() + PATIENCE
        while "connections were refused in their handshake: --dist-secret-file" not in logs[0].read_text():
            assert time.monotonic() < deadline, logs[0].read_text()
            time.sleep(0.1)
        assert nodes[0].poll() is None  # it waits for a node with the correct secret
    finally:
        for node in nodes:
            end(node)
