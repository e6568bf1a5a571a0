"""Draft trees whose lengths are known on the device only: the bookkeeping of a captured step besides that of its chain.

A step with trees is one with chains (`protocol.ChainBuffers`) of the trees' depth, whose drafts are the accepted path:
`TreeKernels.walk` writes the path to the chain's `ids` and `sampled`, and `ChainKernels.accept` then finds where it
ends. The chain's tokens are also those of the draft extend.

Legend: R requests, N nodes of a tree (the root first), S depth, K = S + 1; W entries of a row in the tables of all
rows; E tokens of a request in a forward that drafts a level, C = max(N, largest E).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from moe_engine.kernels.decoder.drafting import RowTables
from moe_engine.kernels.speculation.protocol import ChainBuffers


@dataclass(frozen=True)
class LevelBuffers:
    """The nodes expanded at levels 1 to l, the same number at each, at fixed addresses. They occupy the slots after
    the root's position, and write these again at the next level."""

    positions: Tensor  # [R, E] int64
    slots: Tensor  # [R, E] int64
    lens: Tensor  # [R] int32: context tokens
    real: Tensor  # [R, E] int32
    visible: Tensor  # [R, E] int64: as `PagedQueries.visible`; written with the level


@dataclass(frozen=True)
class TreeBuffers:
    """Memory of one captured size at fixed addresses, contiguous. The host writes `sampled`; drafting writes `ids` and
    `parents`."""

    ids: Tensor  # [R, N] int64
    parents: Tensor  # [R, N] int64; -1 for the root
    positions: Tensor  # [R, N] int64
    slots: Tensor  # [R, N] int64: of the N positions from the root's on
    lens: Tensor  # [R] int32: context tokens
    real: Tensor  # [R, N] int32
    visible: Tensor  # [R, N] int64: as `PagedQueries.visible`
    uniform: Tensor  # [R, N] float32
    sampled: Tensor  # [R, N] int64: the target's token at each node; negative: invalid logits
    path: Tensor  # [R, K] int64: the nodes of the accepted path; after its end the last one again
    taken: Tensor  # [R * K] int64: index of the path's nodes among all R * N
    sources: Tensor  # [R * K] int64: slots whose KV moves to the chain's slots; of rejected nodes onto themselves
    levels: Sequence[LevelBuffers]


class TreeKernels(Protocol):
    """Padding reads slot 0 at position 0, and writes nothing to the tables."""

    name: str

    def spread(self, tables: RowTables, chain: ChainBuffers, tree: TreeBuffers) -> None:
        """After `ChainKernels.inputs`, before drafting: `slots`, `lens`, `real` of the tree and of every level, and
        the levels' positions."""

    def enter(self, chain: ChainBuffers, tree: TreeBuffers) -> None:
        """After drafting: `positions`, `visible`, `uniform` of the nodes."""

    def walk(self, chain: ChainBuffers, tree: TreeBuffers) -> None:
        """Before `ChainKernels.accept`: the path of drafts that equal the token sampled at their parent, to the chain
        (-1 after its end), and everything after `sampled`."""


def ancestor_masks(parents: Tensor) -> Tensor:
    """parents [R, N], -1 for a root -> bit b of masks[r, n]: node b is n or an ancestor of n."""
    masks = torch.zeros_like(parents)
    for node in range(parents.shape[1]):
        parent = parents[:, node : node + 1]
        above = masks.gather(1, parent.clamp_min(0))[:, 0]
        masks[:, node] = torch.where(parent[:, 0] < 0, 0, above) | (1 << node)
    return masks


class TorchTrees:
    """`TreeKernels` in plain torch: correct on any device, the reference of the other row."""

    name = "torch"

    def spread(self, tables: RowTables, chain: ChainBuffers, tree: TreeBuffers) -> None:
        is_real, rows = (chain.rows >= 0)[:, None], chain.rows.clamp_min(0)[:, None]
        starts = torch.where(is_real, chain.starts[:, None], 0)
        width = tables.slots.shape[1]

        def slots_of(count: int) -> Tensor:
            places = starts + torch.arange(count, device=rows.device)
            flat = (rows * width + places.clamp_max(width - 1)).flatten()
            found = tables.slots.view(-1).index_select(0, flat).view(places.shape)
            return torch.where(is_real, found.long(), 0)

        every: list[TreeBuffers | LevelBuffers] = [tree, *tree.levels]
        for index, nodes in enumerate(every):
            count = nodes.slots.shape[1]
            nodes.slots.copy_(slots_of(count))
            nodes.lens.copy_(starts[:, 0] + count)
            nodes.real.copy_(is_real.expand(nodes.real.shape))
            if index:
                level = torch.arange(count, device=rows.device) // (count // index)
                nodes.positions.copy_(torch.where(is_real, starts + level, 0) + chain.shifts[:, None])

    def enter(self, chain: ChainBuffers, tree: TreeBuffers) -> None:
        levels = torch.zeros_like(tree.parents)
        for node in range(1, levels.shape[1]):
            levels[:, node] = levels.gather(1, tree.parents[:, node : node + 1])[:, 0] + 1
        tree.visible.copy_(ancestor_masks(tree.parents))
        positions = torch.where(chain.rows[:, None] >= 0, chain.starts[:, None] + levels, 0)
        tree.positions.copy_(positions + chain.shifts[:, None])
        tree.uniform.copy_(chain.uniform.gather(1, levels))

    def walk(self, chain: ChainBuffers, tree: TreeBuffers) -> None:
        size, count = tree.ids.shape
        node, sources = tree.path.new_zeros(size), tree.sources.view(tree.path.shape)
        going = torch.ones_like(node, dtype=torch.bool)
        for step in range(chain.num_drafts + 1):
            token = tree.sampled.gather(1, node[:, None])[:, 0]
            tree.path[:, step] = node
            sources[:, step] = tree.slots.gather(1, torch.where(going, node, step)[:, None])[:, 0]
            chain.sampled[:, step] = token
            if step == chain.num_drafts:
                break
            good = (tree.parents == node[:, None]) & (tree.ids == token[:, None]) & (token >= 0)[:, None]
            found, child = good.long().max(1)
            going = going & (found > 0)
            chain.ids[:, step + 1] = torch.where(going, token, -1)
            node = torch.where(going, child, node)
        first = torch.arange(0, size * count, count, device=node.device)
        tree.taken.copy_((first[:, None] + tree.path).flatten())
