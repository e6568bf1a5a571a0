"""A node without the leader: starts its ranks, says when one of them dies, and leaves with the leader.

SIGTERM is left to the leader, which drains first: a cluster's scheduler sends it to every node at once. A second one,
or Ctrl-C, ends this node's ranks at once.
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import socket
import time
from collections.abc import Callable, Iterator
from typing import Any, NoReturn

import zmq

from moe_engine.cluster.heartbeat_client import HeartbeatClient
from moe_engine.cluster.peers import identity_of_process
from moe_engine.cluster.rank_process import LocalRanks
from moe_engine.errors import ConfigError, EngineDeadError
from moe_engine.executor import messages
from moe_engine.executor.options import RankGroupOptions, WatchLimits
from moe_engine.processes.rendezvous_address import RendezvousAddress
from moe_engine.processes.zmq_sockets import SECRET_HINT, JobKeys, connect

logger = logging.getLogger("moe_engine")

POLL_SECONDS = 0.1
LAST_RANK_SECONDS = 5.0
"""For the other ranks of a node to leave once the first has."""
LEAVE_SECONDS = 1.0
REPORT_SECONDS = 20.0
"""For node 0 to come up and to learn that this node cannot take part."""


class _NodeRanks:
    """The ranks of a replica on this node, where another node leads it.

    Args:
        lost: called once, from another thread, when the replica is lost, with the reason.

    Raises:
        ConfigError: the leader's host is unknown.
    """

    def __init__(self, config: Any, options: RankGroupOptions, lost: Callable[[str], None], log_level: str) -> None:
        self._address, host = options.leader_tcp(), socket.gethostname()
        here = messages.NodeHere(options.node_rank, host, os.getpid())

        def rank_exited(rank: int, how: str) -> None:
            self.link.send(messages.Died(rank, f"{how} on {host}"))

        self._rank_exited = rank_exited
        name, limits = identity_of_process(f"node{options.node_rank}"), options.limits
        self.link = HeartbeatClient(self._address, name, here, lambda: here, limits, lost, keys=options.keys)
        self._ranks = LocalRanks(config, options, self._address, rank_exited, log_level)

    @property
    def returncodes(self) -> list[int | None]:
        """Of each rank; None for one that runs."""
        return self._ranks.returncodes

    def poll(self) -> None:
        """Tells the leader of ranks that a signal holds. To be called often."""
        self._ranks.find_held(self._rank_exited)

    def kill(self) -> None:
        self._ranks.kill()

    def close(self) -> None:
        self._ranks.kill()
        self.link.close()


def run_node(config: Any, options: RankGroupOptions, log_level: str = "info") -> int:
    """Runs the ranks of node `options.node_rank` until the leader ends them; returns this process's exit code.

    Raises:
        ConfigError: the leader's host is unknown, or the leader refuses the connection.
        EngineDeadError: the leader did not answer in time.
    """
    ranks: _NodeRanks

    def leave(reason: str) -> NoReturn:
        logger.error("Node %d leaves: %s", options.node_rank, reason)
        ranks.kill()
        os._exit(1)

    ranks = _NodeRanks(config, options, leave, log_level)
    try:
        with _first_sigterm_ignored():
            wait_for_leader(ranks.link, options.node_rank, options.limits)
            _wait_for_ranks(ranks)
        if any(ranks.returncodes):
            time.sleep(LEAVE_SECONDS)  # the leader says why and `leave` logs it
    finally:
        ranks.close()
    return int(any(ranks.returncodes))


def report_refusal(address: str, keys: JobKeys | None, message: str) -> bool:
    """Ends the start on node 0, for a reason that only this node sees; whether node 0 has answered in time."""
    report = messages.NodeRefused(socket.gethostname(), os.getpid(), message)
    link: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.DEALER)
    link.setsockopt(zmq.LINGER, 0)
    connect(link, RendezvousAddress(address).tcp(), keys)
    link.send(messages.encode(report))
    answered = bool(link.poll(int(REPORT_SECONDS * 1000)))
    link.close()
    return answered


def wait_for_leader(link: HeartbeatClient, node_rank: int, limits: WatchLimits) -> None:
    """Until node 0 has answered.

    Raises:
        ConfigError: it refuses the connection: this node has another secret, or one of the two has none.
        EngineDeadError: it did not answer in time.
    """
    began = told = time.monotonic()
    while not link.met.wait(min(POLL_SECONDS, limits.progress)):
        now = time.monotonic()
        if link.refused_since is not None and now - link.refused_since > limits.refused:
            raise ConfigError(
                f"node {node_rank}: the leader (node 0) at {link.address} refuses the connection: {SECRET_HINT}"
            )
        if now - began > limits.start:
            raise EngineDeadError(
                f"node {node_rank} has waited {now - began:.0f} s for the leader (node 0) at {link.address}: "
                "is it started, and is --dist-init-addr its address?"
            )
        if now - told >= limits.progress:
            told = now
            logger.info("Waiting for the leader at %s, %.0f of %.0f s", link.address, now - began, limits.start)


def _wait_for_ranks(ranks: _NodeRanks) -> None:
    while not any(code is not None for code in ranks.returncodes):
        ranks.poll()
        time.sleep(POLL_SECONDS)
    deadline = time.monotonic() + LAST_RANK_SECONDS
    while None in ranks.returncodes and time.monotonic() < deadline:
        time.sleep(POLL_SECONDS)


@contextlib.contextmanager
def _first_sigterm_ignored() -> Iterator[None]:
    """As the head of this file has it."""

    def once(number: int, frame: object) -> None:
        logger.info("SIGTERM: the leader drains and then ends this node; a second one ends it at once")
        signal.signal(signal.SIGTERM, lambda number, frame: signal.raise_signal(signal.SIGINT))

    before = signal.signal(signal.SIGTERM, once)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
