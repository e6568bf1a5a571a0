"""Gathers values of all nodes on node 0 and shares node 0's values with all, through torch's TCPStore on node 0."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import TypeVar

import msgspec

from moe_engine.cli.cluster_check.links import TRY_SECONDS, reason_of
from moe_engine.cli.cluster_check.report import Finding
from moe_engine.errors import ConfigError
from moe_engine.processes.rendezvous_address import RendezvousAddress

PROGRESS_SECONDS = 5.0
POLL_SECONDS = 0.1
STORE_SECONDS = 30
STORE_BACKLOG = 2048
"""Listen backlog: nodes that may connect to the store simultaneously."""

T = TypeVar("T")


class CannotJoin(Exception):
    """Node 0 does not listen, or its flags contradict this node's."""


class Exchange:
    """All nodes call `gather` and `share` in the same order. A node that misses one gather is excluded from the next.

    Args:
        names: of the nodes by rank, for logs.
        seconds: time for node 0 to listen.

    Raises:
        CannotJoin, or ConfigError on node 0: the address cannot be bound.
    """

    def __init__(
        self, address: RendezvousAddress, rank: int, names: Sequence[str], seconds: float, log: Callable[[str], None]
    ) -> None:
        self._rank, self._names, self._log = rank, names, log
        self._expected = set(range(len(names)))
        self.ip, node_0, listener = _listen(address) if rank == 0 else _reach(address, seconds, log)
        port = int(address.port) if listener is None else listener.getsockname()[1]
        import torch.distributed as dist

        self._store = dist.TCPStore(
            node_0,
            port,
            is_master=listener is not None,
            wait_for_workers=False,
            timeout=timedelta(seconds=STORE_SECONDS),
            master_listen_fd=None if listener is None else listener.detach(),
        )
        if self._store.add(f"joined {rank}", 1) > 1:
            raise CannotJoin("joined twice: give each node its own --node-rank, from 0")
        if (nodes := self.share("nnodes", len(names))) != len(names):
            raise CannotJoin(f"has --nnodes {len(names)}, node 0 has {nodes}: give the same on all nodes")

    def gather(self, step: str, mine: Finding, seconds: float) -> dict[int, Finding]:
        """On node 0 the findings by rank, of all nodes that were in time; {} on the others."""
        self._store.set(f"{step} begun", "")
        self._store.set(f"{step} {self._rank}", msgspec.json.encode(mine).decode())
        if self._rank:
            return {}
        began = logged_at = time.monotonic()
        while (missing := self._missing(step)) and time.monotonic() < began + seconds:
            if time.monotonic() > logged_at + PROGRESS_SECONDS:
                logged_at = time.monotonic()
                self._log(f"waiting for {', '.join(self._names[rank] for rank in missing)}")
            time.sleep(POLL_SECONDS)
        self._expected.difference_update(missing)
        return {rank: msgspec.json.decode(self._store.get(f"{step} {rank}"), type=Finding) for rank in self._expected}

    def _missing(self, step: str) -> list[int]:
        return [rank for rank in sorted(self._expected) if not self._store.check([f"{step} {rank}"])]

    def begun(self, step: str) -> bool:
        """Whether any node has called `gather`."""
        return bool(self._store.check([f"{step} begun"]))

    def share(self, key: str, value: T) -> T:
        """Node 0's value, on all nodes. The others pass one of the same type."""
        if self._rank == 0:
            self._store.set(key, msgspec.json.encode(value).decode())
        while not self._store.check([key]):
            time.sleep(POLL_SECONDS)
        return msgspec.json.decode(self._store.get(key), type=type(value))


def _listen(address: RendezvousAddress) -> tuple[str, str, socket.socket]:
    """`_reach` on node 0, with a listening socket of its own: the store's socket would listen on all addresses."""
    ip, _, port = address.bind().removeprefix("tcp://").rpartition(":")
    try:
        return ip, ip, socket.create_server((ip, int(port)), backlog=STORE_BACKLOG)
    except OSError as error:
        raise ConfigError(f"node 0 cannot listen on {address.text} ({ip}): {reason_of(error)}") from None


def _reach(address: RendezvousAddress, seconds: float, log: Callable[[str], None]) -> tuple[str, str, None]:
    """The IP addresses of this node and of node 0. Retries until node 0 listens, which may start later."""
    began = logged_at = time.monotonic()
    while True:
        try:
            with socket.create_connection((address.host, int(address.port)), TRY_SECONDS) as probe:
                return probe.getsockname()[0], probe.getpeername()[0], None
        except OSError as error:
            problem = f"node 0 at {address.text}: {reason_of(error)}"
        now = time.monotonic()
        if now > began + seconds:
            raise CannotJoin(f"cannot reach {problem}")
        if now > logged_at + PROGRESS_SECONDS:
            logged_at = now
            log(f"waiting for {problem}")
        time.sleep(POLL_SECONDS)
