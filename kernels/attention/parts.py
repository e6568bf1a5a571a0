"""Chunks of a context in expanded MLA attention: the tokens of a chunk, and the merge of chunk results.

Attention over a whole context from the attention over its chunks, each with its log-sum-exp:
result = sum_i exp(lse_i - lse) result_i, lse = log sum_i exp(lse_i).

Legend: T query tokens, H heads, V value width, S tokens of a chunk (over all requests).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from moe_engine.kernels.queries import PagedQueries

MAX_MERGED = 1 << 22
"""Elements merged at once; bounds the float32 temporaries."""


@dataclass(frozen=True)
class Chunk:
    """Tokens [first_keys[i], first_keys[i] + key_lens[i]) of request i's context, see `ContextChunks.plan`.

    Raises:
        ValueError: a query token would see none of these tokens, or the requests need different masks.
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
            raise ValueError(f"each request needs keys and query tokens in a chunk: {spans}")
        if not (all(own) or all(before)):
            raise ValueError(f"a chunk must end with the contexts, query tokens included, or precede these: {spans}")

    @property
    def causal(self) -> bool:
        """True if the query tokens are the chunk's last keys; otherwise they see the whole chunk."""
        return self.first_keys[0] + self.key_lens[0] == self.queries.context_lens[0]

    def slots(self) -> Tensor:
        """Slots of the chunk's tokens, requests concatenated: [S] int64. No device synchronization."""
        table, rows = self.queries.slot_table, self.queries.rows
        spans = enumerate(zip(self.first_keys, self.key_lens))
        found = [table[:, first : first + keys].index_select(0, rows[i : i + 1]) for i, (first, keys) in spans]
        return torch.cat(found, 1)[0].long()


def chunk_lens(context: int, count: int, size: int) -> list[int]:
    """Chunk lengths, each at most `size`, of a longer context whose last `count` <= `size` tokens are queries.

    The last chunk holds all query tokens. The chunks before it have equal length, except possibly the first: chunks of
    equal length share one plan.
    """
    before = -(-(context - size) // size)
    each = -(-(context - size) // before)
    last = max(count, context - before * each)
    return [context - last - (before - 1) * each, *[each] * (before - 1), last]


def merge_chunks(out: Tensor, lse: Tensor, other: Tensor, other_lse: Tensor) -> None:
    """Merges the attention over another chunk into `out` and `lse`, in place; in torch, for any device."""
    size = max(1, MAX_MERGED // max(1, out[:1].numel()))
    for into, own, source, others in zip(*(x.split(size) for x in (out, lse, other, other_lse)), strict=True):
        share = torch.sigmoid(others - own)[..., None]
        into.copy_(into.float().lerp_(source.float(), share))
        torch.logaddexp(own, others, out=own)
