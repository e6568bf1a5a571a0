"""The chunks of a step with block-sparse attention: requests beyond the selected blocks attend to their selection,
others to their whole context, with the same result.

Host work once per step, shared by all layers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from moe_engine.kernels.attention.protocol import GQABackend
from moe_engine.kernels.attention.selected import Selected
from moe_engine.kernels.block_index import selection
from moe_engine.kernels.block_index.in_place import BlocksInPlace
from moe_engine.kernels.block_index.protocol import BlockIndexKernel
from moe_engine.kernels.block_index.rule import BlockRule
from moe_engine.kernels.queries import AttentionBatch, PagedQueries
from moe_engine.models.layers.attention.sparse_chunks import by_form, exceeds

MAX_TOKENS = 512
"""Query tokens of a prompt that select blocks at once."""


@dataclass(frozen=True)
class BlockChunk:
    """Some queries of a step, and their tokens. With a selection, `rows` are its queries and `plan` is the plan of
    these; `index_plan` is the indexer's plan of `queries`."""

    tokens: slice
    queries: PagedQueries
    plan: Any
    selected: Selected | None = None
    rows: PagedQueries | None = None
    index_plan: Any = None


@dataclass(frozen=True)
class BlockAttention:
    """The kernels of block-sparse attention on this rank, and its KV heads."""

    rule: BlockRule
    heads: int
    backend: GQABackend
    index: BlockIndexKernel

    def cut(self, groups: Sequence[tuple[slice, PagedQueries]], plan: Any, is_decode: bool) -> list[BlockChunk]:
        """The chunks of a step, in token order.

        Args:
            groups: its non-empty groups of queries, with their tokens. plan: their plan.
            is_decode: the first group is the decode group: one request beyond the selection makes it sparse.
        """
        chunks: list[BlockChunk] = []
        for number, (tokens, queries) in enumerate(groups):
            if not exceeds(queries, self.rule.max_tokens):
                chunks.append(BlockChunk(tokens, queries, plan))
            elif is_decode and not number:
                chunks.append(self._sparse(queries, tokens))
            else:
                chunks += self._cut_prompts(queries, tokens.start)
        return chunks

    def in_place(self, plan: BlocksInPlace) -> list[BlockChunk]:
        """The chunk of a captured decode."""
        tokens = slice(0, plan.queries.num_tokens)
        return [BlockChunk(tokens, plan.queries, plan.attention, plan.selected, plan.rows, plan.index)]

    def _cut_prompts(self, prefill: PagedQueries, start: int) -> list[BlockChunk]:
        chunks = []
        for queries, is_sparse in by_form(prefill, self.rule.max_tokens, MAX_TOKENS):
            tokens = slice(start, start + queries.num_tokens)
            own = None if is_sparse else self.backend.plan(AttentionBatch(None, queries))
            chunks.append(self._sparse(queries, tokens) if is_sparse else BlockChunk(tokens, queries, own))
            start = tokens.stop
        return chunks

    def _sparse(self, queries: PagedQueries, tokens: slice) -> BlockChunk:
        selected = selection.empty(queries, self.rule, self.heads)
        rows = selected.queries()
        plan = self.backend.plan(AttentionBatch(rows, None))
        return BlockChunk(tokens, queries, plan, selected, rows, self.index.plan(queries))
