"""A whole decoder as C structs."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from moe_engine.kernels.attention.protocol import PagedQueries
from moe_engine.kernels.cpu.layers import L, LayerPointer, P, Weight, kind_of_weights, weight_struct
from moe_engine.kernels.cpu.library import Library
from moe_engine.kernels.cpu.tensors import KIND, find, latent_form
from moe_engine.kernels.decoder.stacking import StackedLayer


class _Layer(ctypes.Structure):
    _fields_ = [
        *((name, P) for name in ("attention", "post_norm", "next_norm", "experts")),
        ("up", Weight),
        ("down", Weight),
        ("cache", P),
        ("cache_row", L),
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
class DecoderPointer:
    """C structs and the objects they point to."""

    kind: int
    struct: _Decoder
    layers: Any  # array of _Layer
    embedding: Tensor
    widths: list[tuple[int, int]]  # C and P of each layer's latent
    keep: tuple[Any, ...]
    address: int = field(init=False)
    caches: Sequence[Tensor] | None = None
    """The caches that the structs point to."""

    def __post_init__(self) -> None:
        self.address = ctypes.addressof(self.struct)

    def take(self, caches: Sequence[Tensor]) -> None:
        """Points the layers to these caches; free if they are the same tuple as before."""
        if caches is self.caches and isinstance(caches, tuple):
            return
        for layer, cache, widths in zip(self.layers, caches, self.widths, strict=False):
            layer.form = latent_form(cache, self.embedding.dtype, *widths)
            layer.cache, layer.cache_row = cache.data_ptr(), cache.stride(0)
        self.caches = caches


def fuse(embedding: Tensor, first_norm: Tensor, layers: Sequence[StackedLayer]) -> DecoderPointer | None:
    """None if a weight is not in the layout of the layers' own functions."""
    kinds = {KIND.get(embedding.dtype)}
    for layer in layers:
        norms = (first_norm, layer.post_norm, layer.next_norm)
        if any(norm.dtype != torch.float32 for norm in norms) or not isinstance(layer.attention, LayerPointer):
            return None
        kinds.add(layer.attention.kind)
        if isinstance(layer.experts, LayerPointer):
            kinds.add(layer.experts.kind)
        elif layer.mlp is not None:
            kinds.add(kind_of_weights(list(layer.mlp)))
        else:
            return None
    kind = kinds.pop()
    if kinds or kind is None or not layers or not embedding.is_contiguous():
        return None
    structs = (_Layer * len(layers))(*map(_struct, layers))
    struct = _Decoder(
        embedding.data_ptr(), first_norm.data_ptr(), layers[0].eps, embedding.shape[1], len(layers),
        ctypes.addressof(structs),
    )  # fmt: skip
    widths = [layer.attention.widths for layer in layers]
    return DecoderPointer(kind, struct, structs, embedding, widths, (first_norm, tuple(layers)))


def _struct(layer: StackedLayer) -> _Layer:
    up, down = (Weight(), Weight()) if layer.mlp is None else map(weight_struct, layer.mlp)
    return _Layer(
        layer.attention.address, layer.post_norm.data_ptr(), layer.next_norm.data_ptr(),
        None if layer.experts is None else layer.experts.address, up, down, None, 0, 0, layer.eps,
    )  # fmt: skip


def run(
    library: Library, decoder: DecoderPointer, ids: Tensor, positions: Tensor, slots: Tensor, caches: Sequence[Tensor],
    queries: PagedQueries, plan: Any, choices: Sequence[Tensor | None] | None,
) -> Tensor:  # fmt: skip
    """See `FusedStack.run_stack`."""
    decoder.take(caches)
    struct = find(queries, plan)
    out = torch.empty((len(ids), decoder.embedding.shape[1]), dtype=decoder.embedding.dtype)
    chosen = None
    if choices is not None:
        chosen = (P * len(choices))(*(None if ids is None else ids.data_ptr() for ids in choices))
    library.moe_decoder(
        decoder.kind, decoder.address, ids.data_ptr(), len(ids), positions.data_ptr(), slots.data_ptr(),
        struct.address, None if chosen is None else ctypes.addressof(chosen), out.data_ptr(),
    )  # fmt: skip
    return out
