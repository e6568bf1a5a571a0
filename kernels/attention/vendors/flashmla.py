"""FlashMLA: the absorbed form over pages of 64 tokens (Hopper) of bf16 numbers, or in sgl_kernel's build of unscaled
e4m3 numbers, which are multiplied with e4m3 queries; or over FP8 records of 656 bytes.

The library has no dense prefill for Hopper: the expanded form runs on the most preferred other row.
Legend: T query tokens, H query heads, C latent (512), P rotary width (64), B requests, t most query tokens of one.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from moe_engine.kernels.attention.protocol import AttentionCapabilities, ContextChunks, MLABackend
from moe_engine.kernels.attention.vendors.chunks import ChunkPlan, MergesChunks
from moe_engine.kernels.attention.vendors.flashmla_records import Chosen, ChosenInPlace
from moe_engine.kernels.attention.vendors.flashmla_sparse import sparse_attention
from moe_engine.kernels.attention.vendors.in_place import PageBuffer, TableInPlace
from moe_engine.kernels.attention.vendors.paging import TABLE, Paged, StepPlan, as_pages, gathered_slots, plan_of
from moe_engine.kernels.attention.vendors.trees import Tree
from moe_engine.kernels.device import IndexWidths, probe
from moe_engine.kernels.kv_format.formats import E4M3_TENSOR
from moe_engine.kernels.kv_format.latent_records import FP8_GROUPS, FP8_TENSOR, PLAIN, as_queries, form_of, unpack
from moe_engine.kernels.queries import AttentionBatch, PagedQueries
from moe_engine.kernels.vendors import limits
from moe_engine.kernels.vendors.probe import FLASH_MLA, FLASH_MLA_FP8, accepts, needs_no_arguments

PAGE = 64
LATENT, ROTARY = limits.FLASHMLA_LATENT, limits.FLASHMLA_ROTARY


@dataclass(frozen=True)
class _Dense:
    """A group as a rectangle [B, t] of queries: shorter requests are padded at the front with dummy queries, which a
    causal mask aligned to the context's end leaves correct."""

    paged: Paged
    table: Tensor  # [B, W] int32: page numbers
    tree: Tree | None
    schedule: tuple[Any, Any]
    most: int
    token: Tensor | None  # [B, t] int64: index of a query in the group; None if already contiguous
    request: Tensor | None  # [T] int64
    place: Tensor | None  # [T] int64: index within the rectangle

    @classmethod
    def of(
        cls, queries: PagedQueries, plan: StepPlan, new_schedule: Callable[[Tensor, int], tuple[Any, Any]]
    ) -> _Dense:
        tree = Tree.of(queries)
        paged = Paged.of(queries, PAGE, before=tree is not None)
        table, most = plan.get(queries, TABLE, lambda: paged.table), max(paged.query_lens)
        schedule = new_schedule(paged.kv_lens_device, most)
        if min(paged.query_lens) == most:
            return cls(paged, table, tree, schedule, most, None, None, None)
        starts, device = paged.query_starts.long(), paged.rows.device
        counts = starts.diff()
        token = (starts[1:, None] - most + torch.arange(most, device=device)).clamp_min(0)
        request = torch.repeat_interleave(
            torch.arange(len(counts), device=device), counts, output_size=paged.num_tokens
        )
        place = torch.arange(paged.num_tokens, device=device) - starts[1:][request] + most
        return cls(paged, table, tree, schedule, most, token, request, place)

    def rectangle(self, q: Tensor) -> Tensor:
        """q [T, H, W] -> [B, t, H, W]."""
        if self.token is None:
            return q.contiguous().unflatten(0, (-1, self.most))
        rows = q.view(torch.uint8) if q.element_size() == 1 else q  # torch cannot index float8 on a GPU
        return rows[self.token].view(q.dtype)

    def tokens(self, x: Tensor) -> Tensor:
        """x [B, t, *] -> [T, *]."""
        return x.flatten(0, 1) if self.request is None else x[self.request, self.place]


class FlashMLA(MergesChunks):
    """`MLABackend` over `flash_mla_with_kvcache`, in either generation of its interface: the older (2025) needs a
    schedule made by the caller from the step's lengths, and reads no records.

    Args:
        module: the library; default: the installed one.
        expanded: backend of the expanded form (`Row.lacks_expanded`).
        major: compute capability of the GPU; default: of the current GPU.
        index: the model's indexer: attention over selected tokens is needed.
        sinks: of attention over selected tokens.
        kv_dtype: of the cache; unscaled e4m3 numbers need sgl_kernel's build.

    Raises:
        ImportError: the library is missing or lacks a required function.
    """

    name = "flashmla"

    def __init__(
        self, module: Any | None = None, expanded: MLABackend | None = None, major: int | None = None,
        index: IndexWidths | None = None, kv_dtype: str = "auto", sinks: bool = False,
    ) -> None:  # fmt: skip
        library = FLASH_MLA_FP8 if kv_dtype == E4M3_TENSOR else FLASH_MLA
        self._lib = library.load() if module is None else library.check(module)
        selects = index is not None or sinks
        if selects and not hasattr(self._lib, "flash_mla_sparse_fwd"):
            raise ImportError(f"{self._lib.__name__} lacks flash_mla_sparse_fwd: too old ({FLASH_MLA.install})")
        if kv_dtype == E4M3_TENSOR and not accepts(self._lib.flash_mla_with_kvcache, "descale_q"):
            raise ImportError(f"{self._lib.__name__} has no dense kernel for FP8 ({FLASH_MLA.install})")
        self._ones: Tensor | None = None  # scales of e4m3 queries and cache
        self._sparse = sparse_attention(self._lib) if selects else None
        if sinks and self._sparse is not None and not self._sparse.sinks:
            raise ImportError(f"{self._lib.__name__} has no attention sinks: too old ({FLASH_MLA.install})")
        self._plans_itself = needs_no_arguments(self._lib.get_mla_metadata)
        self._prefill = expanded
        self._buffer = PageBuffer()
        self._major = major
        self._heads: int | None = None  # of the last layer over records, padded for the kernel
        self._reads_records: bool | None = None  # None: no layer has run

    @property
    def capabilities(self) -> AttentionCapabilities:
        chunks = ContextChunks(self.plan_chunk, self.expanded_chunk, self.merge_chunks)
        return AttentionCapabilities(self.plan_in_place, chunks, sparse=self._sparse, fp8_queries=True)

    def plan(self, batch: AttentionBatch) -> StepPlan:
        return StepPlan(batch)  # the library builds schedules on the device, at a step's first layer

    def plan_in_place(self, batch: AttentionBatch) -> TableInPlace | ChosenInPlace | None:
        """See `AttentionCapabilities`; schedules are built during capture. FP8 records: on Blackwell only, see
        `flashmla_records`."""
        if batch.decode is None or self._reads_records is None:
            return None
        if not self._reads_records:
            return TableInPlace(batch, batch.decode, self._buffer, PAGE)
        if not self._takes_lengths():
            return None
        schedule, _ = self._lib.get_mla_metadata()
        return ChosenInPlace(batch, batch.decode, self._buffer, schedule, ("chosen", self._heads))

    def _takes_lengths(self) -> bool:
        """True if the records kernel takes a per-list length on the device."""
        if self._major is None:
            self._major = (probe("cuda").capability or (0, 0))[0]
        return self._major >= 10 and accepts(self._lib.flash_mla_with_kvcache, "topk_length")

    def absorbed(
        self, q: Tensor, cache: Tensor, queries: PagedQueries, scale: float, plan: Any, value_width: int | None = None
    ) -> Tensor:
        """See the protocol; C = 512, P = 64; `cache` holds bf16 or unscaled e4m3 values, or `FP8_GROUPS` records."""
        latent = q.shape[2] - ROTARY if value_width is None else value_width
        limits.refuse(limits.flashmla_absorbed(latent, q.shape[2] - latent))
        if not q.shape[0]:
            return q.new_empty(0, q.shape[1], LATENT, dtype=torch.bfloat16 if q.element_size() == 1 else q.dtype)
        form = form_of(cache, LATENT, ROTARY)
        self._reads_records = form not in (PLAIN, FP8_TENSOR)
        if not self._reads_records:
            return self._dense(q, cache, queries, scale, plan_of(plan))
        if form != FP8_GROUPS or not self._plans_itself:
            raise ValueError("this FlashMLA does not support this FP8 record format")
        return self._over_records(q, cache, queries, scale, plan_of(plan))

    def gather_latent(
        self, cache: Tensor, queries: PagedQueries, plan: Any, out: Tensor | None = None, value_width: int | None = None
    ) -> Tensor:
        if cache.dtype != torch.uint8:
            return super().gather_latent(cache, queries, plan, out)
        rows = cache.index_select(0, gathered_slots(plan, queries))
        values = unpack(rows, LATENT, ROTARY)
        return values.to(torch.bfloat16) if out is None else out.copy_(values)

    def expanded(self, q: Tensor, kv: Tensor, k_rope: Tensor, queries: PagedQueries, scale: float, plan: Any) -> Tensor:
        other = self._other(q, kv, k_rope)
        other_plan = plan_of(plan).get(queries, "expanded", lambda: other.plan(AttentionBatch(None, queries)))
        return other.expanded(q, kv, k_rope, queries, scale, other_plan)

    def expanded_chunk(
        self, q: Tensor, kv: Tensor, k_rope: Tensor, scale: float, plan: ChunkPlan
    ) -> tuple[Tensor, Tensor]:
        chunks, part = self._other(q, kv, k_rope).capabilities.chunks, plan.part
        assert chunks is not None  # every GPU row has them
        other_plan = plan.get(
            part.queries, "expanded", lambda: chunks.plan(part.queries, part.first_keys, part.key_lens)
        )
        return chunks.expanded(q, kv, k_rope, scale, other_plan)

    def _other(self, q: Tensor, kv: Tensor, k_rope: Tensor) -> MLABackend:
        """The backend of the expanded form."""
        if self._prefill is None:
            raise ValueError("FlashMLA has no kernels for the expanded form and was built without another backend")
        return self._prefill

    def _dense(self, q: Tensor, cache: Tensor, queries: PagedQueries, scale: float, plan: StepPlan) -> Tensor:
        heads = q.shape[1]  # a schedule depends on the head count and the step's lengths
        fp8 = cache.dtype == torch.float8_e4m3fn
        group = plan.get(queries, ("dense", heads), lambda: self._new_group(queries, heads, fp8, plan))
        out, lse = self._lib.flash_mla_with_kvcache(
            group.rectangle(as_queries(q) if fp8 else q), as_pages(cache, PAGE).unsqueeze(2), group.table,
            group.paged.kv_lens_device, LATENT, *group.schedule, softmax_scale=scale, causal=group.tree is None,
            **(self._descales(q.device) if fp8 else {}),
        )  # fmt: skip
        out = group.tokens(out)
        if group.tree is None:
            return out
        keys = cache.unsqueeze(1)
        return group.tree.add(out, group.tokens(lse.transpose(1, 2)), q, keys, keys[..., :LATENT], scale)

    def _descales(self, device: torch.device) -> dict[str, Tensor]:
        """Made by the first layer, before anything is captured."""
        if self._ones is None:
            self._ones = torch.ones(1, dtype=torch.float32, device=device)
        return {"descale_q": self._ones, "descale_k": self._ones}

    def _new_group(self, queries: PagedQueries, heads: int, fp8: bool, plan: StepPlan) -> _Dense:
        def schedule(lens: Tensor, most: int) -> tuple[Any, Any]:
            """Assignment of requests to SMs, and split counts; newer library versions compute it themselves, but not
            for the FP8 kernel."""
            get = self._lib.get_mla_metadata
            if fp8:
                return get(lens, most * heads, 1, is_fp8_kvcache=True)
            return get() if self._plans_itself else get(lens, most * heads, 1)

        return _Dense.of(queries, plan, schedule)

    def _over_records(self, q: Tensor, cache: Tensor, queries: PagedQueries, scale: float, plan: StepPlan) -> Tensor:
        """Sparse attention with every visible token selected: the library's only kernel for records."""
        tokens, heads, width = q.shape
        limits.refuse(limits.flashmla_records(heads))
        padded = self._heads = limits.flashmla_record_heads(heads)
        query = q.new_zeros(tokens, 1, padded, width)
        query[:, 0, :heads] = q
        pages = as_pages(cache, queries.page_size).unsqueeze(2)
        chosen = plan.get(queries, ("chosen", padded), lambda: Chosen(queries, lambda: self._lib.get_mla_metadata()[0]))
        out = q.new_empty(tokens, heads, LATENT)
        for part, schedule, indices, lengths in chosen.parts():
            result, _ = self._lib.flash_mla_with_kvcache(
                query[part], pages, None, None, LATENT, schedule, softmax_scale=scale, is_fp8_kvcache=True,
                indices=indices, **({} if lengths is None else {"topk_length": lengths}),
            )  # fmt: skip
            out[part] = result[:, 0, :heads]
        return out
