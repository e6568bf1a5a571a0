"""Parent-side handles of this node's rank processes."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from moe_engine.executor.options import RankGroupOptions, RankPlace
from moe_engine.models import registry
from moe_engine.processes.child import ChildProcess
from moe_engine.processes.stopped import StoppedProcessDetector, is_stopped

if TYPE_CHECKING:
    from moe_engine.cluster.core_spec import CoreSpec

RANK_MODULE = "moe_engine.cluster.rank_main"


@dataclass(frozen=True)
class RankSpec:
    """Everything a rank's process needs; sent as a pickle by its parent, never over the network."""

    config: Any
    options: RankGroupOptions
    place: RankPlace
    control_address: str
    log_level: str
    outside_models: list[tuple[str, str, str]]
    import_path: list[str]
    front: CoreSpec | None = None
    """On the leader's node: the core's specification, with the folder of sockets and status files."""


class LocalRanks:
    """Starts this node's ranks and monitors them.

    Args:
        front: specification of the leading core, on its node.
        on_exit: called from a watcher thread with the rank and a sentence: its process and how it ended.
        first_rank: lowest rank to start; rank 0 is the parent by default.
    """

    def __init__(
        self,
        config: Any,
        options: RankGroupOptions,
        control_address: str,
        on_exit: Callable[[int, str], None],
        log_level: str,
        front: CoreSpec | None = None,
        first_rank: int = 1,
    ) -> None:
        self._silent, self._on_exit = options.limits.silent, on_exit
        self._children: dict[int, ChildProcess] = {}
        for place in options.local_places:
            if place.rank < first_rank:
                continue
            spec = RankSpec(config, options, place, control_address, log_level, registry.added(), list(sys.path), front)
            self._children[place.rank] = ChildProcess(place.name, RANK_MODULE, spec, partial(self._exited, place.rank))
        self._held = {rank: StoppedProcessDetector(child.pid) for rank, child in self._children.items()}

    @property
    def pids(self) -> dict[int, int]:
        return {rank: child.pid for rank, child in self._children.items()}

    @property
    def returncodes(self) -> list[int | None]:
        """None for a process that runs, or whose exit was not yet reported to `on_exit`."""
        return [child.returncode for child in self._children.values()]

    def find_held(self, lost: Callable[[int, str], None]) -> None:
        """Calls `lost` (like `on_exit`) for ranks stopped by a signal for too long. To be called often."""
        for rank, held in self._held.items():
            if (seconds := held.seconds()) > self._silent:
                child = self._children[rank]
                lost(rank, f"{child.name} (pid {child.pid}) has been stopped by a signal for {seconds:.1f} s")

    def stop(self, grace: float) -> None:
        """Waits up to `grace` seconds for processes that should exit; kills the others, and immediately those that a
        signal has stopped."""
        for child in self._children.values():
            if is_stopped(child.pid):
                child.kill()
        deadline = time.monotonic() + grace
        for child in self._children.values():
            child.stop(max(0.0, deadline - time.monotonic()))

    def end(self, ranks: Iterable[int]) -> None:
        """Kills these ranks."""
        for rank in ranks:
            if rank in self._children:
                self._children[rank].kill()

    def _exited(self, rank: int, how: str, code: int) -> None:
        self._on_exit(rank, how)

    def kill(self) -> None:
        for child in self._children.values():
            child.kill()
        self.stop(0.0)
