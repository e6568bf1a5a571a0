"""Attention in C++: blockwise over the paged context. Results are batch-invariant, bit for bit."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from moe_engine.kernels.attention.protocol import AttentionBatch, MLALayer, PagedQueries
from moe_engine.kernels.cpu import decoder, draft_step, drafts
from moe_engine.kernels.cpu.layers import LayerPointer, mla_layer
from moe_engine.kernels.cpu.library import Library, load
from moe_engine.kernels.cpu.tensors import Plan, find, head_form, kind_of, latent_form, rows
from moe_engine.kernels.decoder.drafting import ChainSteps, DraftLevel, RowTables, StepDraws, VerifiedChains
from moe_engine.kernels.decoder.stacking import StackedLayer
from moe_engine.kernels.linear.protocol import PreparedLinear
from moe_engine.kernels.sampling.protocol import SamplingParameters


class _Backend:
    name = "cpu"

    def __init__(self, library: Library | None = None) -> None:
        self._lib = library or load()

    def plan(self, batch: AttentionBatch) -> Plan:
        return Plan.of(batch)


class CpuMLA(_Backend):
    max_fused_tokens = 64

    def fuse(self, layer: MLALayer) -> LayerPointer | None:
        return mla_layer(layer)

    def run_layer(
        self, layer: LayerPointer, hidden: Tensor, positions: Tensor, slots: Tensor, cache: Tensor,
        queries: PagedQueries, plan: Any,
    ) -> Tensor:  # fmt: skip
        hidden = rows(hidden)
        if kind_of(hidden.dtype) != layer.kind:
            raise ValueError(f"hidden states are {hidden.dtype}, the cache {cache.dtype}: not the weights' dtype")
        form = latent_form(cache, hidden.dtype, *layer.widths)
        out = torch.empty((hidden.shape[0], layer.hidden), dtype=hidden.dtype)
        struct = find(queries, plan)
        self._lib.moe_mla_layer(
            layer.kind, layer.address, hidden.data_ptr(), hidden.stride(0), hidden.shape[0], positions.data_ptr(),
            slots.data_ptr(), form, cache.data_ptr(), cache.stride(0), struct.address, out.data_ptr(),
        )  # fmt: skip
        return out

    def fuse_stack(
        self, embedding: Tensor, first_norm: Tensor, layers: Sequence[StackedLayer]
    ) -> decoder.DecoderPointer | None:
        return decoder.fuse(embedding, first_norm, layers)

    def run_stack(
        self, stack: decoder.DecoderPointer, ids: Tensor, positions: Tensor, slots: Tensor, caches: Sequence[Tensor],
        queries: PagedQueries, plan: Any, choices: Sequence[Tensor | None] | None = None,
    ) -> Tensor:  # fmt: skip
        return decoder.run(self._lib, stack, ids, positions, slots, caches, queries, plan, choices)

    def absorbed(
        self, q: Tensor, cache: Tensor, queries: PagedQueries, scale: float, plan: Any, value_width: int | None = None
    ) -> Tensor:
        """See the protocol; `value_width` is C where the rotary width is not 64."""
        q = rows(q)
        tokens, heads, width = q.shape
        latent = width - 64 if value_width is None else value_width
        form = latent_form(cache, q.dtype, latent, width - latent)
        out = torch.empty((tokens, heads, latent), dtype=q.dtype)
        struct = find(queries, plan)
        self._lib.moe_absorbed(
            kind_of(q.dtype), form, q.data_ptr(), q.stride(0), q.stride(1), cache.data_ptr(), cache.stride(0),
            struct.address, heads, latent, width - latent, scale, out.data_ptr(),
        )  # fmt: skip
        return out

    def fuse_drafts(
        self, levels: Sequence[DraftLevel], embedding: Tensor, head: PreparedLinear
    ) -> drafts.DraftsPointer | None:
        return drafts.fuse(levels, embedding, head)

    def run_drafts(
        self, fused: drafts.DraftsPointer, states: Tensor, rows: Tensor, roots: Tensor, steps: ChainSteps,
        caches: Sequence[Tensor], parameters: SamplingParameters | None, uniform: Tensor | None,
    ) -> Tensor:  # fmt: skip
        return drafts.run(self._lib, fused, states, rows, roots, steps, caches, parameters, uniform)

    def remember_drafts(
        self, fused: drafts.DraftsPointer, level: int, ids: Tensor, hidden: Tensor, positions: Tensor, slots: Tensor,
        cache: Tensor,
    ) -> None:  # fmt: skip
        drafts.remember(self._lib, fused, level, ids, hidden, positions, slots, cache)

    def fuse_step(
        self, fused: drafts.DraftsPointer, stack: decoder.DecoderPointer, tables: RowTables, caches: Sequence[Tensor]
    ) -> draft_step.DraftStepPointer | None:
        return draft_step.fuse(fused, stack, tables, caches)

    def run_step(
        self, step: draft_step.DraftStepPointer, rows: np.ndarray, depth: int, draws: StepDraws | None
    ) -> VerifiedChains:
        return draft_step.run(self._lib, step, rows, depth, draws)

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
    def paged(
        self, q: Tensor, k_cache: Tensor, v_cache: Tensor, queries: PagedQueries, scale: float, plan: Any
    ) -> Tensor:
        q = rows(q)
        tokens, heads, width = q.shape
        form, other = (head_form(cache, q.dtype, width) for cache in (k_cache, v_cache))
        if form != other:
            raise ValueError(f"keys are {k_cache.dtype}, values {v_cache.dtype}")
        out = torch.empty((tokens, heads, width), dtype=q.dtype)
        struct = find(queries, plan)
        self._lib.moe_paged(
            kind_of(q.dtype), form, q.data_ptr(), q.stride(0), q.stride(1), k_cache.data_ptr(), k_cache.stride(0),
            k_cache.stride(1), v_cache.data_ptr(), v_cache.stride(0), v_cache.stride(1), struct.address, heads,
            k_cache.shape[1], width, scale, out.data_ptr(),
        )  # fmt: skip
        return out


def _same_kind(q: Tensor, *others: Tensor) -> int:
    for other in others:
        if other.dtype != q.dtype or other.stride(-1) != 1:
            raise ValueError(f"queries are {q.dtype}, the context is {other.dtype} with strides {other.stride()}")
    return kind_of(q.dtype)
