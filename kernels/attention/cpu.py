"""Attention in C++: blockwise over the paged context. Results are batch-invariant, bit for bit."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from moe_engine.kernels.attention.protocol import AttentionCapabilities
from moe_engine.kernels.attention.sparse import over_absorbed
from moe_engine.kernels.cpu.library import Library, load
from moe_engine.kernels.cpu.tensors import Plan, find, head_form, kind_of, latent_form, rows
from moe_engine.kernels.decoder.calls import DecoderCalls
from moe_engine.kernels.kv_format import head_records
from moe_engine.kernels.queries import AttentionBatch, PagedQueries


class _Backend:
    name = "cpu"

    def __init__(self, library: Library | None = None) -> None:
        self._lib = library or load()

    def plan(self, batch: AttentionBatch) -> Plan:
        return Plan.of(batch)


class CpuMLA(_Backend):
    @property
    def capabilities(self) -> AttentionCapabilities:
        return AttentionCapabilities(
            expanded_shared=self.expanded_shared, decoder=DecoderCalls(self._lib), sparse=over_absorbed(self)
        )

    def absorbed(
        self, q: Tensor, cache: Tensor, queries: PagedQueries, scale: float, plan: Any, value_width: int | None = None,
        sinks: Tensor | None = None,
    ) -> Tensor:  # fmt: skip
        """See `AbsorbsSinks`."""
        q = rows(q)
        tokens, heads, width = q.shape
        latent = width - 64 if value_width is None else value_width
        form = latent_form(cache, q.dtype, latent, width - latent)
        out = torch.empty((tokens, heads, latent), dtype=q.dtype)
        struct = find(queries, plan)
        self._lib.moe_absorbed(
            kind_of(q.dtype), form, q.data_ptr(), q.stride(0), q.stride(1), cache.data_ptr(), cache.stride(0),
            struct.address, heads, latent, width - latent, scale, None if sinks is None else sinks.data_ptr(),
            out.data_ptr(),
        )  # fmt: skip
        return out

    def gather_latent(
        self, cache: Tensor, queries: PagedQueries, plan: Any, out: Tensor | None = None, value_width: int | None = None
    ) -> Tensor:
        """See the protocol; `value_width` is C where the rotary width is not 64."""
        queries.refuse_tree("gathered")
        size = cache.element_size()
        struct = find(queries, plan)
        if out is not None and size == 1:
            latent = out.shape[1] - 64 if value_width is None else value_width
            form = latent_form(cache, out.dtype, latent, out.shape[1] - latent)
            self._lib.moe_gather_fp8(
                kind_of(out.dtype), form, cache.data_ptr(), cache.stride(0), latent, out.shape[1] - latent,
                struct.address, out.data_ptr(),
            )  # fmt: skip
            return out
        if out is None:
            out = torch.empty((queries.num_context_tokens, cache.shape[1]), dtype=cache.dtype)
        self._lib.moe_gather(
            cache.data_ptr(), cache.stride(0) * size, cache.shape[1] * size, struct.address, out.data_ptr()
        )
        return out

    def expanded(self, q: Tensor, kv: Tensor, k_rope: Tensor, queries: PagedQueries, scale: float, plan: Any) -> Tensor:
        return self._expanded(q, kv, k_rope, queries, scale, plan, by_slots=False)

    def expanded_shared(
        self, q: Tensor, kv: Tensor, k_rope: Tensor, queries: PagedQueries, scale: float, plan: Any
    ) -> Tensor:
        return self._expanded(q, kv, k_rope, queries, scale, plan, by_slots=True)

    def _expanded(
        self, q: Tensor, kv: Tensor, k_rope: Tensor, queries: PagedQueries, scale: float, plan: Any, by_slots: bool
    ) -> Tensor:
        queries.refuse_tree("expanded")
        q, kv, k_rope = rows(q), rows(kv), rows(k_rope)
        tokens, heads, width = q.shape
        rotary = k_rope.shape[1]
        value = kv.shape[2] - (width - rotary)
        kind = _same_kind(q, kv, k_rope)
        out = torch.empty((tokens, heads, value), dtype=q.dtype)
        struct = find(queries, plan)
        self._lib.moe_expanded(
            kind, q.data_ptr(), q.stride(0), q.stride(1), kv.data_ptr(), kv.stride(0), kv.stride(1), k_rope.data_ptr(),
            k_rope.stride(0), struct.address, int(by_slots), heads, width - rotary, rotary, value, scale,
            out.data_ptr(),
        )  # fmt: skip
        return out


class CpuGQA(_Backend):
    @property
    def capabilities(self) -> AttentionCapabilities:
        return AttentionCapabilities(
            windows=True, chunked=True, sinks=self.paged, capped=self.paged, decoder=DecoderCalls(self._lib)
        )

    def paged(
        self, q: Tensor, k_cache: Tensor, v_cache: Tensor, queries: PagedQueries, scale: float, plan: Any,
        sinks: Tensor | None = None, cap: float = 0.0,
    ) -> Tensor:  # fmt: skip
        q = rows(q)
        tokens, heads, width = q.shape
        value = head_records.value_width(k_cache, v_cache, width)
        form, other = head_form(k_cache, q.dtype, width), head_form(v_cache, q.dtype, value)
        if form != other:
            raise ValueError(f"keys are {k_cache.dtype}, values {v_cache.dtype}")
        out = torch.empty((tokens, heads, value), dtype=q.dtype)
        struct = find(queries, plan)
        self._lib.moe_paged(
            kind_of(q.dtype), form, q.data_ptr(), q.stride(0), q.stride(1), k_cache.data_ptr(), k_cache.stride(0),
            k_cache.stride(1), v_cache.data_ptr(), v_cache.stride(0), v_cache.stride(1), struct.address, heads,
            k_cache.shape[1], width, value, scale, cap, None if sinks is None else sinks.data_ptr(), out.data_ptr(),
        )  # fmt: skip
        return out


def _same_kind(q: Tensor, *others: Tensor) -> int:
    for other in others:
        if other.dtype != q.dtype or other.stride(-1) != 1:
            raise ValueError(f"queries are {q.dtype}, the context is {other.dtype} with strides {other.stride()}")
    return kind_of(q.dtype)
