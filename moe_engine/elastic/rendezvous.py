"""Rendezvous of the surviving ranks: one generation of torch.distributed's world per loss."""

from __future__ import annotations

import os
import threading
from typing import Any

from moe_engine.elastic.survivors import Survivors
from moe_engine.executor.process_groups import RankWorld

LAZY_VARIABLE = "TORCH_GLOO_LAZY_INIT"
"""Connect lazily, in the operations that need the connection: such operations can be cancelled, torch's own rendezvous
cannot."""
POLL_SECONDS = 0.005


class SurvivorWorld(RankWorld):
    """This process's membership in the torch.distributed world, across generations."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._left: list[Any] = []  # earlier worlds, kept referenced: destructors would wait for hung operations

    def join(self) -> None:
        os.environ.setdefault(LAZY_VARIABLE, "1")
        super().join()

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
            self._init(f"generation{survivors.generation}", members.index(self._place.rank), len(members))

    def _wait_for_all(self, generation: int, members: list[int], given_up: threading.Event) -> None:
        """Waits until all members are about to join: a wait inside torch's own rendezvous could not be cancelled."""
        assert self._store is not None
        here = [f"here{generation}-{rank}" for rank in members]
        self._store.set(f"here{generation}-{self._place.rank}", "1")
        while not self._store.check(here):
            if given_up.wait(POLL_SECONDS):
                raise RuntimeError("cancelled: another rank was lost")
