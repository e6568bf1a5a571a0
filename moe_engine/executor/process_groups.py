"""torch.distributed rendezvous of the ranks, at a store on the leader."""

from __future__ import annotations

import contextlib
import errno
import os
import socket
import time
from collections.abc import Iterator
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from moe_engine.errors import ConfigError
from moe_engine.executor.options import RankGroupOptions, RankPlace
from moe_engine.processes.addresses import INTERFACE_VARIABLE, LOOPBACK, NO_PORT, interface_towards

if TYPE_CHECKING:
    import torch.distributed as dist

STORE_BACKLOG = 2048
"""Listen backlog: ranks that may connect to the store simultaneously."""

REACH_SECONDS = 30.0
"""Time to reach the store, which is open before any rank has its address."""
RETRY_SECONDS = 0.5
BETWEEN_NODES = (
    "let firewalls admit all TCP ports between the nodes, not that of --dist-init-addr alone, and test every link with "
    "moe-engine cluster-check"
)


def quieten_torch() -> None:
    """Silences torch's C++ warnings about ranks: the failure detector has better ones. Call before torch's import."""
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")


def open_store(options: RankGroupOptions, host: str) -> Any:
    """The leader's TCPStore on a free port (`.port`) of one address; lives as long as the object.

    torch would listen on every address of the machine, so it gets an already bound socket.

    Raises:
        ConfigError: no port is free, or as of `check_reachable`: the loopback interface of this machine is down.
    """
    import torch.distributed as dist

    timeout = timedelta(seconds=options.limits.start)
    with socket.socket() as bound:
        try:
            bound.bind((host, 0))
        except OSError as error:
            if error.errno != errno.EADDRINUSE:
                raise
            raise ConfigError(f"the store of rank 0 cannot listen at {host}: {NO_PORT}") from None
        bound.listen(STORE_BACKLOG)
        port = bound.getsockname()[1]
        check_reachable(host, port)  # torch connects to it too
        return dist.TCPStore(
            host, port, is_master=True, wait_for_workers=False, timeout=timeout, master_listen_fd=bound.detach()
        )


def check_reachable(host: str, port: int) -> None:
    """Waits until the leader's store accepts a connection: torch would wait for the whole time of the start, without a
    word.

    Raises:
        ConfigError: it does not; a firewall admits the port of --dist-init-addr only.
    """
    deadline = time.monotonic() + REACH_SECONDS
    while True:
        try:
            socket.create_connection((host, port), max(RETRY_SECONDS, deadline - time.monotonic())).close()
            return
        except OSError as error:
            if time.monotonic() + RETRY_SECONDS >= deadline:
                fix = "bring its loopback interface up" if host == LOOPBACK else BETWEEN_NODES
                raise ConfigError(
                    f"the store of rank 0, {host}:{port}, cannot be reached from {socket.gethostname()} ({error}): "
                    f"{fix}"
                ) from None
        time.sleep(RETRY_SECONDS)


class RankWorld:
    """This process's membership in the torch.distributed world.

    Args:
        host, port: of the leader's store; the leader itself passes its `store`.
    """

    def __init__(
        self, options: RankGroupOptions, place: RankPlace, host: str, port: int, store: dist.Store | None = None
    ) -> None:
        self._options, self._place = options, place
        self._host, self._port, self._store = host, port, store

    def join(self) -> None:
        """Blocks until all ranks have joined.

        Raises:
            ConfigError: as of `check_reachable`.
            PeerLost: another rank died meanwhile, or is unreachable.
        """
        import torch.distributed as dist

        os.environ.setdefault(INTERFACE_VARIABLE, interface_towards(self._host, self._port))
        timeout = timedelta(seconds=self._options.limits.start)
        with self._rendezvous_errors():
            if self._store is None:
                check_reachable(self._host, self._port)
                self._store = dist.TCPStore(self._host, self._port, is_master=False, timeout=timeout)
            self._init("world", self._place.rank, self._place.size)

    def _init(self, name: str, rank: int, size: int) -> None:
        import torch.distributed as dist

        assert self._store is not None
        dist.init_process_group(
            self._options.backend,
            store=dist.PrefixStore(name, self._store),
            rank=rank,
            world_size=size,
            timeout=timedelta(seconds=self._options.collective_timeout),
        )

    @contextlib.contextmanager
    def _rendezvous_errors(self) -> Iterator[None]:
        from moe_engine.parallel.collectives import PeerLost

        try:
            yield
        except RuntimeError as error:  # base of torch's store and backend errors
            reason = str(error).strip().partition("\n")[0]
            if os.strerror(errno.EADDRINUSE) in reason:  # gloo's, whose socket takes any port
                reason = NO_PORT
            raise PeerLost(f"joining the other ranks at {self._host}:{self._port}: {reason}") from error
