"""Control channel, leader side: a thread that serves ranks, feeds the failure detector and stops a failed group."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

import msgspec
import zmq

from moe_engine.cluster.failure_detector import TICK_SECONDS, FailureDetector
from moe_engine.cluster.liveness_echo import echo_of, echoed
from moe_engine.cluster.peers import Peers
from moe_engine.executor import messages
from moe_engine.executor.options import RankGroupOptions
from moe_engine.processes.frames import FrameReader
from moe_engine.processes.watched_thread import start_watched
from moe_engine.processes.zmq_sockets import SECRET_HINT, ConnectionMonitor, bind

logger = logging.getLogger("moe_engine")

PING_SECONDS = 0.5
MAX_DIFFERENCES = 4
"""Max values in the message about flags that differ between nodes."""
MAX_RECEIVED = 1024
"""Max messages read in one iteration, so that a flood of them cannot block the failure detector or the replies."""


class ControlServer:
    """Serves one address until `close`. Sends `Leave` to every rank when the detector has found a failure.

    Args:
        address: bind address: ``ipc://PATH`` or ``tcp://HOST:PORT``.
        on_status: called with group and values when a scheduler on another node has sent its shared status.
        first_rank: lowest rank outside this process.

    Raises:
        ConfigError: the address cannot be bound.
    """

    decode: Callable[[bytes], Any] = staticmethod(messages.decode_to_leader)

    def __init__(
        self,
        address: str,
        options: RankGroupOptions,
        detector: FailureDetector,
        on_status: Callable[[int, list[float]], None] = lambda group, values: None,
        first_rank: int = 1,
    ) -> None:
        self._options = options
        self._on_status = on_status
        self._detector = detector
        self._socket: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.ROUTER)
        self._socket.setsockopt(zmq.ROUTER_HANDOVER, 1)
        self._socket.setsockopt(zmq.LINGER, 500)
        self._monitor = ConnectionMonitor(self._socket)
        self.address = bind(self._socket, address, options.keys, options.leader_flag)
        self._reader = FrameReader("control channel of the ranks", self.decode)
        self._peers = Peers(options, first_rank)
        self._pinged = 0.0
        self._welcome: messages.Welcome | None = None
        self._uninvited: set[int] = set()  # ranks that wait for `Welcome`
        self._dismissed = False
        self._closing = threading.Event()
        self._thread = start_watched("rank control", self._run, detector.give_up)

    def invite(self, welcome: messages.Welcome) -> None:
        """Sends `Welcome` to every rank, present or later, with its group's plan address."""
        self._welcome = welcome

    @property
    def num_dropped(self) -> int:
        """Messages dropped because their sender is not a member."""
        return self._reader.num_dropped

    def close(self) -> None:
        self._closing.set()
        self._thread.join(2.0)

    def _run(self) -> None:
        began = last = time.monotonic()
        logged_at, released = began, False
        while not self._closing.is_set():
            if self._socket.poll(int(TICK_SECONDS * 1000)):
                self._receive()
            if failed := self._monitor.num_failed():
                self._reader.drop(f"{failed} connections were refused in their handshake: {SECRET_HINT}")
            now = time.monotonic()
            if now - last >= TICK_SECONDS:
                self._detector.tick(now - last)
                last = now
            self._ping(now)
            self._send_welcomes()
            if self._detector.all_loaded and not released:
                released = True
                self._send_all(messages.Go(self._detector.step_addresses))
            self._dismiss()
            if not self._detector.all_loaded and self._detector.failure is None:
                logged_at = self._check_start(now, began, logged_at)
        self._dismiss()  # a failure that was found meanwhile
        self._monitor.close()
        self._socket.close()

    def _dismiss(self) -> None:
        """Sends `Leave` to all ranks and nodes, once, after a failure."""
        if self._detector.failure is not None and not self._dismissed:
            self._dismissed = True
            self._send_all(messages.Leave(str(self._detector.failure)))

    def _check_start(self, now: float, began: float, logged_at: float) -> float:
        """Periodically logs the ranks that are not ready; fails at the time limit. Returns the time of the last log."""
        limits, waited = self._options.limits, now - began
        if waited > limits.start:
            self._detector.give_up(f"not ready after {waited:.0f} s: {self._detector.waited_for()}")
        elif now - logged_at >= limits.progress:
            logger.info("Waiting for ranks, %.0f of %.0f s: %s", waited, limits.start, self._detector.waited_for())
            return now
        return logged_at

    def _receive(self) -> None:
        """Handles up to `MAX_RECEIVED` queued messages; drops those of non-members."""
        for _ in range(MAX_RECEIVED):
            try:
                identity, *frames = self._socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            if (echo := echoed(identity)) is not None:
                if (rank := self._peers.rank_of(echo)) is not None:
                    self._detector.runs(rank)
            elif (message := self._reader.take(frames)) is not None:
                if (refusal := self._refusal(identity, message)) is not None:
                    self._reader.drop(refusal)
                else:
                    self._take(message)
                    self._acknowledge(identity)

    def _refusal(self, identity: bytes, message: messages.ToLeader) -> str | None:
        """Why a message is refused; None for messages of members. A Hello or NodeHere makes its sender a member, or is
        answered by `Leave` with the reason."""
        if isinstance(message, messages.Hello):
            refusal = self._peers.join_rank(identity, message.rank)
        elif isinstance(message, messages.NodeHere):
            refusal = self._peers.join_node(identity, message.node_rank)
        elif isinstance(message, messages.NodeRefused):
            refusal = "startup is over" if self._detector.armed else None
        else:
            return self._peers.refusal(identity, message)
        if refusal is None:
            return None
        self._send(identity, messages.Leave(str(self._detector.failure or refusal)))
        return f"{message.host} (pid {message.pid}) may not join: {refusal}"

    def _acknowledge(self, identity: bytes) -> None:
        failure = self._detector.failure
        self._send(identity, messages.Leave(str(failure)) if failure is not None else messages.Alive())

    def _ping(self, now: float) -> None:
        """Pings the ranks' echoes during startup, when healthy ranks may miss beats."""
        if self._detector.armed or now - self._pinged < PING_SECONDS:
            return
        self._pinged = now
        for identity in self._peers.of_ranks:
            self._socket.send_multipart([echo_of(identity), b""])

    def _take(self, message: messages.ToLeader) -> None:
        detector = self._detector
        if isinstance(message, messages.Hello):
            self._on_hello(message)
        elif isinstance(message, messages.Beat):
            detector.beat(message.rank, message.position)
            if message.status:
                self._on_status(self._options.places[message.rank].group, message.status)
        elif isinstance(message, messages.Loaded):
            detector.loaded(message.rank, message.kernels, message.core_address, message.step_address)
        elif isinstance(message, messages.Failed):
            detector.failed(
                message.rank, message.message, peer_lost=message.peer_lost, config_error=message.config_error
            )
        elif isinstance(message, messages.Ended):
            detector.end()
        elif isinstance(message, messages.NodeRefused):
            detector.give_up(f"on {message.host} (pid {message.pid}): {message.message}", config_error=True)
        elif isinstance(message, messages.Died):
            detector.died(message.rank, message.how)

    def _on_hello(self, hello: messages.Hello) -> None:
        self._uninvited.add(hello.rank)
        self._detector.joined(hello.rank, hello.host, hello.pid, hello.plan_address)
        who = self._detector.describe(hello.rank)
        if hello.fingerprint != self._options.fingerprint:
            others = _differences(hello.fingerprint, self._options.fingerprint)
            self._detector.give_up(
                f"{who} was started with flags or versions different from rank 0's ({others}): "
                "use the same on all nodes",
                config_error=True,
            )
        elif hello.checkpoint != self._options.checkpoint:
            self._detector.give_up(
                f"{who} has files of weights or a config.json different from rank 0's: "
                "copy one checkpoint to all nodes",
                config_error=True,
            )

    def _send_welcomes(self) -> None:
        if self._welcome is None or not self._uninvited:
            return
        places = self._options.places
        for rank in list(self._uninvited):
            group = places[rank].group
            address = self._detector.plan_address_of(group) if group else self._welcome.plan_address
            if address or self._options.group_size == 1:
                self._uninvited.discard(rank)
                self._send_rank(rank, msgspec.structs.replace(self._welcome, plan_address=address))

    def _send_all(self, message: messages.RankMessage) -> None:
        for identity in self._peers.all:
            self._send(identity, message)

    def _send_rank(self, rank: int, message: messages.RankMessage) -> None:
        if (identity := self._peers.identity_of(rank)) is not None:
            self._send(identity, message)

    def _send(self, identity: bytes, message: messages.RankMessage) -> None:
        self._socket.send_multipart([identity, messages.encode(message)])


def _differences(values: Mapping[str, str], of_leader: Mapping[str, str]) -> str:
    """The first values that differ from rank 0's, as text."""
    names = [name for name in {**of_leader, **values} if values.get(name) != of_leader.get(name)]
    shown = [
        f"{name} {values.get(name) or 'none':.40}, not {of_leader.get(name) or 'none':.40}"
        for name in names[:MAX_DIFFERENCES]
    ]
    return "; ".join([*shown, "..."] if len(names) > len(shown) else shown)
