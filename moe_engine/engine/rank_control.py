"""The leader's end of the control channel: a thread that answers ranks, feeds the watch and ends a lost group."""

from __future__ import annotations

import logging
import threading
import time

import zmq

from moe_engine.engine import rank_messages as messages
from moe_engine.engine.rank_options import RankGroupOptions
from moe_engine.engine.rank_watch import TICK_SECONDS, RankWatch
from moe_engine.errors import ConfigError

logger = logging.getLogger("moe_engine")


class RankControl:
    """Serves one address until `close`. Every rank is told when the watch has a verdict.

    Args:
        address: to bind: ``ipc://PATH`` or ``tcp://HOST:PORT``.

    Raises:
        ConfigError: the address cannot be bound.
    """

    def __init__(self, address: str, options: RankGroupOptions, watch: RankWatch) -> None:
        self._options = options
        self._watch = watch
        self._socket: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.ROUTER)
        self._socket.setsockopt(zmq.ROUTER_HANDOVER, 1)
        self._socket.setsockopt(zmq.LINGER, 500)
        try:
            self._socket.bind(address)
        except zmq.ZMQError as error:
            raise ConfigError(f"--dist-init-addr {options.leader_address}: cannot listen there: {error}") from None
        self._peers: set[bytes] = set()
        self._welcome: messages.Welcome | None = None
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="rank control", daemon=True)
        self._thread.start()

    def invite(self, welcome: messages.Welcome) -> None:
        """Sends the welcome to every rank, now and to those that come later."""
        self._welcome = welcome

    def close(self) -> None:
        self._closing.set()
        self._thread.join(2.0)

    def _run(self) -> None:
        began = last = time.monotonic()
        told, invited, dismissed = began, False, False
        while not self._closing.is_set():
            if self._socket.poll(int(TICK_SECONDS * 1000)):
                self._receive()
            now = time.monotonic()
            if now - last >= TICK_SECONDS:
                self._watch.tick(now - last)
                last = now
            if self._welcome is not None and not invited:
                invited = True
                self._tell_all(self._welcome)
            if self._watch.verdict is not None and not dismissed:
                dismissed = True
                self._tell_all(messages.Leave(str(self._watch.verdict)))
            if not self._watch.all_loaded and self._watch.verdict is None:
                told = self._wait_patiently(now, began, told)
        self._socket.close()

    def _wait_patiently(self, now: float, began: float, told: float) -> float:
        """Says who is waited for from time to time; gives up at the end. Returns when it last said something."""
        limits, waited = self._options.limits, now - began
        if waited > limits.start:
            self._watch.give_up(f"not ready after {waited:.0f} s: {self._watch.waited_for()}")
        elif now - told >= limits.progress:
            logger.info("Waiting for ranks, %.0f of %.0f s: %s", waited, limits.start, self._watch.waited_for())
            return now
        return told

    def _receive(self) -> None:
        """All that has arrived."""
        while True:
            try:
                identity, body = self._socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            self._peers.add(identity)
            message = messages.decode_to_leader(body)
            self._take(message)
            if self._watch.verdict is not None:
                self._tell(identity, messages.Leave(str(self._watch.verdict)))
            elif isinstance(message, messages.Hello) and self._welcome is not None:
                self._tell(identity, self._welcome)
            else:
                self._tell(identity, messages.Alive())

    def _take(self, message: messages.ToLeader) -> None:
        watch = self._watch
        if isinstance(message, messages.Hello):
            self._greet(message)
        elif isinstance(message, messages.Beat):
            watch.beat(message.rank, message.position)
        elif isinstance(message, messages.Loaded):
            watch.loaded(message.rank, message.kernels)
        elif isinstance(message, messages.Failed):
            watch.failed(message.rank, message.message, peer_lost=message.peer_lost, config_error=message.config_error)
        elif isinstance(message, messages.Died):
            watch.died(message.rank, message.how)

    def _greet(self, hello: messages.Hello) -> None:
        if not 0 < hello.rank < self._options.size:
            self._watch.give_up(f"rank {hello.rank} on {hello.host} asks to join, but there are {self._options.size}")
            return
        self._watch.joined(hello.rank, hello.host, hello.pid)
        if hello.fingerprint != self._options.fingerprint:
            who = self._watch.describe(hello.rank)
            self._watch.give_up(f"{who} on {hello.host} was started with other flags than rank 0: start all alike")

    def _tell_all(self, message: messages.ToRank) -> None:
        for identity in self._peers:
            self._tell(identity, message)

    def _tell(self, identity: bytes, message: messages.ToRank) -> None:
        self._socket.send_multipart([identity, messages.encode(message)])
