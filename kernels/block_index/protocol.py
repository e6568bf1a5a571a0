"""The indexer of block-sparse attention (MiniMax-M3): for each query token and KV head, the blocks of the context with
the highest scores.

    score(t, g, b) = max over the visible tokens s of block b of q[t, g] . key[s]

Block b has the positions [b * size, (b + 1) * size) of a request. A token's own block and the `local` - 1 blocks before
it are always selected. Of equal scores the lower block is selected.

Legend: T query tokens, G KV heads, I channels of an index head, K selected blocks, B blocks of a context.
"""

from __future__ import annotations

from typing import Any, Protocol

from torch import Tensor

from moe_engine.kernels.attention.selected import Selected
from moe_engine.kernels.block_index.rule import BlockRule
from moe_engine.kernels.queries import PagedQueries


class BlockIndexKernel(Protocol):
    name: str

    def plan(self, queries: PagedQueries) -> Any:
        """Host work for some queries, once per step. Raises ValueError for a draft tree: its blocks are not known."""

    def plan_in_place(self, queries: PagedQueries, heads: int) -> Any | None:
        """`plan` for captured launches: the queries' tensors are overwritten at later steps, and contexts may be as
        long as a row of the slot table. All requests have the same number of query tokens. `heads`: G. None if the
        launches cannot be captured."""

    def select(
        self, q: Tensor, cache: Tensor, queries: PagedQueries, rule: BlockRule, selected: Selected, plan: Any
    ) -> None:
        """Sets `selected.slots` for query token t and KV head g in row t * G + g: the rows of a cache
        [num_slots * G, 1, ...] that belong to the head's selected tokens, by ascending position, then -1. The result
        does not depend on other requests.

        Args:
            q: [T, G, I], normed and rotated. cache: [num_slots, 1, I], index keys.
            selected: from `selection.empty` for this rule.
        """
