"""Draft chains in one call, as C structs.

Legend: T tokens, R rows, D hidden, M MTP layers, S steps of a chain, C and P widths of the latent.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from moe_engine.kernels.cpu.library import Library
from moe_engine.kernels.cpu.tensors import KIND, common_kind, latent_form, pointer
from moe_engine.kernels.decoder.drafting import ChainSteps, DraftLevel
from moe_engine.kernels.decoder.layers import L, P, Weight, kind_of_weights, weight_struct
from moe_engine.kernels.linear.protocol import PreparedLinear
from moe_engine.kernels.sampling.protocol import SamplingParameters

NORMS = ("embedding_norm", "hidden_norm", "input_norm", "post_norm", "final_norm")


class _Level(ctypes.Structure):
    _fields_ = [
        *((name, P) for name in NORMS),
        ("project", Weight),
        *((name, P) for name in ("attention", "experts", "cache")),
        ("cache_row", L),
        ("form", L),
        ("eps", ctypes.c_float),
    ]


class _Draws(ctypes.Structure):
    _fields_ = [(name, P) for name in ("temperature", "top_p", "min_p", "uniform", "top_k")]


@dataclass(frozen=True, slots=True)
class FusedDrafts:
    """Draft chains of MTP layers in one call."""

    kind: int
    levels: list[_Level]
    embedding: Tensor
    head: Weight
    widths: tuple[int, int]  # C and P of the levels' latent
    library: Library
    keep: tuple[Any, ...]
    orders: dict[tuple[int, ...], Any] = field(default_factory=dict)
    """Arrays of pointers to levels, keyed by level indices."""

    def take(self, caches: Sequence[Tensor], dtype: torch.dtype) -> None:
        """Points the levels to these caches, with activations of `dtype`."""
        for level, cache in zip(self.levels, caches):
            level.form = self._form(dtype, cache)
            level.cache, level.cache_row = cache.data_ptr(), cache.stride(0)

    def run(
        self, states: Tensor, rows: Tensor, roots: Tensor, steps: ChainSteps, caches: Sequence[Tensor],
        parameters: SamplingParameters | None, uniform: Tensor | None,
    ) -> Tensor:  # fmt: skip
        """roots [R] int64 -> tokens [R, 1+S] int64: each root, then its drafts, identical to the separate calls.

        Args:
            states: [max_rows, D], states[rows[r]] precedes root r; rows [R] int64.
            caches: of the M layers, [num_slots, C+P].
            parameters: sampling parameters of the rows; None: greedy.
            uniform: [S, R] float32, random number of each draw, with `parameters`.
        """
        self.take(caches, states.dtype)
        num_steps, num_rows = steps.positions.shape
        queries = pointer(steps.queries)
        draws = draws_struct(parameters, None if uniform is None else uniform.data_ptr())
        # numpy, not torch: torch would release the GIL here; the library call below releases it anyway, for longer
        tokens = torch.from_numpy(np.empty((num_rows, 1 + num_steps), dtype=np.int64))
        self.library.moe_draft_chain(
            self.kind, ctypes.addressof(self._order(steps.levels)), num_steps, num_rows, states.shape[1],
            self.embedding.data_ptr(), ctypes.addressof(self.head), steps.positions.data_ptr(), steps.slots.data_ptr(),
            queries.address, steps.context_lens.data_ptr(), states.data_ptr(), rows.data_ptr(), roots.data_ptr(),
            ctypes.addressof(draws), tokens.data_ptr(),
        )  # fmt: skip
        return tokens

    def remember(
        self, level: int, ids: Tensor, hidden: Tensor, positions: Tensor, slots: Tensor, cache: Tensor
    ) -> None:
        """Writes a layer's cache rows for hidden [T, D] followed by tokens ids [T], as in the separate calls; positions
        and slots are [T] int64. For few tokens: all are processed together."""
        form = self._form(hidden.dtype, cache)
        self.library.moe_draft_remember(
            self.kind, ctypes.addressof(self.levels[level]), len(ids), hidden.shape[1], self.embedding.data_ptr(),
            ids.data_ptr(), hidden.contiguous().data_ptr(), positions.data_ptr(), slots.data_ptr(), form,
            cache.data_ptr(), cache.stride(0),
        )  # fmt: skip

    def _order(self, levels: Sequence[int]) -> Any:
        key = tuple(levels)
        if key not in self.orders:
            self.orders[key] = (P * len(key))(*(ctypes.addressof(self.levels[i]) for i in key))
        return self.orders[key]

    def _form(self, dtype: torch.dtype, cache: Tensor) -> int:
        """Row format of the cache (`kv_format`)."""
        if KIND.get(dtype) != self.kind:
            raise ValueError(f"states are {dtype}, the cache {cache.dtype}: not the weights' dtype")
        return latent_form(cache, dtype, *self.widths)


def fuse_drafts(
    library: Library, levels: Sequence[DraftLevel], embedding: Tensor, head: PreparedLinear
) -> FusedDrafts | None:
    """None if a weight is not in the layout of the layers' own functions."""
    kinds = {kind_of_weights([head, *(level.project for level in levels)]), KIND.get(embedding.dtype)}
    for level in levels:
        kinds |= {level.attention.kind, level.experts.kind}
        if any(getattr(level, name).dtype != torch.float32 for name in NORMS):
            return None
    kind = common_kind(kinds)
    if kind is None or not embedding.is_contiguous():
        return None
    structs = [
        _Level(
            *(getattr(level, name).data_ptr() for name in NORMS), weight_struct(level.project),
            level.attention.address, level.experts.address, None, 0, 0, level.eps,
        )
        for level in levels
    ]  # fmt: skip
    widths = levels[0].attention.widths
    return FusedDrafts(kind, structs, embedding, weight_struct(head), widths, library, (tuple(levels), head))


def draws_struct(parameters: SamplingParameters | None, uniform: int | None = None) -> _Draws:
    """Sampling parameters and the address of random numbers as a C struct; greedy without parameters."""
    if parameters is None:
        return _Draws()
    p = parameters
    return _Draws(p.temperature.data_ptr(), p.top_p.data_ptr(), p.min_p.data_ptr(), uniform, p.top_k.data_ptr())
