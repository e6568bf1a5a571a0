"""Norms, rotary, activation, cache writes and routing in C++: one call each, no temporaries."""

from __future__ import annotations

import ctypes
from functools import lru_cache, partial

import torch
from torch import Tensor

from moe_engine.kernels.cpu.library import Library, load
from moe_engine.kernels.cpu.tensors import head_form, kind_of, latent_form, rows
from moe_engine.kernels.gate_form import SILU, GatedActivation
from moe_engine.kernels.ops.cpu_gated_streams import CpuGatedStreams
from moe_engine.kernels.ops.cpu_short_conv import gated_conv
from moe_engine.kernels.ops.protocol import OpsCapabilities, RotaryTable, RouterSpec
from moe_engine.kernels.ops.reference import with_padding
from moe_engine.kernels.ops.residual_blocks import BlockWeights, mix_blocks
from moe_engine.kernels.ops.streams import StreamWeights, mix_streams


class _Router(ctypes.Structure):
    _fields_ = [
        *((name, ctypes.c_int32) for name in ("experts", "top_k", "score", "groups", "topk_groups", "group_score")),
        ("renormalize", ctypes.c_float),
        ("scale", ctypes.c_float),
        ("bias_on_logits", ctypes.c_int32),
        ("held", ctypes.c_int32),
        ("jitter", ctypes.c_float),
    ]


@lru_cache
def router_struct(spec: RouterSpec) -> _Router:
    """The C struct of a router; raises ValueError for an invalid router."""
    scores = {"softmax": 0, "sigmoid": 1, "sqrtsoftplus": 2, "sparsemixer": 3}
    group_scores = {None: 0, "max": 1, "top2": 2}
    if spec.score not in scores or spec.group_score not in group_scores:
        raise ValueError(f"unknown router {spec.score!r} with group score {spec.group_score!r}")
    groups = spec.num_groups if spec.group_score else 1
    if spec.num_experts % groups or not 0 < spec.top_k <= spec.num_experts or spec.topk_groups > spec.num_groups:
        raise ValueError(f"invalid router: {spec}")
    if spec.first or spec.num_shared:
        raise ValueError(f"a router with shared experts, which this row does not support: {spec}")
    numbers = (spec.num_experts, spec.top_k, scores[spec.score], groups, spec.topk_groups)
    return _Router(
        *map(int, numbers), group_scores[spec.group_score], spec.sum_eps * spec.renormalize, spec.scale,
        int(spec.bias_on_logits), spec.num_held, spec.jitter,
    )  # fmt: skip


def _positions(positions: Tensor) -> Tensor:
    return positions if positions.dtype == torch.int64 and positions.is_contiguous() else positions.long().contiguous()


def _slots(slots: Tensor) -> Tensor:
    return slots if slots.is_contiguous() else slots.contiguous()


class _Streams(ctypes.Structure):
    """`moe::Streams` of streams.cpp."""

    _fields_ = (
        *((name, ctypes.c_int64) for name in ("tokens", "width", "count", "numbers", "iterations", "late")),
        *((name, ctypes.c_void_p) for name in ("fn", "base", "scale", "parts")),
        *((name, ctypes.c_float) for name in ("eps", "floor")),
    )


class _Blocks(ctypes.Structure):
    """`moe::ResidualBlocks` of residual_blocks.cpp."""

    _fields_ = (
        *((name, ctypes.c_int64) for name in ("tokens", "width", "written", "starts")),
        *((name, ctypes.c_void_p) for name in ("norm", "proj", "out_norm")),
        ("eps", ctypes.c_float),
    )


_MAX_ROWS = 64
"""Most rows of a token in residual_blocks.cpp."""
_MAX_STREAMS, _STREAM_CHUNK = 8, 1024
"""Largest number of streams, and channels of a task, of streams.cpp."""


class CpuOps:
    name = "cpu"

    def __init__(self, library: Library | None = None) -> None:
        self._lib = library or load()
        self._gated_streams = CpuGatedStreams(self._lib).kernels

    @property
    def capabilities(self) -> OpsCapabilities:
        return OpsCapabilities(
            mix_streams=self.mix_streams,
            gated_streams=self._gated_streams,
            mix_blocks=self.mix_blocks,
            add_input=self.add_input,
            layer_norm=self.layer_norm,
            gated_conv=partial(gated_conv, self._lib),
        )

    def add_input(self, x: Tensor, weights: Tensor, ids: Tensor, add: Tensor | None) -> Tensor:
        """See `AddInput`."""
        x, add = rows(x), None if add is None else rows(add)
        weights, ids = weights.contiguous(), ids.to(torch.int32).contiguous()
        out = torch.empty(x.shape, dtype=x.dtype)
        self._lib.moe_add_input(
            kind_of(x.dtype), x.data_ptr(), x.stride(0), weights.data_ptr(), ids.data_ptr(), ids.shape[1],
            None if add is None else add.data_ptr(), 0 if add is None else add.stride(0), out.data_ptr(), *x.shape,
        )  # fmt: skip
        return out

    def mix_streams(self, x: Tensor | None, residual: Tensor, weights: StreamWeights) -> Tensor:
        """See `MixStreams`."""
        n, numbers = weights.count, len(weights.base)
        tokens, width = len(residual), weights.fn.shape[1] // n
        if n > _MAX_STREAMS or residual.stride(1) != 1:
            return mix_streams(x, residual, weights)
        out = residual.new_empty(tokens, width)
        parts = torch.empty(tokens, -(-width // _STREAM_CHUNK), numbers + 1 + n * weights.late)
        x = None if x is None else rows(x.to(residual.dtype))
        struct = _Streams(
            tokens, width, n, numbers, weights.iterations, weights.late, weights.fn.data_ptr(),
            weights.base.data_ptr(), weights.scale.data_ptr(), parts.data_ptr(), weights.eps, weights.floor,
        )  # fmt: skip
        self._lib.moe_mix_streams(
            kind_of(residual.dtype), ctypes.byref(struct), None if x is None else x.data_ptr(),
            0 if x is None else x.stride(0), residual.data_ptr(), residual.stride(0), out.data_ptr(),
        )  # fmt: skip
        return out

    def mix_blocks(self, x: Tensor | None, residual: Tensor, weights: BlockWeights, norm: Tensor | None) -> Tensor:
        """See `MixBlocks`."""
        if weights.written >= _MAX_ROWS or residual.stride(1) != 1:
            return mix_blocks(x, residual, weights, norm)
        width = len(weights.norm)
        out = residual.new_empty(len(residual), width)
        x = None if x is None else rows(x.to(residual.dtype))
        struct = _Blocks(
            len(residual), width, weights.written, weights.starts, weights.norm.data_ptr(), weights.proj.data_ptr(),
            None if norm is None else norm.data_ptr(), weights.eps,
        )  # fmt: skip
        self._lib.moe_mix_blocks(
            kind_of(residual.dtype), ctypes.byref(struct), None if x is None else x.data_ptr(),
            0 if x is None else x.stride(0), residual.data_ptr(), residual.stride(0), out.data_ptr(),
        )  # fmt: skip
        return out

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        width = x.shape[-1]
        flat = rows(x if x.dim() == 2 else x.reshape(-1, width))
        out = torch.empty_like(x, memory_format=torch.contiguous_format)
        self._lib.moe_rms_norm(
            kind_of(x.dtype), kind_of(weight.dtype), flat.data_ptr(), flat.stride(0), weight.data_ptr(), eps,
            out.data_ptr(), flat.shape[0], width,
        )  # fmt: skip
        return out

    def add_rms_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> Tensor:
        if not residual.is_contiguous():
            residual.add_(x)
            return self.rms_norm(residual, weight, eps)
        x = rows(x)
        out = torch.empty_like(residual)
        self._lib.moe_add_rms_norm(
            kind_of(x.dtype), kind_of(weight.dtype), x.data_ptr(), x.stride(0), residual.data_ptr(), weight.data_ptr(),
            eps, out.data_ptr(), *x.shape,
        )  # fmt: skip
        return out

    def layer_norm(self, x: Tensor | None, residual: Tensor, weight: Tensor, bias: Tensor | None, eps: float) -> Tensor:
        """See `AddLayerNorm`."""
        x, out = None if x is None else rows(x), torch.empty_like(residual)
        self._lib.moe_layer_norm(
            kind_of(residual.dtype), None if x is None else x.data_ptr(), 0 if x is None else x.stride(0),
            residual.data_ptr(), weight.data_ptr(), None if bias is None else bias.data_ptr(), eps, out.data_ptr(),
            *residual.shape,
        )  # fmt: skip
        return out

    def silu_and_mul(self, gate_up: Tensor, form: GatedActivation = SILU) -> Tensor:
        gate_up = rows(gate_up)
        count, width = gate_up.shape
        width = width if form.squared else width // 2
        out = torch.empty((count, width), dtype=gate_up.dtype)
        self._lib.moe_silu_and_mul(
            kind_of(gate_up.dtype), gate_up.data_ptr(), gate_up.stride(0), out.data_ptr(), count, width, form.limit,
            form.alpha, form.beta, form.squared,
        )  # fmt: skip
        return out

    def rotate(self, x: Tensor, positions: Tensor, table: RotaryTable, inverse: bool = False) -> None:
        self._rotate(x, positions, table, x.shape[-1] - table.width, inverse)

    def rotate_leading(self, x: Tensor, positions: Tensor, table: RotaryTable) -> None:
        self._rotate(x, positions, table, 0)

    def _rotate(self, x: Tensor, positions: Tensor, table: RotaryTable, first: int, inverse: bool = False) -> None:
        tokens, heads, _ = x.shape
        token, head, step = x.stride()
        if step != 1:
            raise ValueError("rotate needs contiguous channels")
        positions = _positions(positions)
        self._lib.moe_rotate(
            kind_of(x.dtype), x.data_ptr() + first * x.element_size(), token, head, positions.data_ptr(),
            table.cos_sin.data_ptr(), table.width, table.interleaved, inverse, tokens, heads,
        )  # fmt: skip

    def write_latent(
        self, kv_a: Tensor, weight: Tensor, eps: float, positions: Tensor, table: RotaryTable, slots: Tensor,
        cache: Tensor, scale: float = 1.0,
    ) -> None:  # fmt: skip
        kv_a, positions, slots = rows(kv_a), _positions(positions), _slots(slots)
        tokens, width = kv_a.shape
        rotary = table.width
        self._lib.moe_write_latent(
            kind_of(kv_a.dtype), kind_of(weight.dtype), kv_a.data_ptr(), kv_a.stride(0), weight.data_ptr(), eps,
            positions.data_ptr(), table.cos_sin.data_ptr(), rotary, table.interleaved, slots.data_ptr(),
            slots.dtype == torch.int64, latent_form(cache, kv_a.dtype, width - rotary, rotary), cache.data_ptr(),
            cache.stride(0), tokens, width - rotary, scale,
        )  # fmt: skip

    def write_kv(self, k: Tensor, v: Tensor, slots: Tensor, k_cache: Tensor, v_cache: Tensor) -> None:
        k, v, slots = rows(k), rows(v), _slots(slots)
        tokens, heads, width = k.shape
        size = k.element_size()
        if k_cache.dtype != k.dtype:
            for x, cache in ((k, k_cache), (v, v_cache)):
                self._lib.moe_write_kv_fp8(
                    kind_of(x.dtype), head_form(cache, x.dtype, x.shape[2]), x.data_ptr(), x.stride(0), x.stride(1),
                    slots.data_ptr(), slots.dtype == torch.int64, cache.data_ptr(), cache.stride(0), tokens, heads,
                    x.shape[2],
                )  # fmt: skip
            return
        self._lib.moe_write_kv(
            k.data_ptr(), k.stride(0) * size, k.stride(1) * size, v.data_ptr(), v.stride(0) * size, v.stride(1) * size,
            slots.data_ptr(), slots.dtype == torch.int64, k_cache.data_ptr(), k_cache.stride(0) * size,
            v_cache.data_ptr(), v_cache.stride(0) * size, tokens, heads, width * size, v.shape[2] * size,
        )  # fmt: skip

    def prepare_gate(self, gate: Tensor) -> Tensor:
        return gate

    def route(
        self, x: Tensor, gate: Tensor, bias: Tensor | None, spec: RouterSpec, real: Tensor | None = None,
        experts: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        x = rows(x)
        tokens, width = x.shape
        weights = torch.empty((tokens, spec.top_k), dtype=torch.float32)
        ids = torch.empty((tokens, spec.top_k), dtype=torch.int32)
        experts = None if experts is None else experts.to(torch.int32).contiguous()
        used = bias if spec.has_bias else None
        self._lib.moe_route(
            kind_of(x.dtype), kind_of(gate.dtype), x.data_ptr(), x.stride(0), tokens, width, gate.data_ptr(),
            None if used is None else used.data_ptr(), ctypes.addressof(router_struct(spec)), weights.data_ptr(),
            ids.data_ptr(), None if experts is None else experts.data_ptr(),
        )  # fmt: skip
        return weights, with_padding(ids, real)
