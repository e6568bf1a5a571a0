"""Parts of a decoder layer as the library takes them: C structs that point to weights prepared by other rows."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from typing import Any

import torch

from moe_engine.kernels.attention.protocol import MLALayer
from moe_engine.kernels.cpu.tensors import ExpertPanels, Panels
from moe_engine.kernels.experts.counting import CountPlace
from moe_engine.kernels.experts.protocol import MoELayer
from moe_engine.kernels.linear.protocol import PreparedLinear
from moe_engine.kernels.ops.cpu import router_struct

P, L = ctypes.c_void_p, ctypes.c_int64


class Weight(ctypes.Structure):
    """A packed weight, [outputs, inputs]."""

    _fields_ = [("panels", P), ("bias", P), ("inputs", L), ("outputs", L)]


class _MLA(ctypes.Structure):
    _fields_ = [
        *((name, Weight) for name in ("down", "q", "keys", "values", "o")),
        *((name, P) for name in ("q_norm", "kv_norm", "table")),
        *((name, L) for name in ("heads", "rotary")),
        ("interleaved", ctypes.c_int32),
        ("eps", ctypes.c_float),
        ("scale", ctypes.c_float),
    ]


class _MoE(ctypes.Structure):
    _fields_ = [
        *((name, P) for name in ("gate", "bias", "router", "experts")),
        *((name, L) for name in ("num_experts", "top_k", "width")),
        ("shared_up", Weight),
        ("shared_down", Weight),
        ("cell", P),
        ("first", L),
    ]


@dataclass(frozen=True, slots=True)
class LayerPointer:
    """A C struct and the objects it points to; `kind` as in `tensors.KIND`."""

    kind: int
    address: int
    hidden: int
    keep: tuple[Any, ...]
    widths: tuple[int, int] = (0, 0)
    """C and P of MLA's latent."""


def mla_layer(layer: MLALayer) -> LayerPointer | None:
    """None if a weight is not packed in panels of one dtype, or a norm is not float32."""
    weights = [layer.down, layer.q, layer.keys, layer.values, layer.o]
    kind = kind_of_weights(weights)
    norms = [norm for norm in (layer.q_norm, layer.kv_norm) if norm is not None]
    if kind is None or any(norm.dtype != torch.float32 for norm in norms):
        return None
    struct = _MLA(
        *map(weight_struct, weights), None if layer.q_norm is None else layer.q_norm.data_ptr(),
        layer.kv_norm.data_ptr(), layer.rotary.cos_sin.data_ptr(), layer.keys.data.heads, layer.rotary.width,
        int(layer.rotary.interleaved), layer.eps, layer.scale,
    )  # fmt: skip
    widths = (layer.keys.out_features, layer.rotary.width)
    return LayerPointer(kind, ctypes.addressof(struct), layer.o.out_features, (struct, layer), widths)


def moe_layer(layer: MoELayer) -> LayerPointer | None:
    """None if a weight is not packed in panels of one dtype, or the shared expert cannot run in one call."""
    shared = [] if layer.shared is None else list(layer.shared)
    panels = layer.experts.data
    kinds = {panels.kind if isinstance(panels, ExpertPanels) else None, *([kind_of_weights(shared)] if shared else [])}
    kind = kinds.pop()
    if kinds or kind is None or layer.gate.dtype != torch.float32 or not layer.gate.is_contiguous():
        return None
    if shared and (shared[1].in_features % 16 or shared[0].bias is not None or shared[1].bias is not None):
        return None
    router = router_struct(layer.router)
    bias = layer.bias if layer.router.has_bias else None
    struct = _MoE(
        layer.gate.data_ptr(), None if bias is None else bias.data_ptr(), ctypes.addressof(router), panels.address,
        layer.experts.num_experts, layer.router.top_k, layer.experts.width, *map(weight_struct, shared),
    )  # fmt: skip
    return LayerPointer(kind, ctypes.addressof(struct), layer.experts.hidden, (struct, router, layer))


def count_choices(layer: LayerPointer, place: CountPlace | None) -> None:
    """See `CountsChoices.count_choices`; `layer` comes from `moe_layer`."""
    struct: _MoE = layer.keep[0]
    struct.cell, struct.first = (None, 0) if place is None else (place.cell.address, place.first)


def kind_of_weights(weights: list[PreparedLinear]) -> int | None:
    """The weights' common dtype; None if they differ or belong to another row."""
    kinds = {weight.data.kind if isinstance(weight.data, Panels) else None for weight in weights}
    return kinds.pop() if len(kinds) == 1 else None


def weight_struct(weight: PreparedLinear) -> Weight:
    return Weight(weight.data.weight, weight.data.bias, weight.in_features, weight.out_features)
