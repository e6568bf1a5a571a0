"""The indexer in plain torch, in float32: a loop over requests, in bounded blocks of scores.

Legend: T query tokens (t of one request), Hi index heads, I channels of an index head, S context tokens (s of one
request), K selected tokens.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad
from torch.nn.utils.rnn import pad_sequence

from moe_engine.kernels.attention.reference import hidden_keys, requests_of
from moe_engine.kernels.attention.selected import Selected
from moe_engine.kernels.indexer import index_keys, pools
from moe_engine.kernels.indexer.protocol import BlockChoice
from moe_engine.kernels.queries import PagedQueries

MAX_SCORES = 1 << 22
"""Max scores of heads in memory."""


class TorchIndexer:
    """`IndexerKernel` for any device."""

    name = "torch"
    prepare = None
    gates = None
    select_into = None
    pools = pools.TORCH

    def plan(self, queries: PagedQueries) -> Any:
        return None

    def plan_in_place(self, queries: PagedQueries, heads: int) -> None:
        return None

    def write(self, keys: Tensor, slots: Tensor, cache: Tensor, page_size: int) -> None:
        index_keys.write(keys, slots, cache)

    def select(
        self, q: Tensor, weights: Tensor, cache: Tensor, queries: PagedQueries, top_k: int, selected: Selected,
        plan: Any, blocks: BlockChoice | None = None,
    ) -> None:  # fmt: skip
        width, maxima = q.shape[-1], list[Tensor]()
        if cache.dtype == torch.uint8:
            q, weights = index_keys.quantize_queries(q, weights)
        for tokens, slots, visible in requests_of(queries):
            rows = cache.index_select(0, slots).squeeze(1)
            keys, scales = index_keys.unpack(rows, width) if rows.dtype == torch.uint8 else (rows.float(), None)
            counts, out = selected.counts_device[tokens], selected.slots[tokens]
            num_queries, num_keys = tokens.stop - tokens.start, len(keys)
            block = max(1, MAX_SCORES // (q.shape[1] * max(num_keys, 1)))
            for start in range(0, num_queries, block):
                part = slice(start, min(start + block, num_queries))
                place = slice(tokens.start + part.start, tokens.start + part.stop)
                scores = scores_of(q[place].float(), weights[place], keys, scales)  # [t, s]
                span = range(part.start, part.stop)
                hidden = hidden_keys(span, num_keys - num_queries, num_keys, visible, None, q.device)
                out[part] = best(scores.masked_fill_(hidden, float("-inf")), counts[part], slots, out.shape[1])
                if blocks is not None:
                    maxima += [block_maxima(row, blocks.size) for row in scores]
        if blocks is not None and maxima:
            best_blocks(maxima, blocks)


def scores_of(q: Tensor, weights: Tensor, keys: Tensor, scales: Tensor | None) -> Tensor:
    """q [t, Hi, I], weights [t, Hi], keys [s, I] (with scales [s]), all float32 -> scores [t, s]."""
    products = torch.einsum("thi,si->ths", q, keys).relu_()
    scores = torch.einsum("ths,th->ts", products, weights)
    return scores if scales is None else scores.mul_(scales)


def best(scores: Tensor, counts: Tensor, slots: Tensor, width: int) -> Tensor:
    """scores [t, s], -inf where hidden -> the slots [t, width] int32 of the counts[t] best positions, ascending, then
    -1. Of equal scores the lower position comes first."""
    order = scores.sort(dim=-1, descending=True, stable=True).indices[:, :width]  # [t, width]
    chosen = torch.arange(order.shape[1], device=order.device) < counts.unsqueeze(1)
    positions = order.masked_fill(~chosen, scores.shape[1]).sort(-1).values
    found = slots[positions.clamp(max=len(slots) - 1)].int().masked_fill(positions == scores.shape[1], -1)
    missing = width - found.shape[1]
    return found if not missing else pad(found, (0, missing), value=-1)


def block_maxima(scores: Tensor, size: int) -> Tensor:
    """scores [s] of a token, the last of which is that of its last position -> the highest of each block of `size`
    positions, infinity for the last block."""
    most = pad(scores, (0, -len(scores) % size), value=float("-inf")).unflatten(0, (-1, size)).amax(1)
    most[-1] = float("inf")
    return most


def best_blocks(maxima: list[Tensor], blocks: BlockChoice) -> None:
    """Sets the blocks of tokens by the `block_maxima` of each."""
    width, counts = blocks.found.shape[1], torch.tensor([len(most) for most in maxima], device=blocks.found.device)
    padded = pad_sequence(maxima, batch_first=True, padding_value=float("-inf"))
    numbers = torch.arange(padded.shape[1], device=padded.device)
    blocks.found.copy_(best(padded, counts.clamp(max=width), numbers, width))
