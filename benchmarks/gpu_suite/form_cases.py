"""Forms of kernels that some models launch and DeepSeek V3 does not: each line of a table is a case.

An operation of a table is called as it is, or is a pair: of the row's own function, and of other operations for rows
without it. Legend: T tokens, D hidden, H heads, W width of a head.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from importlib import import_module
from typing import Any, NamedTuple

import torch
from torch import Tensor

from benchmarks.gpu_suite.launched import counted
from benchmarks.kernel_cases import POSITIONS, Call, KernelCase, normal, rotary_table
from benchmarks.step_costs.costs import Routing
from moe_engine.kernels.gate_form import GELU, SQUARED, GatedActivation
from moe_engine.kernels.linear.tiles import FEW_ROWS
from moe_engine.kernels.ops import gated_streams, ngram_rows
from moe_engine.kernels.ops.block_rounding import E2M1, E2M1_SMALL, round_rows
from moe_engine.kernels.ops.protocol import CacheRows, HeadNorms, RotaryTable, RouterSpec
from moe_engine.kernels.ops.reference import TorchOps
from moe_engine.kernels.ops.residual_blocks import mix_blocks
from moe_engine.kernels.ops.streams import mix_streams
from moe_engine.kernels.ops.zero_experts import add_input
from moe_engine.kernels.permutation.protocol import ExpertRows
from moe_engine.kernels.permutation.reference import TorchPermutation
from moe_engine.kernels.quantization.groups import RowGroups
from moe_engine.kernels.quantization.protocol import UNQUANTIZED, ActivationFormat, QuantizedActivation
from moe_engine.kernels.quantization.reference import dequantize_rows
from tests.kernels.choices import Routed
from tests.kernels.drawn import (
    block_residual,
    block_weights,
    late_residual,
    late_weights,
    stream_weights,
    without_numbers,
)

EPS = 1e-6
GROUPS = "moe_engine.kernels.quantization"
STREAMS = 4
Run = Callable[[Any], Any]
"""Of a row: a call's result."""


def _values(found: Any) -> Tensor:
    """The numbers of quantized rows."""
    rows = found.rows if isinstance(found, QuantizedActivation) else found
    return dequantize_rows(rows)


def _case(family: str, name: str, make: Callable[[str], Run], **more: Any) -> KernelCase:
    """A case whose inputs `make` draws on a device."""

    def prepare(row: Any, device: str) -> Call:
        return partial(make(device), row)

    return counted(family, name, prepare, **more)


# -- activations, norms, quantized rows

ACTIVATIONS = {
    "clamped": GatedActivation(10.0), "shifted": GatedActivation(7.0, 1.702), "squared": SQUARED,
    "situ": GatedActivation(25.0, beta=4.0), "gelu": GELU,
}  # fmt: skip


def activations(tokens: int, width: int) -> Iterator[KernelCase]:
    """Activations of MLPs: of GLM-5.3-Flash, MiniMax-M3, Nemotron-H, Kimi K3 and Gemma."""
    for name, form in ACTIVATIONS.items():

        def make(device: str, form: GatedActivation = form) -> Run:
            x = normal(tokens, width if form.squared else 2 * width, device=device, scale=4.0)
            return lambda ops: ops.silu_and_mul(x, form)

        yield _case("ops", f"activation.{name}.{width}.t{tokens}", make)


def quantized(tokens: int, width: int) -> Iterator[KernelCase]:
    """Rows with scales that are powers of two (DeepSeek V4), and norms with and without what follows them."""

    def rows(device: str) -> Run:
        x = normal(tokens, width, device=device)
        return lambda kernel: kernel.quantize_rows(x, True).scales

    def gated(device: str) -> Run:
        x = normal(tokens, 2 * width, device=device, scale=4.0)
        return lambda kernel: _values(kernel.silu_mul_quantize(x, True, limit=10.0))

    def packed(device: str) -> Run:
        """Of rows in padded groups, half of which are valid."""
        groups = RowGroups(torch.full((tokens,), 8, dtype=torch.int32, device=device))
        scales = torch.exp2(torch.randint(-20, 20, (tokens, 16, -(-width // 128)), device=device).float())

        def run(kernel: Any) -> Tensor:
            in_triton = kernel.__name__.endswith("triton_rows")
            pack = import_module(f"{GROUPS}.{'triton_groups' if in_triton else 'groups'}").pack_scales
            found: Tensor = pack(scales, groups)
            return found[:, :8]

        return run

    yield _case("quantization", f"pack_scales.{width}.g{tokens}", packed, routing=Routing(tokens, 8, tokens, tokens))
    yield _case("quantization", f"quantize.powers.{width}.t{tokens}", rows)
    yield _case("quantization", f"activation.quantized.powers.{width}.t{tokens}", gated, fp8=True)
    for adds, powers, keep in ((False, False, False), (True, False, False), (False, False, True), (False, True, False)):

        def norm(device: str, adds: bool = adds, powers: bool = powers, keep: bool = keep) -> Run:
            x, residual = (normal(tokens, width, device=device) for _ in range(2))
            weight = 1 + 0.1 * normal(width, device=device, dtype=torch.float32)

            def run(kernel: Any) -> tuple[Tensor, ...]:
                stream = residual.clone() if adds else None
                normed, found = kernel.rms_norm_quantize(x, weight, EPS, stream, powers, keep)
                return tuple(part for part in (_values(found), normed, stream) if part is not None)

            return run

        form = ".add" * adds + ".powers" * powers + ".keep" * keep
        yield _case("quantization", f"rms_norm_quantized{form}.{width}.t{tokens}", norm, fp8=True)


# -- attention's rows


class GroupedRow(NamedTuple):
    """normed: q and k are. valued: there are values. trailing: the last channels are rotated, in one KV head. asked:
    there are queries."""

    normed: bool = True
    interleaved: bool = False
    valued: bool = True
    trailing: bool = False
    asked: bool = True


GROUPED_ROWS = {
    "plain": GroupedRow(False), "norms": GroupedRow(), "keys": GroupedRow(valued=False),
    "interleaved": GroupedRow(False, True), "interleaved.norms": GroupedRow(True, True),
    "trailing": GroupedRow(True, True, False, True), "trailing.keys": GroupedRow(True, True, False, True, asked=False),
}  # fmt: skip
"""Rows of gpt-oss, Qwen3, the index rows of MiniMax-M3, Llama 4, and DeepSeek V4 with those of its draft extend."""


def grouped_rows(name: str, tokens: int, heads: int, width: int) -> KernelCase:
    form = GROUPED_ROWS[name]
    held = 1 if form.trailing else max(1, heads // 4)

    def make(device: str) -> Run:
        asked = heads * form.asked
        q, k, v = (normal(tokens, count, width, device=device) for count in (asked, held, held))
        table = replace(rotary_table(width // 2, device), interleaved=form.interleaved)
        norms = HeadNorms(torch.rand(width, device=device) + 0.5, torch.rand(width, device=device) + 0.5, EPS)
        positions = torch.randint(POSITIONS, (tokens,), device=device)
        slots = torch.randperm(2 * tokens, device=device)[:tokens]
        caches = [torch.zeros(2 * tokens, held, width, dtype=torch.bfloat16, device=device) for _ in "kv"]
        key_cache, value_cache = caches

        def apart(ops: Any) -> tuple[Tensor, ...]:
            pairs = ((q, norms.q), (k, norms.k))[not form.asked :]
            rows = [ops.rms_norm(x, weight, EPS) if form.normed else x.clone() for x, weight in pairs]
            for x in rows:
                (ops.rotate if form.trailing else ops.rotate_leading)(x, positions, table)
            ops.write_kv(rows[-1], v if form.valued else rows[-1], slots, *caches)
            return *rows[:-1], *caches[: 1 + form.valued]

        def run(ops: Any) -> tuple[Tensor, ...]:
            if (fused := ops.capabilities.grouped_rows) is None:
                return apart(ops)
            values, to = (v, value_cache) if form.valued else (None, None)
            given = norms if form.normed else None, positions, table, slots, key_cache, to, None, form.trailing
            found = fused(q, k, values, *given)
            return *[found][: form.asked], *caches[: 1 + form.valued]

        return run

    return _case("ops", f"grouped_rows.{name}.{heads}x{held}x{width}.t{tokens}", make)


def rows_of_mla(tokens: int, heads: int, latent: int, width: int) -> Iterator[KernelCase]:
    """Rotation of halves, rows without rotary channels (GLM-5.3-Flash), and DeepSeek V4.1's roundings."""

    def halves(device: str) -> Run:
        x, positions = normal(tokens, heads, width, device=device), torch.randint(POSITIONS, (tokens,), device=device)
        table = replace(rotary_table(width // 2, device), interleaved=False)

        def run(ops: Any) -> Tensor:
            ops.rotate_leading(found := x.clone(), positions, table)
            return found

        return run

    def plain(device: str) -> Run:
        x, weight = normal(tokens, latent, device=device), torch.rand(latent, device=device) + 0.5
        slots, positions = torch.randperm(2 * tokens, device=device)[:tokens], torch.arange(tokens, device=device)
        table = RotaryTable(torch.zeros(POSITIONS, 0, device=device), True)
        cache = torch.zeros(2 * tokens, latent, dtype=torch.bfloat16, device=device)

        def run(ops: Any) -> Tensor:
            ops.write_latent(x, weight, EPS, positions, table, slots, cache)
            return cache

        return run

    yield _case("ops", f"rotate.halves.{heads}x{width}.t{tokens}", halves)
    yield _case("ops", f"write_latent.{latent}x0.t{tokens}", plain)
    for kind, normed, writes in ((E2M1, True, True), (E2M1_SMALL, False, True), (E2M1, False, False)):

        def rounded(device: str, kind: str = kind, normed: bool = normed, writes: bool = writes) -> Run:
            x = normal(tokens, 1 if writes else heads, width, device=device)
            norm = (torch.rand(width, device=device) + 0.5, EPS) if normed else None
            positions, table = torch.randint(POSITIONS, (tokens,), device=device), rotary_table(width // 2, device)
            cache = torch.zeros(2 * tokens, width, dtype=torch.bfloat16, device=device)
            to = CacheRows(torch.randperm(2 * tokens, device=device)[:tokens], cache) if writes else None

            def run(ops: Any) -> Tensor:
                rounds = ops.capabilities.round_rows or partial(round_rows, ops)
                return rounds(x.clone(), norm, positions, table, kind, to)

            return run

        form = ".norm" * normed + ("" if writes else ".apart")
        yield _case("ops", f"round_rows.{kind}{form}.{width}.t{tokens}", rounded, fp8=True)


# -- routers

ROUTERS = {
    "v2": RouterSpec(64, 6, "softmax", num_shared=2),
    "v2-ep8": RouterSpec(64, 6, "softmax"),
    "v3": RouterSpec(256, 8, "sigmoid", True, 8, 4, "top2", True, 2.5, num_shared=1),
    "glm-4.6": RouterSpec(160, 8, "sigmoid", True, renormalize=True, scale=2.5, num_shared=1),
    "kimi-k2": RouterSpec(384, 8, "sigmoid", True, renormalize=True, scale=2.827),
    "gpt-oss": RouterSpec(128, 4, "softmax", True, renormalize=True, bias_on_logits=True),
    "qwen3-next": RouterSpec(512, 10, "softmax", renormalize=True, num_shared=1, shared_gate=True),
    "llama-4": RouterSpec(16, 1, "sigmoid"),
    "flint": RouterSpec(256, 6, "sigmoid", renormalize=True, num_shared=2),
    "flint-ep8": RouterSpec(256, 6, "sigmoid", renormalize=True),
    "v4": RouterSpec(256, 6, "sqrtsoftplus", renormalize=True, scale=1.5),
    "phi-3.5": RouterSpec(16, 2, "sparsemixer", jitter=0.1),
}
"""With the shared experts that follow the routed ones."""
AHEAD = "v2", "v3", "glm-4.6", "qwen3-next", "flint"
"""The launch also requests a weight that is read soon."""
GIVEN = ("v4",)
"""The ids are those of a table by token (the first layers of DeepSeek V4)."""
_LING = replace(ROUTERS["v3"], num_experts=512)


def _alone(spec: RouterSpec) -> RouterSpec:
    """Without shared experts: a dispatcher sends the routed ones only."""
    return replace(spec, num_shared=0, shared_gate=False)


IN_ONE_LAUNCH = {
    **ROUTERS,
    "v4-scores": RouterSpec(256, 6, "sqrtsoftplus", True, renormalize=True, scale=1.5),
    "longcat": RouterSpec(768, 12, "softmax", True, scale=6.0),
    "qwen3-next-ep8": _alone(ROUTERS["qwen3-next"]),
}
NORM_ROUTES = {
    **{name: (ROUTERS[name], False) for name in (
        "v2", "kimi-k2", "gpt-oss", "qwen3-next", "llama-4", "flint", "flint-ep8")},
    **{name: (ROUTERS[name], True) for name in ("v3", "glm-4.6")}, "ling": (_LING, False),
    **{f"{name}-ep8": (_alone(ROUTERS[name]), quantizes) for name, quantizes in (
        ("v3", True), ("glm-4.6", True), ("qwen3-next", False))}, "ling-ep8": (_alone(_LING), False),
}  # fmt: skip
"""Routers in one launch with the norm, and whether it is also quantized."""


def routers(tokens: int, many: int, hidden: int) -> Iterator[KernelCase]:
    """Of few tokens, in two launches and in one, and of many."""
    for name, spec in ROUTERS.items():
        for count in (tokens, many):
            yield _router(name, spec, count, hidden)
    for name, spec in IN_ONE_LAUNCH.items():
        yield _router(name, spec, FEW_ROWS + tokens, hidden)
    for name in AHEAD:
        yield _router(name, ROUTERS[name], tokens, hidden, ahead=True)
    for name, (spec, quantizes) in NORM_ROUTES.items():
        for quantized in {False, quantizes}:
            for count in (tokens, FEW_ROWS + tokens):  # in two launches and in one
                yield _norm_route(name, spec, count, hidden, quantized)


def _gate(spec: RouterSpec, hidden: int, device: str) -> tuple[Tensor, Tensor | None]:
    gate = normal(spec.num_logits, hidden, device=device, scale=hidden**-0.5)
    return gate, 0.1 * torch.randn(spec.num_experts, device=device) if spec.has_bias else None


def _route(ops: Any, x: Tensor, gate: Tensor, bias: Tensor | None, spec: RouterSpec, *more: Any) -> tuple[Tensor, ...]:
    """Of a row that has no shared experts by torch's."""
    weights, ids = (ops if ops.capabilities.routes_shared else TorchOps()).route(x, gate, bias, spec, *more)
    return weights, ids


def _router(name: str, spec: RouterSpec, tokens: int, hidden: int, ahead: bool = False) -> KernelCase:
    def make(device: str) -> Run:
        x, (gate, bias) = normal(tokens, hidden, device=device), _gate(spec, hidden, device)
        given = torch.rand(tokens, spec.num_experts, device=device).topk(spec.top_k).indices.int()
        more, wanted = (None, given) if name in GIVEN else (), normal(hidden, hidden, device=device)

        def run(ops: Any) -> Routed:
            early = ops.capabilities.route_ahead
            if early is None or not ahead:
                found = _route(ops, x, ops.prepare_gate(gate), bias, spec, *more)
            else:
                found = early(x, ops.prepare_gate(gate), bias, spec, None, None, wanted)
            return Routed(*found, x, gate, bias, spec, given=given if name in GIVEN else None)

        return run

    return _case("ops", f"router.{name}{'.ahead' * ahead}.shared.t{tokens}", make)


def _norm_route(name: str, spec: RouterSpec, tokens: int, hidden: int, quantized: bool) -> KernelCase:
    """The launch also requests a weight that is read soon."""
    format = ActivationFormat(True, True) if quantized else UNQUANTIZED

    def make(device: str) -> Run:
        x, residual = (normal(tokens, hidden, device=device) for _ in range(2))
        weight, (gate, bias) = 1 + 0.1 * normal(hidden, device=device), _gate(spec, hidden, device)
        ahead = normal(hidden, hidden, device=device) if spec.num_shared else None

        def run(ops: Any) -> tuple[Tensor, Tensor, Routed]:
            stream, fused, given = (
                residual.clone(),
                ops.capabilities.add_norm_route,
                (ops.prepare_gate(gate), bias, spec),
            )
            if fused is None:
                normed = ops.add_rms_norm(x, stream, weight, EPS)
                return normed, stream, Routed(*_route(ops, normed, *given), normed, gate, bias, spec)
            normed, weights, ids = fused(format, x, stream, weight, EPS, *given, None, False, ahead)
            normed = normed.unquantized if quantized else normed
            return normed, stream, Routed(weights, ids, stream, gate, bias, spec, (weight, EPS), roundings=1)

        return run

    return _case("ops", f"norm_route.{name}{'.quantized' * quantized}.t{tokens}", make)


# -- experts' results


def sums(tokens: int, hidden: int, top_k: int) -> Iterator[KernelCase]:
    """Sums of experts' rows beside the ordinary ones: with what is added, the norm without it, identities alone."""
    routing = Routing(tokens, top_k, top_k, top_k)

    def rows(device: str) -> tuple[Tensor, Tensor, Tensor]:
        pairs = tokens * top_k
        positions = torch.randperm(pairs, device=device).int().view(tokens, top_k)
        return normal(pairs, hidden, device=device), positions, torch.rand(tokens, top_k, device=device)

    def combine(device: str) -> Run:
        given, add = rows(device), normal(tokens, hidden, device=device)
        return lambda kernel: kernel.combine(*given, add)

    def plain(device: str) -> Run:
        given = rows(device)[:2]
        return lambda kernel: kernel.combine(*given)

    def norm(device: str, format: ActivationFormat = UNQUANTIZED) -> Run:
        given, residual = rows(device), normal(tokens, hidden, device=device)
        weight = 1 + 0.1 * normal(hidden, device=device)

        def run(ops: Any) -> tuple[Tensor, Tensor]:
            stream, able = residual.clone(), ops.capabilities
            if able.add_rows_rms_norm is None:
                return ops.add_rms_norm(TorchPermutation().combine(*given), stream, weight, EPS), stream
            rows = ExpertRows(*given, None)
            if format.rows:
                return _values(able.quantized_norms.add_rows_rms_norm(format, rows, stream, weight, EPS)), stream
            return able.add_rows_rms_norm(rows, stream, weight, EPS), stream

        return run

    def identities(device: str) -> Run:
        x, weights = normal(tokens, hidden, device=device), torch.rand(tokens, top_k, device=device)
        ids = torch.randint(-64, 128, (tokens, top_k), dtype=torch.int32, device=device).clamp(min=-1)
        return lambda ops: (ops.capabilities.add_input or add_input)(x, weights, ids, None)

    yield _case("permutation", f"combine.add.{hidden}x{top_k}.t{tokens}", combine, routing=routing)
    yield _case("permutation", f"combine.ones.{hidden}x{top_k}.t{tokens}", plain, routing=routing)
    for name, format in (("rows", ActivationFormat.fp8(False)), ("quantized", ActivationFormat(True, True))):
        make = partial(norm, format=format)
        yield _case("ops", f"combine_norm.{name}.{hidden}x{top_k}.t{tokens}", make, routing=routing, fp8=True)
    yield _case("ops", f"combine_norm.alone.{hidden}x{top_k}.t{tokens}", norm, routing=routing)
    yield _case("ops", f"zero_experts.alone.{hidden}x{top_k}.t{tokens}", identities)


# -- residuals of several rows


class StreamForm(NamedTuple):
    """adds: a part's result. quantized: the norm, keeps: also its unquantized values. numbers: those of the next part
    are computed, else only the sum or the mean is read. writes: something is written behind the sum. normed: a norm of
    the sum is part of it."""

    adds: bool = True
    quantized: bool = False
    keeps: bool = True
    numbers: bool = True
    writes: bool = True
    normed: bool = True


STREAM_FORMS = {
    "begins": StreamForm(adds=False), "quantized": StreamForm(quantized=True), "rows": StreamForm(True, True, False),
    "read": StreamForm(numbers=False), "head": StreamForm(writes=False),
    "sum": StreamForm(writes=False, normed=False),
}  # fmt: skip


def residuals(tokens: int, width: int) -> Iterator[KernelCase]:
    """`STREAM_FORMS` with and without late sums, gated streams before the first part, a row of the residual that
    begins."""
    for late in (False, True):
        yield from (
            _streams(name, tokens, width, late) for name in STREAM_FORMS if STREAM_FORMS[name].writes or not late
        )

    def begun(device: str) -> Run:
        residual, norm = block_residual(2, width, tokens, device).bfloat16(), torch.rand(width, device=device) + 0.5
        weights, x = block_weights(width, 1, True, device), normal(tokens, width, device=device)

        def run(ops: Any) -> tuple[Tensor, Tensor]:
            stream = residual.clone()
            return (ops.capabilities.mix_blocks or mix_blocks)(x, stream, weights, norm), stream

        return run

    def gated(device: str) -> Run:
        residual = normal(tokens, STREAMS * (width + 1), device=device)
        weight, projected = torch.rand(STREAMS, width, device=device) + 0.5, normal(tokens, 64, device=device)

        def run(ops: Any) -> tuple[Tensor, Tensor]:
            kernels = ops.capabilities.gated_streams or gated_streams.IN_TORCH
            return kernels.norm(None, residual, weight, EPS), kernels.gate(projected, 64, STREAMS, None)

        return run

    def values(device: str) -> Run:
        rows = normal(tokens, 24, 256, device=device)
        return lambda ops: (ops.capabilities.ngrams or ngram_rows.IN_TORCH).values(rows, None, torch.bfloat16)

    yield _case("ops", f"mix_blocks.begins.{width}.t{tokens}", begun)
    yield _case("ops", f"gated_streams.first.{width}.t{tokens}", gated)
    yield _case("ops", f"ngram_values.bf16.t{tokens}", values)


def _streams(name: str, tokens: int, width: int, late: bool) -> KernelCase:
    """One of the forms `STREAM_FORMS`."""
    form, norm_format = STREAM_FORMS[name], UNQUANTIZED
    if form.quantized:
        norm_format = ActivationFormat(form.keeps, True, True)

    def make(device: str) -> Run:
        if late:
            weights = late_weights(STREAMS, width, device)[0]
        else:
            weights = stream_weights(STREAMS, width, form.writes, device=device)
        weights = weights if form.numbers else without_numbers(weights)
        residual = late_residual(STREAMS, width, tokens, device).bfloat16()
        norm = torch.rand(width, device=device) + 0.5
        x = normal(tokens, width, device=device) if form.adds else None

        def run(ops: Any) -> tuple[Tensor, Tensor]:
            stream, fused = residual.clone(), ops.capabilities.mix_norm_streams
            if not form.normed:
                return (ops.capabilities.mix_streams or mix_streams)(x, stream, weights), stream
            if fused is None:
                read = (ops.capabilities.mix_streams or mix_streams)(x, stream, weights)
                return ops.rms_norm(read, norm, EPS), stream
            found = fused(x, stream, weights, norm_format, norm, EPS)
            return _values(found) if form.quantized else found, stream

        return run

    return _case("ops", f"streams{'.late' * late}.{name}.{width}.t{tokens}", make, fp8=form.quantized)


def cases(tokens: int, many: int, hidden: int, heads: int, width: int) -> list[KernelCase]:
    """Of steps of `tokens` decodes, and of `many` tokens."""
    return [
        *activations(tokens, hidden), *quantized(tokens, hidden),
        *(grouped_rows(name, tokens, heads, width) for name in GROUPED_ROWS),
        *rows_of_mla(tokens, heads, 4 * width, width), *routers(tokens, many, hidden), *sums(tokens, hidden, 8),
        *residuals(tokens, hidden),
    ]  # fmt: skip
