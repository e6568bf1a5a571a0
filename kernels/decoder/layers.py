"""Whole layers in one call, as C structs that point to the weights of the C++ rows.

Legend: T tokens, D hidden, H heads, N qk_nope, P rotary width, C kv_lora_rank, V v_head, Q q_lora_rank, I width of the
shared expert, E experts, K experts per token.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from moe_engine.kernels.cpu.library import Library
from moe_engine.kernels.cpu.tensors import (
    ANY_KIND,
    KIND,
    ExpertPanels,
    Panels,
    common_kind,
    find,
    kind_of,
    latent_form,
    rows,
)
from moe_engine.kernels.decoder.counting import CountPlace
from moe_engine.kernels.gate_form import GatedActivation
from moe_engine.kernels.linear.protocol import PreparedLinear
from moe_engine.kernels.ops.cpu import router_struct
from moe_engine.kernels.ops.protocol import RotaryTable, RouterSpec
from moe_engine.kernels.queries import PagedQueries

MAX_TOKENS, MAX_LOGITS = 256, 1 << 24
"""Max tokens of a call of whole layers, and logits of a call with a head: the call keeps their memory for the next."""

P, L = ctypes.c_void_p, ctypes.c_int64


def most_tokens(vocab_size: int) -> int:
    """Max tokens of a call that ends with logits of all of them."""
    return min(MAX_TOKENS, MAX_LOGITS // vocab_size)


class Weight(ctypes.Structure):
    """A packed weight, [outputs, inputs]."""

    _fields_ = [("panels", P), ("bias", P), ("form", P), ("inputs", L), ("outputs", L)]


class _MLA(ctypes.Structure):
    _fields_ = [
        *((name, Weight) for name in ("down", "q", "keys", "values", "o")),
        *((name, P) for name in ("q_norm", "kv_norm", "table")),
        *((name, L) for name in ("heads", "rotary")),
        ("interleaved", ctypes.c_int32),
        *((name, ctypes.c_float) for name in ("eps", "scale", "latent_scale")),
    ]


class _MoE(ctypes.Structure):
    _fields_ = [
        *((name, P) for name in ("gate", "bias", "router", "experts", "experts_up", "experts_down")),
        *((name, L) for name in ("num_experts", "top_k", "width")),
        ("shared_up", Weight),
        ("shared_down", Weight),
        ("cell", P),
        ("first", L),
        ("gate_bf16", L),
        ("limit", ctypes.c_float),
    ]


@dataclass(frozen=True)
class MLALayer:
    """The weights of an MLA layer with absorbed products."""

    down: PreparedLinear  # [Q+C+P, D]: q's latent (if any), then the KV latent and the rotary channels
    q_norm: Tensor | None  # [Q] float32
    q: PreparedLinear  # [H*(N+P), Q], or [H*(N+P), D] without q_norm
    kv_norm: Tensor  # [C] float32
    keys: PreparedLinear  # heads of [C, N]
    values: PreparedLinear  # heads of [V, C]
    o: PreparedLinear  # [D, H*V]
    rotary: RotaryTable
    eps: float  # of both norms
    scale: float  # of scores
    latent_scale: float = 1.0  # of cache rows; scale and values include it


class PackedExperts(Protocol):
    """The part of `ExpertWeights` that a fused layer reads: packed weights and sizes."""

    @property
    def data(self) -> Any: ...
    @property
    def bias(self) -> Any: ...
    @property
    def activation(self) -> GatedActivation: ...
    @property
    def num_experts(self) -> int: ...
    @property
    def width(self) -> int: ...
    @property
    def hidden(self) -> int: ...


@dataclass(frozen=True)
class MoELayer:
    """The weights of a mixture-of-experts layer on one rank."""

    gate: Tensor  # [E, D] float32 or bfloat16
    bias: Tensor | None  # [E] float32
    router: RouterSpec
    experts: PackedExperts
    shared: tuple[PreparedLinear, PreparedLinear] | None  # the shared expert: gate and up [2I, D], down [D, I]


@dataclass(frozen=True, slots=True)
class FusedMLA:
    """An MLA layer in one call, in the absorbed form."""

    kind: int  # as in `tensors.KIND`, or `ANY_KIND`
    address: int
    hidden: int
    widths: tuple[int, int]  # C and P
    library: Library
    keep: tuple[Any, ...]

    def run(
        self, hidden: Tensor, positions: Tensor, slots: Tensor, cache: Tensor, queries: PagedQueries, plan: Any
    ) -> Tensor:
        """hidden [T, D] -> [T, D] bit-identical to the separate calls; all tokens belong to `queries`.

        Writes the tokens' rows to cache[slots] before attention; positions and slots are [T] int64.
        """
        hidden = rows(hidden)
        kind = kind_of(hidden.dtype)
        if self.kind not in (kind, ANY_KIND):
            raise ValueError(f"hidden states are {hidden.dtype}, the cache {cache.dtype}: not the weights' dtype")
        form = latent_form(cache, hidden.dtype, *self.widths)
        out = torch.empty((hidden.shape[0], self.hidden), dtype=hidden.dtype)
        struct = find(queries, plan)
        self.library.moe_mla_layer(
            kind, self.address, hidden.data_ptr(), hidden.stride(0), hidden.shape[0], positions.data_ptr(),
            slots.data_ptr(), form, cache.data_ptr(), cache.stride(0), struct.address, None, 0, out.data_ptr(),
        )  # fmt: skip
        return out


@dataclass(frozen=True, slots=True)
class FusedMoE:
    """A mixture-of-experts layer in one call: router, routed experts and shared expert."""

    kind: int
    address: int
    hidden: int
    struct: _MoE
    library: Library
    keep: tuple[Any, ...]

    def run(self, x: Tensor, topk_ids: Tensor | None = None) -> Tensor:
        """x [T, D] -> [T, D], bit-identical to the separate calls. `topk_ids` int32 [T, K], contiguous, if given,
        receives the router's choices."""
        x = rows(x)
        tokens, hidden = x.shape
        kind = kind_of(x.dtype)
        if self.kind not in (kind, ANY_KIND) or hidden != self.hidden:
            raise ValueError(f"rows {list(x.shape)} {x.dtype} do not fit a layer of hidden size {self.hidden}")
        out = torch.empty((tokens, hidden), dtype=x.dtype)
        chosen = None if topk_ids is None else topk_ids.data_ptr()
        self.library.moe_moe_layer(
            kind, self.address, x.data_ptr(), x.stride(0), tokens, hidden, out.data_ptr(), chosen
        )  # fmt: skip
        return out

    def count_choices(self, place: CountPlace | None) -> None:
        """Makes the layer, alone or inside a larger call, add 1 for every chosen expert from now on; None stops it. The
        caller keeps the cell alive."""
        struct = self.struct
        struct.cell, struct.first = (None, 0) if place is None else (place.cell.address, place.first)


def fuse_mla(library: Library, layer: MLALayer) -> FusedMLA | None:
    """None if a weight is not packed in panels of one dtype, or a norm is not float32."""
    weights = [layer.down, layer.q, layer.keys, layer.values, layer.o]
    kind = kind_of_weights(weights)
    norms = [norm for norm in (layer.q_norm, layer.kv_norm) if norm is not None]
    if kind is None or any(norm.dtype != torch.float32 for norm in norms):
        return None
    struct = _MLA(
        *map(weight_struct, weights), None if layer.q_norm is None else layer.q_norm.data_ptr(),
        layer.kv_norm.data_ptr(), layer.rotary.cos_sin.data_ptr(), layer.keys.data.heads, layer.rotary.width,
        int(layer.rotary.interleaved), layer.eps, layer.scale, layer.latent_scale,
    )  # fmt: skip
    widths = (layer.keys.out_features, layer.rotary.width)
    return FusedMLA(kind, ctypes.addressof(struct), layer.o.out_features, widths, library, (struct, layer))


def fuse_moe(library: Library, layer: MoELayer) -> FusedMoE | None:
    """None if a weight is not packed in panels of one dtype, or the shared expert cannot run in one call, or experts
    have biases, or their activation."""
    shared = [] if layer.shared is None else list(layer.shared)
    panels = layer.experts.data
    of_experts = panels.kind if isinstance(panels, ExpertPanels) else None
    kind = common_kind([of_experts, *([kind_of_weights(shared)] if shared else [])])
    if layer.experts.bias is not None or not layer.experts.activation.is_silu:
        return None
    if kind is None or layer.gate.dtype not in KIND or not layer.gate.is_contiguous():
        return None
    if shared and (shared[1].in_features % 16 or shared[0].bias is not None or shared[1].bias is not None):
        return None
    router = router_struct(layer.router)
    bias = layer.bias if layer.router.has_bias else None
    struct = _MoE(
        layer.gate.data_ptr(), None if bias is None else bias.data_ptr(), ctypes.addressof(router), panels.address,
        panels.form, panels.down_form, layer.experts.num_experts, layer.router.top_k, layer.experts.width,
        *map(weight_struct, shared), gate_bf16=kind_of(layer.gate.dtype), limit=layer.experts.activation.limit,
    )  # fmt: skip
    return FusedMoE(kind, ctypes.addressof(struct), layer.experts.hidden, struct, library, (router, layer))


def kind_of_weights(weights: list[PreparedLinear]) -> int | None:
    """The weights' common kind (`tensors.KIND`, `ANY_KIND`); None if they differ or belong to another row."""
    return common_kind(weight.data.kind if isinstance(weight.data, Panels) else None for weight in weights)


def weight_struct(weight: PreparedLinear) -> Weight:
    return Weight(weight.data.weight, weight.data.bias, weight.data.form, weight.in_features, weight.out_features)
