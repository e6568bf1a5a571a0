"""`ExpertPlacement`: the expert in each slot, and derived tables.

Legend: L layers, E logical experts, P slots, G ranks, X max copies of one expert.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import ArrayLike, NDArray

from moe_engine.errors import ConfigError
from moe_engine.parallel.placement.layout import ExpertLayout

IntArray = NDArray[np.int32]
EMPTY = -1


@dataclass(frozen=True, eq=False)
class ExpertPlacement:
    """Immutable; a new plan is a new value.

    Args:
        physical_to_logical: int32 [L, P]; `EMPTY` marks an empty slot (of a lost rank).
        num_experts: logical experts of a layer (E).
        num_ranks: expert-parallel ranks (G).

    Raises:
        ConfigError: an expert id is out of range, or the slots do not divide evenly among the ranks.
    """

    physical_to_logical: IntArray
    num_experts: int
    num_ranks: int = 1

    def __post_init__(self) -> None:
        table = np.array(self.physical_to_logical, dtype=np.int32)
        if table.ndim != 2 or not table.size:
            raise ConfigError(f"physical_to_logical_map must be [layers, slots], got shape {list(table.shape)}")
        if table.shape[1] % self.num_ranks:
            raise ConfigError(
                f"physical_to_logical_map has {table.shape[1]} slots, not a multiple of --ep-size {self.num_ranks}"
            )
        if table.min() < EMPTY or table.max() >= self.num_experts:
            raise ConfigError(
                f"physical_to_logical_map holds expert {table.max() if table.max() > 0 else table.min()}; "
                f"this model's experts are 0 to {self.num_experts - 1}"
            )
        table.setflags(write=False)
        object.__setattr__(self, "physical_to_logical", table)

    @classmethod
    def trivial(cls, layout: ExpertLayout, num_layers: int) -> ExpertPlacement:
        """Slot i holds expert i mod E, in every layer."""
        row = np.arange(layout.num_physical, dtype=np.int32) % layout.num_experts
        return cls(np.tile(row, (num_layers, 1)), layout.num_experts, layout.num_ranks)

    @property
    def num_layers(self) -> int:
        return int(self.physical_to_logical.shape[0])

    @property
    def num_physical(self) -> int:
        return int(self.physical_to_logical.shape[1])

    @property
    def slots_per_rank(self) -> int:
        return self.num_physical // self.num_ranks

    @property
    def by_rank(self) -> IntArray:
        """[L, G, P/G]: the experts of each rank."""
        return self.physical_to_logical.reshape(self.num_layers, self.num_ranks, self.slots_per_rank)

    @cached_property
    def num_valid(self) -> IntArray:
        """[L, E]: copies of each expert."""
        copies = np.zeros((self.num_layers, self.num_experts + 1), dtype=np.int32)  # the last column is for EMPTY
        np.add.at(copies, (np.arange(self.num_layers)[:, None], self.physical_to_logical), 1)
        return np.ascontiguousarray(copies[:, :-1])

    @cached_property
    def logical_to_all_physical(self) -> IntArray:
        """[L, E, X]: the slots of each expert in ascending order, padded with -1."""
        width = max(1, int(self.num_valid.max()))
        slots = np.full((self.num_layers, self.num_experts, width), -1, dtype=np.int32)
        for layer, row in enumerate(self.physical_to_logical):
            order = np.argsort(row, kind="stable").astype(np.int32)
            order = order[row[order] != EMPTY]
            experts = row[order]
            starts = np.searchsorted(experts, experts)  # start of the copies of the same expert
            slots[layer, experts, np.arange(len(order)) - starts] = order
        return slots

    @property
    def missing(self) -> list[tuple[int, int]]:
        """(layer, expert) of every expert without a slot; a complete placement has none."""
        return [(int(layer), int(expert)) for layer, expert in np.argwhere(self.num_valid == 0)]

    def require_complete(self, source: str) -> ExpertPlacement:
        """This placement, if every expert has a slot.

        Raises:
            ConfigError: with `source` and the first experts without a slot.
        """
        if self.missing:
            named = ", ".join(f"layer {layer} expert {expert}" for layer, expert in self.missing[:3])
            raise ConfigError(f"{source}: {len(self.missing)} experts have no slot ({named}); a token may need them")
        return self

    def of_ranks(self, alive: ArrayLike) -> ExpertPlacement:
        """The placement of the live ranks only, renumbered. `alive`: bool [G]."""
        kept = self.by_rank[:, np.asarray(alive, dtype=bool)]
        return ExpertPlacement(kept.reshape(self.num_layers, -1), self.num_experts, kept.shape[1])

    def without_ranks(self, alive: NDArray[np.bool_]) -> ExpertPlacement:
        """The placement with the slots of lost ranks empty. `alive`: bool [G]."""
        table = self.by_rank.copy()
        table[:, ~np.asarray(alive, dtype=bool)] = EMPTY
        return ExpertPlacement(table.reshape(self.num_layers, -1), self.num_experts, self.num_ranks)
