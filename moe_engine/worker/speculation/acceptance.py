"""Acceptance of drafts: verifies a draft tree against the tokens that the target model samples.

The target's token is sampled at every node with the node's path as context and with the random number of that position:
the same token that decoding without drafts would sample there. From the root on, the draft that equals the token
sampled at its parent is accepted; the token sampled at the last accepted node is new. The output, greedy or sampled, is
therefore exactly the one without drafts. For a draft chosen before sampling this is rejection sampling: it is accepted
with the target's probability, else the token has the target's distribution without it.

Thresholds below 1 accept more (SGLang's lossy acceptance): a draft whose target probability p reaches `single`, and any
other with a total probability of p / `acc`.

Legend: D requests, N nodes, K = depth + 1.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor


@dataclass(frozen=True)
class Accepted:
    """tokens [D, K]: the new tokens of a request, counts[i] of them; path [D, K]: the node where each was sampled.

    Entries after counts[i] repeat the last one.
    """

    tokens: Tensor
    counts: Tensor  # [D] int64, at least 1
    path: Tensor


def accept(
    sampled: Tensor, drafts: Tensor, parents: Tensor | None, depth: int, forced: Tensor | None = None
) -> Accepted:
    """Walks every tree from its root.

    Args:
        sampled: [D, N] the target's token at each node; negative for invalid logits (NaN).
        drafts: [D, N] the token of each node; -1: no node.
        parents: [D, N], None for chains.
        depth: max accepted drafts.
        forced: [D, N] bool, drafts to accept although the target sampled another token (thresholds).
    """
    if parents is None and forced is None:
        return accept_chains(sampled, drafts, depth)
    count = sampled.shape[0]
    if parents is None:
        parents = torch.arange(-1, sampled.shape[1] - 1, device=sampled.device).expand(count, -1)
    node = sampled.new_zeros(count)
    going = torch.ones_like(node, dtype=torch.bool)
    path, tokens = [node], []
    counts = torch.ones_like(node)
    for _ in range(depth):
        token = sampled.gather(1, node[:, None])[:, 0]
        below = (parents == node[:, None]) & (drafts >= 0)
        exact = below & (drafts == token[:, None])
        wanted = exact if forced is None else exact * 2 + (below & forced)
        best, child = wanted.long().max(1)
        going = going & (best > 0) & (token >= 0)
        new = drafts.gather(1, child[:, None])[:, 0]
        tokens.append(torch.where(going, new, token))
        node = torch.where(going, child, node)
        path.append(node)
        counts = counts + going
    tokens.append(sampled.gather(1, node[:, None])[:, 0])
    return Accepted(torch.stack(tokens, 1), counts, torch.stack(path, 1))


def accept_chains(sampled: Any, drafts: Any, depth: int) -> Accepted:
    """`accept` for chains without thresholds; also for numpy arrays, which take a fraction of torch's time."""
    library: Any = np if isinstance(sampled, np.ndarray) else torch
    places, rows = (library.arange(n, device=sampled.device) for n in (depth + 1, len(sampled)))
    verified = sampled[:, :depth]
    good = ((drafts[:, 1 : depth + 1] == verified) & (verified >= 0)).cumprod(1)
    counts = good.sum(1) + 1
    path = library.minimum(places, counts[:, None] - 1)
    return Accepted(*map(torch.as_tensor, (sampled[rows[:, None], path], counts, path)))


def accept_at_random(sampled: Tensor, drafts: Tensor, length: float, uniform: Tensor) -> Accepted:
    """Chains whose first drafts are accepted whatever the target sampled, for benchmarks: `length` tokens of each on
    average, fewer if there are fewer drafts.

    Args:
        sampled, drafts: [D, N] as in `accept`.
        uniform: [D] numbers in [0, 1).
    """
    place = torch.arange(drafts.shape[1], device=drafts.device)
    offered = (drafts[:, 1:] >= 0).cumprod(1).sum(1)
    least = int(length)
    counts = torch.minimum(least + (uniform < length - least), offered + 1).long()
    path = torch.minimum(place, counts[:, None] - 1)
    # the drafts after the root, then the token sampled at the last of them
    tokens = torch.where(place < counts[:, None] - 1, drafts.roll(-1, 1), sampled.gather(1, path[:, -1:]))
    return Accepted(tokens, counts, path)


def force(probabilities: Tensor, uniform: Tensor, single: float, acc: float) -> Tensor:
    """[D, N] bool: drafts that the thresholds accept although the target sampled another token.

    Args:
        probabilities: [D, N] of each draft at its parent, under the target's sampling distribution.
        uniform: [D, N] independent numbers in [0, 1).
    """
    chance = (probabilities / acc).clamp_max(1.0)
    # equality accepts with probability p already; accept as much of the rest to reach `chance` in total
    extra = (chance - probabilities) / (1.0 - probabilities).clamp_min(1e-6)
    return (probabilities >= single) | (uniform < extra)
