"""The check's parts without a cluster: nodes are tasks of this process, or processes on loopback."""

from __future__ import annotations

import asyncio
import socket
import subprocess
import sys
import tempfile

import pytest

from moe_engine.cli.cluster_check import engine_trial, facts, leader
from moe_engine.cli.cluster_check.engine_trial import EngineProcess, trial_flags
from moe_engine.cli.cluster_check.follower import Follower
from moe_engine.cli.cluster_check.leader import Leader, Plan
from moe_engine.cli.cluster_check.links import Listener, try_links
from moe_engine.cli.cluster_check.report import Report
from moe_engine.cli.cluster_check.wire import ConnectionLost, Hello, Peer, TryLinks, connect
from moe_engine.config.args import EngineArgs, build_parser
from moe_engine.config.flags import parse_flags
from moe_engine.planning.prepare import prepare
from tests.free_port import free_port


def plan(nodes: int, join_seconds: float = 20.0, engine_seconds: float = 0.0) -> Plan:
    hosts = [f"host{rank}" for rank in range(nodes)]
    return Plan(nodes, f"127.0.0.1:{free_port()}", hosts, join_seconds, engine_seconds)


def follower(of: Plan, rank: int, output: list[str], join_seconds: float = 20.0) -> Follower:
    return Follower(rank, of.host, of.port, join_seconds, output.append)


async def check(of: Plan, ranks: list[int]) -> tuple[Report, list[int]]:
    """The leader's report and the followers' exit codes."""
    output: list[str] = []
    report, *codes = await asyncio.gather(
        Leader(of, output.append).run(), *(follower(of, rank, output).run() for rank in ranks)
    )
    return report, codes


def test_nodes_and_links_in_order():
    report, codes = asyncio.run(check(plan(3), [1, 2]))
    assert report.ok and codes == [0, 0] and report.text().endswith("\nOK")
    assert all(node.slowest_link is not None and node.slowest_link > 0 for node in report.nodes)


def test_missing_node_is_named_and_others_are_checked():
    report, codes = asyncio.run(check(plan(4, join_seconds=0.5), [1, 3]))
    assert not report.ok and codes == [1, 1]
    assert [bool(node.problems) for node in report.nodes] == [False, False, True, False]
    assert "FAILED host2: did not join within 0.5 s" in report.text()
    assert report.nodes[3].slowest_link is not None


def test_a_follower_names_a_leader_it_cannot_reach():
    output: list[str] = []
    of = plan(2)
    assert asyncio.run(follower(of, 1, output, join_seconds=0.2).run()) == 1
    assert "cannot reach node 0 at 127.0.0.1" in output[-1] and "connection refused" in output[-1]


def test_two_nodes_with_the_same_number():
    report, codes = asyncio.run(check(plan(3, join_seconds=1.0), [1, 1]))
    assert not report.ok and codes == [1, 1]
    assert "joined as node 1 twice" in report.text()


def test_a_node_with_other_versions_or_another_clock_is_named(monkeypatch):
    """Nodes 1 to 3 in turn: as node 0, with another torch, ten seconds ahead."""
    usual = facts.gather
    made = []

    def gather():
        node = usual()
        made.append(node)
        if len(made) == 3:
            node.versions["torch"] = "1.0"
        if len(made) == 4:
            node.time += 10
        return node

    monkeypatch.setattr(facts, "gather", gather)
    report, codes = asyncio.run(check(plan(4), [1, 2, 3]))
    assert codes == [1, 1, 1]
    problems = [problem for node in report.nodes for problem in node.problems]
    assert len(problems) == 2, problems
    assert sum(problem.startswith("torch 1.0, the others have 2.") for problem in problems) == 1
    assert sum("ahead of node 0's" in problem for problem in problems) == 1


def test_the_majority_is_right_about_versions():
    nodes = {rank: facts.gather() for rank in range(5)}
    for rank in (0, 3):
        nodes[rank].versions["numpy"] = "1.0"
    assert set(facts.differences(nodes)) == {0, 3}
    del nodes[4]  # two against two: node 0 is right
    assert set(facts.differences(nodes)) == {1, 2}


def test_closed_silent_and_foreign_links(monkeypatch):
    monkeypatch.setattr("moe_engine.cli.cluster_check.links.TRY_SECONDS", 0.3)

    async def stranger(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"SSH-2.0-OpenSSH_9.2\r\n")

    async def go():
        good = await Listener.open(socket.AF_INET, 0)
        other = await asyncio.start_server(stranger, "127.0.0.1", 0)
        silent = socket.create_server(("127.0.0.1", 0))
        ports = [good.port, other.sockets[0].getsockname()[1], silent.getsockname()[1], free_port()]
        result = await try_links([Peer(1, "127.0.0.1", ports)])
        good.close()
        other.close()
        silent.close()
        return ports, result

    ports, result = asyncio.run(go())
    assert [link.port for link in result.broken] == ports[1:]
    assert [link.reason for link in result.broken] == [
        "another program listens there",
        "no answer within 0.3 s",
        "connection refused",
    ]
    assert result.slowest > 0


def test_a_node_that_vanishes_between_two_steps_is_named():
    async def vanishing(of: Plan) -> None:
        channel = await connect(of.host, of.port, 5)
        await channel.send(Hello(1, facts.gather(), []))
        await channel.receive(TryLinks, 10)
        channel.close()

    async def go() -> Report:
        of = plan(2)
        listening = asyncio.create_task(Leader(of, lambda text: None).run())
        while True:
            try:
                await vanishing(of)
                return await listening
            except ConnectionLost:
                await asyncio.sleep(0.02)

    assert "lost while testing its links: the connection was closed" in asyncio.run(go()).text()


# -- the engine over the nodes


@pytest.mark.parametrize("nodes", [1, 2, 3, 4, 5, 7, 8, 16, 33])
def test_the_trial_engine_fits_any_number_of_nodes(nodes):
    flags = [*trial_flags(nodes, "127.0.0.1:20000", 60), "--node-rank", str(nodes - 1)]
    config = prepare(EngineArgs.from_kwargs(**parse_flags(build_parser("serve"), flags)))
    assert config.parallel.num_ranks == nodes


class Part(EngineProcess):
    """Stands in for a node's part of the engine. `endings`: output and exit code by node."""

    endings: dict[int, tuple[str, int]]

    @classmethod
    async def start(cls, flags, node_rank, http_port=None):
        text, code = cls.endings.get(node_rank, ("", 0))
        program = f"import time; print({text!r}); time.sleep({0 if code else 0.3}); raise SystemExit({code})"
        arguments = [sys.executable, "-c", program]
        log = tempfile.TemporaryFile("w+")  # noqa: SIM115  # closed with the process
        return cls(await asyncio.create_subprocess_exec(*arguments, stdout=log, stderr=log), log)


@pytest.mark.parametrize(
    ("wrong", "endings", "expected"),
    [
        ("", {}, "\nOK"),
        ("the engine answered 'Rome'", {}, "FAILED the engine answered 'Rome'"),
        ("", {2: ("rank 2 fell over", 3)}, "The engine's last lines on {host}:\n    rank 2 fell over"),
        ("the engine exited during startup", {0: ("TP1 is lost", 1), 1: ("leaves", 1)}, "    TP1 is lost"),
    ],
)
def test_engine_results_are_evaluated(monkeypatch, wrong, endings, expected):
    async def ask(engine, http_port, seconds):
        await asyncio.sleep(0.1)
        return wrong

    monkeypatch.setattr(leader, "ask", ask)
    monkeypatch.setattr(Part, "endings", endings, raising=False)
    monkeypatch.setattr(leader, "EngineProcess", Part)
    monkeypatch.setattr("moe_engine.cli.cluster_check.follower.EngineProcess", Part)
    monkeypatch.setattr(Part, "stop", lambda self: self._process.wait())
    report, codes = asyncio.run(check(plan(3, engine_seconds=10), [1, 2]))
    good = not wrong and not endings
    assert report.ok == good and codes == [int(not good)] * 2
    assert expected.format(host=socket.gethostname()) in report.text()
    assert [node.engine for node in report.nodes] == [
        f"exit code {endings[rank][1]}" if rank in endings else "ok" for rank in range(3)
    ]


def test_exited_or_wrong_engine_fails(monkeypatch):
    class Engine:
        running = False

    assert asyncio.run(engine_trial.ask(Engine(), free_port(), 5.0)) == "the engine exited during startup"
    monkeypatch.setattr(engine_trial, "_healthy", lambda url: True)
    monkeypatch.setattr(engine_trial, "_chat", lambda url: "Rome, I think.")
    assert "answered 'Rome, I think.'" in asyncio.run(engine_trial.ask(Engine(), 1, 5.0))


def run_check(*arguments: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "moe_engine.cli.main", "cluster-check", *arguments]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)


def test_the_command_with_the_real_engine():
    with run_check() as check:
        lines = check.communicate(timeout=120)[0].splitlines()
    assert check.returncode == 0 and lines[-1] == "OK" and lines[-2].split()[-2:] == ["ok", "ok"], "\n".join(lines)


def test_the_command_on_two_nodes_given_by_flags():
    nodes = ["--no-engine", "--nnodes", "2", "--dist-init-addr", f"127.0.0.1:{free_port()}"]
    with run_check(*nodes, "--node-rank", "1") as other, run_check(*nodes) as first:
        lines = first.communicate(timeout=60)[0].splitlines()
        assert other.wait(60) == 0
    assert first.returncode == 0 and lines[-1] == "OK", "\n".join(lines)
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
