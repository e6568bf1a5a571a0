"""Replica choice: the router's logical ids to slots.

Legend: L layers, E logical experts, P slots, G ranks, X max copies, T tokens, K experts per token.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, NamedTuple

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from torch import Tensor

from moe_engine.errors import ConfigError
from moe_engine.kernels.uploads import pinned
from moe_engine.parallel.placement.placement import ExpertPlacement

Algorithm = Literal["static", "dynamic"]
ALGORITHMS = ("static", "dynamic")


def static_choice(
    placement: ExpertPlacement, *, num_nodes: int = 1, first_layer: int = 0, ranks: Sequence[int] | None = None
) -> NDArray[np.int32]:
    """The slot each rank sends each expert's tokens to: its own copy, else one on its node, else any.

    Ranks with the same candidate copies take them round-robin, with a different start per layer and expert. A rank's
    choice depends only on the layer's table, so every rank computes the same.

    Args:
        placement: copies on ranks.
        num_nodes: nodes; ranks are evenly distributed.
        first_layer: the model's index of the placement's first layer.
        ranks: ranks to compute; None: all G.

    Returns:
        int32 [L, G, E] slots; -1 if an expert has none.
    """
    wanted = range(placement.num_ranks) if ranks is None else ranks
    slots, per_node = placement.logical_to_all_physical, placement.num_ranks // num_nodes
    chosen = np.repeat(slots[:, None, :, 0], len(wanted), axis=1)  # [L, G, E]
    for layer in range(placement.num_layers):
        for expert in np.flatnonzero(placement.num_valid[layer] > 1).tolist():
            copies = slots[layer, expert, : placement.num_valid[layer, expert]].tolist()
            turn = first_layer + layer + expert
            chosen[layer, :, expert] = _deal(copies, placement.slots_per_rank, per_node, turn, wanted)
    return chosen


def _deal(copies: list[int], per_rank: int, per_node: int, turn: int, ranks: Sequence[int]) -> list[int]:
    """One of the copies (slots) for each of the ranks, round-robin among ranks with the same candidates."""
    here: dict[int, list[int]] = {}
    near: dict[int, list[int]] = {}
    for slot in copies:
        here.setdefault(slot // per_rank, []).append(slot)
        near.setdefault(slot // per_rank // per_node, []).append(slot)
    able = [here.get(rank) or near.get(rank // per_node) or copies for rank in range(max(ranks) + 1)]
    return [able[rank][(turn + able[:rank].count(able[rank])) % len(able[rank])] for rank in ranks]


class LayerChoice(NamedTuple):
    """Candidate copies of a layer, on the host, pinned for a GPU: slots int32 [E, X], or [E, 1] if already chosen, and
    the number of copies, [E]."""

    layer: int
    slots: Tensor
    copies: Tensor | None = None


class ReplicaChoice:
    """Maps logical expert ids to slots, on the device. Its tensors keep their addresses when the placement changes.

    Args:
        placement: copies on ranks.
        rank: the sending rank.
        algorithm: ``static`` (one slot per expert for this rank) or ``dynamic`` (token row mod number of copies: ranks
            that compute the same rows agree).
        num_nodes: for ``static``.
        device: of the ids.

    Raises:
        ConfigError: the algorithm is unknown.
    """

    def __init__(
        self,
        placement: ExpertPlacement,
        rank: int,
        algorithm: Algorithm,
        *,
        num_nodes: int = 1,
        device: torch.device | str = "cpu",
    ) -> None:
        if algorithm not in ALGORITHMS:
            raise ConfigError(f"--ep-dispatch-algorithm {algorithm}: unknown; choose from {', '.join(ALGORITHMS)}")
        self._rank = rank
        self._dynamic = algorithm == "dynamic"
        self._num_nodes, self._device = num_nodes, torch.device(device)
        width = max(1, placement.num_physical - placement.num_experts + 1) if self._dynamic else 1
        # one extra row: index -1 (no expert) is the last row, and maps to -1
        shape = (placement.num_layers, placement.num_experts + 1)
        self._slots = torch.full((*shape, width), -1, dtype=torch.int32, device=device)  # [L, E + 1, X]
        self._copies = torch.ones(shape, dtype=torch.int64, device=device)
        self._by_layer = [slots.squeeze(-1) for slots in self._slots.unbind(0)]
        self._num_experts, self._num_ranks = placement.num_experts, placement.num_ranks
        for layer, table in enumerate(placement.physical_to_logical):
            self.update_layer(self.prepare(layer, table))

    def prepare(self, layer: int, table: ArrayLike) -> LayerChoice:
        """Prepares `update_layer` for one layer's physical_to_logical [P]; callable from any thread at any time.

        Raises:
            ValueError: an expert has more copies than the initial placement allows.
        """
        placement = ExpertPlacement(np.array([table], dtype=np.int32), self._num_experts, self._num_ranks)
        if self._dynamic:
            slots = placement.logical_to_all_physical[0]
            if slots.shape[1] > self._slots.shape[2]:
                raise ValueError(f"{slots.shape[1]} copies of an expert; the maximum is {self._slots.shape[2]}")
            copies = np.maximum(placement.num_valid[0], 1)
            return LayerChoice(layer, pinned(slots, self._device), pinned(copies, self._device))
        chosen = static_choice(placement, num_nodes=self._num_nodes, first_layer=layer, ranks=[self._rank])[0, 0]
        return LayerChoice(layer, pinned(chosen[:, None], self._device))

    def update_layer(self, choice: LayerChoice) -> None:
        """Applies a prepared layer; between two steps, when the experts are in their slots."""
        self._slots[choice.layer, :-1, : choice.slots.shape[1]].copy_(choice.slots, non_blocking=True)
        if choice.copies is not None:
            self._copies[choice.layer, :-1].copy_(choice.copies, non_blocking=True)

    def to_physical(self, layer: int, topk_ids: Tensor) -> Tensor:
        """topk_ids [T, K] logical, -1 for none -> int32 [T, K] slots, -1 kept."""
        ids, slots = topk_ids.long(), self._by_layer[layer]
        if slots.dim() == 1:
            return slots[ids]
        rows = torch.arange(ids.shape[0], device=ids.device).unsqueeze(1)  # [T, 1]
        return slots[ids, rows % self._copies[layer][ids]]
