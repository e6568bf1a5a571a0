"""The surviving ranks of a world, and the error that interrupts their steps.

Each announcement of survivors begins a new generation of process groups and step numbers.
"""

from __future__ import annotations

import msgspec

from moe_engine.errors import EngineDeadError


class Survivors(msgspec.Struct, frozen=True):
    """`losses`: one sentence per loss, naming ranks and causes, in order."""

    alive: tuple[bool, ...] = ()
    losses: tuple[str, ...] = ()

    @property
    def generation(self) -> int:
        return len(self.losses)

    @property
    def first(self) -> int:
        """The lowest rank alive."""
        return self.alive.index(True)


class RanksChanged(EngineDeadError):
    """Ranks were lost and the survivors continue: steps in flight must be restarted."""
