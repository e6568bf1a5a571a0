"""Bind address and own address of rank 0, including machines whose own name resolves to 127.0.1.1."""

from __future__ import annotations

import runpy
import shutil
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from moe_engine.errors import ConfigError
from moe_engine.executor import process_groups
from moe_engine.executor.options import RankGroupOptions
from moe_engine.parallel.collectives import PeerLost
from moe_engine.processes import addresses as rank_addresses
from tests.distributed.ranks.hosts import ADDRESSES, two_hosts, why_not


def options(address: str = "node0:20000") -> RankGroupOptions:
    return RankGroupOptions(4, lambda: None, num_nodes=2, leader_address=address)


@pytest.fixture
def resolve(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Addresses by name."""

    def to(address: str) -> None:
        monkeypatch.setattr(socket, "gethostbyname", lambda name: address)

    return to


def test_an_address_that_others_know_is_bound_itself(resolve: Callable[[str], None]) -> None:
    resolve("10.1.2.3")
    assert options().leader_tcp() == options().leader_bind() == "tcp://10.1.2.3:20000"
    assert options().leader_bind("*") == "tcp://10.1.2.3:*"


@pytest.mark.parametrize("own", ["127.0.1.1", "127.0.0.1"])
def test_a_name_that_means_the_machine_itself_is_bound_at_one_address_of_its_network(
    resolve: Callable[[str], None], own: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    resolve(own)
    monkeypatch.setattr(rank_addresses, "_source_address", lambda family, destination: "10.1.2.3")
    assert options().leader_bind() == "tcp://10.1.2.3:20000" and options().leader_bind("*") == "tcp://10.1.2.3:*"


@pytest.mark.parametrize("host", ["127.0.0.1", "127.0.0.5", "localhost"])
def test_loopback_that_was_asked_for_is_bound_itself(resolve: Callable[[str], None], host: str) -> None:
    bound = "127.0.0.1" if host == "localhost" else host
    resolve(bound)
    assert options(f"{host}:20000").leader_bind() == f"tcp://{bound}:20000"


def test_the_interface_for_small_messages_is_taken_before_the_default_route(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(rank_addresses.INTERFACE_VARIABLE, "lo")
    assert rank_addresses.network_address() == "127.0.0.1"


@pytest.mark.parametrize("number", [socket.EAI_NONAME, socket.EAI_AGAIN])
def test_a_name_may_become_known_during_the_start(
    number: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A pod of Kubernetes starts before the DNS knows the name of the leader's pod."""
    tries = []

    def lookup(*asked: object, **kind: object) -> object:
        tries.append(asked)
        if len(tries) % 3:
            raise socket.gaierror(number, "unknown")
        found = [(socket.AF_INET, socket.SOCK_DGRAM, 17, "", ("10.1.2.3", 9))]
        return "10.1.2.3" if len(asked) == 1 else found

    monkeypatch.setattr(rank_addresses, "RETRY_SECONDS", 0.0)
    monkeypatch.setattr(rank_addresses, "_source_address", lambda family, destination: destination[0])
    for name in ("gethostbyname", "getaddrinfo"):
        monkeypatch.setattr(socket, name, lookup)
    assert options().leader_tcp() == "tcp://10.1.2.3:20000" and len(tries) == 3
    assert rank_addresses.own_address_towards("node0") == "10.1.2.3" and len(tries) == 6
    (line, _) = [record.getMessage() for record in caplog.records]
    assert line.startswith("--dist-init-addr: unknown host node0: ") and line.endswith("; trying for 60 s")


def test_a_system_without_all_numbers_of_errors_can_import_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(socket, "EAI_NODATA")  # as with musl
    found = runpy.run_module("moe_engine.processes.addresses")
    assert found["UNKNOWN"] == (socket.EAI_NONAME, socket.EAI_AGAIN)


def test_an_unknown_name_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(name: str) -> str:
        raise socket.gaierror(-2, "Name or service not known")

    monkeypatch.setattr(socket, "gethostbyname", fail)
    monkeypatch.setattr(rank_addresses, "NAME_SECONDS", 0.0)
    with pytest.raises(ConfigError, match="--dist-init-addr node0:20000: unknown host"):
        options().leader_tcp()


def test_own_address_is_the_one_on_the_way_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """The own address for a leader that /etc/hosts maps to 127.0.1.1, this machine: not a loopback address."""
    found = {("node0", 9): "127.0.1.1"}

    def lookup(host: str, port: int, **kind: object) -> list[tuple[object, ...]]:
        return [(socket.AF_INET, socket.SOCK_DGRAM, 17, "", (found.get((host, port), host), port))]

    monkeypatch.setattr(socket, "getaddrinfo", lookup)
    routes = {("127.0.1.1", 9): "127.0.1.1", rank_addresses.ELSEWHERE: "10.1.2.3"}
    monkeypatch.setattr(rank_addresses, "_source_address", lambda family, destination: routes[destination])
    assert rank_addresses.own_address_towards("node0") == "10.1.2.3"
    routes[rank_addresses.ELSEWHERE] = ""  # no default route: an address of a common network
    monkeypatch.setattr(rank_addresses, "_first_address", lambda: "10.9.9.9")
    assert rank_addresses.own_address_towards("node0") == "10.9.9.9"


LISTEN = """
import sys, zmq
from moe_engine.executor import process_groups
from moe_engine.executor.options import RankGroupOptions
options = RankGroupOptions(2, print, num_nodes=2, leader_address="node0:20000")
socket = zmq.Context.instance().socket(zmq.REP)
socket.bind(options.leader_bind())
other = zmq.Context.instance().socket(zmq.REP)
other.bind(options.leader_bind("*"))
print(other.getsockopt(zmq.LAST_ENDPOINT).rstrip(bytes(1)).decode(), flush=True)
while True:
    socket.send(b"from node0 to " + socket.recv())
"""
ASK = """
import zmq
from moe_engine.executor import process_groups
from moe_engine.executor.options import RankGroupOptions
from moe_engine.processes.addresses import own_address_towards
options = RankGroupOptions(2, print, num_nodes=2, node_rank=1, leader_address="node0:20000")
socket = zmq.Context.instance().socket(zmq.REQ)
socket.setsockopt(zmq.REQ_RELAXED, 1)
socket.setsockopt(zmq.REQ_CORRELATE, 1)
socket.connect(options.leader_tcp())
for attempt in range(60):
    socket.send(own_address_towards("node0").encode())
    if socket.poll(1000):
        break
print(socket.recv(zmq.NOBLOCK).decode())
"""


def test_a_host_with_such_a_name_is_reached_from_another(tmp_path: Path) -> None:
    reason = why_not() or ("not installed: mount" if shutil.which("mount") is None else None)
    if reason is not None:
        pytest.skip(reason)
    with two_hosts() as hosts:
        started = []
        for number, (own, code) in enumerate((("127.0.1.1", LISTEN), (ADDRESSES[0], ASK))):
            names = tmp_path / f"hosts{number}"
            names.write_text(f"127.0.0.1 localhost\n{own} node0\n")
            inside = f"mount --bind {names} /etc/hosts && exec {sys.executable} -c '{code}'"
            command = ["unshare", "--mount", "--propagation", "private", "sh", "-c", inside]
            started.append(hosts.start(number, *command, stdout=subprocess.PIPE))
        listener, asker = started
        try:
            # The listener runs until the answer has arrived: a process that ends at once may lose what it sent.
            answer = asker.communicate(timeout=120)[0]
            listener.kill()
            bound = listener.communicate(timeout=120)[0]
        finally:
            for process in started:
                process.kill()
                process.wait()
    assert bound.startswith(f"tcp://{ADDRESSES[0]}:")
    assert answer == f"from node0 to {ADDRESSES[1]}\n"


def test_a_store_that_cannot_be_reached_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """A firewall admits the port of --dist-init-addr only: torch would wait for the whole time of the start."""
    monkeypatch.setattr(process_groups, "RETRY_SECONDS", 0.01)
    with socket.create_server(("127.0.0.1", 0)) as store:
        port = store.getsockname()[1]
        process_groups.check_reachable("127.0.0.1", port)
    for host, fix in (("127.0.0.1", "loopback interface"), ("127.0.0.2", "firewalls .*cluster-check")):
        for seconds in (0.2, 0.0):  # 0: over when the last attempt begins, as after a long wait for a core
            monkeypatch.setattr(process_groups, "REACH_SECONDS", seconds)
            with pytest.raises(ConfigError, match=rf"{host}:{port}, cannot be reached .*{fix}"):
                process_groups.check_reachable(host, port)


def test_a_leader_that_does_not_reach_its_own_store_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    """In a network namespace without loopback torch would wait for the whole time of the start."""

    def fail(*_: object) -> None:
        raise OSError(101, "Network is unreachable")

    monkeypatch.setattr(process_groups, "REACH_SECONDS", 0.0)
    monkeypatch.setattr(socket, "create_connection", fail)
    with pytest.raises(ConfigError, match=r"Network is unreachable.*bring its loopback interface up"):
        process_groups.open_store(RankGroupOptions(2, lambda: None), "127.0.0.1")


HOLD_ALL_PORTS = """
import socket
from moe_engine.errors import ConfigError
from moe_engine.executor import process_groups
from moe_engine.executor.options import RankGroupOptions
held = [socket.create_server(("127.0.0.1", port)) for port in range(40000, 40004)]
try:
    process_groups.open_store(RankGroupOptions(2, print), "127.0.0.1")
except ConfigError as error:
    print(error)
"""


def test_a_machine_without_a_free_port_says_so() -> None:
    """Programs with many connections can hold the whole range: "Address already in use" names no port to change."""
    if reason := why_not():
        pytest.skip(reason)
    inside = f"echo 40000 40003 > /proc/sys/net/ipv4/ip_local_port_range && exec {sys.executable} -c '{HOLD_ALL_PORTS}'"
    command = ["unshare", "--net", "sh", "-c", f"ip link set lo up && {inside}"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.stdout.startswith("the store of rank 0 cannot listen at 127.0.0.1: no port of net.ipv4.ip_local"), done


def test_a_group_without_a_free_port_says_so() -> None:
    """The error is gloo's, of two ranks of `serve --tp 2` with a range of four ports."""
    seen = "[enforce fail at gloo/transport/tcp/socket.cc:95] rv != -1. -1 vs -1. bind: Address already in use"
    world = process_groups.RankWorld(options(), options().places[1], "127.0.0.1", 40001)
    with pytest.raises(PeerLost, match=r"at 127\.0\.0\.1:40001: no port .* is free: "), world._rendezvous_errors():
        raise RuntimeError(seen)
