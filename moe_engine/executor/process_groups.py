"""torch.distributed rendezvous of the ranks: a store on the leader, one generation of process groups per regroup."""

from __future__ import annotations

import contextlib
import os
import socket
import threading
from collections.abc import Iterator
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from moe_engine.core.executor import Survivors
from moe_engine.executor.options import RankGroupOptions, RankPlace
from moe_engine.processes.addresses import INTERFACE_VARIABLE, interface_towards

if TYPE_CHECKING:
    import torch.distributed as dist

LAZY_VARIABLE = "TORCH_GLOO_LAZY_INIT"
"""Connect lazily, in the operations that need the connection: these can be cancelled, torch's own rendezvous cannot."""
RENDEZVOUS_POLL_SECONDS = 0.005
STORE_BACKLOG = 2048
"""Listen backlog: ranks that may connect to the store simultaneously."""


def quieten_torch() -> None:
    """Silences torch's C++ warnings about ranks: the failure detector has better ones. Call before torch's import."""
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")


def open_store(options: RankGroupOptions, host: str) -> Any:
    """The leader's TCPStore on a free port (`.port`) of one address; lives as long as the object.

    torch would listen on every address of the machine, so it gets an already bound socket.
    """
    import torch.distributed as dist

    timeout = timedelta(seconds=options.limits.start)
    with socket.socket() as bound:
        bound.bind((host, 0))
        bound.listen(STORE_BACKLOG)
        port = bound.getsockname()[1]
        return dist.TCPStore(
            host,
            port,
            is_master=True,
            wait_for_workers=False,
            timeout=timeout,
            master_listen_fd=bound.detach(),
        )


class RankWorld:
    """This process's membership in the torch.distributed world, across generations.

    Args:
        host, port: of the leader's store; the leader itself passes its `store`.
    """

    def __init__(
        self, options: RankGroupOptions, place: RankPlace, host: str, port: int, store: dist.Store | None = None
    ) -> None:
        self._options, self._place = options, place
        self._host, self._port, self._store = host, port, store
        self._left: list[Any] = []  # earlier worlds, kept referenced: destructors would wait for hung operations

    def join(self) -> None:
        """Blocks until all ranks have joined.

        Raises:
            PeerLost: another rank died meanwhile, or is unreachable.
        """
        import torch.distributed as dist

        os.environ.setdefault(INTERFACE_VARIABLE, interface_towards(self._host, self._port))
        if self._options.coverage is not None:
            os.environ.setdefault(LAZY_VARIABLE, "1")
        timeout = timedelta(seconds=self._options.limits.start)
        with self._rendezvous_errors():
            if self._store is None:
                self._store = dist.TCPStore(self._host, self._port, is_master=False, timeout=timeout)
            self._init(0, list(range(self._place.size)))

    def rejoin(self, survivors: Survivors, given_up: threading.Event) -> None:
        """Replaces the current world by one of the ranks alive, renumbered in their order.

        Raises:
            PeerLost: a rank did not join and the attempt was cancelled, or a rank died meanwhile.
        """
        import torch.distributed as dist

        members = [rank for rank, alive in enumerate(survivors.alive) if alive]
        with self._rendezvous_errors():
            if dist.is_initialized():
                self._left.append(dist.group.WORLD)
                dist.destroy_process_group()
            self._wait_for_all(survivors.generation, members, given_up)
            self._init(survivors.generation, members)

    def _wait_for_all(self, generation: int, members: list[int], given_up: threading.Event) -> None:
        """Waits until all members are about to join: a wait inside torch's own rendezvous could not be cancelled."""
        assert self._store is not None
        here = [f"here{generation}-{rank}" for rank in members]
        self._store.set(f"here{generation}-{self._place.rank}", "1")
        while not self._store.check(here):
            if given_up.wait(RENDEZVOUS_POLL_SECONDS):
                raise RuntimeError("cancelled: another rank was lost")

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
    def _rendezvous_errors(self) -> Iterator[None]:
        from moe_engine.parallel.collectives import PeerLost

        try:
            yield
        except RuntimeError as error:  # base of torch's store and backend errors
            reason = str(error).strip().partition("\n")[0]
            raise PeerLost(f"joining the other ranks at {self._host}:{self._port}: {reason}") from error
