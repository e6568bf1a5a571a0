"""A wrong address, port or host gives one sentence that names the flag, exit code 2 and no traceback."""

from __future__ import annotations

import re
import socket
import subprocess
import sys
from collections.abc import Iterator

import psutil
import pytest

from moe_engine.cli import main as cli
from moe_engine.cluster import node as rank_node
from moe_engine.processes import addresses
from moe_engine.processes.addresses import free_port
from tests.distributed.ranks.drill import PATIENCE

NODES = ("--tp", "2", "--nnodes", "2")
STEP = {
    "SLURM_JOB_ID": "123",
    "SLURM_STEP_ID": "0",
    "SLURM_STEP_NUM_NODES": "2",
    "SLURM_STEP_NODELIST": "node[1-2]",
    "SLURM_PROCID": "1",
    "SLURM_NODEID": "1",
    "SLURM_LOCALID": "0",
}


@pytest.fixture(autouse=True)
def names_are_looked_up_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(addresses, "NAME_SECONDS", 0.0)


@pytest.fixture
def taken() -> Iterator[int]:
    """A port of 127.0.0.1 in use by another program."""
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        yield other.getsockname()[1]


CASES = [
    (NODES, "0", "nohost.invalid:20000", "unknown host"),
    (NODES, "0", "a..b:20000", "unknown host"),
    (NODES, "0", "192.0.2.1:20000", "it must be one of node 0's own (is this --node-rank 0?)"),
    (NODES, "0", "[::1]:20000", "IPv6 addresses are not supported"),
    (NODES, "0", "127.0.0.1:TAKEN", "if node 0 has it, this node needs another --node-rank"),
    (NODES, "0", "127.0.0.1:70000", "must be HOST:PORT"),
    (NODES, "0", "127.0.0.1", "must be HOST:PORT"),
    (NODES, "0", "http://127.0.0.1:20000", "must be HOST:PORT"),
    (NODES, "1", "127.0.0.1", "must be HOST:PORT"),
    (NODES, "1", ":20000", "must be HOST:PORT"),
    (NODES, "1", "127.0.0.1:70000", "must be HOST:PORT"),
    (NODES, "1", "http://127.0.0.1:20000", "must be HOST:PORT"),
    (NODES, "1", "nohost.invalid:20000", "unknown host"),
    (NODES, "1", "a..b:20000", "unknown host"),
    ((), "", "--host 192.0.2.1", "cannot listen there"),
    ((), "", "--host nohost.invalid", "no address of that name"),
    ((), "", "--host a..b", "not the name of a host"),
    ((), "", "--port TAKEN", "cannot listen there"),
    ((), "", "--port 70000", "at most 65535"),
    ((), "", "--port -1", "at least 0"),
]


def refused(capfd: pytest.CaptureFixture[str], *flags: str) -> str:
    """The launch's error output; checks that none of its processes remains."""
    port = () if "--port" in flags else ("--port", "0")
    before = psutil.Process().children()  # processes of other tests
    assert cli.main(["serve", "--max-total-tokens", "2048", *port, *flags]) == cli.USAGE_ERROR
    printed = "".join(capfd.readouterr())
    assert "Traceback" not in printed and "ZMQError" not in printed, printed
    now = psutil.Process().children()
    assert not [child for child in now if child not in before and child.status() != psutil.STATUS_ZOMBIE]
    (error,) = re.findall(r"^moe-engine serve: error: (.*)$", printed, re.M)
    return error


@pytest.mark.parametrize(("launch", "rank", "address", "reason"), CASES, ids=lambda value: str(value)[:40])
def test_a_wrong_address_is_one_sentence(
    launch: tuple[str, ...], rank: str, address: str, reason: str, taken: int, capfd: pytest.CaptureFixture[str]
) -> None:
    address = address.replace("TAKEN", str(taken))
    flags = address.split() if not launch else ["--node-rank", rank, "--dist-init-addr", address]
    error = refused(capfd, *launch, *flags)
    assert reason in error and (address if launch else flags[0]) in error, error


@pytest.fixture
def no_node_0(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rank_node, "REPORT_SECONDS", 0.1)
    monkeypatch.setattr(socket, "gethostbyname", lambda name: "127.0.0.1")


@pytest.mark.usefixtures("no_node_0")
@pytest.mark.parametrize("more", [(), ("--nnodes", "2"), ("--nnodes", "2", "--dist-init-addr", "127.0.0.1:20000")])
def test_a_node_rank_that_slurm_contradicts(
    more: tuple[str, ...], monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """`srun moe-engine serve --node-rank "$SLURM_NODEID"` in a batch script: the rank is 0 on all nodes."""
    for name, value in STEP.items():
        monkeypatch.setenv(name, value)
    error = refused(capfd, "--tp", "2", "--node-rank", "0", *more)
    assert error.startswith("--node-rank 0, but SLURM_NODEID=1 (SLURM_* of job 123): leave --node-rank out, or")
    assert "srun bash -c '... --node-rank $SLURM_NODEID'" in error


@pytest.mark.drawn(1)
@pytest.mark.parametrize("secret", ["", "0123456789abcdef"], ids=["without", "secret"])
def test_node_0_exits_with_the_other_nodes_error(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], secret: str
) -> None:
    """Node 0 itself has no error: it would wait for the other node until --dist-timeout."""
    if secret:
        monkeypatch.setenv("MOE_ENGINE_DIST_SECRET", secret)
    flags = [*NODES, "--max-total-tokens", "2048", "--node-rank", "0", "--dist-init-addr", f"127.0.0.1:{free_port()}"]
    command = [sys.executable, "-m", "moe_engine", "serve", "--port", "0", *flags]
    node_0 = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    try:
        for name, value in STEP.items():
            monkeypatch.setenv(name, value)
        assert cli.main(["serve", *flags]) == cli.USAGE_ERROR
        assert f"Reporting this to node 0 at {flags[-1]}, for up to 60 s" in capfd.readouterr().err
        _, error = node_0.communicate(timeout=PATIENCE)
    finally:
        node_0.kill()
        node_0.wait()
    assert node_0.returncode == cli.USAGE_ERROR and "Traceback" not in error, error
    assert re.search(r"^moe-engine serve: error: on .* \(pid \d+\): --node-rank 0, but SLURM_NODEID=1", error, re.M), (
        error
    )
