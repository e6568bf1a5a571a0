"""Cases of fused launches: a row without the capability runs the separate operations.

Legend: T tokens, H heads, N qk_nope, C kv_lora_rank, R rotary width, V v_head, K experts per token, D hidden.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from benchmarks.gpu_suite.launched import counted
from benchmarks.kernel_cases import POSITIONS, Call, KernelCase, normal, rotary_table
from benchmarks.step_costs.costs import Routing
from moe_engine.kernels.permutation.protocol import ExpertRows
from moe_engine.kernels.permutation.reference import TorchPermutation
from moe_engine.kernels.quantization.protocol import ActivationFormat, QuantizedActivation
from moe_engine.kernels.quantization.reference import dequantize_rows, quantize_rows


def absorb(tokens: int, heads: int, nope: int = 128, latent: int = 512, rotary: int = 64) -> KernelCase:
    """MLA's decode query and cache rows."""

    def prepare(ops: Any, device: str) -> Call:
        q = normal(tokens, heads, nope + rotary, device=device)
        keys = normal(heads, latent, nope, device=device, scale=nope**-0.5)
        kv_a, weight = normal(tokens, latent + rotary, device=device), 1 + 0.1 * normal(latent, device=device)
        positions = torch.randint(POSITIONS, (tokens,), device=device)
        slots, table = torch.randperm(2 * tokens, device=device)[:tokens], rotary_table(rotary, device)
        cache = torch.zeros(2 * tokens, latent + rotary, dtype=torch.bfloat16, device=device)
        fused = ops.capabilities.absorb

        def apart() -> tuple[Tensor, Tensor]:
            turned = q.clone()
            ops.rotate(turned, positions, table)
            ops.write_latent(kv_a, weight, 1e-6, positions, table, slots, cache)
            product = torch.einsum("thn,hcn->thc", q[..., :nope].float(), keys.float()).to(q.dtype)
            return torch.cat((product, turned[..., nope:]), -1), cache

        def together() -> tuple[Tensor, Tensor]:
            return fused(q, keys, kv_a, weight, 1e-6, positions, table, slots, cache), cache

        return apart if fused is None else together

    return counted("ops", f"fused.absorb.{heads}x{latent}.t{tokens}", prepare)


def combine_norm(tokens: int, hidden: int, top_k: int) -> KernelCase:
    """The weighted sum of experts' rows, the residual stream, and its norm."""

    def prepare(ops: Any, device: str) -> Call:
        pairs = tokens * top_k
        positions = torch.randperm(pairs, device=device).int().view(tokens, top_k)
        weights, shared = torch.rand(tokens, top_k, device=device), normal(tokens, hidden, device=device)
        rows = ExpertRows(normal(pairs, hidden, device=device), positions, weights, shared)
        residual, weight = normal(tokens, hidden, device=device), 1 + 0.1 * normal(hidden, device=device)
        fused = ops.capabilities.add_rows_rms_norm

        def apart() -> tuple[Tensor, Tensor]:
            stream = residual.clone()
            summed = TorchPermutation().combine(rows.rows, rows.positions, rows.weights, rows.add)
            return ops.add_rms_norm(summed, stream, weight, 1e-6), stream

        def together() -> tuple[Tensor, Tensor]:
            stream = residual.clone()
            return fused(rows, stream, weight, 1e-6), stream

        return apart if fused is None else together

    routing = Routing(tokens, top_k, top_k, top_k)
    return counted("ops", f"fused.combine_norm.{hidden}x{top_k}.t{tokens}", prepare, routing=routing)


def heads_quantized(tokens: int, heads: int, value: int = 128, latent: int = 512) -> KernelCase:
    """The product per head, quantized for o_proj."""

    def prepare(linear: Any, device: str) -> Call:
        x = normal(tokens, heads, latent, device=device)
        weight = linear.prepare_heads(normal(heads, value, latent, device=device, scale=latent**-0.5))
        fused, format = linear.capabilities.heads_quantized, ActivationFormat.fp8(False)

        def apart() -> Tensor:
            return dequantize_rows(quantize_rows(linear.run_heads(x, weight).flatten(1)))

        def together() -> Tensor:
            found: QuantizedActivation = fused(x, weight, format)
            return dequantize_rows(found.rows)

        return apart if fused is None else together

    return counted("linear", f"fused.heads_quantized.{heads}x{value}.t{tokens}", prepare, fp8=True)


def parity_cases() -> list[KernelCase]:
    """Few and many tokens: both tilings."""
    cases = [make(tokens, 128) for make in (absorb, heads_quantized) for tokens in (3, 130)]
    return [*cases, combine_norm(5, 2048, 6), combine_norm(130, 7168, 8)]


def tiny_cases() -> list[KernelCase]:
    return [absorb(3, 2, 32, 64, 16), combine_norm(5, 256, 2), heads_quantized(3, 2, 128, 64)]
