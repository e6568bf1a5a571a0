"""Chains of drafts as the library takes them."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from moe_engine.kernels.attention.drafting import ChainSteps, DraftLevel
from moe_engine.kernels.cpu.layers import L, LayerPointer, P, Weight, kind_of_weights, weight_struct
from moe_engine.kernels.cpu.library import Library
from moe_engine.kernels.cpu.tensors import KIND, pointer
from moe_engine.kernels.linear.protocol import PreparedLinear
from moe_engine.kernels.sampling.protocol import SamplingParameters

NORMS = ("embedding_norm", "hidden_norm", "input_norm", "post_norm", "final_norm")


class _Level(ctypes.Structure):
    _fields_ = [
        *((name, P) for name in NORMS),
        ("project", Weight),
        *((name, P) for name in ("attention", "experts", "cache")),
        ("cache_row", L),
        ("eps", ctypes.c_float),
    ]


class _Draws(ctypes.Structure):
    _fields_ = [(name, P) for name in ("temperature", "top_p", "min_p", "uniform", "top_k")]


@dataclass(frozen=True, slots=True)
class DraftsPointer:
    """C structs and what they point to."""

    kind: int
    levels: list[_Level]
    embedding: Tensor
    head: Weight
    keep: tuple[Any, ...]


def fuse(levels: Sequence[DraftLevel], embedding: Tensor, head: PreparedLinear) -> DraftsPointer | None:
    """None where a weight is not as the layers' own functions want it."""
    weights = [head, *(level.project for level in levels)]
    kinds = {kind_of_weights(weights), KIND.get(embedding.dtype)}
    for level in levels:
        if not (isinstance(level.attention, LayerPointer) and isinstance(level.experts, LayerPointer)):
            return None
        kinds |= {level.attention.kind, level.experts.kind}
        if any(getattr(level, name).dtype != torch.float32 for name in NORMS):
            return None
    kind = kinds.pop()
    if kinds or kind is None or not embedding.is_contiguous():
        return None
    structs = [
        _Level(
            *(getattr(level, name).data_ptr() for name in NORMS), weight_struct(level.project),
            level.attention.address, level.experts.address, None, 0, level.eps,
        )
        for level in levels
    ]  # fmt: skip
    return DraftsPointer(kind, structs, embedding, weight_struct(head), (tuple(levels), head))


def run(
    library: Library, drafts: DraftsPointer, state: Tensor, roots: Tensor, steps: ChainSteps, caches: Sequence[Tensor],
    parameters: SamplingParameters | None, uniform: Tensor | None,
) -> Tensor:  # fmt: skip
    """As `FusedDrafting.run_drafts`."""
    for level, cache in zip(drafts.levels, caches):
        if KIND.get(cache.dtype) != drafts.kind or KIND.get(state.dtype) != drafts.kind:
            raise ValueError(f"states are {state.dtype}, the cache {cache.dtype}: not what the weights are")
        level.cache, level.cache_row = cache.data_ptr(), cache.stride(0)
    num_steps, rows = steps.positions.shape
    order = (P * num_steps)(*(ctypes.addressof(drafts.levels[i]) for i in steps.levels))
    queries = pointer(steps.queries)
    draws = _Draws()
    if parameters is not None and uniform is not None:
        p = parameters
        draws = _Draws(*(t.data_ptr() for t in (p.temperature, p.top_p, p.min_p, uniform, p.top_k)))
    tokens = torch.empty((num_steps, rows), dtype=torch.int64)
    library.moe_draft_chain(
        drafts.kind, ctypes.addressof(order), num_steps, rows, state.shape[1], drafts.embedding.data_ptr(),
        ctypes.addressof(drafts.head), steps.positions.data_ptr(), steps.slots.data_ptr(), queries.address,
        steps.context_lens.data_ptr(), state.contiguous().data_ptr(), roots.contiguous().data_ptr(),
        ctypes.addressof(draws), tokens.data_ptr(),
    )  # fmt: skip
    return tokens
