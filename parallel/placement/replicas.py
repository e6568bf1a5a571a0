"""Which copy of an expert a token goes to: from the router's logical ids to slots.

Legend: L layers, E logical experts, P slots, G ranks, X most copies, T tokens, K experts per token.
"""

from __future__ import annotations

from typing import Literal

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from torch import Tensor

from moe_engine.errors import ConfigError
from moe_engine.parallel.placement.placement import ExpertPlacement

SEED = 42
ALGORITHMS = ("static", "dynamic")


def static_choice(placement: ExpertPlacement, *, num_nodes: int = 1, first_layer: int = 0) -> NDArray[np.int32]:
    """The slot each rank sends each expert's tokens to: its own copy, else one on its node, else any.

    Ranks that have the same copies to choose from are dealt out among them evenly, in an order drawn from a fixed seed,
    so that every rank computes the same table.

    Args:
        placement: copies on ranks.
        num_nodes: machines the ranks are spread over evenly.
        first_layer: the model's number of the placement's first layer; what is drawn for a layer hangs on it alone.

    Returns:
        int32 [L, G, E] slots; -1 where an expert has none.
    """
    slots = placement.logical_to_all_physical
    chosen = np.repeat(slots[:, None, :, 0], placement.num_ranks, axis=1)  # [L, G, E]
    for layer in range(placement.num_layers):
        generator = np.random.default_rng((SEED, first_layer + layer))
        for expert in np.flatnonzero(placement.num_valid[layer] > 1):
            copies = slots[layer, expert, : placement.num_valid[layer, expert]]
            chosen[layer, :, expert] = _deal(copies, placement, num_nodes, generator)
    return chosen


def _deal(
    copies: NDArray[np.int32], placement: ExpertPlacement, num_nodes: int, generator: np.random.Generator
) -> list[int]:
    """For each rank one of the copies (slots)."""
    per_node = placement.num_ranks // num_nodes
    groups: dict[tuple[int, ...], list[int]] = {}  # ranks by the copies they may use
    for rank in range(placement.num_ranks):
        holders = copies // placement.slots_per_rank
        here, near = copies[holders == rank], copies[holders // per_node == rank // per_node]
        able = here if len(here) else near if len(near) else copies
        groups.setdefault(tuple(able.tolist()), []).append(rank)
    chosen = [0] * placement.num_ranks
    for slots, ranks in groups.items():
        dealt = np.resize(generator.permutation(slots), len(ranks))
        for rank, slot in zip(ranks, generator.permutation(dealt).tolist()):
            chosen[rank] = slot
    return chosen


class ReplicaChoice:
    """Turns logical expert ids into slots, on the device. Its tensors keep their place when the placement changes.

    Args:
        placement: copies on ranks.
        rank: whose tokens are sent.
        algorithm: ``static`` (one slot an expert for this rank) or ``dynamic`` (token row mod number of copies: ranks
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
        algorithm: Literal["static", "dynamic"] = "static",
        *,
        num_nodes: int = 1,
        device: torch.device | str = "cpu",
    ) -> None:
        if algorithm not in ALGORITHMS:
            raise ConfigError(f"--ep-dispatch-algorithm {algorithm}: unknown here; there are {', '.join(ALGORITHMS)}")
        self._rank = rank
        self._dynamic = algorithm == "dynamic"
        self._num_nodes = num_nodes
        width = max(1, placement.num_physical - placement.num_experts + 1) if self._dynamic else 1
        shape = (placement.num_layers, placement.num_experts)
        self._slots = torch.full((*shape, width), -1, dtype=torch.int32, device=device)  # [L, E, X]
        self._copies = torch.ones(shape, dtype=torch.int32, device=device)
        self._num_experts, self._num_ranks = placement.num_experts, placement.num_ranks
        for layer, table in enumerate(placement.physical_to_logical):
            self.update_layer(layer, table)

    def update_layer(self, layer: int, table: ArrayLike) -> None:
        """Takes over one layer's physical_to_logical [P]; between two steps, when the experts are in their slots.

        Raises:
            ValueError: an expert has more copies than the placement this was made with could hold.
        """
        placement = ExpertPlacement(np.array([table], dtype=np.int32), self._num_experts, self._num_ranks)
        if self._dynamic:
            slots = placement.logical_to_all_physical[0]
            if slots.shape[1] > self._slots.shape[2]:
                raise ValueError(f"{slots.shape[1]} copies of an expert; made for {self._slots.shape[2]} at most")
            self._slots[layer, :, : slots.shape[1]].copy_(torch.from_numpy(slots))
            self._copies[layer].copy_(torch.from_numpy(np.maximum(placement.num_valid[0], 1)))
        else:
            chosen = static_choice(placement, num_nodes=self._num_nodes, first_layer=layer)[0, self._rank]
            self._slots[layer, :, 0].copy_(torch.from_numpy(chosen))

    def to_physical(self, layer: int, topk_ids: Tensor) -> Tensor:
        """topk_ids [T, K] logical, -1 for none -> int32 [T, K] slots, -1 kept."""
        ids = topk_ids.long().clamp_min(0)
        if self._dynamic:
            rows = torch.arange(ids.shape[0], device=ids.device).unsqueeze(1)  # [T, 1]
            slots = self._slots[layer][ids, rows % self._copies[layer][ids]]
        else:
            slots = self._slots[layer, :, 0][ids]
        return torch.where(topk_ids < 0, topk_ids.to(slots.dtype), slots)
