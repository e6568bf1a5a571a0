"""The front end's desk, against nodes that the tests play: orders, news, refusals, silence, and what a start says."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import zmq

from moe_engine.config.resolve_parallel import ParallelPlan
from moe_engine.engine.client_api import EngineInfo
from moe_engine.engine.core_handle import CoreHandle
from moe_engine.engine.nodes import messages as news
from moe_engine.engine.nodes.desk import NodeDesk
from moe_engine.engine.nodes.remote_core import RemoteCore
from moe_engine.engine.ranks.options import WatchLimits
from moe_engine.engine.start import wait_ready
from moe_engine.engine.status_board import StatusBoard
from moe_engine.errors import ConfigError, EngineDeadError
from moe_engine.parallel.topology import Topology
from tests.nodes.cluster import free_port
from tests.server.fake_engine import INFO

PATIENT = WatchLimits(silent=60.0, start_silent=60.0, start=60.0, progress=60.0)
SECONDS = 20.0


class Local(CoreHandle):
    """The replica on node 0 itself."""

    def __init__(self, facts: dict[str, Any]) -> None:
        super().__init__("engine core DP0")
        self._facts = facts

    @property
    def pid(self) -> int:
        return 1

    def poll_ready(self, seconds: float = 0.05) -> dict[str, Any] | None:
        return self._facts

    def kill(self, reason: str) -> None:
        self._died(reason)

    def stop(self, grace: float) -> None: ...


class FakeNode:
    """A node that says what the test wants."""

    def __init__(self, address: str, rank: int, *, fingerprint: str = "same", pid: int = 4242) -> None:
        self._socket: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.DEALER)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.connect(f"tcp://{address}")
        self.say(news.NodeHello(rank, f"host{rank}", pid, fingerprint))

    def say(self, message: news.ToFront) -> None:
        self._socket.send(news.encode(message))

    def say_nonsense(self) -> None:
        self._socket.send(b"\x81\xa4kind\xa4what")

    def hears(self, kind: type[Any]) -> Any:
        """The next message of a kind."""
        deadline = time.monotonic() + SECONDS
        while time.monotonic() < deadline:
            if self._socket.poll(100) and isinstance(found := news.decode_to_node(self._socket.recv()), kind):
                return found
        raise AssertionError(f"no {kind.__name__}")

    def close(self) -> None:
        self._socket.close(0)


class Stage:
    """A desk for `nodes` nodes; `remote` are the cores that others lead."""

    def __init__(self, tp_size: int, replicas: int, nodes: int, limits: WatchLimits) -> None:
        self.address = f"127.0.0.1:{free_port()}"
        topology = Topology(tp_size, num_nodes=max(1, nodes // replicas))
        plan = ParallelPlan(topology, num_replicas=replicas, num_nodes=nodes, leader_address=self.address)
        self.desk = NodeDesk(plan, "same", limits)
        led_elsewhere = [replica for replica in range(replicas) if plan.nodes_of(replica)[0]]
        self.remote = [self.desk.core(replica) for replica in led_elsewhere]
        self.local: list[CoreHandle] = [Local(facts()) for _ in range(replicas - len(self.remote))]
        self.desk.open([*self.local, *self.remote])
        self._nodes: list[FakeNode] = []

    def node(self, rank: int, **about: Any) -> FakeNode:
        self._nodes.append(FakeNode(self.address, rank, **about))
        return self._nodes[-1]

    def serving(self, rank: int, replica: int) -> FakeNode:
        """A node whose replica is ready, as the front end has seen."""
        node = self.node(rank)
        assert node.hears(news.Lead).replica == replica
        node.say(news.Started(replica, f"engine core DP{replica} on host{rank}", 77))
        node.say(news.Ready(replica, facts(max_total_num_tokens=100 + rank)))
        core = next(core for core in self.remote if core.replica == replica)
        while core.poll_ready() is None:
            pass
        return node

    def close(self) -> None:
        for core in self.remote:
            core.expect_exit()
            core.ended("the test is over")
            core.stop(0.0)
        for node in self._nodes:
            node.close()


@contextmanager
def stage(tp_size: int = 1, replicas: int = 2, nodes: int = 2, limits: WatchLimits = PATIENT) -> Iterator[Stage]:
    made = Stage(tp_size, replicas, nodes, limits)
    try:
        yield made
    finally:
        made.close()


def facts(**changes: Any) -> dict[str, Any]:
    known = {name: getattr(INFO, name) for name in EngineInfo.__dataclass_fields__}
    return {**known, "core_addresses": ["tcp://127.0.0.1:1"], **changes}


def until(condition: Callable[[], Any]) -> None:
    deadline = time.monotonic() + SECONDS
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.005)


def failure_of(core: RemoteCore, error: type[Exception] = EngineDeadError) -> str:
    """What the start of a core raises."""
    with pytest.raises(error) as failed:
        core.wait_ready()
    return str(failed.value)


def test_a_replica_on_another_node_from_hello_to_its_end(tmp_path: Path) -> None:
    with stage() as on:
        (core,) = on.remote
        node = on.node(1)
        order = node.hears(news.Lead)
        assert (order.replica, order.front_address) == (1, core.front_address)
        assert core.poll_ready() is None
        node.say(news.Started(1, "engine core DP1 on host1", 77))
        node.say(news.Ready(1, facts(core_addresses=["tcp://10.0.0.2:5"])))
        core.wait_ready()
        assert (core.to_core_addresses, core.pid, core.dead) == (["tcp://10.0.0.2:5"], 77, None)
        assert core.boards[0].read().ready
        node.hears(news.AllReady)
        board = StatusBoard(tmp_path / "of-the-node", create=True)
        board.write(num_running=5)
        node.say(news.NodeBeat({1: [board.pack()]}))
        until(lambda: core.boards[0].read().num_running == 5)
        core.kill("no step for 300 s")
        assert node.hears(news.Kill) == news.Kill(1, "no step for 300 s")
        node.say(news.Ended(1, "engine core DP1 on host1 (pid 77) was killed by SIGKILL: no step for 300 s"))
        until(lambda: core.dead)
        assert core.dead == "engine core DP1 on host1 (pid 77) was killed by SIGKILL: no step for 300 s"
        core.expect_exit()
        assert node.hears(news.End) == news.End(0)


def test_what_the_core_said_itself_counts_more_than_how_it_ended() -> None:
    with stage() as on:
        node, (core,) = on.serving(1, 1), on.remote
        core.note_failure("TP1 is lost")
        node.say(news.Ended(1, "engine core DP1 on host1 (pid 77) exited with code 1"))
        assert core._ended.wait(SECONDS)
        assert core.dead == "engine core DP1 on host1 (pid 77) failed: TP1 is lost"


def test_requests_are_measured_by_the_replica_with_least_room() -> None:
    with stage(replicas=3, nodes=3) as on:
        for rank in (2, 1):
            on.serving(rank, rank)
        found = iter([facts(max_total_num_tokens=101), facts(max_total_num_tokens=102)])
        for core in on.remote:
            core._start.put(next(found))
        assert wait_ready([*on.local, *on.remote]).max_total_num_tokens == 101


@pytest.mark.parametrize(("kind", "error"), [("ConfigError", ConfigError), ("OSError", EngineDeadError)])
def test_a_core_that_cannot_start_says_why(kind: str, error: type[Exception]) -> None:
    with stage() as on:
        node = on.node(1)
        node.hears(news.Lead)
        node.say(news.StartFailed(1, "model-00002.safetensors: truncated", kind))
        assert failure_of(on.remote[0], error) == "model-00002.safetensors: truncated"
        on.remote[0].expect_exit()
        assert node.hears(news.End) == news.End(1, "the start was broken off")


def test_nodes_with_other_flags_end_the_start_and_later_only_themselves() -> None:
    sentence = "node 1 (host1, pid 5) was started with other flags than node 0: start all alike"
    with stage() as on:
        assert on.node(1, fingerprint="other", pid=5).hears(news.End) == news.End(1, sentence)
        assert failure_of(on.remote[0]) == sentence
    with stage() as on:
        on.serving(1, 1).hears(news.AllReady)
        assert on.node(1, fingerprint="other", pid=5).hears(news.End).reason == sentence
        assert on.node(7, pid=6).hears(news.End).reason.startswith("node 7 (host7, pid 6) was started with other flags")
        assert on.remote[0].dead is None


def test_the_second_of_two_nodes_with_one_number_is_sent_away() -> None:
    with stage() as on:
        first = on.serving(1, 1)
        end = on.node(1, pid=5).hears(news.End)
        assert end == news.End(1, "node 1 (host1, pid 5) comes second: there is node 1 (host1, pid 4242)")
        first.say(news.NodeBeat())
        first.hears(news.Heard)
        assert on.remote[0].dead is None


def test_nonsense_and_strangers_are_ignored() -> None:
    with stage() as on:
        node = on.node(1)
        node.hears(news.Lead)
        node.say_nonsense()
        stranger: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.DEALER)
        stranger.connect(f"tcp://{on.address}")
        stranger.send(news.encode(news.Ended(1, "gone")))
        node.say(news.NodeBeat())
        node.hears(news.Heard)
        stranger.close(0)
        assert on.remote[0].dead is None


def test_a_node_that_falls_silent_takes_what_it_leads_and_may_not_come_back() -> None:
    with stage(limits=WatchLimits(silent=0.3, start_silent=60.0)) as on:
        node, (core,) = on.serving(1, 1), on.remote
        until(lambda: core.dead)
        assert core.dead is not None and core.dead.startswith(
            "engine core DP1 on host1 (pid 77) is lost: node 1 (host1, pid 4242) silent for 0."
        )
        node.say(news.NodeBeat())
        assert node.hears(news.End).reason in core.dead


@pytest.mark.parametrize("rank", [1, 2, 3])
def test_a_node_lost_in_the_start_ends_it_whatever_it_has(rank: int) -> None:
    """Nodes 0 and 1 have replica 0, 2 and 3 replica 1."""
    limits = WatchLimits(silent=0.3, start_silent=0.3, start=60.0)
    with stage(tp_size=2, nodes=4, limits=limits) as on:
        on.node(rank)
        lost = f"node {rank} (host{rank}, pid 4242) silent for 0."
        if rank == 1:  # its leader's process is on node 0
            until(lambda: on.local[0].dead)
            assert str(on.local[0].dead).startswith(lost)
        else:
            assert lost in failure_of(on.remote[0])


def test_ranks_of_a_replica_over_two_nodes_are_sent_to_its_leader() -> None:
    with stage(tp_size=2, nodes=4) as on:
        early, leader = on.node(3), on.node(2)
        assert leader.hears(news.Lead).replica == 1
        leader.say(news.Listens(1, "tcp://10.0.0.3:41000"))
        assert early.hears(news.Join) == news.Join(1, "tcp://10.0.0.3:41000")
    with stage(tp_size=2, nodes=4) as on:
        leader = on.node(2)
        leader.say(news.Listens(1, "tcp://10.0.0.3:41000"))
        until(lambda: on.desk._meetings)
        assert on.node(3).hears(news.Join).replica == 1


def test_a_node_that_does_not_come_is_named(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "moe_engine")
    with stage(replicas=3, nodes=3, limits=WatchLimits(start=0.6, progress=0.1)) as on:
        on.node(1).hears(news.Lead)
        message = failure_of(on.remote[1])
        assert message.endswith(f"s: node 2 (not there): started with its --node-rank, and able to reach {on.address}?")
        assert "of 1 s: node 2 (not there)" in caplog.text and "Node 1 is there: host1, pid 4242" in caplog.text


def test_the_known_address_must_be_free() -> None:
    with stage() as on, pytest.raises(ConfigError, match=f"--dist-init-addr {on.address}: cannot listen there"):
        NodeDesk(ParallelPlan(num_replicas=2, num_nodes=2, leader_address=on.address), "same")


def test_a_node_that_comes_when_all_is_over_leaves_at_once() -> None:
    with stage() as on:
        on.remote[0].expect_exit()
        assert on.node(1).hears(news.End) == news.End(1, "the start was broken off")
