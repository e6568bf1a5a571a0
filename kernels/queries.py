"""Queries of a step over a paged context: the input of every attention backend.

Legend: T query tokens, R requests.

A slot is one token's position in the KV pool. `slot_table[row, position]` names it; a page is `page_size` neighboring
slots. Query tokens of a request are its last `query_lens[i]` positions; attention is causal unless
`PagedQueries.visible` defines a draft tree, and limited to the last positions, or those of a
chunk, by `PagedQueries.window`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from moe_engine.kernels.attention_windows import first_seen

MAX_TREE_TOKENS = 64
"""Max query tokens of a request with `PagedQueries.visible`: one bit each."""


class SharedRun(NamedTuple):
    """Requests [first, last) of a group with a shared prefix: `length` context tokens in the same slots."""

    first: int
    last: int
    length: int


@dataclass(frozen=True)
class PagedQueries:
    """Query tokens of some requests in a step, and the paged context they attend to.

    Host lists and device tensors hold the same values. `context_lens` include this step's tokens, whose KV is written
    before attention runs. `query_starts` [R+1] are prefix sums of `query_lens`.
    """

    query_lens: list[int]
    context_lens: list[int]
    rows: Tensor  # [R] int32
    query_starts: Tensor  # [R+1] int32
    context_lens_device: Tensor  # [R] int32
    slot_table: Tensor  # [max_rows, max_context] int32, shared by all steps
    page_size: int
    visible: Tensor | None = None
    """[T] int64, of draft trees: bit b of visible[t] is set if query token t sees query token b of its own request. Its
    own bit is always set, all context before the query tokens is visible. None: causal."""
    shared: Sequence[SharedRun] = ()
    """Shared prefixes: requests whose contexts begin in the same slots. Requests not listed share no useful prefix."""

    window: int | None = None
    """Sliding window: a query token sees its last `window` positions, its own included; positions before them are
    never read. A `ChunkWindow`: it sees those of its chunk. None: all positions."""

    rate: int = 1
    """Tokens of an entry. Above 1 the positions of the context are entries (DeepSeek V4), whose slots are those of
    their first tokens in the slot table, divided by their number; for indexers with `plan_in_place`."""

    selected: bool = False
    """The slot table has a list of selected slots for each request."""

    def __post_init__(self) -> None:
        if self.visible is None:
            return
        if self.window is not None:
            raise ValueError("a sliding window needs causal queries: a draft tree (visible) has no window")
        if max(self.query_lens, default=0) > MAX_TREE_TOKENS:
            raise ValueError(f"visible has a bit for {MAX_TREE_TOKENS} query tokens, a request has {self.query_lens}")
        if self.visible.dtype != torch.int64 or self.visible.shape != (self.num_tokens,):
            raise ValueError(
                f"visible is {self.visible.dtype} {list(self.visible.shape)}, not int64 [{self.num_tokens}]"
            )

    def refuse_tree(self, form: str) -> None:
        """Raises ValueError if these queries are a draft tree, which this `form` of attention does not support."""
        if self.visible is not None:
            raise ValueError(f"{form} attention is causal: a draft tree (visible) needs absorbed or paged attention")

    @property
    def first_seen(self) -> list[int]:
        """The first position that each request's query tokens see."""
        return [first_seen(kv - count, self.window) for kv, count in zip(self.context_lens, self.query_lens)]

    @property
    def num_requests(self) -> int:
        return len(self.query_lens)

    @property
    def num_tokens(self) -> int:
        return sum(self.query_lens)

    @property
    def num_context_tokens(self) -> int:
        return sum(self.context_lens)


@dataclass(frozen=True)
class AttentionBatch:
    """The queries of a step in two groups, decode first in the token dimension.

    `decode` (tokens [0, decode.num_tokens)): few query tokens each; MLA runs them in the absorbed form. `prefill` (the
    following tokens): MLA runs them in the expanded form. Either may be None.
    """

    decode: PagedQueries | None
    prefill: PagedQueries | None

    @property
    def window(self) -> int | None:
        """Sliding window of the queries."""
        queries = self.decode if self.decode is not None else self.prefill
        return None if queries is None else queries.window

    def with_window(self, window: int | None, slot_table: Tensor | None) -> AttentionBatch:
        """These queries with another window, and another slot table unless it is None. A window is causal: with one,
        the query tokens of a block do not see each other both ways."""
        change: dict[str, Any] = {"window": window}
        change |= {} if slot_table is None else {"slot_table": slot_table}
        change |= {} if window is None else {"visible": None}
        decode, prefill = (None if q is None else replace(q, **change) for q in (self.decode, self.prefill))
        return AttentionBatch(decode, prefill)
