"""FlashAttention 3 (Hopper): MLA and GQA over pages of any size, and varlen attention over expanded keys.

MLA's absorbed form is its `qv` product: scores are q_rope . k_rope + q_latent . latent, values are the latent.
Legend: T query tokens, H query heads, G KV heads, N qk_nope, P rotary width, C kv_lora_rank, V v_head, R requests,
S context tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor

from moe_engine.kernels.attention.protocol import AttentionCapabilities, ContextChunks
from moe_engine.kernels.attention.selected import Selected, SparseAttention
from moe_engine.kernels.attention.vendors.chunks import ChunkPlan, MergesChunks, compile_merge, keys_and_values
from moe_engine.kernels.attention.vendors.flashmla_sparse import sparse_attention
from moe_engine.kernels.attention.vendors.in_place import PageBuffer, TableInPlace
from moe_engine.kernels.attention.vendors.paging import TABLE, Paged, StepPlan, as_pages, plan_of
from moe_engine.kernels.attention.vendors.trees import Tree
from moe_engine.kernels.device import IndexWidths
from moe_engine.kernels.queries import AttentionBatch, PagedQueries
from moe_engine.kernels.uploads import upload
from moe_engine.kernels.vendors import limits
from moe_engine.kernels.vendors.probe import FA3, FLASH_MLA, accepts
from moe_engine.kernels.workspaces import fa3_splits

PROMPT_TOKENS = 128
"""Query tokens over selected tokens from which FlashMLA's sparse kernel runs them, if it is installed: it has one
program for each token and 64 heads, so that fewer do not fill the device. SGLang's defaults are the same: FlashMLA for
prompts, this library for decodes."""

_LSE_KEYWORDS = ("return_softmax_lse", "return_attn_probs")
"""Keywords of `flash_attn_varlen_func` that request the log-sum-exp, in sgl_kernel and in
hopper/flash_attn_interface.py."""


@dataclass(frozen=True)
class _Group:
    """Arguments that every layer passes for a group of queries."""

    paged: Paged
    table: Tensor  # [R, W] int32: page numbers
    tree: Tree | None
    window: int | None
    metadata: dict[Any, Tensor] = field(default_factory=dict)
    """Schedules by numbers of heads and widths."""

    @classmethod
    def of(cls, queries: PagedQueries, plan: StepPlan) -> _Group:
        tree = Tree.of(queries)
        paged = Paged.of(queries, before=tree is not None)
        return cls(paged, plan.get(queries, TABLE, lambda: paged.table), tree, queries.window)

    def arguments(self, heads: int, value_width: int) -> dict[str, Any]:
        """Arguments for a layer with this number of query heads and this value width. The library sees them again in
        `_Backend._metadata`: the schedule is valid for equal arguments only."""
        paged = self.paged
        window = {} if self.window is None else {"window_size": (self.window - 1, 0)}  # without the own position
        return {
            **window,
            "cache_seqlens": paged.kv_lens_device,
            "page_table": self.table,
            "cu_seqlens_q": paged.query_starts,
            "max_seqlen_q": max(paged.query_lens),
            "causal": self.tree is None,
            "num_splits": fa3_splits(paged.num_tokens, heads, value_width),
        }


class _Backend:
    name = "fa3"

    def __init__(self, module: Any | None = None) -> None:
        self._lib = FA3.load() if module is None else FA3.check(module)
        self._schedule = getattr(self._lib, "get_scheduler_metadata", None)
        self._buffer = PageBuffer()

    def plan(self, batch: AttentionBatch) -> StepPlan:
        plan = StepPlan(batch)
        for queries in (batch.decode, batch.prefill):
            if queries is not None and queries.num_tokens:
                self._group(plan, queries)
        return plan

    def plan_in_place(self, batch: AttentionBatch) -> TableInPlace | None:
        """See `AttentionCapabilities`: the library partitions work on the device, inside the launch."""
        return None if batch.decode is None else TableInPlace(batch, batch.decode, self._buffer)

    def _group(self, plan: Any, queries: PagedQueries) -> _Group:
        known = plan_of(plan)
        return known.get(queries, "group", lambda: _Group.of(queries, known))

    def _run(self, group: _Group, q: Tensor, keys: Tensor, values: Tensor, **options: Any) -> Any:
        arguments = group.arguments(q.shape[1], values.shape[-1])
        if (metadata := self._metadata(group, q, keys, values)) is not None:
            arguments["scheduler_metadata"] = metadata
        return self._lib.flash_attn_with_kvcache(q, keys, values, **arguments, **options)

    def _metadata(self, group: _Group, q: Tensor, keys: Tensor, values: Tensor) -> Tensor | None:
        """The schedule of these lengths, computed by the first layer of a step (in a captured step: by each replay).
        None: the library computes the schedule in every layer (builds without the function, as older sgl_kernels)."""
        if self._schedule is None:
            return None
        heads, widths = (q.shape[1], keys.shape[2]), (q.shape[-1], values.shape[-1])
        key = (*heads, *widths)
        if key not in group.metadata:
            arguments = group.arguments(heads[0], widths[1])
            table = arguments.pop("page_table")
            group.metadata[key] = self._schedule(
                len(table), arguments.pop("max_seqlen_q"), table.shape[1] * keys.shape[1], *heads, widths[0],
                arguments.pop("cache_seqlens"), q.dtype, widths[1], page_size=keys.shape[1], **arguments,
            )  # fmt: skip
        return group.metadata[key]

    def _with_lse(self, group: _Group, *tensors: Tensor, **options: Any) -> tuple[Tensor, Tensor]:
        """out [T, H, *] and its log-sum-exp [T, H] (natural)."""
        out, lse, *_ = self._run(group, *tensors, return_softmax_lse=True, **options)
        return out, lse.transpose(0, 1)  # the library returns [H, T]


class _SelectedPages(StepPlan):
    """Plan of a selection, also a `RenewablePlan`: each query token is a request of its own, and its list of slots is
    its page table, of pages of one token. The library reads no entry beyond a request's length."""

    on_device = True
    common = True

    def __init__(self, selected: Selected) -> None:
        self.queries = selected.queries()
        super().__init__(AttentionBatch(self.queries, None))
        self.get(self.queries, TABLE, lambda: selected.slots)

    def renew(self) -> None:
        """No-op: the library reads the lists and their lengths at their fixed addresses."""


class FA3MLA(MergesChunks, _Backend):
    """`MLABackend`. Raises ImportError if the library is missing or lacks a required function.

    Args:
        module: the library; default: the installed one.
        index: the model's indexer: attention over selected tokens is needed.
        prompts: `flash_mla`, whose sparse kernel runs steps of many tokens; default: the installed one, if any.
    """

    def __init__(self, module: Any | None = None, index: IndexWidths | None = None, prompts: Any | None = None) -> None:
        super().__init__(module)
        if index is not None and prompts is None and FLASH_MLA.installed():
            prompts = FLASH_MLA.load()
        self._prompts = sparse_attention(prompts) if hasattr(prompts, "flash_mla_sparse_fwd") else None

    @property
    def capabilities(self) -> AttentionCapabilities:
        chunks = ContextChunks(self.plan_chunk, self.expanded_chunk, self.merge_chunks)
        sparse = SparseAttention(self._plan_selected, self._run_selected, _SelectedPages)
        return AttentionCapabilities(self.plan_in_place, chunks, sparse=sparse)

    def _plan_selected(self, selected: Selected) -> Any:
        if self._prompts is None or len(selected.counts) < PROMPT_TOKENS:
            return _SelectedPages(selected)
        return self._prompts.plan(selected)

    def _run_selected(
        self, q: Tensor, cache: Tensor, selected: Selected, scale: float, plan: Any, value_width: int,
        sinks: Tensor | None = None,
    ) -> Tensor:  # fmt: skip
        """`SparseRun`."""
        if sinks is not None:
            raise ValueError("FlashAttention 3's sparse attention is called without sinks")
        if isinstance(plan, _SelectedPages):
            return self.absorbed(q, cache, plan.queries, scale, plan, value_width)
        assert self._prompts is not None
        return self._prompts.run(q, cache, selected, scale, plan, value_width)

    def absorbed(
        self, q: Tensor, cache: Tensor, queries: PagedQueries, scale: float, plan: Any, value_width: int | None = None
    ) -> Tensor:
        """See the protocol; C at least 256 and P at most 64."""
        latent = q.shape[2] - 64 if value_width is None else value_width
        rotary = q.shape[2] - latent
        limits.refuse(limits.fa3_absorbed(latent, rotary))
        if not q.shape[0]:
            return q.new_empty(0, q.shape[1], latent)
        group = self._group(plan, queries)
        pages = as_pages(cache, queries.page_size).unsqueeze(2)  # [pages, page_size, 1, C+P]
        parts = q[..., latent:], pages[..., latent:], pages[..., :latent]
        options: dict[str, Any] = {"qv": q[..., :latent], "softmax_scale": scale}
        if group.tree is None:
            return self._run(group, *parts, **options)
        out, lse = self._with_lse(group, *parts, **options)
        keys = cache.unsqueeze(1)
        return group.tree.add(out, lse, q, keys, keys[..., :latent], scale)

    def expanded(self, q: Tensor, kv: Tensor, k_rope: Tensor, queries: PagedQueries, scale: float, plan: Any) -> Tensor:
        queries.refuse_tree("expanded")
        value = kv.shape[2] - q.shape[2] + k_rope.shape[1]
        limits.refuse(limits.fa3_expanded(q.shape[2], value))
        compile_merge(q.dtype, value, q.device)
        if not q.shape[0]:
            return q.new_empty(0, q.shape[1], value)
        starts = plan_of(plan).get(queries, "context_starts", lambda: _context_starts(queries))
        out = self._varlen(q, kv, k_rope, queries, starts, queries.context_lens, scale, causal=True)
        return out[0] if isinstance(out, tuple) else out  # some builds always return the log-sum-exp

    def expanded_chunk(
        self, q: Tensor, kv: Tensor, k_rope: Tensor, scale: float, plan: ChunkPlan
    ) -> tuple[Tensor, Tensor]:
        part, queries = plan.part, plan.part.queries
        starts = plan.get(queries, "key_starts", lambda: _uploaded_sums(part.key_lens, q.device))
        out, lse, *_ = self._varlen(
            q, kv, k_rope, queries, starts, part.key_lens, scale, causal=part.causal, **self._lse_asked
        )
        return out, lse.transpose(0, 1).contiguous()  # the library returns [H, T], natural

    @cached_property
    def _lse_asked(self) -> dict[str, bool]:
        """Keyword that makes the varlen function return the log-sum-exp; empty for builds that always return it."""
        return {name: True for name in _LSE_KEYWORDS if accepts(self._lib.flash_attn_varlen_func, name)}

    def _varlen(
        self, q: Tensor, kv: Tensor, k_rope: Tensor, queries: PagedQueries, starts: Tensor, key_lens: Sequence[int],
        scale: float, **options: Any,
    ) -> Any:  # fmt: skip
        keys, values = keys_and_values(kv, k_rope, q.shape[2] - k_rope.shape[1])
        return self._lib.flash_attn_varlen_func(
            q, keys, values, cu_seqlens_q=queries.query_starts, cu_seqlens_k=starts,
            max_seqlen_q=max(queries.query_lens), max_seqlen_k=max(key_lens), softmax_scale=scale, **options,
        )  # fmt: skip


class FA3GQA(_Backend):
    """`GQABackend`. Raises ImportError if the library is missing or lacks a required function."""

    @property
    def capabilities(self) -> AttentionCapabilities:
        return AttentionCapabilities(self.plan_in_place, windows=True)

    def paged(
        self, q: Tensor, k_cache: Tensor, v_cache: Tensor, queries: PagedQueries, scale: float, plan: Any
    ) -> Tensor:
        limits.refuse(limits.fa3_paged(q.shape[2]))
        if not q.shape[0]:
            return q.new_empty(q.shape)
        group = self._group(plan, queries)
        pages = as_pages(k_cache, queries.page_size), as_pages(v_cache, queries.page_size)
        if group.tree is None:
            return self._run(group, q, *pages, softmax_scale=scale)
        out, lse = self._with_lse(group, q, *pages, softmax_scale=scale)
        return group.tree.add(out, lse, q, k_cache, v_cache, scale)


def _uploaded_sums(lens: Sequence[int], device: torch.device) -> Tensor:
    """[R+1] int32 on the device: the library refuses sums in host memory."""
    return upload(np.cumsum([0, *lens]).astype(np.int32), device)


def _context_starts(queries: PagedQueries) -> Tensor:
    """[R+1] int32 on the device."""
    lens = queries.context_lens_device
    return torch.cat((lens.new_zeros(1), lens.cumsum(0))).to(torch.int32)
