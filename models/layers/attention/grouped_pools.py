"""The chunks of a step whose query tokens attend to selected pools by grouped-query attention (Qwen3.8-Flash-Next):
requests that exceed no selection attend to their whole context, with the same result.

Host work once per step, shared by all layers.
"""

from __future__ import annotations

from collections.abc import Iterator

from moe_engine.kernels.attention.protocol import GQABackend
from moe_engine.kernels.attention.sparse import PlansOwnRequests
from moe_engine.kernels.indexer.protocol import IndexerKernel
from moe_engine.kernels.queries import AttentionBatch, PagedQueries
from moe_engine.models.batch import ForwardBatch
from moe_engine.models.config import IndexerConfig
from moe_engine.models.layers.attention.mla_chunks import AttentionChunk
from moe_engine.models.layers.attention.pool_chunks import PoolSteps
from moe_engine.models.layers.attention.sparse_chunks import by_form, exceeds


class GroupedPoolSteps(PoolSteps):
    """`PoolSteps` for grouped-query attention. Chunks without `selected` attend to their whole context."""

    def __init__(self, config: IndexerConfig, backend: GQABackend, kernel: IndexerKernel) -> None:
        super().__init__(config, PlansOwnRequests(backend), kernel)
        self._backend, (size, most) = backend, self.rule
        self._seen = (most + 1) * size - 1
        """Context tokens of which a query token sees all: the pools that it selects, and those after the last."""

    def _of_group(self, group: PagedQueries, start: int, batch: ForwardBatch) -> list[AttentionChunk]:
        if not exceeds(group, self._seen):
            tokens = slice(start, start + group.num_tokens)
            return [AttentionChunk(tokens, group, batch.attention_plan, absorbed=False)]
        if group is batch.attention.decode:
            return super()._of_group(group, start, batch)
        return list(self._by_form(group, start, batch))

    def _by_form(self, group: PagedQueries, start: int, batch: ForwardBatch) -> Iterator[AttentionChunk]:
        for queries, is_sparse in by_form(group, self._seen, self._max_tokens):
            if is_sparse:
                yield from super()._of_group(queries, start, batch)
            else:
                plan = self._backend.plan(AttentionBatch(None, queries))
                yield AttentionChunk(slice(start, start + queries.num_tokens), queries, plan, absorbed=False)
            start += queries.num_tokens
