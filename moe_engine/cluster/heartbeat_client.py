"""A follower's end of the control channel: a thread that sends signs of life and ends the process with the group."""

from __future__ import annotations

import itertools
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
from moe_engine.core.executor import Survivors
from moe_engine.errors import EngineDeadError
from moe_engine.executor import messages
from moe_engine.executor.leader_worker import Failure
from moe_engine.executor.options import WatchLimits
from moe_engine.processes.frames import FrameReader
from moe_engine.processes.watched_thread import start_watched
from moe_engine.processes.zmq_sockets import HandshakeMonitor, JobKeys, connect

BEAT_SECONDS = 0.2
MAX_RECEIVED = 1024
"""Messages read in one turn, so that beats go out whatever comes in."""
LEAVE_SECONDS = 10.0
"""For the leader to end this process after it has learnt of a failure here."""
HEARD_SECONDS = 5.0
"""For the leader to answer the last word of a process that has served to the end."""

logger = logging.getLogger("moe_engine")


def leave(reason: str) -> NoReturn:
    """Ends a rank's process at once: a thread of it may hang in a collective."""
    logger.error("This rank leaves: %s", reason)
    os._exit(1)


class HeartbeatClient:
    """Connects to the leader and stays connected.

    Args:
        hello: sent first; `sign` makes the sign of life sent every `BEAT_SECONDS`.
        limits: without an answer, after the first one, the leader is lost after `silent` seconds, during the start
            after `start_silent`.
        leave: called from the link's thread, once, with the reason why this process must end now.
        run: begins a call that the leader asks for; its future holds the answer.
        keys: of sockets between nodes.
        regroup: told, from the link's thread, that ranks were lost and the others go on.
    """

    decode: Callable[[bytes], Any] = staticmethod(messages.decode_to_rank)

    def __init__(
        self,
        address: str,
        identity: str,
        hello: msgspec.Struct,
        sign: Callable[[], msgspec.Struct],
        limits: WatchLimits,
        leave: Callable[[str], None],
        run: Callable[[str], Future[Any]] | None = None,
        regroup: Callable[[Survivors], None] = lambda survivors: None,
        keys: JobKeys | None = None,
    ) -> None:
        self.welcome: Future[messages.Welcome] = Future()
        self.go: Future[messages.Go] = Future()
        self.address = address
        self._identity, self._hello, self._sign = identity, hello, sign
        self._limits, self._leave = limits, leave
        self._run_call, self._regroup = run, regroup
        self._keys = keys
        self._leader = f"the leader at {address}"
        self._asked: dict[int, Future[list[Any]]] = {}
        self._ask_ids = itertools.count()
        self._outbox: queue.SimpleQueue[msgspec.Struct] = queue.SimpleQueue()
        self._wake = threading.Event()
        self.met = threading.Event()
        """Set when the leader has answered."""
        self.refused_since: float | None = None
        """When the leader's end first refused the handshake of this connection; None where it never did."""
        self._closing = self._until_heard = False
        self._unheard = 0  # messages that the leader has not answered yet
        if isinstance(hello, messages.Hello):
            start_echo(address, identity, keys)
        self._reader = FrameReader(f"{identity}, from the leader", self.decode)
        self._thread = start_watched("rank link", self._run, leave)

    def send(self, message: msgspec.Struct) -> None:
        self._outbox.put(message)
        self._wake.set()

    def send_failure(self, rank: int, error: BaseException) -> None:
        """Tells the leader that a rank cannot go on; its answer ends this process."""
        failure = Failure.of(error)
        if not failure.peer_lost and not failure.config_error:
            logger.error("%s", "".join(traceback.format_exception(error)))
        self.send(messages.Failed(rank, failure.message, failure.peer_lost, failure.config_error))

    def ask_others(self, rank: int, method: str) -> Future[list[Any]]:
        """Has every other rank run one of `worker.calls`, by way of the leader; their answers in order."""
        future: Future[list[Any]] = Future()
        number = next(self._ask_ids)
        self._asked[number] = future
        self.send(messages.Ask(rank, number, method))
        return future

    def hurry(self) -> None:
        """The next sign of life goes out now."""
        self._wake.set()

    def close(self, *, heard: bool = False) -> None:
        """After what was sent has left; with `heard`, when the leader has answered it, and so knows why this process
        goes before it can miss it."""
        self._until_heard = heard
        self._closing = True
        self._wake.set()
        self._thread.join(HEARD_SECONDS if heard else 1.0)

    def _run(self) -> None:
        socket: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.DEALER)
        socket.setsockopt(zmq.IDENTITY, self._identity.encode())
        socket.setsockopt(zmq.LINGER, 500)
        monitor = HandshakeMonitor(socket)
        connect(socket, self.address, self._keys)
        self._say(socket, self._hello)
        silence, last = Silence(BEAT_SECONDS), time.monotonic()
        while not self._closing:
            if monitor.num_failed() and self.refused_since is None:
                self.refused_since = last
            for _ in range(MAX_RECEIVED):
                if not socket.poll(0):
                    break
                if self._hear(socket):
                    self.met.set()
                    silence.heard()
            self._say(socket, self._sign())
            self._flush(socket)
            self._wake.wait(BEAT_SECONDS)
            self._wake.clear()
            now = time.monotonic()
            silence.pass_time(now - last)
            last = now
            limit = self._limits.silent if self.go.done() else self._limits.start_silent
            if self.met.is_set() and silence.seconds > limit and not socket.poll(0):
                why = "stopped, or its machine or link is down"
                self._leave(f"{self._leader} silent for {silence.seconds:.1f} s ({why})")
                return
        self._flush(socket)
        while self._until_heard and self._unheard and socket.poll(int(HEARD_SECONDS * 1000)):
            self._hear(socket)
        monitor.close()
        socket.close()

    def _flush(self, socket: zmq.Socket[bytes]) -> None:
        while not self._outbox.empty():
            self._say(socket, self._outbox.get())

    def _say(self, socket: zmq.Socket[bytes], message: msgspec.Struct) -> None:
        socket.send(messages.encode(message))
        self._unheard += 1

    def _hear(self, socket: zmq.Socket[bytes]) -> bool:
        """Whether what came is a message."""
        message = self._reader.take(socket.recv_multipart())
        if message is None:
            return False
        if isinstance(message, messages.Alive):  # the answer to each
            self._unheard -= 1
        self._take(message)
        return True

    def _take(self, message: messages.ToRank) -> None:
        if isinstance(message, messages.Welcome) and not self.welcome.done():
            self._leader = message.leader
            self.welcome.set_result(message)
        elif isinstance(message, messages.Go) and not self.go.done():
            self.go.set_result(message)
        elif isinstance(message, messages.Run):
            self._begin(message)
        elif isinstance(message, messages.Answers):
            asked = self._asked.pop(message.id, None)
            if asked is None:
                self._reader.drop(f"answers to call {message.id}, which was not made")
            elif message.error:
                asked.set_exception(EngineDeadError(message.error))
            else:
                asked.set_result(message.values)
        elif isinstance(message, messages.Regroup):
            self._regroup(message.survivors)
        elif isinstance(message, messages.Leave):
            self._leave(message.reason)

    def _begin(self, run: messages.Run) -> None:
        rank = self._hello.rank if isinstance(self._hello, messages.Hello) else -1
        if rank < 0 or self._run_call is None:
            return

        def answer(done: Future[Any]) -> None:
            error = done.exception()
            value = None if error is not None else done.result()
            self.send(messages.Answer(rank, run.id, value, f"{type(error).__name__}: {error}" if error else ""))

        try:
            begun = self._run_call(run.method)
        except Exception as error:
            begun = Future()
            begun.set_exception(error)
        begun.add_done_callback(answer)
