"""The check without a cluster: nodes are threads of this process, or processes on loopback."""

from __future__ import annotations

import os
import re
import shlex
import signal
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import psutil
import pytest

from moe_engine.cli.cluster_check import command, engine_trial, facts, links
from moe_engine.cli.cluster_check.engine_trial import trial_flags
from moe_engine.cli.cluster_check.exchange import Exchange
from moe_engine.cli.cluster_check.facts import Reference, differences, versions
from moe_engine.cli.cluster_check.links import EchoListener, try_links
from moe_engine.cli.cluster_check.report import Finding
from moe_engine.config.args import EngineArgs, build_parser
from moe_engine.config.flags import parse_flags
from moe_engine.planning.inputs.cluster_env import ClusterPlace
from moe_engine.planning.prepare import prepare
from moe_engine.processes import child
from moe_engine.processes.addresses import free_port
from moe_engine.processes.rendezvous_address import RendezvousAddress

pytestmark = pytest.mark.usefixtures("forked_processes")

HOST = socket.gethostname()


def check(
    num_nodes: int, ranks: list[int], join_seconds: float = 20.0, engine_seconds: float = 0.0
) -> tuple[list[int], list[str]]:
    """The exit codes of the nodes in `ranks`, one thread each, and all their lines."""
    names = tuple(f"host{rank}" for rank in range(num_nodes))
    address, lines = f"127.0.0.1:{free_port()}", []

    def node(rank: int) -> int:
        threading.current_thread().name = str(rank)
        place = ClusterPlace(num_nodes, rank, address, 0, "flags", names)
        return command.check(place, join_seconds, engine_seconds, lambda text: lines.extend(text.splitlines()))

    with ThreadPoolExecutor(len(ranks)) as pool:
        return list(pool.map(node, ranks)), lines


def test_nodes_and_links_in_order():
    codes, lines = check(3, [0, 1, 2])
    assert codes == [0, 0, 0] and lines[-1] == "OK"
    for rank, row in enumerate(lines[-4:-1]):
        assert re.fullmatch(rf"{HOST} +{rank} .* \d+\.\d ms +not run +ok", row), row


def test_missing_node_is_named_and_others_are_checked():
    codes, lines = check(4, [0, 1, 3], join_seconds=3.0)
    assert codes == [1, 1, 1] and lines[-1] == "NOT OK: 1 problem"
    assert lines[-2].startswith("FAILED host2: did not join within 3 s: ")
    assert [line.split()[-1] for line in lines[-6:-2]] == ["ok", "ok", "FAILED", "ok"]
    assert lines[-3].split()[-4] == "ms"  # the links of node 3


def test_unreachable_node_0_is_named_with_the_reason():
    codes, lines = check(2, [1], join_seconds=0.2)
    assert codes == [1]
    assert re.fullmatch(
        rf"FAILED node 1 \({HOST}\) cannot reach node 0 at 127.0.0.1:\d+: connection refused", lines[-1]
    )


def test_two_nodes_with_the_same_rank():
    codes, lines = check(3, [0, 1, 1], join_seconds=3.0)
    assert codes == [1, 1, 1]
    assert f"FAILED node 1 ({HOST}) joined twice: give each node its own --node-rank, from 0" in lines
    assert any(line.startswith("FAILED host2: did not join") for line in lines)


def test_another_number_of_nodes_is_named():
    port = free_port()
    with RunningCheck("--nnodes", "2", "--dist-init-addr", f"127.0.0.1:{port}", "--join-timeout", "15") as first:
        lines: list[str] = []
        place = ClusterPlace(3, 2, f"127.0.0.1:{port}", 0, "flags")
        assert command.check(place, 20.0, 0.0, lines.append) == 1
        first.process.send_signal(signal.SIGTERM)
        assert first.process.wait(60) == 1
    assert lines == [f"FAILED node 2 ({HOST}) has --nnodes 3, node 0 has 2: give the same on all nodes"]


def test_versions_and_clock_that_differ_are_named():
    usual = versions()
    assert differences(Reference(usual, time.time(), {})) == []
    found = differences(Reference(usual | {"torch": "1.0", "xyz": "3"}, time.time() - 10, {}))
    assert found[0] == f"{HOST}: torch {usual['torch']}, node 0 has 1.0"
    assert found[1] == f"{HOST}: xyz none, node 0 has 3"
    assert re.fullmatch(rf"{HOST}: its clock is 10\.\d s ahead of node 0's", found[2]) and len(found) == 3


def test_a_node_with_another_version_fails_the_check_of_all(monkeypatch):
    def other() -> dict[str, str]:
        return versions() | ({"numpy": "1.0"} if threading.current_thread().name == "1" else {})

    monkeypatch.setattr(facts, "versions", other)
    codes, lines = check(3, [0, 1, 2])
    assert codes == [1, 1, 1]
    assert lines[-2:] == [f"FAILED {HOST}: numpy 1.0, node 0 has {versions()['numpy']}", "NOT OK: 1 problem"]
    assert [line.split()[-1] for line in lines[-5:-2]] == ["ok", "FAILED", "ok"]


def test_too_little_memory_fails_the_check(monkeypatch):
    monkeypatch.setattr(facts, "LEAST_MEMORY_BYTES", 1 << 60)
    codes, lines = check(1, [0])
    assert codes == [1] and re.match(rf"FAILED {HOST}: only .*B of memory available", lines[-2])


def test_closed_silent_and_foreign_links_are_named(monkeypatch):
    monkeypatch.setattr(links, "TRY_SECONDS", 1.0)

    def stranger(listener: socket.socket) -> None:
        connection = listener.accept()[0]
        connection.sendall(b"SSH-2.0-OpenSSH_9.2\r\n")
        while connection.recv(1 << 16):
            connection.shutdown(socket.SHUT_WR)

    with (
        EchoListener("127.0.0.1") as good,
        socket.create_server(("127.0.0.1", 0)) as other,
        socket.create_server(("127.0.0.1", 0)) as silent,
    ):
        threading.Thread(target=stranger, args=(other,), daemon=True).start()
        ports = [good.server_address[1], other.getsockname()[1], silent.getsockname()[1], free_port()]
        nodes = {rank: Finding({"node": f"host{rank}"}, [], f"127.0.0.1:{port}") for rank, port in enumerate(ports, 1)}
        found = try_links(0, nodes)
        assert try_links(1, {1: nodes[1]}) == Finding()
    assert float(found.cells["slowest link"].removesuffix(" ms")) > 0
    assert found.problems == [
        f"link {HOST} -> host2 at 127.0.0.1:{ports[1]}: another program or host has that address",
        f"link {HOST} -> host3 at 127.0.0.1:{ports[2]}: no answer within 1 s",
        f"link {HOST} -> host4 at 127.0.0.1:{ports[3]}: connection refused",
    ]


def test_node_that_vanishes_between_two_steps_is_named(monkeypatch):
    monkeypatch.setattr(command, "RESULT_SECONDS", 1.0)
    usual = command.try_links

    def vanish(rank: int, nodes: dict[int, Finding]) -> Finding:
        if rank == 1:
            raise RuntimeError("as if the connection to node 0 was lost")
        return usual(rank, nodes)

    monkeypatch.setattr(command, "try_links", vanish)
    codes, lines = check(3, [0, 1, 2])
    assert codes == [1, 1, 1]
    assert f"FAILED {HOST}: lost while testing its links" in lines


def test_another_node_ends_when_node_0_dies():
    """The third node never starts, so the other two wait."""
    nodes = ["--no-engine", "--nnodes", "3", "--dist-init-addr", f"127.0.0.1:{free_port()}"]
    with RunningCheck(*nodes) as first, RunningCheck(*nodes, "--node-rank", "1") as other:
        assert any(line == "waiting for node 2\n" for line in first.output)
        first.process.kill()
        code, lines = other.finish()
    assert code == 1 and "lost node 0 at 127.0.0.1" in "\n".join(lines)


def test_node_0_listens_at_the_announced_address_only():
    port = free_port()
    with RunningCheck("--nnodes", "2", "--dist-init-addr", f"127.0.0.1:{port}") as first:
        Exchange(RendezvousAddress(f"127.0.0.1:{port}"), 1, ["a", "b"], 30.0, print)  # node 0 is ready
        listening = [
            item for item in psutil.Process(first.process.pid).net_connections() if item.status == psutil.CONN_LISTEN
        ]
        first.process.send_signal(signal.SIGTERM)
        assert first.process.wait(60) == 1
    assert port in [item.laddr.port for item in listening]
    assert {item.laddr.ip for item in listening} == {"127.0.0.1"}


# -- the engine over the nodes


@pytest.mark.parametrize("nodes", [1, 2, 3, 4, 5, 7, 8, 16, 33])
def test_the_trial_engine_fits_any_number_of_nodes(nodes):
    flags = [*trial_flags(nodes, "127.0.0.1:20000", 60), "--node-rank", str(nodes - 1)]
    config = prepare(EngineArgs.from_kwargs(**parse_flags(build_parser("serve"), flags)))
    assert config.parallel.num_ranks == nodes


@pytest.mark.parametrize(
    ("endings", "engine", "expected"),
    [
        ({}, ["ok", "ok", "ok"], "\nOK"),
        (
            {0: ("Rome", 0, 0.2)},
            ["wrong answer", "ok", "ok"],
            "part of the engine: wrong answer; last lines:\n    Rome\n",
        ),
        (
            {2: ("a\nrank 2 fell over", 3, 0)},
            ["ok", "ok", "exit code 3"],
            "exit code 3; last lines:\n    rank 2 fell over\n",
        ),
        (
            {0: ("TP1 is lost\nb", 1, 0.2), 1: ("", 1, 0)},
            ["exit code 1", "exit code 1", "ok"],
            "    TP1 is lost\n    b\n",
        ),
        ({1: ("", 0, 600)}, ["ok", "hangs", "ok"], "part of the engine: hangs"),
    ],
)
def test_engine_results_are_evaluated(monkeypatch, endings, engine, expected):
    """`endings`: output, exit code and seconds of a node's part."""

    def part(flags: list[str], rank: int) -> list[str]:
        text, code, seconds = endings.get(rank, ("Paris", 0, 0.2))
        return ["sh", "-c", f"printf '%s\\n' {shlex.quote(text)}; sleep {seconds}; exit {code}"]

    monkeypatch.setattr(engine_trial, "part_command", part)
    monkeypatch.setattr(engine_trial, "END_SECONDS", 3.0 if "hangs" in engine else 60.0)
    codes, lines = check(3, [0, 1, 2], engine_seconds=90.0)
    assert codes == [int(bool(endings))] * 3
    assert expected in "\n".join(lines)
    rows = lines[lines.index(next(line for line in lines if line.startswith("node "))) + 1 :][:3]
    assert all(f"  {state}  " in row for state, row in zip(engine, rows)), rows


class RunningCheck:
    """``moe-engine cluster-check`` in a separate, forked process."""

    def __init__(self, *arguments: str) -> None:
        read, write = os.pipe()
        with open(write, "wb") as output:
            command = ["moe_engine.cli.main", "cluster-check", *arguments]
            self.process = child.start_interpreter.start_program(command, output)
        self.output = open(read)  # noqa: SIM115

    def __enter__(self) -> RunningCheck:
        return self

    def __exit__(self, *_: object) -> None:
        self.process.kill()
        self.process.wait()
        self.output.close()

    def finish(self) -> tuple[int, list[str]]:
        """Exit code, and the remaining lines."""
        lines = self.output.read().splitlines()
        return self.process.wait(60), lines


def test_the_command_with_the_real_engine():
    with RunningCheck() as check:
        code, lines = check.finish()
    assert code == 0 and lines[-1] == "OK" and lines[-2].split()[-2:] == ["ok", "ok"], "\n".join(lines)


def test_the_command_on_two_nodes_given_by_flags():
    nodes = ["--no-engine", "--nnodes", "2", "--dist-init-addr", f"127.0.0.1:{free_port()}"]
    with RunningCheck(*nodes, "--node-rank", "1") as other, RunningCheck(*nodes) as first:
        code, lines = first.finish()
        assert other.finish()[0] == 0
    assert code == 0 and lines[-1] == "OK", "\n".join(lines)
    assert [line.split()[1] for line in lines[-3:-1]] == ["0", "1"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--nnodes", "2"], "needs --dist-init-addr"),
        (["--nnodes", "2", "--node-rank", "2"], "--node-rank 2: must be 0 to 1 with --nnodes 2"),
    ],
)
def test_wrong_flags_of_the_command(arguments, message, capsys):
    from moe_engine.cli.main import main

    assert main(["cluster-check", *arguments]) == 2
    assert message in capsys.readouterr().err
