"""Step sync of the surviving attention groups. A loss begins a new generation, with step numbers from its own range."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from moe_engine.core.dp_sync import MAX_EARLY, DPSync, PrefillTurns, StepExchange, StepFactsMessage
from moe_engine.types import StepFacts
from moe_engine.types.prefill_delay import DelayFacts

STEPS = 1 << 40
"""Step numbers per generation: g * STEPS + 1 and on."""
LOST = StepFacts(leaving=True)
"""Facts of a lost group."""


class SurvivorExchange(StepExchange):
    """A step exchange whose groups may be lost."""

    _generation = 0
    _lost: frozenset[int] = frozenset()

    def regroup(self, generation: int, alive: Sequence[bool]) -> None:
        """Continues with the groups alive. Drops facts of earlier generations; keeps facts that already arrived for
        this one."""
        self._generation, self._complete = generation, generation * STEPS
        self._lost = frozenset(group for group, lives in enumerate(alive) if not lives)
        self._facts = {number: facts for number, facts in self._facts.items() if number > self._complete}
        for group in self._lost & self._peers.keys():
            self._peers.pop(group).close(0)

    def gather(self, number: int, check: Callable[[], None]) -> tuple[StepFacts, ...]:
        self._facts.setdefault(number, {}).update(dict.fromkeys(self._lost, LOST))
        return super().gather(number, check)

    def _take(self, message: StepFactsMessage) -> None:
        if not 0 < message.number <= self._generation * STEPS:  # else sent before the loss
            super()._take(message)

    def _is_due(self, message: StepFactsMessage) -> bool:
        """Each new generation means the loss of at least one group; a peer may enter it before this group."""
        if message.group in self._lost:
            return False
        generation, number = divmod(message.number, STEPS)
        if not self._generation < generation < self.num_groups:
            return super()._is_due(message)
        return self._is_peer(message.group) and 0 < number <= MAX_EARLY


class SurvivorSync(DPSync):
    """The step sync of a group, across losses of other groups."""

    def __init__(self, exchange: SurvivorExchange, check: Callable[[], None]) -> None:
        super().__init__(exchange, check)
        self._survivors = exchange

    def regroup(self, generation: int, alive: Sequence[bool]) -> None:
        """Continues with the groups alive."""
        self._survivors.regroup(generation, alive)
        turns = SurvivorTurns(alive, delays=self.end_delays())
        self._number, self._turns, self.last = generation * STEPS, turns, ()
        self.num_groups = sum(alive)


class SurvivorTurns(PrefillTurns):
    """Counts the groups alive only."""

    def __init__(self, alive: Sequence[bool], **more: Any) -> None:
        super().__init__(**more)
        self._alive = tuple(alive)

    def after(self, groups: tuple[StepFacts, ...], own: DelayFacts | None = None) -> None:
        super().after(tuple(facts for facts, lives in zip(groups, self._alive) if lives), own)
