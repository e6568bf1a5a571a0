"""The indexer in Triton. The selection is batch-invariant: a score depends on its token and key only.

Legend: T query tokens, Hi index heads, I channels of an index head, S context tokens.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor

from moe_engine.kernels.attention.selected import Selected
from moe_engine.kernels.indexer import index_keys, triton_keys, triton_select
from moe_engine.kernels.indexer.pools import PoolKernels
from moe_engine.kernels.indexer.protocol import LOGITS_BYTES, BlockChoice, GateProduct, PrepareIndex
from moe_engine.kernels.indexer.triton_pools import TRITON
from moe_engine.kernels.indexer.triton_scores import KEYS, scores, tokens_of_a_record
from moe_engine.kernels.indexer.triton_select import Selection
from moe_engine.kernels.ops.triton_router import gate_parts
from moe_engine.kernels.queries import PagedQueries
from moe_engine.kernels.query_records import upload_records
from moe_engine.kernels.triton.launch import with_contiguous_rows
from moe_engine.kernels.uploads import upload

PROGRAMS = 512
"""Programs of a launch of scores, about four for each SM of an H200: fewer records have more programs each."""


@dataclass
class IndexPlan:
    """Host work of a group, once per step.

    Attributes:
        request_of: [T] int32, request of each token.
        longest: bound of the context lengths.
        records: by heads of the index queries, the records of `triton_scores` and the first token of each of them.
    """

    queries: PagedQueries
    request_of: Tensor
    longest: int
    records: dict[int, tuple[Tensor, np.ndarray]]

    @classmethod
    def of(cls, queries: PagedQueries, longest: int | None = None) -> IndexPlan:
        if queries.visible is not None:
            raise ValueError("the triton indexer is causal: a draft tree (visible) needs the torch row")
        numbers = np.repeat(np.arange(queries.num_requests), queries.query_lens).astype(np.int32)
        longest = max(queries.context_lens, default=0) if longest is None else longest
        return cls(queries, upload(numbers, queries.rows.device), longest, {})

    @classmethod
    def find(cls, plan: Any, queries: PagedQueries) -> IndexPlan:
        """`plan` if it belongs to these queries, else a new plan."""
        return plan if isinstance(plan, IndexPlan) and plan.queries is queries else cls.of(queries)

    def records_for(self, heads: int) -> tuple[Tensor, np.ndarray]:
        """Device records [N, 3], and the tokens before each of them [N + 1]."""
        if heads not in self.records:
            self.records[heads] = upload_records(self.queries, tokens_of_a_record(heads), self.request_of.device)
        return self.records[heads]

    @cached_property
    def prompt(self) -> tuple[Tensor, Tensor]:
        """For queries of one request: slots of its context [S], and visible tokens of each query token [T], int32."""
        context, tokens = self.queries.context_lens[0], self.queries.num_tokens
        slots = self.queries.slot_table.index_select(0, self.queries.rows)[0, :context]
        return slots, torch.arange(context - tokens + 1, context + 1, dtype=torch.int32, device=slots.device)


class TritonIndexer:
    """`IndexerKernel` for causal queries.

    Args:
        logits_bytes: max bytes of scores at once.
    """

    name = "triton"

    def __init__(self, logits_bytes: int = LOGITS_BYTES) -> None:
        self._budget = logits_bytes // 4

    @property
    def prepare(self) -> PrepareIndex:
        return triton_keys.prepare

    @property
    def gates(self) -> GateProduct:
        return gate_parts

    @property
    def pools(self) -> PoolKernels:
        return TRITON

    def plan(self, queries: PagedQueries) -> IndexPlan:
        return IndexPlan.of(queries)

    def plan_in_place(self, queries: PagedQueries, heads: int) -> IndexPlan:
        plan = IndexPlan.of(queries, queries.slot_table.shape[1] // queries.rate)
        plan.records_for(heads)  # uploaded before the capture
        return plan

    def write(self, keys: Tensor, slots: Tensor, cache: Tensor, page_size: int) -> None:
        if cache.dtype == torch.uint8:
            triton_keys.write(keys, slots, cache)
        else:
            index_keys.write(keys, slots, cache)

    def select(
        self, q: Tensor, weights: Tensor, cache: Tensor, queries: PagedQueries, top_k: int, selected: Selected,
        plan: Any, blocks: BlockChoice | None = None,
    ) -> None:  # fmt: skip
        self._select(q, weights, cache, queries, Selection(selected.slots, top_k), plan, blocks)

    def select_into(
        self, q: Tensor, weights: Tensor, cache: Tensor, queries: PagedQueries, top_k: int, rows: Tensor,
        columns: Tensor, counts: Tensor, added: int, plan: Any, blocks: BlockChoice | None = None,
    ) -> None:  # fmt: skip
        """See `SelectInto`."""
        self._select(q, weights, cache, queries, Selection(rows, top_k, columns, counts, added), plan, blocks)

    def _select(
        self, q: Tensor, weights: Tensor, cache: Tensor, queries: PagedQueries, selection: Selection, plan: Any,
        blocks: BlockChoice | None = None,
    ) -> None:  # fmt: skip
        if not len(q):
            return
        own = IndexPlan.find(plan, queries)
        q, weights = with_contiguous_rows(q), with_contiguous_rows(weights)
        if cache.dtype == torch.uint8 and q.dtype != torch.float8_e4m3fn:
            q, weights = triton_keys.quantize_queries(q, weights)
        weights = triton_keys.in_parts(weights)
        records, starts = own.records_for(q.shape[1])
        longest = own.longest
        most = max(self._budget // longest, tokens_of_a_record(q.shape[1]))  # query tokens scored at once
        begin = 0
        while begin < len(records):
            end = max(begin + 1, int(np.searchsorted(starts, starts[begin] + most, side="right")) - 1)
            first, num_tokens = int(starts[begin]), int(starts[end] - starts[begin])
            out = torch.empty((num_tokens, longest), dtype=torch.float32, device=q.device)
            programs = max(1, min(-(-longest // KEYS), PROGRAMS // (end - begin)))
            scores(q, weights, cache, queries, records[begin:end], out, first, programs)
            triton_select.select(out, queries, own.request_of, first, selection)
            if blocks is not None:
                triton_select.select_blocks(out, queries, own.request_of, first, blocks)
            begin = end
