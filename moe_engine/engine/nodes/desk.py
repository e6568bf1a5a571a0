"""The front end's side of replicas on several nodes: a thread that tells nodes what to start and hears how it goes.

Each node but 0 comes to the one known address (`nodes.agent`). It is told which replicas to lead, and where the ranks
of a replica meet that it has a part of. A node that falls silent takes the replicas that it leads with it; the ranks
that it has of others are missed by the leader of their replica.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

import zmq

from moe_engine.config.resolve_parallel import ParallelPlan
from moe_engine.engine.core_handle import CoreHandle
from moe_engine.engine.core_process import CoreProcess
from moe_engine.engine.frames import FrameReader
from moe_engine.engine.nodes import messages as news
from moe_engine.engine.nodes.known_address import KnownAddress
from moe_engine.engine.nodes.remote_core import RemoteCore
from moe_engine.engine.ranks.options import WatchLimits
from moe_engine.engine.ranks.watch import TICK_SECONDS, Silence
from moe_engine.engine.watched_thread import start_watched
from moe_engine.engine.zmq_sockets import bind, job_keys

logger = logging.getLogger("moe_engine")


@dataclass
class NodeState:
    """What is known of a node. `lost`: why it counts as gone."""

    rank: int
    host: str = ""
    pid: int = 0
    identity: bytes = b""
    joined: set[int] = field(default_factory=set)
    """Replicas led elsewhere whose meeting point it was told."""
    silence: Silence = field(default_factory=Silence)
    lost: str = ""

    @property
    def is_here(self) -> bool:
        return bool(self.identity) and not self.lost

    def __str__(self) -> str:
        return f"node {self.rank} ({self.host}, pid {self.pid})" if self.identity else f"node {self.rank} (not there)"


class NodeDesk:
    """Listens at the known address from the moment it is made, and works from `open` until the last of its cores has
    been stopped.

    Args:
        fingerprint: equal on nodes that were started with the same flags.

    Raises:
        ConfigError: the address cannot be bound.
    """

    def __init__(self, plan: ParallelPlan, fingerprint: str, limits: WatchLimits | None = None) -> None:
        assert plan.leader_address is not None
        self._plan, self._fingerprint = plan, fingerprint
        self._limits = limits or WatchLimits(start=plan.start_seconds)
        self._known = KnownAddress(plan.leader_address)
        self._socket: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.ROUTER)
        self._socket.setsockopt(zmq.LINGER, 500)
        self._keys = job_keys(plan.secret)
        bind(self._socket, self._known.bind(), self._keys, f"--dist-init-addr {plan.leader_address}")
        self._reader = FrameReader(f"nodes at {self._known.text}", news.decode_to_front)
        self._nodes = [NodeState(rank) for rank in range(1, plan.num_nodes)]
        self._cores: list[CoreHandle] = []
        self._meetings: dict[int, str] = {}
        self._serving: set[int] = set()
        self._unreleased: set[int] = set()
        self._outbox: queue.SimpleQueue[tuple[bytes, news.ToNode]] = queue.SimpleQueue()
        self._armed = False
        self._ending: news.End | None = None
        self._closing = threading.Event()
        self._thread: threading.Thread | None = None

    def core(self, replica: int) -> RemoteCore:
        """Of a replica that another node leads."""
        node = self._plan.nodes_of(replica)[0]
        return RemoteCore(self, replica, node, self._plan.topology.attn_dp_size, self._known, self._keys)

    def open(self, cores: Sequence[CoreHandle]) -> None:
        """Args: cores: of all replicas."""
        self._cores = list(cores)
        self._unreleased = {core.replica for core in self._remote}
        self._thread = start_watched("node desk", self._run, self._failed)

    @property
    def _remote(self) -> list[RemoteCore]:
        return [core for core in self._cores if isinstance(core, RemoteCore)]

    # -- what its cores ask of it, on any thread

    def tell_leader(self, replica: int, message: news.ToNode) -> bool:
        state = self._nodes[self._plan.nodes_of(replica)[0] - 1]
        if state.is_here:
            self._outbox.put((state.identity, message))
        return state.is_here

    def serves(self, replica: int) -> None:
        """The replica was seen to be ready."""
        self._serving.add(replica)
        if self._serving == {core.replica for core in self._remote}:
            for state in self._nodes:
                state.silence.heard()
            self._armed = True
            self._tell_all(news.AllReady())

    def end(self) -> None:
        """The server ends: well, if it has served and anything still lives. Nodes that come later hear it, too."""
        if self._ending is None:
            causes = [core.dead for core in self._cores if core.dead]
            well = self._armed and len(causes) < len(self._cores)
            self._ending = news.End(0) if well else news.End(1, "; ".join(causes) or "the start was broken off")
            self._tell_all(self._ending)

    def release(self, replica: int) -> None:
        """The core was stopped; after the last one nobody listens any more."""
        self._unreleased.discard(replica)
        if not self._unreleased:
            self._closing.set()
            if self._thread is not None:
                self._thread.join(2.0)

    def _tell_all(self, message: news.ToNode) -> None:
        for state in self._nodes:
            if state.is_here:
                self._outbox.put((state.identity, message))

    def _failed(self, message: str) -> None:
        """The thread ended: no news of the other nodes will come."""
        for core in self._remote:
            core.lost(message)

    # -- the thread

    def _run(self) -> None:
        began = last = told = time.monotonic()
        while not self._closing.is_set() or not self._outbox.empty():
            if self._socket.poll(int(TICK_SECONDS * 1000)):
                self._receive()
            now = time.monotonic()
            self._pass_time(now - last)
            last = now
            self._arrange_meetings()
            if not self._armed and self._ending is None:
                told = self._wait_patiently(now, began, told)
            while not self._outbox.empty():
                identity, message = self._outbox.get()
                self._socket.send_multipart([identity, news.encode(message)])
        self._socket.close()

    def _receive(self) -> None:
        """All that has arrived."""
        while True:
            try:
                identity, *frames = self._socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            if (message := self._reader.take(frames)) is None:
                continue
            state = next((state for state in self._nodes if state.identity == identity), None)
            answer: news.ToNode = news.Heard()
            if isinstance(message, news.NodeHello):
                answer = self._greet(identity, message)
            elif state is None:
                continue
            elif state.lost:
                answer = news.End(1, state.lost)
            else:
                state.silence.heard()
                self._take(message)
            self._outbox.put((identity, answer))

    def _greet(self, identity: bytes, hello: news.NodeHello) -> news.ToNode:
        who = f"node {hello.node_rank} ({hello.host}, pid {hello.pid})"
        if hello.fingerprint != self._fingerprint or not 0 < hello.node_rank < self._plan.num_nodes:
            reason = f"{who} was started with other flags than node 0: start all alike"
            if not self._armed:
                for core in self._remote:
                    core.start_failed(reason)
            return news.End(1, reason)
        state = self._nodes[hello.node_rank - 1]
        if state.identity not in (b"", identity):
            return news.End(1, f"{who} comes second: there is {state}")
        state.host, state.pid, state.identity = hello.host, hello.pid, identity
        state.silence.heard()
        if self._ending is not None:
            return self._ending
        for core in self._remote:
            if self._plan.nodes_of(core.replica)[0] == state.rank:
                self._outbox.put((identity, news.Lead(core.replica, core.front_address)))
        logger.info("Node %d is there: %s, pid %d", state.rank, state.host, state.pid)
        return news.Heard()

    def _take(self, message: news.ToFront) -> None:
        if isinstance(message, news.NodeBeat):
            for replica, boards in message.boards.items():
                self._core(replica).show(boards)
        elif isinstance(message, news.Started):
            self._core(message.replica).started(message.name, message.pid)
        elif isinstance(message, news.Listens):
            self._meetings[message.replica] = message.address
        elif isinstance(message, news.Ready):
            self._core(message.replica).ready(message.info)
        elif isinstance(message, news.StartFailed):
            self._core(message.replica).start_failed(message.message, message.error)
        elif isinstance(message, news.Ended):
            self._core(message.replica).ended(message.how)

    def _core(self, replica: int) -> RemoteCore:
        core = self._cores[replica]
        assert isinstance(core, RemoteCore)  # nodes were told to lead no other
        return core

    def _arrange_meetings(self) -> None:
        """Sends nodes to the leaders of replicas that they have a part of."""
        for replica, core in enumerate(self._cores):
            if isinstance(core, CoreProcess) and core.control_address:
                self._meetings[replica] = core.control_address
        for replica, address in self._meetings.items():
            for rank in self._plan.nodes_of(replica)[1:]:
                state = self._nodes[rank - 1]
                if state.is_here and replica not in state.joined:
                    state.joined.add(replica)
                    self._outbox.put((state.identity, news.Join(replica, address)))

    def _pass_time(self, elapsed: float) -> None:
        limit = self._limits.silent if self._armed else self._limits.start_silent
        for state in self._nodes:
            if state.is_here and self._ending is None:
                state.silence.pass_time(elapsed)
                if state.silence.seconds > limit:
                    self._lose(state)

    def _lose(self, state: NodeState) -> None:
        seconds = state.silence.seconds
        state.lost = f"{state} silent for {seconds:.1f} s: stopped, or its machine or link is down"
        logger.error("%s", state.lost)
        for replica, core in enumerate(self._cores):
            nodes = self._plan.nodes_of(replica)
            if state.rank == nodes[0]:
                self._core(replica).lost(state.lost)
            elif state.rank in nodes and not self._armed:  # its leader may not have met it yet
                core.start_failed(state.lost) if isinstance(core, RemoteCore) else core.kill(state.lost)

    def _wait_patiently(self, now: float, began: float, told: float) -> float:
        """Says which nodes are waited for from time to time, gives up at the end. Returns when it last said it."""
        missing = [state for state in self._nodes if not state.identity]
        waited, limits = now - began, self._limits
        names = ", ".join(map(str, missing))
        if missing and waited > limits.start:
            for core in self._remote:
                core.start_failed(
                    f"not ready after {waited:.0f} s: {names}: started with its --node-rank, and able to reach "
                    f"{self._known.text}?"
                )
        elif missing and now - told >= limits.progress:
            logger.info("Waiting for nodes, %.0f of %.0f s: %s", waited, limits.start, names)
        else:
            return told
        return now
