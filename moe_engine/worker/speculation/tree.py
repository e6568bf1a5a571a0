"""Builds draft trees level by level, for any drafter that can expand a node.

At each level the best `topk` nodes of the previous level are expanded into `topk` children each; finally the nodes with
the highest cumulative probability over all levels are kept, parents before children. One child of a node is sampled as
the target will sample there, with the same random number, and is scored as the most likely child, which it is for a
greedy request.

Legend: D rows with drafts, F nodes expanded at a level (the frontier), C candidates, E hidden size, N nodes kept.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from moe_engine.kernels.speculation.trees import ancestor_masks
from moe_engine.models.batch import ForwardBatch
from moe_engine.worker.sampling.logits_passes import Head, LogitsPasses
from moe_engine.worker.sampling.sampler import SampledRows, Sampler
from moe_engine.worker.speculation.draft_batch import DraftBatches
from moe_engine.worker.speculation.drafts import Drafts, DraftTask


class Expand(Protocol):
    """Computes the nodes of a level."""

    def __call__(self, level: int, tokens: Tensor, parents: Tensor) -> Tensor:
        """tokens [D, F] of the nodes of `level` >= 1, and the indices [D, F] of their parents in the previous frontier
        -> hidden states [D * F, E]."""


class Draw(Protocol):
    """Samples a child of each node."""

    def __call__(self, level: int, nodes: int) -> Callable[[slice, Tensor], Tensor]:
        """For `nodes` nodes of each row at a level: (part of the nodes [D * nodes], their logits) -> tokens."""


@dataclass(frozen=True)
class TreeSize:
    """`topk` children of a node, `depth` levels below the root, at most `num_nodes` nodes."""

    topk: int
    depth: int
    num_nodes: int


def grow(
    task: DraftTask, head: Head, roots: Tensor, expand: Expand, sampler: Sampler, ids: Tensor | None = None
) -> Drafts:
    """Trees for a task.

    Args:
        head: the LM head, hidden states -> logits.
        roots: hidden states [D, E] of the roots.
        ids: the target's ids of the head's tokens; None: they are the same.
    """

    def draw(level: int, nodes: int) -> Callable[[slice, Tensor], Tensor]:
        rows, lengths = np.repeat(task.rows, nodes), np.repeat(task.lengths + 1 + level, nodes)
        sampled = SampledRows(rows, lengths, task.rows_device.repeat_interleave(nodes))
        return lambda part, logits: sampler.sample(logits, sampled.part(part))

    size = TreeSize(task.topk, task.depth, task.num_nodes)
    return grow_trees(size, task.roots, LevelHead(head, sampler.passes, draw, ids), roots, expand)


@dataclass(frozen=True)
class LevelHead:
    """The LM head over the nodes of a level. `ids`: the target's ids of the head's tokens; None: they are the same."""

    head: Head
    passes: LogitsPasses
    draw: Draw
    ids: Tensor | None = None

    def children(self, hidden: Tensor, level: int, nodes: int, width: int) -> tuple[Tensor, Tensor]:
        """hidden [D * nodes, E] -> tokens and log-probabilities [D, nodes, width] of each node's children."""
        draw = self.draw(level, nodes)

        def work(part: slice, logits: Tensor) -> tuple[Tensor, Tensor]:
            drawn = draw(part, logits).clamp_min(0)[:, None]
            logprobs = logits.log_softmax(-1)
            best = logprobs.amax(-1, keepdim=True)
            others, other_tokens = logprobs.scatter_(1, drawn, -torch.inf).topk(width - 1)
            return torch.cat((drawn, other_tokens), 1), torch.cat((best, others), 1)

        parts = self.passes.over(self.head, hidden, None, work)
        tokens, scores = parts[0] if len(parts) == 1 else map(torch.cat, zip(*parts))
        tokens = tokens if self.ids is None else self.ids[tokens]
        return tokens.view(-1, nodes, width), scores.view(-1, nodes, width)


def grow_trees(size: TreeSize, root_ids: Tensor, head: LevelHead, roots: Tensor, expand: Expand) -> Drafts:
    """Trees of D roots, with ids [D] and hidden states [D, E]; all shapes follow from the size, and nothing is read by
    the host."""
    num_rows, width = len(root_ids), size.topk
    tokens, scores = head.children(roots, 0, 1, width)  # each [D, 1, width]
    all_tokens, all_scores = [tokens[:, 0]], [scores[:, 0]]
    all_parents = [torch.full_like(all_tokens[0], -1)]  # among all candidates
    frontier = torch.arange(width, device=tokens.device).expand(num_rows, -1)  # among the candidates of the last level
    first_of_level = 0  # index of the last level's first candidate among all
    places = torch.zeros_like(frontier)  # of the frontier's parents in the previous frontier
    for level in range(1, size.depth):
        above, above_scores = all_tokens[-1].gather(1, frontier), all_scores[-1].gather(1, frontier)
        hidden = expand(level, above, places)
        tokens, scores = head.children(hidden, level, width, width)
        all_tokens.append(tokens.flatten(1))
        all_scores.append((above_scores[:, :, None] + scores).flatten(1))
        all_parents.append((frontier + first_of_level).repeat_interleave(width, 1))
        first_of_level += all_tokens[-2].shape[1]
        # stable sort: prefers the sampled child to others of the same score
        frontier = all_scores[-1].sort(dim=1, descending=True, stable=True).indices[:, :width].sort(1).values
        places = frontier // width
    candidates = torch.cat(all_tokens, 1), torch.cat(all_scores, 1), torch.cat(all_parents, 1)
    return _keep_best(size.num_nodes, root_ids, *candidates)


def _keep_best(num_nodes: int, root_ids: Tensor, tokens: Tensor, scores: Tensor, parents: Tensor) -> Drafts:
    """Candidates [D, C] -> trees of N nodes. A parent scores at least as high as its children and comes before them, so
    a stable sort never keeps a child without its parent."""
    chosen = scores.sort(dim=1, descending=True, stable=True).indices[:, : num_nodes - 1].sort(1).values
    node = torch.zeros_like(parents)  # node of each candidate
    node.scatter_(1, chosen, torch.arange(1, chosen.shape[1] + 1, device=tokens.device).expand_as(chosen))
    above = parents.gather(1, chosen)
    node_parents = torch.where(above < 0, 0, node.gather(1, above.clamp_min(0)))
    roots = torch.full_like(root_ids, -1)[:, None]
    return Drafts(torch.cat((root_ids[:, None], tokens.gather(1, chosen)), 1), torch.cat((roots, node_parents), 1))


class NodeRun:
    """Runs the nodes of a tree through one KV cache level by level; earlier levels are recomputed with later ones.

    Args:
        first: [D] column of the first node in the slot table; all columns before it are context.
        positions: [D] position of the nodes of the first added level; each further level is one further.
    """

    def __init__(self, batches: DraftBatches, rows: np.ndarray, first: np.ndarray, positions: np.ndarray) -> None:
        self._batches = batches
        self._rows = rows
        self._first = first
        self._base = positions
        self._tokens: list[Tensor] = []
        self._parents: list[Tensor] = []

    def add(self, tokens: Tensor, parents: Tensor) -> tuple[Tensor, ForwardBatch]:
        """Adds a level: tokens [D, F], and the indices [D, F] of their parents in the previous level. Returns all
        tokens so far [D, E], and a batch of them."""
        width, levels = tokens.shape[1], len(self._tokens)
        self._tokens.append(tokens)
        self._parents.append(parents + (levels - 1) * width if levels else torch.full_like(parents, -1))
        everything = torch.cat(self._tokens, 1)  # [D, E]
        masks = ancestor_masks(torch.cat(self._parents, 1))
        num_rows, count = everything.shape
        depth = np.repeat(np.arange(levels + 1), width)
        _, forward = self._batches.runs(
            self._rows,
            self._first,
            np.full(num_rows, count),
            everything.flatten(),
            positions=(self._base[:, None] + depth).ravel(),
            visible=masks.cpu().numpy().ravel(),
        )
        return everything, forward
