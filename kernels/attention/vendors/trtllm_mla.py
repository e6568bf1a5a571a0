"""TensorRT-LLM's MLA decode (trtllm-gen), through FlashInfer: the absorbed form on Blackwell.

The kernels read lengths and the page table on the device and partition work there, so captured steps renew both in
place and nothing is planned on the host. The expanded form and draft trees run on FlashInfer's wrappers.
A cache of unscaled e4m3 numbers is multiplied with e4m3 queries; its scales would be factors of bmm1_scale and
bmm2_scale and are 1 (`kv_format`).

Source: `trtllm_batch_decode_with_kv_cache_mla` of flashinfer/mla/_core.py, 0.7.2.
Legend: T query tokens, H query heads, C kv_lora_rank, P rotary width.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from moe_engine.kernels.attention.protocol import AttentionCapabilities
from moe_engine.kernels.attention.vendors.flashinfer_mla import FlashInferMLA
from moe_engine.kernels.attention.vendors.in_place import PageBuffer, TableInPlace
from moe_engine.kernels.attention.vendors.paging import TABLE, Paged, StepPlan, as_pages, plan_of
from moe_engine.kernels.kv_format.latent_records import as_queries
from moe_engine.kernels.queries import AttentionBatch, PagedQueries
from moe_engine.kernels.vendors import limits
from moe_engine.kernels.vendors.probe import TRTLLM_MLA
from moe_engine.kernels.workspaces import TRTLLM_BYTES

_QK_NOPE = 128
"""`qk_nope_head_dim`: a required argument that the decode kernels do not read."""


@dataclass(frozen=True)
class _Group:
    """Arguments that every layer passes for a group of queries."""

    paged: Paged
    table: Tensor  # [R, W] int32: page numbers

    @classmethod
    def of(cls, queries: PagedQueries, plan: StepPlan) -> _Group:
        paged = Paged.of(queries)
        return cls(paged, plan.get(queries, TABLE, lambda: paged.table))

    @property
    def arguments(self) -> dict[str, Any]:
        paged = self.paged
        ragged = {"cum_seq_lens_q": paged.query_starts, "max_q_len": max(paged.query_lens)}
        return {
            "block_tables": self.table,
            "seq_lens": paged.kv_lens_device,
            # in a captured step: the longest context that any replay may have
            "max_seq_len": self.table.shape[1] * paged.page_size,
            **({} if self.is_even else ragged),
        }

    @property
    def is_even(self) -> bool:
        """Whether all requests have the same number of query tokens."""
        return len(set(self.paged.query_lens)) == 1


class TrtllmMLA(FlashInferMLA):
    """`MLABackend`. Args and errors as `FlashInferMLA`; also ImportError if FlashInfer lacks the decode function."""

    name = "trtllm_mla"

    def __init__(self, module: Any | None = None, major: int | None = None) -> None:
        super().__init__(TRTLLM_MLA.load() if module is None else TRTLLM_MLA.check(module), major)
        self._tables = PageBuffer()
        self._scratch: Tensor | None = None

    @property
    def capabilities(self) -> AttentionCapabilities:
        return AttentionCapabilities(self._table_in_place, super().capabilities.chunks, fp8_queries=True)

    def plan(self, batch: AttentionBatch) -> StepPlan:
        tree = batch.decode if batch.decode is not None and batch.decode.visible is not None else None
        plan = super().plan(AttentionBatch(tree, batch.prefill))
        if tree is None and batch.decode is not None and batch.decode.num_tokens:
            self._group(plan, batch.decode)
        return plan

    def _table_in_place(self, batch: AttentionBatch) -> TableInPlace | None:
        queries = batch.decode  # trees run in FlashInfer's wrapper, which plans on the host
        return None if queries is None or queries.visible is not None else TableInPlace(batch, queries, self._tables)

    def absorbed(
        self, q: Tensor, cache: Tensor, queries: PagedQueries, scale: float, plan: Any, value_width: int | None = None
    ) -> Tensor:
        """See the protocol; C + P must be 512 + 64 or 256 + 64, pages 32 or 64 tokens."""
        if queries.visible is not None:
            return super().absorbed(q, cache, queries, scale, plan, value_width)
        tokens, heads, width = q.shape
        latent = width - 64 if value_width is None else value_width
        limits.refuse(limits.trtllm_absorbed(latent, width - latent, heads) or limits.trtllm_page(queries.page_size))
        fp8 = cache.dtype == torch.float8_e4m3fn
        if not tokens:
            return q.new_empty(0, heads, latent, dtype=torch.bfloat16)
        if fp8:
            q = as_queries(q).view(torch.uint8)  # padding of bytes works for every type
        padded = limits.trtllm_heads(heads)
        group = self._group(plan_of(plan), queries)
        query = q if heads == padded else F.pad(q, (0, 0, 0, padded - heads))  # F.pad copies even without padding
        query = query.contiguous().view(cache.dtype)
        if group.is_even:
            query = query.unflatten(0, (len(group.paged.query_lens), -1))
        out = self._lib.mla.trtllm_batch_decode_with_kv_cache_mla(
            query=query, kv_cache=as_pages(cache, queries.page_size), workspace_buffer=self._workspace(q.device),
            qk_nope_head_dim=_QK_NOPE, kv_lora_rank=latent, qk_rope_head_dim=width - latent, bmm1_scale=scale,
            bmm2_scale=1.0, backend="trtllm-gen", **group.arguments,
        )  # fmt: skip
        return out.reshape(tokens, padded, latent)[:, :heads]

    def _group(self, plan: StepPlan, queries: PagedQueries) -> _Group:
        return plan.get(queries, "trtllm", lambda: _Group.of(queries, plan))

    def _workspace(self, device: torch.device) -> Tensor:
        """Zeroed once and not shared with FlashInfer's wrappers: kernels keep counters in it between launches."""
        if self._scratch is None:
            self._scratch = torch.zeros(TRTLLM_BYTES, dtype=torch.uint8, device=device)
        return self._scratch
