"""A node without the HTTP server, where replicas lie on several: runs what node 0 tells it to, and leaves with it.

A replica that is lost leaves this process running, which would else end the step of a cluster's scheduler, and so the
other replicas. SIGTERM is left to node 0, which drains first.
"""

from __future__ import annotations

import logging
import os
import queue
import socket
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any, Protocol

from moe_engine.config.resolve import ResolvedConfig
from moe_engine.engine.core_process import CoreProcess
from moe_engine.engine.nodes import messages as news
from moe_engine.engine.nodes.known_address import KnownAddress, host_of
from moe_engine.engine.ranks import messages as rank_messages
from moe_engine.engine.ranks.addresses import own_address_towards
from moe_engine.engine.ranks.link import RankLink
from moe_engine.engine.ranks.node import NodeRanks, first_sigterm_ignored, wait_for_leader
from moe_engine.engine.ranks.options import WatchLimits
from moe_engine.engine.ranks.worker import fingerprint, rank_group_options
from moe_engine.engine.zmq_sockets import job_keys
from moe_engine.errors import ConfigError, EngineDeadError

logger = logging.getLogger("moe_engine")

POLL_SECONDS = 0.05
END_SECONDS = 20.0
"""For what runs here to end by itself after node 0 has drained."""

Tell = Callable[[news.ToFront], None]


class Part(Protocol):
    """What this node has of a replica."""

    ended: bool

    def poll(self) -> None:
        """To be called often; finds whether it has ended."""

    def expect_exit(self) -> None: ...

    def kill(self, reason: str) -> None: ...

    def close(self) -> None:
        """Ends what still runs."""


class LedReplica:
    """A replica whose core, with its rank 0, is here."""

    def __init__(self, config: ResolvedConfig, order: news.Lead, tell: Tell) -> None:
        self._replica, self._tell = order.replica, tell
        options = rank_group_options(config, order.replica)
        assert options is not None  # there are several replicas
        if options.leader_address is not None:
            own = own_address_towards(host_of(order.front_address))
            options = replace(options, leader_address=f"{own}:0")
        name = f"engine core DP{order.replica} on {socket.gethostname()}"
        self._core = CoreProcess(config, name=name, ranks=options, front=order.front_address)
        self.ended, self._ready, self._listens = False, False, ""
        tell(news.Started(order.replica, name, self._core.pid))

    @property
    def boards(self) -> list[list[float]]:
        return [board.pack() for board in self._core.boards]

    def poll(self) -> None:
        if self.ended:
            return
        if not self._ready:
            self._poll_start()
        elif self._core.dead:
            self._end(news.Ended(self._replica, self._core.dead))

    def _poll_start(self) -> None:
        try:
            facts = self._core.poll_ready(0.0)
        except (ConfigError, EngineDeadError) as error:
            kind = "ConfigError" if isinstance(error, ConfigError) else "EngineDeadError"
            self._end(news.StartFailed(self._replica, str(error), kind))
            return
        if self._core.control_address != self._listens:
            self._listens = self._core.control_address
            self._tell(news.Listens(self._replica, self._listens))
        if facts is not None:
            self._ready = True
            self._tell(news.Ready(self._replica, facts))

    def _end(self, message: news.ToFront) -> None:
        self.ended = True
        self._tell(message)
        self._core.stop(0.0)

    def expect_exit(self) -> None:
        self._core.expect_exit()

    def kill(self, reason: str) -> None:
        self._core.kill(reason)

    def close(self) -> None:
        if not self.ended:
            self._core.expect_exit()
            self._end(news.Ended(self._replica, f"{self._core.name} (pid {self._core.pid}) was ended on its node"))


class JoinedReplica:
    """Ranks of a replica that another node leads."""

    def __init__(self, config: ResolvedConfig, order: news.Join) -> None:
        options = rank_group_options(config, order.replica)
        assert options is not None
        options = replace(options, leader_address=order.address.removeprefix("tcp://"))
        self._name, self.ended, self._is_lost = f"DP{order.replica}", False, False
        self._ranks = NodeRanks(config, options, self._lost, config.logging.log_level)

    def _lost(self, reason: str) -> None:
        logger.error("The ranks of %s here end: %s", self._name, reason)
        self._is_lost = True

    def poll(self) -> None:
        if self._is_lost and not self.ended:
            self._ranks.kill()
        self._ranks.poll()
        self.ended = None not in self._ranks.returncodes

    def expect_exit(self) -> None: ...

    def kill(self, reason: str) -> None:
        self._ranks.kill()

    def close(self) -> None:
        self._ranks.close()


class NodeLink(RankLink):
    """To node 0's front end. Every message but those of life goes to `inbox`."""

    decode = staticmethod(news.decode_to_node)

    def __init__(self, *args: Any, inbox: queue.SimpleQueue[news.ToNode], **options: Any) -> None:
        self._inbox = inbox
        super().__init__(*args, **options)

    def _take(self, message: Any) -> None:
        if isinstance(message, news.AllReady):
            if not self.go.done():
                self.go.set_result(rank_messages.Go())
        elif not isinstance(message, news.Heard):
            self._inbox.put(message)


class NodeAgent:
    """Raises ConfigError: node 0's host is unknown."""

    def __init__(self, config: ResolvedConfig, limits: WatchLimits | None = None) -> None:
        plan = config.parallel
        assert plan.leader_address is not None
        self._config, self._node_rank = config, plan.node_rank
        self._limits = limits or WatchLimits(start=plan.start_seconds)
        self._parts: dict[int, Part] = {}
        self._inbox: queue.SimpleQueue[news.ToNode] = queue.SimpleQueue()
        self._ending: news.End | None = None
        host, pid = socket.gethostname(), os.getpid()
        hello = news.NodeHello(plan.node_rank, host, pid, fingerprint(config))
        address = KnownAddress(plan.leader_address).tcp()
        identity = f"node{plan.node_rank} {host} {pid}"  # of two with the same number the second is told so
        keys = job_keys(plan.secret)
        self._link = NodeLink(
            address, identity, hello, self._beat, self._limits, self._leave, keys=keys, inbox=self._inbox
        )

    def run(self) -> int:
        """Until node 0 says that this node is to leave; returns the exit code.

        Raises:
            EngineDeadError: node 0 did not answer in time.
        """
        try:
            with first_sigterm_ignored():
                wait_for_leader(self._link, self._node_rank, self._limits)
                return self._serve()
        finally:
            for part in self._parts.values():
                part.close()
            self._link.close()

    def _serve(self) -> int:
        deadline = float("inf")
        while True:
            for message in self._messages():
                self._take(message)
            for part in self._parts.values():
                part.poll()
            ending = self._ending
            if ending is None:
                continue
            if ending.code:
                logger.error("Node %d leaves: %s", self._node_rank, ending.reason)
                return ending.code
            deadline = min(deadline, time.monotonic() + END_SECONDS)
            if all(part.ended for part in self._parts.values()) or time.monotonic() > deadline:
                return 0

    def _messages(self) -> list[news.ToNode]:
        """What has come; waits a moment for a first one."""
        try:
            found = [self._inbox.get(timeout=POLL_SECONDS)]
        except queue.Empty:
            return []
        while not self._inbox.empty():
            found.append(self._inbox.get())
        return found

    def _take(self, message: news.ToNode) -> None:
        if isinstance(message, news.Lead):
            self._parts[message.replica] = LedReplica(self._config, message, self._link.send)
        elif isinstance(message, news.Join):
            self._parts[message.replica] = JoinedReplica(self._config, message)
        elif isinstance(message, news.Kill) and message.replica in self._parts:
            self._parts[message.replica].kill(message.reason)
        elif isinstance(message, news.End):
            self._ending = message
            for part in self._parts.values():
                part.expect_exit()

    def _beat(self) -> news.NodeBeat:
        led = {replica: part for replica, part in self._parts.copy().items() if isinstance(part, LedReplica)}
        return news.NodeBeat({replica: part.boards for replica, part in led.items()})

    def _leave(self, reason: str) -> None:
        """From the link's thread: node 0 is gone."""
        if self._ending is not None:
            return
        logger.error("Node %d leaves: %s", self._node_rank, reason)
        for part in self._parts.copy().values():
            part.close()
        os._exit(1)
