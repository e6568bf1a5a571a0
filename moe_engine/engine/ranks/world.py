"""Joins the ranks by torch.distributed: a store on the leader, generations of process groups over it."""

from __future__ import annotations

import contextlib
import os
import socket
import threading
from collections.abc import Iterator
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import psutil

from moe_engine.engine.ranks.options import RankGroupOptions, RankPlace
from moe_engine.worker.rank_group import Survivors

if TYPE_CHECKING:
    import torch.distributed as dist

ELSEWHERE = ("192.0.2.1", 9)
"""An address of nobody (RFC 5737): the way there is the default route."""

INTERFACE_VARIABLE = "GLOO_SOCKET_IFNAME"
LAZY_VARIABLE = "TORCH_GLOO_LAZY_INIT"
"""Connections are made by the operations that need them: these can be given up, a meeting inside of torch cannot."""
MEETING_POLL_SECONDS = 0.005


def quieten_torch() -> None:
    """Before torch is imported. What its C++ parts say about ranks, the watch says better."""
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")


def open_store(options: RankGroupOptions) -> Any:
    """The leader's store, on a free port (`.port`); lives as long as the object."""
    import torch.distributed as dist

    timeout = timedelta(seconds=options.limits.start)
    return dist.TCPStore(options.leader_host, 0, is_master=True, wait_for_workers=False, timeout=timeout)


class RankWorld:
    """This process as a rank of torch.distributed's world, once for each generation of it.

    Args:
        host: of the leader's store, at `port`; the leader itself hands in its `store`.
    """

    def __init__(
        self, options: RankGroupOptions, place: RankPlace, host: str, port: int, store: dist.Store | None = None
    ) -> None:
        self._options, self._place = options, place
        self._host, self._port, self._store = host, port, store
        self._left: list[Any] = []  # worlds of earlier generations: their end waits for what hangs in them

    def join(self) -> None:
        """Returns when all ranks have joined.

        Raises:
            PeerLost: another rank went meanwhile, or cannot be reached.
        """
        import torch.distributed as dist

        os.environ.setdefault(INTERFACE_VARIABLE, interface_towards(self._host, self._port))
        if self._options.coverage is not None:
            os.environ.setdefault(LAZY_VARIABLE, "1")
        timeout = timedelta(seconds=self._options.limits.start)
        with self._meeting():
            if self._store is None:
                self._store = dist.TCPStore(self._host, self._port, is_master=False, timeout=timeout)
            self._init(0, list(range(self._place.size)))

    def rejoin(self, survivors: Survivors, given_up: threading.Event) -> None:
        """Leaves the world that it is in for that of the ranks alive, numbered in their order.

        Raises:
            PeerLost: one of them does not come, and so the attempt was given up; or went just then.
        """
        import torch.distributed as dist

        members = [rank for rank, alive in enumerate(survivors.alive) if alive]
        with self._meeting():
            if dist.is_initialized():
                self._left.append(dist.group.WORLD)
                dist.destroy_process_group()
            self._wait_for_all(survivors.generation, members, given_up)
            self._init(survivors.generation, members)

    def _wait_for_all(self, generation: int, members: list[int], given_up: threading.Event) -> None:
        """Until all are on their way: whoever waits inside of torch's own meeting cannot be called back."""
        assert self._store is not None
        here = [f"here{generation}-{rank}" for rank in members]
        self._store.set(f"here{generation}-{self._place.rank}", "1")
        while not self._store.check(here):
            if given_up.wait(MEETING_POLL_SECONDS):
                raise RuntimeError("given up: yet another rank was lost")

    def _init(self, generation: int, members: list[int]) -> None:
        import torch.distributed as dist

        assert self._store is not None
        dist.init_process_group(
            self._options.backend,
            store=dist.PrefixStore(f"generation{generation}", self._store),
            rank=members.index(self._place.rank),
            world_size=len(members),
            timeout=timedelta(seconds=self._options.collective_timeout),
        )

    @contextlib.contextmanager
    def _meeting(self) -> Iterator[None]:
        from moe_engine.parallel.collectives import PeerLost

        try:
            yield
        except RuntimeError as error:  # torch's errors of stores and backends derive from it
            reason = str(error).strip().partition("\n")[0]
            raise PeerLost(f"joining the other ranks at {self._host}:{self._port}: {reason}") from error


def own_address_towards(host: str, port: int = 9) -> str:
    """This machine's IP address on the way to `host`: the one the other ranks can reach it by, too."""
    family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
    own = _source_address(family, address)
    if own.startswith("127.") and own != "127.0.0.1":  # `host` is this machine's own name, in /etc/hosts
        own = _source_address(socket.AF_INET, ELSEWHERE) or _first_address() or own
    return own


def _source_address(family: int, destination: Any) -> str:
    """Empty where no route leads there."""
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(destination)  # sends nothing: the system only picks a route
        except OSError:
            return ""
        return str(probe.getsockname()[0])


def _first_address() -> str:
    """An address of this machine that is not its own loop."""
    for addresses in psutil.net_if_addrs().values():
        for item in addresses:
            if item.family == socket.AF_INET and not item.address.startswith("127."):
                return str(item.address)
    return ""


def interface_towards(host: str, port: int) -> str:
    """The network interface of `own_address_towards`."""
    own = own_address_towards(host, port)
    for name, addresses in psutil.net_if_addrs().items():
        if any(item.address.partition("%")[0] == own for item in addresses):
            return name
    return "lo"
