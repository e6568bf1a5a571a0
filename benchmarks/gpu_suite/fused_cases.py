"""Cases of fused launches: a row without the capability runs the separate operations.

Legend: T tokens, H heads, N qk_nope, C kv_lora_rank, R rotary width, V v_head, K experts per token, D hidden.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from benchmarks.attention_cases import paged_queries, pool_size
from benchmarks.gpu_suite.launched import counted, kernel_case
from benchmarks.kernel_cases import POSITIONS, Call, KernelCase, linear_weight, normal, rotary_table
from benchmarks.step_costs.costs import Routing
from moe_engine.kernels.kv_format.formats import FP8_GROUPS
from moe_engine.kernels.kv_format.latent_records import pack, unpack
from moe_engine.kernels.linear.shapes import LinearShape
from moe_engine.kernels.ops.protocol import RouterSpec
from moe_engine.kernels.ops.reference import TorchOps
from moe_engine.kernels.permutation.protocol import ExpertRows
from moe_engine.kernels.permutation.reference import TorchPermutation
from moe_engine.kernels.quantization.protocol import UNQUANTIZED, ActivationFormat, QuantizedActivation, RowsToNorm
from moe_engine.kernels.quantization.reference import dequantize_rows, quantize_rows
from moe_engine.kernels.queries import AttentionBatch
from tests.kernels.choices import Routed


def absorb(
    tokens: int, heads: int, nope: int = 128, latent: int = 512, rotary: int = 64, fp8: bool = False
) -> KernelCase:
    """MLA's decode query and cache rows, with `fp8` in records."""

    def prepare(ops: Any, device: str) -> Call:
        q = normal(tokens, heads, nope + rotary, device=device)
        keys = normal(heads, latent, nope, device=device, scale=nope**-0.5)
        kv_a, weight = normal(tokens, latent + rotary, device=device), 1 + 0.1 * normal(latent, device=device)
        positions = torch.randint(POSITIONS, (tokens,), device=device)
        slots, table = torch.randperm(2 * tokens, device=device)[:tokens], rotary_table(rotary, device)
        cache = torch.zeros(2 * tokens, latent + rotary, dtype=torch.bfloat16, device=device)
        cache = pack(cache, latent, FP8_GROUPS) if fp8 else cache
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

    def numbers(found: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        query, cache = found
        return query, unpack(cache, latent, rotary) if fp8 else cache

    name = f"fused.absorb{'.fp8' * fp8}.{heads}x{latent}.t{tokens}"
    return counted("ops", name, prepare, fp8=fp8, compared=numbers)


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


@kernel_case("linear", "fused.heads_quantized.{heads}x{value}{powers:.powers}.t{tokens}", fp8=True)
def heads_quantized(
    linear: Any, device: str, tokens: int, heads: int, value: int = 128, latent: int = 512, powers: bool = False
) -> Call:
    """The product per head, quantized for o_proj. powers: with scales that are powers of two."""
    x = normal(tokens, heads, latent, device=device)
    weight = linear.prepare_heads(normal(heads, value, latent, device=device, scale=latent**-0.5))
    fused, format = linear.capabilities.heads_quantized, ActivationFormat.fp8(powers)

    def apart() -> Tensor:
        return dequantize_rows(quantize_rows(linear.run_heads(x, weight).flatten(1), powers))

    def together() -> Tensor:
        found: QuantizedActivation = fused(x, weight, format)
        return dequantize_rows(found.rows)

    return apart if fused is None else together


@kernel_case("ops", "fused.norm_route.{hidden}x{experts}x{top_k}.t{tokens}")
def norm_route(ops: Any, device: str, tokens: int, hidden: int, experts: int, top_k: int) -> Call:
    """A part's result, the residual stream, its norm, and the router."""
    x, residual = (normal(tokens, hidden, device=device) for _ in range(2))
    weight, spec = 1 + 0.1 * normal(hidden, device=device), RouterSpec(experts, top_k, "softmax")
    gate = ops.prepare_gate(normal(experts, hidden, device=device, dtype=torch.float32, scale=hidden**-0.5))
    fused = ops.capabilities.add_norm_route

    def apart() -> tuple[Any, ...]:
        stream = residual.clone()
        normed = ops.add_rms_norm(x, stream, weight, 1e-6)
        return normed, Routed(*ops.route(normed, gate, None, spec), normed, gate, None, spec), stream

    def together() -> tuple[Any, ...]:
        stream = residual.clone()
        normed, *found = fused(UNQUANTIZED, x, stream, weight, 1e-6, gate, None, spec, None, False)
        return normed, Routed(*found, stream, gate, None, spec, (weight, 1e-6), roundings=1), stream

    return apart if fused is None else together


def _formats(powers: bool) -> tuple[ActivationFormat, ActivationFormat]:
    return ActivationFormat.fp8(powers), ActivationFormat(True, True, powers)


def requests(tokens: int, width: int) -> list[KernelCase]:
    """Norms and products per head that request the weights behind them."""

    def ahead(ops: Any, device: str) -> dict[str, Tensor]:
        return {"ahead": normal(width, width, device=device)} if ops.capabilities.norms_ahead else {}

    def norms(ops: Any, device: str) -> Call:
        x, residual, other = (normal(tokens, width, device=device) for _ in range(3))
        weight, more = 1 + 0.1 * normal(width, device=device), ahead(ops, device)

        def call() -> tuple[Tensor, ...]:
            first, *streams = (residual.clone() for _ in range(3))
            pair, sums = ops.capabilities.add_pair_rms_norm, [more, {}]  # of two parts: also without a request
            both = [
                pair(x, other, stream, weight, 1e-6, **request) if pair
                else ops.add_rms_norm(x + other, stream, weight, 1e-6)
                for stream, request in zip(streams, sums)
            ]  # fmt: skip
            alone = ops.rms_norm(x, weight, 1e-6, **more), ops.add_rms_norm(x, first, weight, 1e-6, **more)
            return *alone, first, *both, *streams

        return call

    def quantized(ops: Any, device: str) -> Call:
        x, residual = (normal(tokens, width, device=device) for _ in range(2))
        positions, chosen = torch.arange(tokens, device=device).int()[:, None], torch.rand(tokens, 1, device=device)
        weight, able = 1 + 0.1 * normal(width, device=device), ops.capabilities
        more, rows = ahead(ops, device), ExpertRows(x, positions, chosen, None)
        forms = [make for powers in (False, True) for make in _formats(powers)]

        def apart() -> tuple[Any, ...]:
            summed = TorchPermutation().combine(x, positions, chosen)
            added = [ops.add_rms_norm(part, residual.clone(), weight, 1e-6) for part in (summed, x, x + x)]
            return (ops.rms_norm(x, weight, 1e-6), *added) * len(forms)

        def together() -> tuple[Any, ...]:
            norms, found = able.quantized_norms, list[Any]()
            for form in forms:
                found += [
                    norms.rms_norm(form, x, weight, 1e-6, **more),
                    norms.add_rows_rms_norm(form, rows, residual.clone(), weight, 1e-6, **more),
                    norms.add_rms_norm(form, x, residual.clone(), weight, 1e-6, **more),
                    norms.add_pair_rms_norm(form, x, x, residual.clone(), weight, 1e-6, **more),
                ]
            return tuple(found)

        return apart if able.quantized_norms is None else together

    def numbers(found: tuple[Any, ...]) -> tuple[Tensor, ...]:
        return tuple(dequantize_rows(x.rows) if isinstance(x, QuantizedActivation) else x for x in found)

    def rows(ops: Any, device: str) -> Call:
        positions = torch.randperm(2 * tokens, device=device).int().view(tokens, 2)
        given = normal(2 * tokens, width, device=device), positions, torch.rand(tokens, 2, device=device)
        adds = None, normal(tokens, width, device=device)
        residual, weight = normal(tokens, width, device=device), 1 + 0.1 * normal(width, device=device)
        fused, more = ops.capabilities.add_rows_rms_norm, ahead(ops, device)

        def one(add: Tensor | None) -> Tensor:
            stream = residual.clone()
            if fused is None:
                return ops.add_rms_norm(TorchPermutation().combine(*given, add), stream, weight, 1e-6)
            return fused(ExpertRows(*given, add), stream, weight, 1e-6, **more)

        return lambda: tuple(map(one, adds))

    def heads(linear: Any, device: str) -> Call:
        x = normal(tokens, 4, 512, device=device)
        weight = linear.prepare_heads(normal(4, 128, 512, device=device, scale=512**-0.5))
        memory = tuple(normal(width, width, device=device) for _ in range(2))
        return lambda: tuple(linear.run_heads(x, replace(weight, following=memory[:n])) for n in (1, 2))

    return [
        counted("ops", f"requests.norms.{width}.t{tokens}", norms),
        counted("ops", f"requests.quantized.{width}.t{tokens}", quantized, fp8=True, compared=numbers),
        counted("ops", f"requests.rows.{width}.t{tokens}", rows),
        counted("linear", f"requests.heads.{width}.t{tokens}", heads),
    ]


ROUTERS = {
    "v3": (7168, RouterSpec(256, 8, "sigmoid", True, 8, 4, "top2", True, 2.5)),
    "kimi-k2": (7168, RouterSpec(384, 8, "sigmoid", True, renormalize=True, scale=2.827)),
    "gpt-oss": (2880, RouterSpec(128, 4, "softmax", True, renormalize=True, bias_on_logits=True)),
    "qwen3-next": (2048, RouterSpec(512, 10, "softmax", renormalize=True)),
    "v4": (4096, RouterSpec(256, 6, "sqrtsoftplus", True, renormalize=True, scale=1.5)),
    "longcat": (6144, RouterSpec(768, 12, "softmax", True, scale=6.0)),
}
"""Hidden size and router of models, whose gates are in bfloat16."""


@kernel_case("ops", "router.{label}.t{tokens}")
def router(ops: Any, device: str, label: str, tokens: int) -> Call:
    """The choice of experts by one of `ROUTERS`."""
    hidden, spec = ROUTERS[label]
    x, gate = normal(tokens, hidden, device=device), normal(spec.num_experts, hidden, device=device)
    bias = 0.1 * torch.randn(spec.num_experts, device=device) if spec.has_bias else None
    gate = gate * hidden**-0.5
    return lambda: Routed(*ops.route(x, gate, bias, spec), x, gate, bias, spec)


@kernel_case("mla", "fused.values.{heads}x{latent}.r{requests}.s{context}")
def attention_values(
    kernel: Any, device: str, requests: int, context: int, heads: int, latent: int = 512, value: int = 128
) -> Call:
    """MLA's absorbed decode and the product of its results with W_UV."""
    asked, width = paged_queries(requests, 1, context, device), latent + 64
    q, cache = normal(requests, heads, width, device=device), normal(pool_size(asked), width, device=device)
    weight, plan = normal(heads, value, latent, device=device), kernel.plan(AttentionBatch(asked, None))
    given, fused = (q, cache, asked, width**-0.5, plan), kernel.capabilities.absorbed_values

    def apart() -> Tensor:
        mixed = kernel.absorbed(*given, latent).float()
        return torch.einsum("thc,hvc->thv", mixed, weight.float()).to(q.dtype)

    return apart if fused is None else lambda: fused.run(*given, weight)


@kernel_case("linear", "fused.mlp.{hidden}x{width}.t{tokens}", fp8=True)
def mlp(linear: Any, device: str, tokens: int, hidden: int, width: int) -> Call:
    """A gated MLP in FP8: the activation between its products is quantized as it is computed."""
    shapes = (2 * width, hidden), (hidden, width)
    gate_up, down = (linear_weight(linear, LinearShape("", tokens, *shape, True), device) for shape in shapes)
    x, fused = normal(tokens, hidden, device=device), linear.fuse_mlp(gate_up, down)
    apart = lambda: linear.run(TorchOps().silu_and_mul(linear.run(x, gate_up)), down)  # noqa: E731
    return apart if fused is None else lambda: fused(x)


@kernel_case("linear", "fused.normed_query.{n}x{k}{row_scales:.rows}{power_of_two:.powers}.t{tokens}", fp8=True)
def normed_query(
    linear: Any, device: str, tokens: int, n: int, k: int, row_scales: bool = False, power_of_two: bool = False
) -> Call:
    """A query's product, which computes the norm of its few rows itself; they are part of wider rows. row_scales,
    power_of_two: as in `LinearShape`."""
    shape = LinearShape("", tokens, n, k, True, row_scales=row_scales, power_of_two=power_of_two)
    weight = linear_weight(linear, shape, device)
    x = normal(tokens, k + 64, device=device)[:, :k]
    norm, format = 1 + 0.1 * normal(k, device=device, dtype=torch.float32), linear.input_format(weight)
    if linear.capabilities.norms is None or not format.rows or format.exponents:
        return lambda: linear.run(TorchOps().rms_norm(x, norm, 1e-6), weight)
    return lambda: linear.run(RowsToNorm(x, norm, 1e-6), weight)


def parity_cases() -> list[KernelCase]:
    """Few and many tokens: both tilings."""
    many = [normed_query(1, 4096, 1024), absorb(130, 128), absorb(130, 128, fp8=True), heads_quantized(130, 128)]
    many += [combine_norm(130, 7168, 8)]
    many += [router(label, tokens) for label in ROUTERS for tokens in (5, 300)]
    many += [norm_route(130, 2048, 64, 6), *requests(40, 2048)]
    return [*timed_cases(5, 2048, 6, 300), *many]


def timed_cases(tokens: int, hidden: int, top_k: int, context: int) -> list[KernelCase]:
    """Of a decode step of few tokens."""
    return [
        absorb(tokens, 128),
        absorb(tokens, 128, fp8=True),
        heads_quantized(tokens, 128),
        combine_norm(tokens, hidden, top_k),
        norm_route(tokens, hidden, 256, top_k),
        norm_route(tokens, 2048, 64, 6),
        attention_values(tokens, context, 16),
        mlp(tokens, hidden, 2048),
        normed_query(tokens, 3072, 1536),
        normed_query(tokens, 3072, 1536, row_scales=True),
        normed_query(tokens, 3072, 1536, power_of_two=True),
        heads_quantized(tokens, 128, powers=True),
    ]


def tiny_cases() -> list[KernelCase]:
    return [
        absorb(3, 2, 32, 64, 16), absorb(3, 2, 32, 128, 16, fp8=True), combine_norm(5, 256, 2),
        heads_quantized(3, 2, 128, 64), norm_route(3, 64, 16, 2), *requests(3, 256),
        attention_values(2, 400, 4, 64, 32), mlp(3, 128, 128), heads_quantized(3, 2, 128, 64, powers=True),
        normed_query(3, 70, 256), normed_query(3, 70, 256, row_scales=True),
        normed_query(3, 70, 256, power_of_two=True),
    ]  # fmt: skip
