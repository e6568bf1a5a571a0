"""`Ops` in Triton. The kernels and their launches are in the sibling files, by function."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from moe_engine.kernels.gate_form import SILU, GatedActivation
from moe_engine.kernels.kv_format import head_records, latent_records
from moe_engine.kernels.kv_format.formats import PLAIN
from moe_engine.kernels.ops import (
    triton_absorb,
    triton_fp8_cache,
    triton_norm,
    triton_residual_blocks,
    triton_rotary,
    triton_router,
    triton_streams,
)
from moe_engine.kernels.ops.protocol import Gates, OpsCapabilities, QuantizedNorms, RotaryTable, RouterSpec
from moe_engine.kernels.ops.triton_block_rounding import round_rows
from moe_engine.kernels.ops.triton_combine_norm import combine_norm
from moe_engine.kernels.ops.triton_gated_streams import TRITON as GATED_STREAMS
from moe_engine.kernels.ops.triton_gates import gate_heads, gate_rows, scale_heads
from moe_engine.kernels.ops.triton_grouped import grouped_rows
from moe_engine.kernels.ops.triton_layer_norm import add_layer_norm
from moe_engine.kernels.ops.triton_lookup import lookup
from moe_engine.kernels.ops.triton_ngram_products import TRITON as NGRAM_PRODUCTS
from moe_engine.kernels.ops.triton_ngrams import NGRAMS
from moe_engine.kernels.ops.triton_norm_route import add_norm_route
from moe_engine.kernels.ops.triton_short_conv import gated_conv
from moe_engine.kernels.ops.triton_zero_experts import add_input
from moe_engine.kernels.permutation.protocol import ExpertRows
from moe_engine.kernels.quantization.protocol import Activation, ActivationFormat, QuantizedActivation
from moe_engine.kernels.quantization.triton_rows import rms_norm_quantize
from moe_engine.kernels.triton.grid_barrier import barrier_state


class TritonOps:
    """`Ops` on a GPU; no host synchronization, and no step-dependent shape compiles a new kernel.

    Args:
        deterministic: batch-invariant results; otherwise the router splits its sums by the number of tokens, and small
            steps have norm and router in one launch.
    """

    name = "triton"

    def __init__(self, deterministic: bool = False) -> None:
        self._deterministic = deterministic
        self._barriers: dict[torch.device, Tensor] = {}

    @property
    def capabilities(self) -> OpsCapabilities:
        norms = QuantizedNorms(
            self.rms_norm_quantized,
            self.add_rms_norm_quantized,
            self.add_pair_rms_norm_quantized,
            self.add_rows_rms_norm_quantized,
        )
        absorb = partial(triton_absorb.absorb, deterministic=self._deterministic)
        return OpsCapabilities(
            norms, self.add_pair_rms_norm, self.add_rows_rms_norm, self.route_int64,
            self.route_ahead, None if self._deterministic else self.add_norm_route, routes_shared=True, absorb=absorb,
            grouped_rows=grouped_rows, gates=Gates(gate_heads, gate_rows), lookup=lookup,
            mix_streams=triton_streams.mix, mix_norm_streams=triton_streams.mix_norm, ngrams=NGRAMS,
            gated_streams=GATED_STREAMS, ngram_products=NGRAM_PRODUCTS, round_rows=round_rows,
            mix_blocks=triton_residual_blocks.mix, add_input=add_input, scale_heads=scale_heads,
            layer_norm=add_layer_norm, norms_ahead=True, gated_conv=gated_conv,
        )  # fmt: skip

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float, ahead: Tensor | None = None) -> Tensor:
        return triton_norm.rms_norm(x, weight, eps, ahead)

    def add_rms_norm(
        self, x: Tensor, residual: Tensor, weight: Tensor, eps: float, ahead: Tensor | None = None
    ) -> Tensor:
        return triton_norm.add_rms_norm(x, residual, weight, eps, None, ahead)

    def rms_norm_quantized(
        self, format: ActivationFormat, x: Tensor, weight: Tensor, eps: float, ahead: Tensor | None = None
    ) -> QuantizedActivation:
        return _quantized(x, weight, eps, None, format, None, ahead)

    def add_rms_norm_quantized(
        self, format: ActivationFormat, x: Tensor, residual: Tensor, weight: Tensor, eps: float,
        ahead: Tensor | None = None,
    ) -> QuantizedActivation:  # fmt: skip
        return _quantized(x, weight, eps, residual, format, None, ahead)

    def add_pair_rms_norm(
        self, x: Tensor, other: Tensor, residual: Tensor, weight: Tensor, eps: float, ahead: Tensor | None = None
    ) -> Tensor:
        return triton_norm.add_rms_norm(x, residual, weight, eps, other, ahead)

    def add_pair_rms_norm_quantized(
        self, format: ActivationFormat, x: Tensor, other: Tensor, residual: Tensor, weight: Tensor, eps: float,
        ahead: Tensor | None = None,
    ) -> QuantizedActivation:  # fmt: skip
        return _quantized(x, weight, eps, residual, format, other, ahead)

    def add_rows_rms_norm(
        self, rows: ExpertRows, residual: Tensor, weight: Tensor, eps: float, ahead: Tensor | None = None
    ) -> Tensor:
        normed = combine_norm(rows, residual, weight, eps, ahead=ahead)
        assert isinstance(normed, Tensor)
        return normed

    def add_rows_rms_norm_quantized(
        self, format: ActivationFormat, rows: ExpertRows, residual: Tensor, weight: Tensor, eps: float,
        ahead: Tensor | None = None,
    ) -> QuantizedActivation:  # fmt: skip
        normed = combine_norm(rows, residual, weight, eps, format, ahead)
        assert isinstance(normed, QuantizedActivation)
        return normed

    def silu_and_mul(self, gate_up: Tensor, form: GatedActivation = SILU) -> Tensor:
        return triton_norm.silu_and_mul(gate_up, form)

    def rotate(self, x: Tensor, positions: Tensor, table: RotaryTable, inverse: bool = False) -> None:
        triton_rotary.rotate(x[..., x.shape[-1] - table.width :], positions, table, inverse)

    def rotate_leading(self, x: Tensor, positions: Tensor, table: RotaryTable) -> None:
        triton_rotary.rotate(x[..., : table.width], positions, table)

    def write_latent(
        self,
        kv_a: Tensor,
        weight: Tensor,
        eps: float,
        positions: Tensor,
        table: RotaryTable,
        slots: Tensor,
        cache: Tensor,
        scale: float = 1.0,
    ) -> None:
        form = latent_records.form_of(cache, weight.shape[0], table.width)
        if form == PLAIN:
            triton_rotary.write_latent(kv_a, weight, eps, positions, table, slots, cache)
        else:
            triton_fp8_cache.write_latent(kv_a, weight, eps, positions, table, slots, cache, form, scale)

    def write_kv(self, k: Tensor, v: Tensor, slots: Tensor, k_cache: Tensor, v_cache: Tensor) -> None:
        plain = head_records.form_of(k_cache, k.shape[-1]) == PLAIN
        (triton_rotary if plain else triton_fp8_cache).write_kv(k, v, slots, k_cache, v_cache)

    def prepare_gate(self, gate: Tensor) -> Tensor:
        self._barrier(gate.device)  # before a graph is captured
        return triton_router.prepare_gate(gate)

    def route(
        self, x: Tensor, gate: Tensor, bias: Tensor | None, spec: RouterSpec, real: Tensor | None = None,
        experts: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        barrier = self._barrier(x.device)
        return triton_router.route(x, gate, bias, spec, barrier, self._deterministic, real, torch.int32, experts)

    def route_int64(
        self, x: Tensor, gate: Tensor, bias: Tensor | None, spec: RouterSpec, real: Tensor | None = None,
        experts: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        barrier = self._barrier(x.device)
        return triton_router.route(x, gate, bias, spec, barrier, self._deterministic, real, torch.int64, experts)

    def route_ahead(
        self, x: Tensor, gate: Tensor, bias: Tensor | None, spec: RouterSpec, real: Tensor | None,
        experts: Tensor | None, ahead: Tensor,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        given = self._barrier(x.device), self._deterministic, real, torch.int32, experts
        return triton_router.route(x, gate, bias, spec, *given, ahead)

    def add_norm_route(
        self, format: ActivationFormat, x: Tensor, residual: Tensor, weight: Tensor, eps: float, gate: Tensor,
        bias: Tensor | None, spec: RouterSpec, real: Tensor | None, ids_int64: bool,
        ahead: Tensor | None = None,
    ) -> tuple[Activation, Tensor, Tensor]:  # fmt: skip
        ids_dtype = torch.int64 if ids_int64 else torch.int32
        barrier = self._barrier(x.device)
        return add_norm_route(format, x, residual, weight, eps, gate, bias, spec, barrier, real, ids_dtype, ahead)

    def _barrier(self, device: torch.device) -> Tensor:
        """The barrier state of the router's launches, which follow each other on the worker's stream."""
        found = self._barriers.get(device)
        if found is None:
            found = self._barriers[device] = barrier_state(device)
        return found


def _quantized(
    x: Tensor, weight: Tensor, eps: float, residual: Tensor | None, format: ActivationFormat,
    other: Tensor | None, ahead: Tensor | None,
) -> QuantizedActivation:  # fmt: skip
    normed, rows = rms_norm_quantize(
        x, weight, eps, residual, format.power_of_two, format.unquantized, other, format.exponents, ahead
    )
    return QuantizedActivation(rows, normed, x.dtype)
