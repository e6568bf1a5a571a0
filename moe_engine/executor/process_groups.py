"""Joins the ranks by torch.distributed: a store on the leader, generations of process groups over it."""

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
"""Connections are made by the operations that need them: these can be given up, a meeting inside of torch cannot."""
MEETING_POLL_SECONDS = 0.005
STORE_BACKLOG = 2048
"""Ranks that may connect to the store at the same moment."""


def quieten_torch() -> None:
    """Before torch is imported. What its C++ parts say about ranks, the watch says better."""
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")


def open_store(options: RankGroupOptions, host: str) -> Any:
    """The leader's store, on a free port (`.port`) of one address; lives as long as the object.

    torch would listen at every address of the machine, so it gets a socket that is bound already.
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
