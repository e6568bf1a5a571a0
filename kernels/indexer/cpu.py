"""The indexer in C++. The selection is batch-invariant: a score depends on its token and key only."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from moe_engine.kernels.attention.selected import Selected
from moe_engine.kernels.cpu.library import Library, load
from moe_engine.kernels.cpu.tensors import Plan, find, head_form, kind_of, rows
from moe_engine.kernels.indexer import index_keys, pools
from moe_engine.kernels.indexer.protocol import LOGITS_BYTES, BlockChoice
from moe_engine.kernels.queries import AttentionBatch, PagedQueries


class CpuIndexer:
    """`IndexerKernel`.

    Args:
        logits_bytes: max bytes of scores at once.
    """

    name = "cpu"
    prepare = None
    gates = None
    select_into = None
    pools = pools.TORCH

    def __init__(self, library: Library | None = None, logits_bytes: int = LOGITS_BYTES) -> None:
        self._lib = library or load()
        self._budget = logits_bytes // 4

    def plan(self, queries: PagedQueries) -> Plan:
        return Plan.of(AttentionBatch(queries, None))

    def plan_in_place(self, queries: PagedQueries, heads: int) -> None:
        return None

    def write(self, keys: Tensor, slots: Tensor, cache: Tensor, page_size: int) -> None:
        index_keys.write(keys, slots, cache)

    def select(
        self, q: Tensor, weights: Tensor, cache: Tensor, queries: PagedQueries, top_k: int, selected: Selected,
        plan: Any, blocks: BlockChoice | None = None,
    ) -> None:  # fmt: skip
        dtype, width = q.dtype, q.shape[2]
        form = head_form(cache, dtype, width)
        if cache.dtype == torch.uint8:
            q, weights = index_keys.quantize_queries(q, weights)
            q = q.to(dtype)  # exact: bf16 has all e4m3 numbers
        q, weights, out = rows(q), weights.contiguous(), selected.slots
        struct = find(queries, plan)
        self._lib.moe_index_select(
            kind_of(dtype), form, q.data_ptr(), q.stride(0), q.stride(1), weights.data_ptr(), cache.data_ptr(),
            cache.stride(0), struct.address, q.shape[1], width, top_k, self._budget, out.data_ptr(), out.stride(0),
            *((None, 0, 0) if blocks is None else (blocks.found.data_ptr(), blocks.found.shape[1], blocks.size)),
        )  # fmt: skip
