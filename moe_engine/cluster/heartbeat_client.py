"""Heartbeat client (control channel, follower side): a thread that sends beats and stops the process with its group."""

from __future__ import annotations

import logging
import os
import queue
import threading
import time
import traceback
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, NoReturn

import msgspec
import zmq

from moe_engine.cluster.failure_detector import Silence
from moe_engine.cluster.liveness_echo import start_echo
from moe_engine.executor import messages
from moe_engine.executor.leader_worker import Failure
from moe_engine.executor.options import DetectorLimits
from moe_engine.processes.frames import FrameReader
from moe_engine.processes.stopped import is_starved
from moe_engine.processes.watched_thread import start_watched
from moe_engine.processes.zmq_sockets import ConnectionMonitor, JobKeys, connect

BEAT_SECONDS = 0.2
MAX_RECEIVED = 1024
"""Max messages read in one iteration, so that a flood of them cannot delay beats."""
LEAVE_SECONDS = 10.0
"""Time for the leader to stop this process after a reported failure."""
ACK_POLL_MS = 50
ACK_SECONDS = 5.0
"""Time for the leader to acknowledge the last report of a process that exits."""

logger = logging.getLogger("moe_engine")


def leave(reason: str) -> NoReturn:
    """Exits a rank's process immediately: one of its threads may hang in a collective."""
    logger.error("This rank exits: %s", reason)
    os._exit(1)


class HeartbeatClient:
    """Connects to the leader and stays connected.

    Args:
        hello: sent first; `make_beat` creates the beat sent every `BEAT_SECONDS`.
        limits: after its first reply, a leader that is silent for `silent` seconds (`start_silent` during startup) is
            lost.
        leave: called once, from this client's thread, with the reason why this process must exit now.
        keys: CURVE keys of sockets between nodes.
    """

    decode: Callable[[bytes], Any] = staticmethod(messages.decode_to_rank)

    def __init__(
        self,
        address: str,
        identity: str,
        hello: msgspec.Struct,
        make_beat: Callable[[], msgspec.Struct],
        limits: DetectorLimits,
        leave: Callable[[str], None],
        keys: JobKeys | None = None,
    ) -> None:
        self.welcome: Future[messages.Welcome] = Future()
        self.go: Future[messages.Go] = Future()
        self.address = address
        self._identity, self._hello, self._make_beat = identity, hello, make_beat
        self._limits, self._leave = limits, leave
        self._keys = keys
        self._leader = f"the leader at {address}"
        self._outbox: queue.SimpleQueue[msgspec.Struct] = queue.SimpleQueue()
        self._num_sent = self._num_answered = 0
        """The leader answers each message once, in order."""
        self._last_report = 0
        """Number of the last message that `send` was given."""
        self._wake = threading.Event()
        self.met = threading.Event()
        """Set once the leader has replied."""
        self.refused_since: float | None = None
        """When the leader first refused this connection's handshake; None if it never did."""
        self._closing = False
        if isinstance(hello, messages.Hello):
            start_echo(address, identity, keys)
        self._reader = FrameReader(f"{identity}, from the leader", self.decode)
        self._thread = start_watched("heartbeat", self._run, leave)

    def send(self, message: msgspec.Struct) -> None:
        self._outbox.put(message)
        self._wake.set()

    def send_failure(self, rank: int, error: BaseException) -> None:
        """Reports to the leader that a rank cannot continue; the reply stops this process."""
        failure = Failure.of(error)
        if not failure.peer_lost and not failure.config_error:
            logger.error("%s", "".join(traceback.format_exception(error)))
        self.send(messages.Failed(rank, failure.message, failure.peer_lost, failure.config_error))

    def beat_now(self) -> None:
        """Sends the next beat now."""
        self._wake.set()

    def close(self) -> None:
        """Stops once the leader has acknowledged all reports or is gone, after `ACK_SECONDS` at most. A process that
        exits earlier loses what its socket has not sent, and the leader may take its exit for a failure."""
        self._closing = True
        self._wake.set()
        self._thread.join(ACK_SECONDS + BEAT_SECONDS)

    def _run(self) -> None:
        socket: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.DEALER)
        socket.setsockopt(zmq.IDENTITY, self._identity.encode())
        socket.setsockopt(zmq.LINGER, 500)
        monitor = ConnectionMonitor(socket)
        connect(socket, self.address, self._keys)
        self._send(socket, self._hello)
        silence, last = Silence(BEAT_SECONDS), time.monotonic()
        while not self._closing:
            if monitor.num_failed() and self.refused_since is None:
                self.refused_since = last
            for _ in range(MAX_RECEIVED):
                if not socket.poll(0):
                    break
                if self._receive(socket):
                    self.met.set()
                    silence.reset()
            self._send(socket, self._make_beat())
            self._flush(socket)
            self._wake.wait(BEAT_SECONDS)
            self._wake.clear()
            now = time.monotonic()
            silence.add(now - last)
            last = now
            limit = self._limits.silent if self.go.done() else self._limits.start_silent
            if self.met.is_set() and silence.seconds > limit and not socket.poll(0) and not self._starves(silence):
                why = "stopped, or its machine or link is down"
                self._leave(f"{self._leader} silent for {silence.seconds:.1f} s ({why})")
                return
        self._end(socket, monitor)
        monitor.close()
        socket.close()

    def _starves(self, silence: Silence) -> bool:
        """Whether a leader that is this process's parent gets too little processor time to answer."""
        own_machine = self.address.startswith("ipc://") and silence.seconds < self._limits.start_silent
        return own_machine and is_starved(os.getppid())

    def _end(self, socket: zmq.Socket[bytes], monitor: ConnectionMonitor) -> None:
        """See `close`."""
        self._flush(socket)
        deadline = time.monotonic() + ACK_SECONDS
        while self._num_answered < self._last_report and time.monotonic() < deadline:
            if socket.poll(ACK_POLL_MS):
                self._receive(socket)
            elif not monitor.num_failed() and not monitor.connected:
                return

    def _flush(self, socket: zmq.Socket[bytes]) -> None:
        while not self._outbox.empty():
            self._send(socket, self._outbox.get())
            self._last_report = self._num_sent

    def _send(self, socket: zmq.Socket[bytes], message: msgspec.Struct) -> None:
        socket.send(messages.encode(message))
        self._num_sent += 1

    def _receive(self, socket: zmq.Socket[bytes]) -> bool:
        """Handles one frame; whether it was a valid message."""
        message = self._reader.take(socket.recv_multipart())
        if message is None:
            return False
        self._take(message)
        return True

    def _take(self, message: messages.ToRank) -> None:
        self._num_answered += isinstance(message, messages.Alive | messages.Leave)
        if isinstance(message, messages.Welcome) and not self.welcome.done():
            self._leader = message.leader
            self.welcome.set_result(message)
        elif isinstance(message, messages.Go) and not self.go.done():
            self.go.set_result(message)
        elif isinstance(message, messages.Leave):
            self._leave(message.reason)
