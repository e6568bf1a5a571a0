"""CURVE at every socket between nodes admits only processes with the job's secret; sockets on one node are not
encrypted."""

from __future__ import annotations

import ast
import secrets
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import zmq

from moe_engine.core import messages as core_messages
from moe_engine.core.dp_sync import StepExchange
from moe_engine.core.transport import ZmqTransport
from moe_engine.errors import ConfigError
from moe_engine.executor import messages
from moe_engine.executor.options import RankGroupOptions
from moe_engine.executor.plan_broadcast import PlanReceiver, PlanSender, Step
from moe_engine.processes.zmq_sockets import JobKeys, bind, connect
from moe_engine.types import StepFacts, StepPlan
from tests.distributed.ranks.test_strays import LIMITS, Group
from tests.waiting import until

ANY = "tcp://127.0.0.1:*"
QUIET_MS = 300
KEYS = JobKeys(secrets.token_bytes(32))
ROOT = Path(__file__).resolve().parents[3]


def others() -> list[JobKeys | None]:
    """Foreign processes: without a secret, with another secret, and with only the connecting key pair."""
    half = JobKeys(secrets.token_bytes(32))
    half.connect_public, half.connect_secret = KEYS.connect_public, KEYS.connect_secret
    return [None, JobKeys(secrets.token_bytes(32)), half]


@pytest.fixture
def sockets() -> Iterator[list[zmq.Socket[bytes]]]:
    made: list[zmq.Socket[bytes]] = []
    yield made
    for socket in made:
        socket.close(0)


def stranger(kind: int, address: str, keys: JobKeys | None, made: list[zmq.Socket[bytes]]) -> zmq.Socket[bytes]:
    socket: zmq.Socket[bytes] = zmq.Context.instance().socket(kind)
    made.append(socket)
    connect(socket, address, keys)
    return socket


def test_keys_follow_from_the_secret_alone() -> None:
    assert JobKeys(b"one" * 8).bind_public == JobKeys(b"one" * 8).bind_public != JobKeys(b"two" * 8).bind_public
    keys = vars(JobKeys(b"one" * 8)).values()
    assert len(set(keys)) == 4 and all(len(key) == 40 for key in keys)
    assert "one" not in repr(JobKeys(b"one" * 8))


def test_requests_need_the_secret(sockets: list[zmq.Socket[bytes]], tmp_path: Path) -> None:
    port = ZmqTransport(ANY, f"ipc://{tmp_path}/from", keys=KEYS)
    for keys in others():
        stranger(zmq.PUSH, port.address, keys, sockets).send(core_messages.encode(core_messages.Shutdown()))
    assert port.receive(QUIET_MS / 1000) == []
    stranger(zmq.PUSH, port.address, KEYS, sockets).send(core_messages.encode(core_messages.Call(1, "x")))
    assert [message.id for message in port.receive(30.0)] == [1]  # type: ignore[union-attr]
    port.close()


def test_a_socket_with_an_address_on_the_node_and_one_for_others(
    sockets: list[zmq.Socket[bytes]], tmp_path: Path
) -> None:
    """A socket as the frontend has it, in both orders of binding."""
    for order in (0, 1):
        socket: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.PULL)
        sockets.append(socket)
        pair = [f"ipc://{tmp_path}/s{order}", ANY]
        bound = {address: bind(socket, address, KEYS) for address in (pair if order else reversed(pair))}
        for keys in others():
            stranger(zmq.PUSH, bound[ANY], keys, sockets).send(b"stranger")
        stranger(zmq.PUSH, bound[pair[0]], None, sockets).send(b"on the node")
        stranger(zmq.PUSH, bound[ANY], KEYS, sockets).send(b"of the job")
        found = set()
        while socket.poll(30_000 if len(found) < 2 else QUIET_MS):
            found.add(socket.recv())
        assert found == {b"on the node", b"of the job"}


def test_steps_and_plans_need_the_secret(sockets: list[zmq.Socket[bytes]]) -> None:
    first, second = (StepExchange(group, 2, ANY, KEYS) for group in range(2))
    for mesh in (first, second):
        mesh.connect([first.address, second.address])
    for keys in others():
        stranger(zmq.PUSH, first.address, keys, sockets).send(b"x")
    second.send(1, StepFacts(num_tokens=2))
    first.send(1, StepFacts(num_tokens=1))
    assert [facts.num_tokens for facts in first.gather(1, lambda: None)] == [1, 2]
    first.begun(2)
    assert first.num_dropped == 0
    sender = PlanSender(ANY, KEYS)
    strangers = [PlanReceiver(sender.address, "rank1", keys) for keys in others()]
    assert not sender.wait_subscribed(["rank1"], QUIET_MS / 1000)
    receiver = PlanReceiver(sender.address, "rank1", KEYS)
    assert sender.wait_subscribed(["rank1"], 30.0)
    sender.send(StepPlan(5))
    assert isinstance(receiver.receive(30.0), Step)
    assert all(other.receive(0.05) is None for other in strangers)
    for closing in (first, second, sender, receiver, *strangers):
        closing.close()


def test_control_channel_needs_the_secret(sockets: list[zmq.Socket[bytes]]) -> None:
    options = RankGroupOptions(2, lambda: None, num_nodes=2, leader_address="127.0.0.1:1", limits=LIMITS, keys=KEYS)
    group = Group(ANY, options)
    for keys in others():
        sender = stranger(zmq.DEALER, group.control.address, keys, sockets)
        sender.send(messages.encode(messages.Hello(99, "there", 9)))
        assert not sender.poll(QUIET_MS)
    until(lambda: group.control.num_dropped, "refused handshakes were not counted")
    group.check()
    group.close()


def test_an_address_that_cannot_be_bound_names_the_flag() -> None:
    socket: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.PULL)
    taken: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.PULL)
    address = bind(taken, ANY)
    for where, reason in (
        ("tcp://192.0.2.1:*", "not an address of this host"),
        (address, "the port is in use"),
        (f"ipc:///{'x' * 120}", "set TMPDIR"),
        ("ipc:///no/such/folder/x", "set TMPDIR"),
    ):
        with pytest.raises(ConfigError, match=f"--some-flag: cannot listen there .*{reason}"):
            bind(socket, where, None, "--some-flag")
    socket.close(0)
    taken.close(0)


def test_no_socket_is_bound_or_connected_elsewhere() -> None:
    """Only one of the files with ZeroMQ sockets binds and connects them; sockets elsewhere would not be encrypted."""
    found = []
    for path in sorted((ROOT / "moe_engine").rglob("*.py")):
        text = path.read_text()
        if "import zmq" not in text or path.name == "zmq_sockets.py":
            continue
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
                owner = ast.unparse(node.func.value)
                if node.args and ast.unparse(node.args[0]).startswith("'inproc://"):
                    continue  # stays within the process
                if node.func.attr == "bind" or (node.func.attr == "connect" and owner != "self._exchange"):
                    found.append(f"{path.relative_to(ROOT)}:{node.lineno}: {ast.unparse(node.func)}")
    found = [line for line in found if not line.endswith(("self._known.bind", "leader_bind", "front.bind"))]
    assert not found, "\n".join(found)


def test_refused_node_exits_and_names_the_flag(sockets: list[zmq.Socket[bytes]]) -> None:
    from dataclasses import replace

    from moe_engine.cluster.heartbeat_client import HeartbeatClient
    from moe_engine.cluster.node import wait_for_leader

    leader: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.ROUTER)
    sockets.append(leader)
    address = bind(leader, ANY, KEYS)
    for keys in others():
        here, limits = messages.NodeHere(1, "here", 9), replace(LIMITS, refused=0.2)
        link = HeartbeatClient(
            address, "node1 here 9", here, lambda here=here: here, limits, lambda reason: None, keys=keys
        )
        began = time.monotonic()
        with pytest.raises(ConfigError, match=r"node 1: the leader .* refuses the connection: --dist-secret-file or"):
            wait_for_leader(link, 1, limits)
        assert time.monotonic() - began < limits.start
        link.close()
