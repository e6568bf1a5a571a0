"""GQA by FlashInfer: one paged prefill wrapper for prompts, decode and verification.

Legend: T query tokens, H query heads, G KV heads, Dh head width.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from moe_engine.kernels.attention.protocol import AttentionCapabilities
from moe_engine.kernels.attention.vendors.flashinfer import Lists, Planned, WrapperInPlace, Wrappers, workspace
from moe_engine.kernels.attention.vendors.in_place import PageBuffer
from moe_engine.kernels.attention.vendors.paging import Paged, StepPlan, as_pages, host_ints, plan_of, prefix_sums
from moe_engine.kernels.attention.vendors.trees import Tree
from moe_engine.kernels.queries import AttentionBatch, PagedQueries
from moe_engine.kernels.vendors import limits
from moe_engine.kernels.vendors.probe import FLASHINFER
from moe_engine.kernels.workspaces import flashinfer_gqa_bytes


@dataclass(frozen=True)
class _Form:
    """Plan parameters besides the queries."""

    heads: int
    kv_heads: int
    width: int
    scale: float
    q_dtype: torch.dtype
    kv_dtype: torch.dtype


class FlashInferGQA:
    """`GQABackend` over `BatchPrefillWithPagedKVCacheWrapper`; its tensor-core kernels also serve single queries.

    Args:
        module: the library; default: the installed one.

    Raises:
        ImportError: the library is missing or lacks a required function.
    """

    name = "flashinfer"

    def __init__(self, module: Any | None = None) -> None:
        self._lib = FLASHINFER.load() if module is None else FLASHINFER.check(module)
        self._wrappers: Wrappers | None = None
        self._form: _Form | None = None
        self._buffer = PageBuffer()

    @property
    def capabilities(self) -> AttentionCapabilities:
        return AttentionCapabilities(self.plan_in_place, windows=True)

    def plan(self, batch: AttentionBatch) -> StepPlan:
        """The first step plans at its first layer; later steps plan here, with the parameters of the last layer run."""
        plan = StepPlan(batch)
        for queries in (batch.decode, batch.prefill):
            if self._form is not None and queries is not None and queries.num_tokens:
                self._planned(plan, queries, self._form)
        return plan

    def plan_in_place(self, batch: AttentionBatch) -> WrapperInPlace | None:
        """See `AttentionCapabilities`; for layers like the last one run."""
        queries, form = batch.decode, self._form
        if queries is None or form is None:
            return None
        lists = Lists.of(queries, self._buffer)
        rows = max(queries.query_lens) * form.heads // form.kv_heads
        size = flashinfer_gqa_bytes(queries.num_requests, rows, form.heads, form.kv_heads, form.width)
        wrapper = self._lib.BatchPrefillWithPagedKVCacheWrapper(
            workspace(queries.rows.device, size), "NHD", use_cuda_graph=True, qo_indptr_buf=lists.query_starts,
            paged_kv_indptr_buf=lists.page_starts, paged_kv_indices_buf=lists.pages,
            paged_kv_last_page_len_buf=lists.lens,
        )  # fmt: skip
        return WrapperInPlace(
            batch, queries, form, wrapper, lambda: _arguments(Paged.of(queries), form, window=queries.window)
        )

    def paged(
        self, q: Tensor, k_cache: Tensor, v_cache: Tensor, queries: PagedQueries, scale: float, plan: Any
    ) -> Tensor:
        tokens, heads, width = q.shape
        limits.refuse(limits.flashinfer_paged(width))
        if not tokens:
            return q.new_empty(q.shape)
        form = _Form(heads, k_cache.shape[1], width, scale, q.dtype, k_cache.dtype)
        self._form = form
        planned = self._planned(plan_of(plan), queries, form)
        pages = as_pages(k_cache, queries.page_size), as_pages(v_cache, queries.page_size)
        tree: Tree | None = planned.detail
        if tree is None:
            return planned.wrapper.run(q.contiguous(), pages)
        out, lse = planned.wrapper.run(q.contiguous(), pages, return_lse=True)  # lse [T, H] in base 2
        return tree.add(out, lse, q, k_cache, v_cache, scale, base_2=True)

    def _planned(self, plan: StepPlan, queries: PagedQueries, form: _Form) -> Planned:
        return plan.get(queries, form, lambda: self._new_plan(queries, form))

    def _new_plan(self, queries: PagedQueries, form: _Form) -> Planned:
        tree = Tree.of(queries)
        paged = Paged.of(queries, before=tree is not None)
        if self._wrappers is None:
            buffer = workspace(queries.rows.device)
            make = self._lib.BatchPrefillWithPagedKVCacheWrapper
            self._wrappers = Wrappers(lambda: make(buffer, "NHD"))
        return self._wrappers.plan(**_arguments(paged, form, tree is None, queries.window), detail=tree)


def _arguments(paged: Paged, form: _Form, causal: bool = True, window: int | None = None) -> dict[str, Any]:
    """Arguments of the wrapper's `plan`. FlashInfer counts a window without the query token's own position."""
    device = paged.rows.device
    last = [kv - (count - 1) * paged.page_size for kv, count in zip(paged.kv_lens, paged.num_pages)]
    return {
        "qo_indptr": prefix_sums(paged.query_lens, device),
        "paged_kv_indptr": prefix_sums(paged.num_pages, device),
        "paged_kv_indices": paged.flat,
        "paged_kv_last_page_len": host_ints(last, device),
        "num_qo_heads": form.heads,
        "num_kv_heads": form.kv_heads,
        "head_dim_qk": form.width,
        "page_size": paged.page_size,
        "causal": causal,
        "window_left": -1 if window is None else window - 1,
        "sm_scale": form.scale,
        "q_data_type": form.q_dtype,
        "kv_data_type": form.kv_dtype,
    }
