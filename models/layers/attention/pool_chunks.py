"""The chunks of a step whose query tokens attend to selected pools of adjacent tokens, and to the tokens after the
last whole pool (GLM-5.3-Flash).

Host work once per step, shared by all layers. `pools_in_place` has captured decodes.

Legend: T query tokens, R requests, K pools that a token selects at most, W slots.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from moe_engine.kernels.attention.selected import PlansSelected, Selected, num_visible
from moe_engine.kernels.indexer.pools import PooledTokens, PoolRule
from moe_engine.kernels.indexer.protocol import IndexerKernel
from moe_engine.kernels.queries import AttentionBatch, PagedQueries
from moe_engine.kernels.uploads import upload
from moe_engine.models.batch import ForwardBatch
from moe_engine.models.config import IndexerConfig
from moe_engine.models.layers.attention.compressed_rows import entry_slots, to_select_from
from moe_engine.models.layers.attention.mla_chunks import AttentionChunk
from moe_engine.models.layers.attention.pools_in_place import PoolChoice, PoolsInPlace
from moe_engine.models.layers.fixed_memory import FixedMemory
from moe_engine.models.step_memory import MAX_ABSORBED_TOKENS


@dataclass(frozen=True)
class _Part:
    """Tokens of a group, the context tokens that each sees, and the numbers of their requests."""

    tokens: slice
    seen: np.ndarray
    requests: np.ndarray


class PoolSteps:
    """Builds the chunks of steps.

    Args:
        sparse: attention over the selected slots.
        max_tokens: query tokens of a chunk at most.
    """

    def __init__(
        self, config: IndexerConfig, sparse: PlansSelected, kernel: IndexerKernel,
        max_tokens: int = MAX_ABSORBED_TOKENS,
    ) -> None:  # fmt: skip
        self.rule = PoolRule(config.pool, config.top_k // config.pool)
        self._sparse, self.kernel = sparse, kernel
        self._heads, self._max_tokens, self._memory = config.num_heads, max_tokens, FixedMemory()

    def plan_in_place(self, batch: AttentionBatch) -> PoolsInPlace | None:
        """The plan of captured decodes; None if one of the kernels cannot be captured."""
        assert batch.decode is not None
        return PoolsInPlace.of(self.rule, self._heads, batch.decode, self._sparse, self.kernel, self._memory)

    def of(self, batch: ForwardBatch) -> list[AttentionChunk]:
        """The chunks of a step, in token order, each of tokens of one group. `index_plan` is a `PoolChoice`; None where
        the tokens see no more pools than are selected."""
        if isinstance(batch.attention_plan, PoolsInPlace):
            return [batch.attention_plan.chunk(batch.places)]
        chunks: list[AttentionChunk] = []
        start = 0
        for group in (batch.attention.decode, batch.attention.prefill):
            if group is None or not group.num_tokens:
                continue
            group.refuse_tree("pooled")
            chunks += self._of_group(group, start, batch)
            start += group.num_tokens
        return chunks

    def _of_group(self, group: PagedQueries, start: int, batch: ForwardBatch) -> list[AttentionChunk]:
        """The chunks of a group whose first token is `start`."""
        chunks = []
        for part in self._parts(group):
            tokens = slice(start + part.tokens.start, start + part.tokens.stop)
            chunks.append(self._chunk(group, tokens, batch.places[tokens], part))
        return chunks

    def _parts(self, group: PagedQueries) -> Iterator[_Part]:
        seen = np.array(num_visible(group))
        requests = np.repeat(np.arange(group.num_requests), group.query_lens)
        for first in range(0, len(seen), self._max_tokens):
            part = slice(first, min(first + self._max_tokens, len(seen)))
            yield _Part(part, seen[part], requests[part])

    def _chunk(self, group: PagedQueries, tokens: slice, positions: Tensor, part: _Part) -> AttentionChunk:
        device, (size, most), pools = group.rows.device, self.rule, self.kernel.pools
        whole, requests = part.seen // size, upload(part.requests.astype(np.int32), device)
        own = np.minimum(part.seen, most * size + part.seen % size)
        lens, counts = (torch.empty(len(own), dtype=torch.int32, device=device) for _ in range(2))
        given = PooledTokens(positions, group.rows.index_select(0, requests), group.slot_table, self.rule)
        pools.count(given, lens, counts)
        slots = torch.empty((len(own), int(own.max())), dtype=torch.int32, device=device)
        selected = Selected(slots, own.tolist(), counts)
        choice = None
        if whole.max() > most:
            choice = self._choice(group, requests, given, whole, lens)
        else:
            pools.place(None, given, slots)
        plan = self._sparse.plan(selected)
        return AttentionChunk(tokens, group, plan, absorbed=True, selected=selected, index_plan=choice)

    def _choice(
        self, group: PagedQueries, requests: Tensor, tokens: PooledTokens, whole: np.ndarray, lens: Tensor
    ) -> PoolChoice:
        """`whole`: pools that each token sees."""
        (size, most), device, context = self.rule, lens.device, np.maximum(whole, 1)
        table = to_select_from(entry_slots(group.slot_table, group.rows, size, int(whole.max())))
        starts = torch.arange(len(whole) + 1, dtype=torch.int32, device=device)
        queries = PagedQueries([1] * len(whole), context.tolist(), requests, starts, lens, table, 1)
        slots = torch.empty((len(whole), most), dtype=torch.int32, device=device)
        chosen = Selected(slots, np.minimum(context, most).tolist(), lens.clamp(max=most))
        return PoolChoice(queries, chosen, self.kernel.plan(queries), tokens)
