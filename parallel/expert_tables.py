"""Current expert placement of every MoE layer, from one rank's view. Changes only between two steps.

Legend: L layers of the model, E logical experts, P slots, G expert-parallel ranks, T tokens, K experts per token.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from moe_engine.kernels.uploads import upload
from moe_engine.parallel.placement.placement import ExpertPlacement
from moe_engine.parallel.placement.replicas import Algorithm, LayerChoice, ReplicaChoice


class CountsByLayer(Protocol):
    def update_layer(self, layer_index: int, physical_to_logical: Tensor) -> None: ...


class ExpertTables:
    """The current placement, and the replica choice of this rank's tokens.

    Layers after the placement's last one (MTP layers) start with the trivial placement.

    Args:
        placement: complete, of the main model's layers.
        rank: this rank's index among the G.
        algorithm: see `ReplicaChoice`; must be ``dynamic`` if every rank computes the same rows.
        num_more_layers: MTP layers.
        num_nodes: nodes of the G ranks, evenly distributed.
    """

    def __init__(
        self,
        placement: ExpertPlacement,
        rank: int,
        algorithm: Algorithm,
        *,
        num_more_layers: int = 0,
        num_nodes: int = 1,
        device: torch.device | str = "cpu",
    ) -> None:
        self.rank = rank
        self.num_layers = placement.num_layers
        self.num_physical = placement.num_physical
        self.num_redundant = placement.num_physical - placement.num_experts
        self.slots_per_rank = placement.slots_per_rank
        trivial = np.arange(placement.num_physical) % placement.num_experts
        self._table = np.vstack([placement.physical_to_logical, np.tile(trivial, (num_more_layers, 1))])
        self._num_experts, self._num_ranks = placement.num_experts, placement.num_ranks
        self._device = torch.device(device)
        whole = ExpertPlacement(self._table, placement.num_experts, placement.num_ranks)
        self._choice = ReplicaChoice(whole, rank, algorithm, num_nodes=num_nodes, device=device)

    @property
    def placement(self) -> ExpertPlacement:
        """Current placement of the main model's layers."""
        return ExpertPlacement(self._table[: self.num_layers], self._num_experts, self._num_ranks)

    @property
    def whole_placement(self) -> ExpertPlacement:
        """Current placement, MTP layers included."""
        return ExpertPlacement(self._table, self._num_experts, self._num_ranks)

    def held(self, layer: int) -> list[int]:
        """The logical expert in each of this rank's slots."""
        first = self.rank * self.slots_per_rank
        return self._table[layer, first : first + self.slots_per_rank].tolist()

    @property
    def all_held(self) -> list[list[int]]:
        """`held` of every layer, MTP layers included."""
        return [self.held(layer) for layer in range(len(self._table))]

    def to_physical(self, layer: int, topk_ids: Tensor) -> Tensor:
        """topk_ids int [T, K] logical -> int32 [T, K] slots."""
        return self._choice.to_physical(layer, topk_ids)

    def prepare(self, layer: int, table: Sequence[int]) -> LayerChoice:
        """Precomputes most of `update_layer`; callable from any thread."""
        return self._choice.prepare(layer, table)

    def update_layer(
        self,
        layer: int,
        table: Sequence[int],
        counter: CountsByLayer | None = None,
        prepared: LayerChoice | None = None,
    ) -> None:
        """Sets the experts [P] of the layer's slots, also in the counter. `prepared`: from `prepare` of this table."""
        self._table[layer] = table
        self._choice.update_layer(self.prepare(layer, table) if prepared is None else prepared)
        if counter is not None:
            counter.update_layer(layer, upload(self._table[layer], self._device))
