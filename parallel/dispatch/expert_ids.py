"""Expert ids of tokens: checks of the router's choices, lost ranks, and ids counted from this rank's first expert."""

from __future__ import annotations

import torch
from torch import Tensor

from moe_engine.kernels.permutation.protocol import Permutation
from moe_engine.parallel.collectives import Group


def check_choices(permutation: Permutation, ids: Tensor, num_experts: int) -> None:
    """Rejects invalid router output. Synchronizes with the device, once.

    Raises:
        ValueError: an id outside -1..num_experts-1, or a repeated expert in one token.
    """
    if permutation.valid(ids, num_experts):
        return
    if bool(((ids < -1) | (ids >= num_experts)).any()):
        raise ValueError(f"topk_ids holds an expert outside 0..{num_experts - 1}")
    ordered = ids.sort(dim=1).values
    twice = ((ordered[:, 1:] == ordered[:, :-1]) & (ordered[:, 1:] >= 0)).any(1)  # [T]
    token = int(twice.nonzero()[0])
    raise ValueError(f"token {token} has a repeated expert: {ids[token].tolist()}")


def live_ranks(group: Group) -> Tensor:
    """bool [R] on the group's device: the ranks that `Permutation.route` may send to."""
    return torch.ones(group.size, dtype=torch.bool, device=group.device) if group.alive is None else group.alive


def without_lost(ids: Tensor, alive: Tensor | None) -> Tensor:
    """ids [R * M, K] of the rows of R ranks, in rank order -> the same, -1 for ranks not `alive` [R]."""
    if alive is None:
        return ids
    return torch.where(alive.repeat_interleave(len(ids) // len(alive)).unsqueeze(1), ids, -1)
