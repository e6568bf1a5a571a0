"""Contexts whose keys and values are expanded a part at a time: which tokens a part has, and how results are merged.

Attention over the parts of a context, each with its log-sum-exp, is attention over the whole:
result = sum_i exp(lse_i - lse) result_i, lse = log sum_i exp(lse_i).
Legend: T query tokens, H heads, V value width, S tokens of a part (of all requests).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from moe_engine.kernels.attention.protocol import PagedQueries

MAX_MERGED = 1 << 22
"""Elements merged at once: what is held in float32 meanwhile."""


@dataclass(frozen=True)
class Part:
    """Tokens [first_keys[i], first_keys[i] + key_lens[i]) of request i's context, as `ExpandsParts.plan_part` takes it.

    Raises:
        ValueError: some query token would see none of them, or the requests need different masks.
    """

    queries: PagedQueries
    first_keys: Sequence[int]
    key_lens: Sequence[int]

    def __post_init__(self) -> None:
        self.queries.refuse_tree("expanded")
        counts, contexts = self.queries.query_lens, self.queries.context_lens
        spans = list(zip(self.first_keys, self.key_lens, counts, contexts, strict=True))
        own = [first + keys == context and count <= keys for first, keys, count, context in spans]
        before = [first + keys <= context - count for first, keys, count, context in spans]
        if min((*counts, *self.key_lens), default=1) < 1 or min(self.first_keys, default=0) < 0:
            raise ValueError(f"a part needs keys and query tokens of each request: {spans}")
        if not (all(own) or all(before)):
            raise ValueError(f"a part ends with the contexts and holds the query tokens, or lies before these: {spans}")

    @property
    def causal(self) -> bool:
        """The query tokens are the last keys of the part; otherwise they see all of it."""
        return self.first_keys[0] + self.key_lens[0] == self.queries.context_lens[0]

    def slots(self) -> Tensor:
        """Of the part's tokens, one request behind the other: [S] int64. Made without waiting for the device."""
        table, rows = self.queries.slot_table, self.queries.rows
        spans = enumerate(zip(self.first_keys, self.key_lens))
        found = [table[:, first : first + keys].index_select(0, rows[i : i + 1]) for i, (first, keys) in spans]
        return torch.cat(found, 1)[0].long()


def part_lens(context: int, count: int, size: int) -> list[int]:
    """Lengths of the parts, each at most `size`, of a longer context whose last `count` (at most `size`) tokens ask.

    The last part holds all query tokens. Those before it have the same length, but for the first where that cannot be:
    equal parts share one plan.
    """
    before = -(-(context - size) // size)
    each = -(-(context - size) // before)
    last = max(count, context - before * each)
    return [context - last - (before - 1) * each, *[each] * (before - 1), last]


def merge_parts(out: Tensor, lse: Tensor, other: Tensor, other_lse: Tensor) -> None:
    """Attention over one part of a context takes in that over another, in place; in torch, for any device.

    out and other [T, H, V], lse and other_lse [T, H] float32 (natural logarithm).
    """
    size = max(1, MAX_MERGED // max(1, out[:1].numel()))
    for mine, own, theirs, others in zip(*(x.split(size) for x in (out, lse, other, other_lse)), strict=True):
        share = torch.sigmoid(others - own)[..., None]
        mine.copy_(mine.float().lerp_(theirs.float(), share))
        torch.logaddexp(own, others, out=own)
