"""Selection among candidates (DeepSeek V4.1): one indexer's scores put blocks of entries first, and later indexers
choose among the entries of these blocks. In torch, for any device.

Legend: T query tokens, Hi index heads, I channels of an index head, E entries of a request, B blocks, S entries of a
block, K selected entries.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad

from moe_engine.kernels.attention.selected import Selected
from moe_engine.kernels.indexer.reference import MAX_SCORES, best
from moe_engine.kernels.queries import PagedQueries


def best_blocks(q: Tensor, weights: Tensor, cache: Tensor, queries: PagedQueries, count: int, size: int) -> Tensor:
    """The blocks [T, count] int64 with the highest score of an entry, then -1. The block of a token's last entry is
    always among them; of equal scores the lower block is.

    Args:
        q, weights, cache: as for `IndexerKernel.select`.
        queries: each query token as a request, whose context are the entries that it sees.
        size: S.
    """
    found = torch.full((len(q), count), -1, dtype=torch.int64, device=q.device)
    most = max(queries.context_lens, default=0)
    for part in _parts(len(q), q.shape[1] * max(most, 1)):
        lens = queries.context_lens_device[part].long().unsqueeze(1)
        slots = queries.slot_table[queries.rows[part].long(), :most]  # [t, E]
        scores = _scores(q[part], weights[part], cache, slots)
        scores = scores.masked_fill(torch.arange(most, device=q.device) >= lens, float("-inf"))
        blocks = pad(scores, (0, -most % size), value=float("-inf")).unflatten(1, (-1, size)).amax(2)
        last = torch.arange(blocks.shape[1], device=q.device) == (lens - 1) // size
        blocks = blocks.masked_fill(last, float("inf"))
        values, order = blocks.sort(dim=1, descending=True, stable=True)
        chosen = order[:, :count].masked_fill(values[:, :count] == float("-inf"), -1)
        found[part, : chosen.shape[1]] = chosen
    return found


def select_among(
    q: Tensor, weights: Tensor, cache: Tensor, queries: PagedQueries, blocks: Tensor, size: int, selected: Selected
) -> None:
    """`IndexerKernel.select` among the entries of blocks [T, B] of `best_blocks`."""
    width = selected.slots.shape[1]
    for part in _parts(len(q), q.shape[1] * blocks.shape[1] * size):
        lens = queries.context_lens_device[part].long().unsqueeze(1)
        order = blocks[part].sort(dim=1).values.unsqueeze(2) * size + torch.arange(size, device=q.device)
        places = order.flatten(1)  # [t, B S], ascending; negative without a block
        hidden = (places < 0) | (places >= lens)
        slots = queries.slot_table[queries.rows[part].long().unsqueeze(1), places.masked_fill(hidden, 0)]
        scores = _scores(q[part], weights[part], cache, slots).masked_fill(hidden, float("-inf"))
        counts = selected.counts_device[part]
        chosen = best(scores, counts, torch.arange(scores.shape[1], device=q.device), width)
        found = slots.gather(1, chosen.clamp(min=0).long()).int()
        selected.slots[part] = found.masked_fill(chosen < 0, -1)


def _scores(q: Tensor, weights: Tensor, cache: Tensor, slots: Tensor) -> Tensor:
    """Scores of entries slots [t, s] of each token's own: [t, s] float32."""
    keys = cache.squeeze(1)[slots.long()].float()
    products = torch.einsum("thi,tsi->ths", q.float(), keys).relu_()
    return torch.einsum("ths,th->ts", products, weights)


def _parts(num_tokens: int, each: int) -> list[slice]:
    """Tokens whose scores, `each` of a token, are in memory at once."""
    step = max(1, MAX_SCORES // max(each, 1))
    return [slice(start, min(start + step, num_tokens)) for start in range(0, num_tokens, step)]
