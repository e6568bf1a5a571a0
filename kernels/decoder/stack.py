"""A whole decoder in one call, as C structs.

Legend: T tokens, D hidden, V vocabulary, L layers, K experts per token, I width of an MLP, C and P widths of
the latent, G KV heads, Dh head width.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from moe_engine.kernels.cpu.library import Library
from moe_engine.kernels.cpu.tensors import KIND, common_kind, find, latent_form
from moe_engine.kernels.decoder.grouped import FusedGQA, HeadCaches
from moe_engine.kernels.decoder.layers import FusedMLA, FusedMoE, L, P, Weight, kind_of_weights, weight_struct
from moe_engine.kernels.linear.protocol import PreparedLinear
from moe_engine.kernels.queries import PagedQueries


@dataclass(frozen=True)
class StackedLayer:
    """A decoder layer: attention and one kind of feed-forward, each followed by the norm of the residual sum."""

    attention: FusedMLA | FusedGQA
    post_norm: Tensor  # [D] float32
    next_norm: Tensor  # [D] float32: the next layer's input norm, or the final norm
    eps: float
    experts: FusedMoE | None = None
    mlp: tuple[PreparedLinear, PreparedLinear] | None = None
    """Gate and up [2I, D], down [D, I], which `LinearKernel.fuse_mlp` supports."""


class _Layer(ctypes.Structure):
    _fields_ = [
        *((name, P) for name in ("attention", "grouped", "post_norm", "next_norm", "experts")),
        ("up", Weight),
        ("down", Weight),
        ("cache", P),
        ("cache_row", L),
        ("heads", HeadCaches),
        ("form", ctypes.c_int32),
        ("eps", ctypes.c_float),
    ]


class _Decoder(ctypes.Structure):
    _fields_ = [
        ("embedding", P),
        ("first_norm", P),
        ("eps", ctypes.c_float),
        ("hidden", L),
        ("num_layers", L),
        ("layers", P),
    ]


@dataclass(slots=True)
class FusedStack:
    """All decoder layers in one call."""

    kind: int
    struct: _Decoder
    layers: Any  # array of _Layer
    embedding: Tensor
    parts: list[FusedMLA | FusedGQA]  # of each layer
    library: Library
    keep: tuple[Any, ...]
    address: int = field(init=False)
    caches: Sequence[Any] | None = None
    """The caches that the structs point to."""

    def __post_init__(self) -> None:
        self.address = ctypes.addressof(self.struct)

    def take(self, caches: Sequence[Any]) -> None:
        """Points the layers to these caches; free if they are the same tuple as before."""
        if caches is self.caches and isinstance(caches, tuple):
            return
        dtype = self.embedding.dtype
        for layer, cache, part in zip(self.layers, caches, self.parts, strict=False):
            if isinstance(part, FusedGQA):
                part.point_to(layer.heads, cache, dtype)
                continue
            layer.form = latent_form(cache, dtype, *part.widths)
            layer.cache, layer.cache_row = cache.data_ptr(), cache.stride(0)
        self.caches = caches

    def run(
        self, ids: Tensor, positions: Tensor, slots: Tensor, caches: Sequence[Any], queries: PagedQueries, plan: Any,
        choices: Sequence[Tensor | None] | None = None,
    ) -> Tensor:  # fmt: skip
        """Tokens -> hidden states after the final norm, [T, D], bit-identical to the separate calls.

        Args:
            ids, positions, slots: [T] int64; all tokens belong to `queries`, attention is absorbed.
            caches: of the L layers (more may follow), [num_slots, C+P], or keys and values [num_slots, G, Dh]; the
                tokens' rows are written first.
            choices: per layer, [T, K] int32 output of the router's choices, or None.
        """
        self.take(caches)
        ids, positions, slots = ids.contiguous(), positions.contiguous(), slots.contiguous()
        struct = find(queries, plan)
        out = torch.empty((len(ids), self.embedding.shape[1]), dtype=self.embedding.dtype)
        chosen = None
        if choices is not None:
            chosen = (P * len(choices))(*(None if ids is None else ids.data_ptr() for ids in choices))
        self.library.moe_decoder(
            self.kind, self.address, ids.data_ptr(), len(ids), positions.data_ptr(), slots.data_ptr(),
            struct.address, None, None if chosen is None else ctypes.addressof(chosen), out.data_ptr(),
        )  # fmt: skip
        return out


def fuse_stack(
    library: Library, embedding: Tensor, first_norm: Tensor, layers: Sequence[StackedLayer]
) -> FusedStack | None:
    """None if a weight is not in the layout of the layers' own functions."""
    kinds: set[int | None] = {KIND.get(embedding.dtype)}
    for layer in layers:
        norms = (first_norm, layer.post_norm, layer.next_norm)
        if any(norm.dtype != torch.float32 for norm in norms):
            return None
        kinds.add(layer.attention.kind)
        if layer.experts is not None:
            kinds.add(layer.experts.kind)
        elif layer.mlp is not None:
            kinds.add(kind_of_weights(list(layer.mlp)))
        else:
            return None
    kind = common_kind(kinds)
    if kind is None or not layers or not embedding.is_contiguous():
        return None
    structs = (_Layer * len(layers))(*map(_struct, layers))
    struct = _Decoder(
        embedding.data_ptr(), first_norm.data_ptr(), layers[0].eps, embedding.shape[1], len(layers),
        ctypes.addressof(structs),
    )  # fmt: skip
    parts = [layer.attention for layer in layers]
    return FusedStack(kind, struct, structs, embedding, parts, library, (first_norm, tuple(layers)))


def _struct(layer: StackedLayer) -> _Layer:
    up, down = (Weight(), Weight()) if layer.mlp is None else map(weight_struct, layer.mlp)
    address, grouped = layer.attention.address, isinstance(layer.attention, FusedGQA)
    return _Layer(
        None if grouped else address, address if grouped else None, layer.post_norm.data_ptr(),
        layer.next_norm.data_ptr(), None if layer.experts is None else layer.experts.address, up, down, None, 0,
        HeadCaches(), 0, layer.eps,
    )  # fmt: skip
