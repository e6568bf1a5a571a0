"""Launcher of a node without the leader (--node-rank > 0): starts its ranks, reports deaths, exits with the leader.

The first SIGTERM is ignored, because a cluster scheduler sends it to every node at the same time and the leader drains
first. A second one, or Ctrl-C, stops this node's ranks immediately. SIGHUP is ignored: the leader ends this node.
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
from moe_engine.executor.options import DetectorLimits, RankGroupOptions
from moe_engine.processes.rendezvous_address import RendezvousAddress
from moe_engine.processes.zmq_sockets import SECRET_HINT, JobKeys, connect

logger = logging.getLogger("moe_engine")

POLL_SECONDS = 0.1
LAST_RANK_SECONDS = 5.0
"""Time for the other ranks of a node to exit after the first one."""
REPORT_SECONDS = 60.0
"""Time for node 0 to start and to receive this node's refusal."""


class _NodeRanks:
    """This node's ranks of a replica led by another node.

    Args:
        lost: called once, from another thread, with the reason when the replica is lost.

    Raises:
        ConfigError: the leader's host is unknown.
    """

    def __init__(self, config: Any, options: RankGroupOptions, lost: Callable[[str], None], log_level: str) -> None:
        self._address, host = options.leader_tcp(), socket.gethostname()
        here = messages.NodeHere(options.node_rank, host, os.getpid())

        def rank_exited(rank: int, how: str) -> None:
            self.heartbeat.send(messages.Died(rank, f"{how} on {host}"))

        self._rank_exited = rank_exited
        name, limits = identity_of_process(f"node{options.node_rank}"), options.limits
        self.heartbeat = HeartbeatClient(self._address, name, here, lambda: here, limits, lost, keys=options.keys)
        self._ranks = LocalRanks(config, options, self._address, rank_exited, log_level)

    @property
    def returncodes(self) -> list[int | None]:
        """Exit code per rank; None while it runs."""
        return self._ranks.returncodes

    def poll(self) -> None:
        """Reports ranks stopped by a signal to the leader. To be called often."""
        self._ranks.find_held(self._rank_exited)

    def kill(self) -> None:
        self._ranks.kill()

    def close(self) -> None:
        """Waits until the leader has received the exits of this node's ranks: it replies to a failure with the reason,
        and `lost` is called."""
        self._ranks.kill()
        self.heartbeat.close()


def run_node(config: Any, options: RankGroupOptions, log_level: str = "info") -> int:
    """Runs the ranks of node `options.node_rank` until the leader stops them; returns this process's exit code.

    Raises:
        ConfigError: the leader's host is unknown, or the leader refuses the connection.
        EngineDeadError: the leader did not reply in time.
    """
    ranks: _NodeRanks

    def leave(reason: str) -> NoReturn:
        logger.error("Node %d exits: %s", options.node_rank, reason)
        ranks.kill()
        os._exit(1)

    ranks = _NodeRanks(config, options, leave, log_level)
    try:
        with _first_sigterm_ignored():
            wait_for_leader(ranks.heartbeat, options.node_rank, options.limits)
            _wait_for_ranks(ranks)
    finally:
        ranks.close()
    codes = ranks.returncodes
    if any(codes):  # the leader, whose reply to a failure ends this process in `leave`, has not replied
        logger.error("Node %d exits: return codes of its ranks: %s; no reply of the leader", options.node_rank, codes)
    return int(any(codes))


def report_refusal(address: str, keys: JobKeys | None, message: str) -> None:
    """Aborts the startup on node 0 for a reason found on this node alone; waits for its reply.

    Raises:
        ConfigError: the address is wrong.
    """
    leader = RendezvousAddress(address)
    leader.check()
    report = messages.NodeRefused(socket.gethostname(), os.getpid(), message)
    heartbeat: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.DEALER)
    heartbeat.setsockopt(zmq.LINGER, 0)
    connect(heartbeat, leader.tcp(), keys)
    heartbeat.send(messages.encode(report))
    logger.info("Reporting this to node 0 at %s, for up to %.0f s; Ctrl-C ends it", address, REPORT_SECONDS)
    heartbeat.poll(int(REPORT_SECONDS * 1000))
    heartbeat.close()


def wait_for_leader(heartbeat: HeartbeatClient, node_rank: int, limits: DetectorLimits) -> None:
    """Blocks until node 0 has replied.

    Raises:
        ConfigError: it refuses the connection: the two nodes' secrets differ, or only one of them has one.
        EngineDeadError: it did not reply in time.
    """
    began = logged_at = time.monotonic()
    while not heartbeat.met.wait(min(POLL_SECONDS, limits.progress)):
        now = time.monotonic()
        if heartbeat.refused_since is not None and now - heartbeat.refused_since > limits.refused:
            raise ConfigError(
                f"node {node_rank}: the leader (node 0) at {heartbeat.address} refuses the connection: {SECRET_HINT}; "
                "or another program listens there"
            )
        if now - began > limits.start:
            raise EngineDeadError(
                f"node {node_rank} has waited {now - began:.0f} s for the leader (node 0) at {heartbeat.address}: "
                "check that it is running and that --dist-init-addr is its address"
            )
        if now - logged_at >= limits.progress:
            logged_at = now
            logger.info("Waiting for the leader at %s, %.0f of %.0f s", heartbeat.address, now - began, limits.start)


def _wait_for_ranks(ranks: _NodeRanks) -> None:
    while not any(code is not None for code in ranks.returncodes):
        ranks.poll()
        time.sleep(POLL_SECONDS)
    deadline = time.monotonic() + LAST_RANK_SECONDS
    while None in ranks.returncodes and time.monotonic() < deadline:
        time.sleep(POLL_SECONDS)


@contextlib.contextmanager
def _first_sigterm_ignored() -> Iterator[None]:
    """See the module docstring."""

    def once(number: int, frame: object) -> None:
        logger.info("SIGTERM: the leader drains and then stops this node; a second SIGTERM stops it immediately")
        signal.signal(signal.SIGTERM, lambda number, frame: signal.raise_signal(signal.SIGINT))

    before = {signal.SIGTERM: signal.signal(signal.SIGTERM, once)}
    before[signal.SIGHUP] = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
