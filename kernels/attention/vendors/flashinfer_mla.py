"""MLA by FlashInfer: the absorbed form by its MLA wrapper, the expanded form by its ragged prefill wrapper.

Plans need parameters known only in the layers (heads, scale, dtypes). The first step plans at its first layer; later
steps plan ahead, in `plan` and `plan_chunk`, with the parameters of the last layer run.
Legend: T query tokens, H query heads, N qk_nope, P rotary width, C kv_lora_rank, V v_head, S context tokens.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any
from weakref import WeakValueDictionary

import torch
import torch.nn.functional as F
from torch import Tensor

from moe_engine.kernels.attention.protocol import AttentionCapabilities, ContextChunks
from moe_engine.kernels.attention.vendors.chunks import ChunkPlan, MergesChunks, compile_merge, keys_and_values
from moe_engine.kernels.attention.vendors.flashinfer import Lists, Planned, WrapperInPlace, Wrappers, workspace
from moe_engine.kernels.attention.vendors.in_place import PageBuffer
from moe_engine.kernels.attention.vendors.paging import Paged, StepPlan, as_pages, host_ints, plan_of, prefix_sums
from moe_engine.kernels.attention.vendors.trees import Tree
from moe_engine.kernels.device import probe
from moe_engine.kernels.kv_format.formats import E4M3_TENSOR
from moe_engine.kernels.queries import AttentionBatch, PagedQueries
from moe_engine.kernels.vendors import limits
from moe_engine.kernels.vendors.probe import FLASHINFER, accepts
from moe_engine.kernels.workspaces import FLASHINFER_SMALL_PLAN_BYTES, flashinfer_ragged_plan_bytes

HOPPER = 9


@dataclass(frozen=True)
class _Absorbed:
    """Plan parameters of the absorbed form, besides the queries."""

    heads: int
    latent: int
    rotary: int
    scale: float
    q_dtype: torch.dtype
    kv_dtype: torch.dtype


@dataclass(frozen=True)
class _Expanded:
    heads: int
    key_width: int
    value_width: int
    scale: float
    dtype: torch.dtype


class FlashInferMLA(MergesChunks):
    """`MLABackend` over `BatchMLAPagedAttentionWrapper` and `BatchPrefillWithRaggedKVCacheWrapper`.

    Args:
        module: the library; default: the installed one.
        major: compute capability of the GPU; default: of the current GPU.
        kv_dtype: of the cache. Unscaled e4m3 numbers are read on Hopper, with queries in bf16.

    Raises:
        ImportError: the library is missing or lacks a required function.
    """

    name = "flashinfer"

    def __init__(self, module: Any | None = None, major: int | None = None, kv_dtype: str = "auto") -> None:
        self._lib = FLASHINFER.load() if module is None else FLASHINFER.check(module)
        run = self._lib.mla.BatchMLAPagedAttentionWrapper.run
        if kv_dtype == E4M3_TENSOR and not accepts(run, "kpe_scale"):
            raise ImportError(f"this FlashInfer reads no FP8 latents ({FLASHINFER.install})")
        self._major = major
        self._buffer = PageBuffer()
        self._wrappers: dict[Any, Wrappers] = {}
        self._absorbed: _Absorbed | None = None
        self._fp8_scale: float | None = None
        """Scale of scores that the library plans with over e4m3; layers with another one (`k_scale`) multiply their
        queries, since one plan serves all layers."""
        self._expanded: _Expanded | None = None
        self._ragged: WeakValueDictionary[tuple[Any, ...], Planned] = WeakValueDictionary()

    @property
    def capabilities(self) -> AttentionCapabilities:
        chunks = ContextChunks(self.plan_chunk, self.expanded_chunk, self.merge_chunks)
        return AttentionCapabilities(self.plan_in_place, chunks)

    def plan(self, batch: AttentionBatch) -> StepPlan:
        plan = StepPlan(batch)
        if self._absorbed is not None and batch.decode is not None and batch.decode.num_tokens:
            self._plan_absorbed(plan, batch.decode, self._absorbed)
        if self._expanded is not None and batch.prefill is not None and batch.prefill.num_tokens:
            self._plan_expanded(plan, batch.prefill, self._expanded)
        return plan

    def plan_in_place(self, batch: AttentionBatch) -> WrapperInPlace | None:
        """See `AttentionCapabilities`; for layers like the last one run."""
        queries, form = batch.decode, self._absorbed
        if queries is None or form is None:
            return None
        lists = Lists.of(queries, self._buffer)
        major = self._major or (probe("cuda").capability or (0, 0))[0]
        wrapper = self._lib.mla.BatchMLAPagedAttentionWrapper(
            workspace(queries.rows.device), use_cuda_graph=True, qo_indptr=lists.query_starts,
            kv_indptr=lists.page_starts, kv_indices=lists.pages, kv_len_arr=lists.lens,
            # on other GPUs the library may select kernels whose plans cannot be renewed
            backend="auto" if major == HOPPER else "fa2",
        )  # fmt: skip
        return WrapperInPlace(batch, queries, form, wrapper, lambda: self._arguments(Paged.of(queries), form))

    def absorbed(
        self, q: Tensor, cache: Tensor, queries: PagedQueries, scale: float, plan: Any, value_width: int | None = None
    ) -> Tensor:
        """See the protocol; C must be a multiple of 128 and P one of 64."""
        tokens, heads, width = q.shape
        latent = width - 64 if value_width is None else value_width
        limits.refuse(limits.flashinfer_absorbed(latent, width - latent))
        if not tokens:
            return q.new_empty(0, heads, latent)
        # 64 or 128 query rows are a tile: other head counts are refused if a tile would end inside a token
        padded = 1 << (heads - 1).bit_length()
        fp8 = cache.dtype == torch.float8_e4m3fn
        planned_scale = scale
        if fp8:
            planned_scale = self._fp8_scale = self._fp8_scale or scale
        form = _Absorbed(padded, latent, width - latent, planned_scale, q.dtype, cache.dtype)
        self._absorbed = form
        planned = self._plan_absorbed(plan_of(plan), queries, form)
        query = q if heads == padded else F.pad(q, (0, 0, 0, padded - heads))  # F.pad copies even without padding
        query = query.contiguous()
        if scale != planned_scale:
            query = query * (scale / planned_scale)
        pages = as_pages(cache, queries.page_size)
        out = q.new_empty(tokens, padded, latent)
        scales = {"ckv_scale": 1.0, "kpe_scale": 1.0} if fp8 else {}
        tree: Tree | None = planned.detail
        if tree is None:
            planned.wrapper.run(query=query, kv_cache=pages, out=out, **scales)
            return out[:, :heads]
        _, lse = planned.wrapper.run(
            query=query, kv_cache=pages, out=out, return_lse=True, return_lse_base_on_e=True, **scales
        )  # [T, H]
        keys = cache.unsqueeze(1)
        return tree.add(out[:, :heads], lse[:, :heads], q, keys, keys[..., :latent], scale)

    def expanded(self, q: Tensor, kv: Tensor, k_rope: Tensor, queries: PagedQueries, scale: float, plan: Any) -> Tensor:
        queries.refuse_tree("expanded")
        form = self._form_of(q, kv, k_rope, scale)
        compile_merge(form.dtype, form.value_width, q.device)
        if not q.shape[0]:
            return q.new_empty(0, form.heads, form.value_width)
        return self._run_ragged(self._plan_expanded(plan_of(plan), queries, form), q, kv, k_rope)

    # -- context chunks

    def plan_chunk(self, queries: PagedQueries, first_keys: Sequence[int], key_lens: Sequence[int]) -> ChunkPlan:
        plan = super().plan_chunk(queries, first_keys, key_lens)
        if self._expanded is not None:
            self._plan_expanded_chunk(plan, self._expanded)
        return plan

    def expanded_chunk(
        self, q: Tensor, kv: Tensor, k_rope: Tensor, scale: float, plan: ChunkPlan
    ) -> tuple[Tensor, Tensor]:
        planned = self._plan_expanded_chunk(plan, self._form_of(q, kv, k_rope, scale))
        out, lse = self._run_ragged(planned, q, kv, k_rope, return_lse=True)
        return out, lse.mul_(math.log(2))  # all of the library's kernels return base 2

    def _form_of(self, q: Tensor, kv: Tensor, k_rope: Tensor, scale: float) -> _Expanded:
        form = _Expanded(q.shape[1], q.shape[2], kv.shape[2] - q.shape[2] + k_rope.shape[1], scale, q.dtype)
        limits.refuse(limits.flashinfer_expanded(form.key_width, form.value_width))
        self._expanded = form
        return form

    def _run_ragged(self, planned: Planned, q: Tensor, kv: Tensor, k_rope: Tensor, **options: Any) -> Any:
        keys, values = keys_and_values(kv, k_rope, q.shape[2] - k_rope.shape[1])
        # strides are not documented; the copy is cheap next to the product
        return planned.wrapper.run(q.contiguous(), keys, values.contiguous(), **options)

    def _plan_absorbed(self, plan: StepPlan, queries: PagedQueries, form: _Absorbed) -> Planned:
        return plan.get(queries, form, lambda: self._new_absorbed(queries, form))

    def _new_absorbed(self, queries: PagedQueries, form: _Absorbed) -> Planned:
        tree = Tree.of(queries)
        paged = Paged.of(queries, before=tree is not None)
        buffer = workspace(queries.rows.device)
        make = self._lib.mla.BatchMLAPagedAttentionWrapper
        wrappers = self._wrappers.setdefault("absorbed", Wrappers(lambda: make(buffer)))
        return wrappers.plan(**self._arguments(paged, form, tree), detail=tree)

    def _arguments(self, paged: Paged, form: _Absorbed, tree: Tree | None = None) -> dict[str, Any]:
        """Arguments of the wrapper's `plan`."""
        device = paged.rows.device
        metadata = self._lib.mla.MLAPlanMetadata.csr(
            prefix_sums(paged.query_lens, device),
            prefix_sums(paged.num_pages, device),
            paged.flat,
            host_ints(paged.kv_lens, device),
        )
        return {
            "metadata": metadata,
            "num_heads": form.heads,
            "head_dim_ckv": form.latent,
            "head_dim_kpe": form.rotary,
            "page_size": paged.page_size,
            "causal": tree is None,
            "sm_scale": form.scale,
            "q_data_type": form.q_dtype,
            "kv_data_type": form.kv_dtype,
            "lse_mode": "none" if tree is None else "basee",
        }

    def _plan_expanded(self, plan: StepPlan, queries: PagedQueries, form: _Expanded) -> Planned:
        return plan.get(queries, form, lambda: self._new_ragged(queries, queries.context_lens, True, form))

    def _plan_expanded_chunk(self, plan: ChunkPlan, form: _Expanded) -> Planned:
        part = plan.part
        return plan.get(part.queries, form, lambda: self._new_ragged(part.queries, part.key_lens, part.causal, form))

    def _new_ragged(self, queries: PagedQueries, key_lens: Sequence[int], causal: bool, form: _Expanded) -> Planned:
        """One plan for all chunks of the same lengths, while referenced."""
        key = (*queries.query_lens, None, *key_lens, causal, form)
        known = self._ragged.get(key)
        if known is not None:
            return known
        device = queries.rows.device
        starts, ends = (prefix_sums(lens, device) for lens in (queries.query_lens, list(key_lens)))
        needed = flashinfer_ragged_plan_bytes(queries.num_tokens, queries.num_requests, form.heads)
        small = needed <= FLASHINFER_SMALL_PLAN_BYTES  # a step of many long prompts needs many
        wrappers = self._wrappers.setdefault(
            ("expanded", small), Wrappers(lambda: self._new_ragged_wrapper(device, small))
        )
        planned = self._ragged[key] = wrappers.plan(
            starts, ends, form.heads, form.heads, form.key_width, head_dim_vo=form.value_width, causal=causal,
            sm_scale=form.scale, q_data_type=form.dtype, kv_data_type=form.dtype,
        )  # fmt: skip
        return planned

    def _new_ragged_wrapper(self, device: torch.device, small: bool) -> Any:
        buffer = workspace(device)
        wrapper = self._lib.BatchPrefillWithRaggedKVCacheWrapper(buffer, "NHD")
        if small:
            wrapper.reset_workspace_buffer(
                buffer, torch.empty(FLASHINFER_SMALL_PLAN_BYTES, dtype=torch.uint8, device=device)
            )
        return wrapper
