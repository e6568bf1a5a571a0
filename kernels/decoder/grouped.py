"""A layer of grouped-query attention for whole-decoder calls, as a C struct.

Legend: D hidden, H query heads, G KV heads, Dh head width.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from moe_engine.kernels.cpu.tensors import head_form
from moe_engine.kernels.decoder.layers import L, P, Weight, kind_of_weights, weight_struct
from moe_engine.kernels.linear.protocol import PreparedLinear
from moe_engine.kernels.ops.protocol import RotaryTable


class _GQA(ctypes.Structure):
    _fields_ = [
        *((name, Weight) for name in ("qkv", "o")),
        *((name, P) for name in ("q_norm", "k_norm", "table", "sinks")),
        *((name, L) for name in ("heads", "key_heads", "width", "rotary")),
        ("interleaved", ctypes.c_int32),
        ("eps", ctypes.c_float),
        ("scale", ctypes.c_float),
    ]


class HeadCaches(ctypes.Structure):
    """Keys and values of a layer; strides in stored elements."""

    _fields_ = [
        *((name, P) for name in ("k", "v")),
        *((name, L) for name in ("k_row", "k_head", "v_row", "v_head", "form")),
    ]


@dataclass(frozen=True)
class GQALayer:
    """The weights of a layer; q and k are rotated over their leading channels."""

    qkv: PreparedLinear  # [(H+2G)*Dh, D]
    o: PreparedLinear  # [D, H*Dh]
    norms: tuple[Tensor, Tensor] | None  # of the heads of q and of k, [Dh] float32
    sinks: Tensor | None  # [H] float32
    heads: int
    key_heads: int
    rotary: RotaryTable
    eps: float
    scale: float


@dataclass(frozen=True, slots=True)
class FusedGQA:
    """A layer of a `FusedStack`."""

    kind: int  # as in `tensors.KIND`
    address: int
    key_heads: int
    width: int
    keep: tuple[Any, ...]

    def point_to(self, place: HeadCaches, caches: tuple[Tensor, Tensor], dtype: torch.dtype) -> None:
        """Fills the struct of keys and values [num_slots, G, Dh]. Raises ValueError: not `dtype`, or FP8 rows."""
        keys, values = caches
        form, other = (head_form(cache, dtype, self.width) for cache in caches)
        if form != other:
            raise ValueError(f"keys are {keys.dtype}, values {values.dtype}")
        place.k, place.v, place.form = keys.data_ptr(), values.data_ptr(), form
        place.k_row, place.k_head = keys.stride(0), keys.stride(1)
        place.v_row, place.v_head = values.stride(0), values.stride(1)


def fuse_gqa(layer: GQALayer) -> FusedGQA | None:
    """None if a weight is not packed in panels of one dtype, or a norm is not float32."""
    weights = [layer.qkv, layer.o]
    kind = kind_of_weights(weights)
    small = [*(layer.norms or ()), *(() if layer.sinks is None else (layer.sinks,))]
    if kind is None or any(x.dtype != torch.float32 or not x.is_contiguous() for x in small):
        return None
    width = layer.qkv.out_features // (layer.heads + 2 * layer.key_heads)
    norms = (None, None) if layer.norms is None else tuple(norm.data_ptr() for norm in layer.norms)
    struct = _GQA(
        *map(weight_struct, weights), *norms, layer.rotary.cos_sin.data_ptr(),
        None if layer.sinks is None else layer.sinks.data_ptr(), layer.heads, layer.key_heads, width,
        layer.rotary.width, int(layer.rotary.interleaved), layer.eps, layer.scale,
    )  # fmt: skip
    return FusedGQA(kind, ctypes.addressof(struct), layer.key_heads, width, (struct, layer))
