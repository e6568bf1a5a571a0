"""The indexer of block-sparse attention in plain torch, in float32: a loop over requests, in bounded blocks of scores.

Legend: t query tokens of a request, G KV heads, I channels of an index head, s context tokens of a request, B blocks.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from moe_engine.kernels.attention.reference import hidden_keys, requests_of
from moe_engine.kernels.attention.selected import Selected
from moe_engine.kernels.block_index.rule import BlockRule
from moe_engine.kernels.block_index.selection import TokenPlaces, choose
from moe_engine.kernels.queries import PagedQueries

MAX_SCORES = 1 << 22
"""Max scores of tokens in memory."""


class TorchBlockIndex:
    """`BlockIndexKernel` for any device."""

    name = "torch"

    def plan(self, queries: PagedQueries) -> TokenPlaces:
        return TokenPlaces.of(queries)

    def plan_in_place(self, queries: PagedQueries, heads: int) -> None:
        return None

    def select(
        self, q: Tensor, cache: Tensor, queries: PagedQueries, rule: BlockRule, selected: Selected, plan: Any
    ) -> None:
        for tokens, slots, _ in requests_of(queries):
            keys = cache.index_select(0, slots).squeeze(1).float()  # [s, I]
            num_queries, num_keys = tokens.stop - tokens.start, len(keys)
            most = max(1, MAX_SCORES // (q.shape[1] * max(num_keys, 1)))
            for start in range(0, num_queries, most):
                span = range(start, min(start + most, num_queries))
                place = slice(tokens.start + span.start, tokens.start + span.stop)
                scores = torch.einsum("tgi,si->gts", q[place].float(), keys)
                hidden = hidden_keys(span, num_keys - num_queries, num_keys, None, None, q.device)
                scores.masked_fill_(hidden, float("-inf"))
                scores = pad(scores, (0, -num_keys % rule.size), value=float("-inf"))
                of_blocks = scores.unflatten(-1, (-1, rule.size)).amax(-1)  # [G, t, B]
                choose(of_blocks.transpose(0, 1).contiguous(), place, rule, selected, plan)
