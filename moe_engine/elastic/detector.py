"""Failure detector of ranks that continue without lost ones as long as the remaining slots hold every expert."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from moe_engine.cluster.failure_detector import FailureDetector, Silence
from moe_engine.elastic.survivors import Survivors
from moe_engine.executor.options import DetectorLimits, RankPlace
from moe_engine.executor.progress import Position
from moe_engine.planning.parallelism.resolve_elastic import Coverage

GATHER_SECONDS = 0.15
"""After a loss, wait this long for simultaneous losses, so that the survivors regroup only once."""


class ElasticDetector(FailureDetector):
    """Runs outside the ranks and monitors all of them.

    Args:
        coverage: ranks may be lost without failing the group as long as it covers the survivors.
    """

    def __init__(self, places: Sequence[RankPlace], limits: DetectorLimits, coverage: Coverage) -> None:
        super().__init__(places, limits)
        self.survivors = Survivors((True,) * len(places))
        self._coverage = coverage
        self._newly_lost: dict[int, str] = {}  # ranks lost since the last announcement, with causes
        self._gathering = Silence()
        self._on_survivors: list[Callable[[Survivors], None]] = []

    def on_survivors(self, listener: Callable[[Survivors], None]) -> None:
        """Calls `listener` whenever ranks were lost and the others continue."""
        self._on_survivors.append(listener)

    def failed(
        self, rank: int, message: str, *, peer_lost: bool = False, config_error: bool = False, generation: int = 0
    ) -> None:
        """As in the base; ignores failures in process groups that were abandoned since."""
        if generation == self.survivors.generation and not self._newly_lost:
            super().failed(rank, message, peer_lost=peer_lost, config_error=config_error)

    def tick(self, elapsed: float) -> None:
        if not self._newly_lost or self.ending or self.failure is not None:
            super().tick(elapsed)
            return
        self._gathering.add(elapsed)
        if self._gathering.seconds >= GATHER_SECONDS:
            self._announce()

    def _lose(self, ranks: Sequence[int], message: str) -> None:
        with self._lock:
            new = [rank for rank in ranks if self.survivors.alive[rank] and rank not in self._newly_lost]
            if not new:
                return
            left = sum(self.survivors.alive) - len(self._newly_lost) - len(new)
            if not self.armed:
                self._fail(message)
            elif left == 0 or not self._coverage.covers(left):
                lost = "; ".join(dict.fromkeys([*self._newly_lost.values(), message]))
                self._fail(f"{lost}; {self._uncovered(left)}")
            else:
                self._newly_lost |= dict.fromkeys(new, message)
                self._gathering.reset()

    def _uncovered(self, left: int) -> str:
        coverage, size = self._coverage, len(self._ranks)
        if not left:
            return "no rank is left"
        return (
            f"{left} of {size} ranks cannot hold {coverage.num_experts} experts in {coverage.slots} slots each: "
            f"--ep-num-redundant-experts {coverage.redundant_needed(left, size)} would have covered the loss"
        )

    def _announce(self) -> None:
        """Announces all recent losses to the survivors in one message."""
        with self._lock:
            alive = tuple(lives and rank not in self._newly_lost for rank, lives in enumerate(self.survivors.alive))
            lost = "; ".join(dict.fromkeys(self._newly_lost.values()))
            self._newly_lost, self._suspected, self._suspected_time = {}, None, Silence()
            self.survivors = Survivors(alive, (*self.survivors.losses, lost))
            self._watched = [state for state in self._ranks if alive[state.place.rank]]
            for state in self._watched:
                state.position, state.reported = Position(), False
                state.still.reset()
        for listener in list(self._on_survivors):
            listener(self.survivors)
