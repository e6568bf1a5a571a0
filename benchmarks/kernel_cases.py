"""Kernel calls for benchmarks: the inputs of every named shape, and the call on a row of its family.

No command: `benchmarks.kernels` and `benchmarks.gpu_suite` time these calls.

Legend: T tokens, D hidden, I expert width, E experts, K experts per token.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Protocol

import torch
from torch import Tensor

from moe_engine.kernels.experts.batch import ExpertBiases, ExpertWeights
from moe_engine.kernels.experts.shapes import ExpertModel, ExpertShape
from moe_engine.kernels.linear.protocol import PreparedLinear
from moe_engine.kernels.linear.shapes import LinearShape
from moe_engine.kernels.ops.protocol import RotaryTable, RouterSpec
from moe_engine.kernels.ops.shapes import OpShape
from moe_engine.kernels.quantization.codes import CodedWeight, GroupCodes
from moe_engine.kernels.quantization.protocol import (
    FP8,
    FP8_MAX,
    ROW_FP8,
    BlockFP8,
    BlockWeight,
    KernelFormat,
    RowWeight,
)
from moe_engine.kernels.quantization.reference import dequantize_weight, quantize_weight
from moe_engine.kernels.sampling.protocol import Draw, SamplingParameters
from tests.kernels.choices import Routed
from tests.kernels.drawn import coded_weight

Call = Callable[[], Any]
POSITIONS = 4096


class NotServed(Exception):
    """This row does not support this shape; the message has the reason."""


class Work(Protocol):
    """What a call cannot do without: bytes of device memory and operations; any named shape."""

    @property
    def bytes(self) -> int: ...

    @property
    def flops(self) -> int: ...


@dataclass(frozen=True)
class KernelCase:
    """A shape of a family; `prepare(kernel, device)` makes inputs and returns the call to time.

    All kernels get the same seeded inputs; the call returns its result.

    Attributes:
        work: of the call, or a function of the case that counts it when it is first asked for.
        fp8: the products are in FP8, or the result is: parity has a wider bound.
        compared: the call's result -> what parity compares: tensors, or a router's choices.
    """

    family: str
    name: str
    work: Work | Callable[[KernelCase], Work]
    fp8: bool
    prepare: Callable[[Any, str], Call]
    compared: Callable[[Any], Any] = lambda found: found

    @cached_property
    def _work(self) -> Work:
        return self.work(self) if callable(self.work) else self.work

    @property
    def bytes(self) -> int:
        return self._work.bytes

    @property
    def flops(self) -> int:
        return self._work.flops

    def floor_seconds(self, bytes_per_s: float, flops_per_s: float) -> float:
        """Lower bound of any kernel's time on such a device."""
        return max(self.bytes / bytes_per_s, self.flops / flops_per_s)


def normal(*shape: int, device: str, dtype: torch.dtype = torch.bfloat16, scale: float = 1.0) -> Tensor:
    return torch.randn(*shape, device=device, dtype=torch.float32).mul_(scale).to(dtype)


def writes(result: Any, function: Callable[..., None], *arguments: Any) -> Call:
    """A call of a function that writes to tensors; gives these."""

    def call() -> Any:
        function(*arguments)
        return result

    return call


def op_case(shape: OpShape) -> KernelCase:
    family = "sampling" if shape.operation == "sample" else "ops"
    makers: dict[str, Callable[..., Call]] = {
        "rms_norm": _rms_norm, "add_rms_norm": _add_rms_norm, "silu_and_mul": _silu_and_mul, "rotate": _rotate,
        "write_latent": _write_latent, "route": _route, "sample": _sample,
    }  # fmt: skip
    make = makers[shape.operation]
    return KernelCase(
        family, shape.name, shape, False,
        lambda kernel, device: make(kernel, device, shape.tokens, *shape.widths),
    )  # fmt: skip


def _rms_norm(ops: Any, device: str, tokens: int, width: int) -> Call:
    x, weight = normal(tokens, width, device=device), normal(width, device=device)
    return lambda: ops.rms_norm(x, weight, 1e-6)


def _add_rms_norm(ops: Any, device: str, tokens: int, width: int) -> Call:
    x, residual, weight = (normal(*s, device=device) for s in ((tokens, width), (tokens, width), (width,)))
    return lambda: ops.add_rms_norm(x, residual, weight, 1e-6)


def _silu_and_mul(ops: Any, device: str, tokens: int, width: int) -> Call:
    gate_up = normal(tokens, 2 * width, device=device)
    return lambda: ops.silu_and_mul(gate_up)


def rotary_table(width: int, device: str) -> RotaryTable:
    angles = torch.rand(POSITIONS, width // 2, device=device) * 2 * math.pi
    return RotaryTable(torch.cat((angles.cos(), angles.sin()), -1), True)


def _rotate(ops: Any, device: str, tokens: int, heads: int, width: int) -> Call:
    x, table = normal(tokens, heads, 128 + width, device=device), rotary_table(width, device)
    positions = torch.randint(POSITIONS, (tokens,), device=device)
    return writes(x, ops.rotate, x, positions, table)


def _write_latent(ops: Any, device: str, tokens: int, latent: int, rotary: int) -> Call:
    kv_a, weight = normal(tokens, latent + rotary, device=device), normal(latent, device=device)
    table = rotary_table(rotary, device)
    positions = torch.randint(POSITIONS, (tokens,), device=device)
    cache = torch.zeros(2 * tokens, latent + rotary, dtype=torch.bfloat16, device=device)
    slots = torch.randperm(2 * tokens, device=device)[:tokens]
    return writes(cache, ops.write_latent, kv_a, weight, 1e-6, positions, table, slots, cache)


def _route(ops: Any, device: str, tokens: int, hidden: int, experts: int, top_k: int) -> Call:
    x, gate = normal(tokens, hidden, device=device), normal(experts, hidden, device=device, dtype=torch.float32)
    grouped = experts == 256
    spec = RouterSpec(experts, top_k, "softmax")
    if grouped:
        spec = RouterSpec(experts, top_k, "sigmoid", True, 8, 4, "top2", True, 2.5)
    bias = torch.randn(experts, device=device) if grouped else None
    return lambda: Routed(*ops.route(x, gate, bias, spec), x, gate, bias, spec)


def _sample(sampling: Any, device: str, rows: int, vocab: int) -> Call:
    """top_p 0.95 of peaked logits: as in chat requests."""
    import numpy as np

    logits = normal(rows, vocab, device=device, dtype=torch.float32, scale=3.0)

    def column(value: float) -> Tensor:
        return torch.full((rows,), value, device=device)

    top_k = torch.full((rows,), vocab, dtype=torch.int64, device=device)
    draws = np.full(rows, Draw.NUCLEUS, np.uint8)
    parameters = SamplingParameters(draws, column(0.7), column(0.95), column(0.0), top_k, device != "cpu")
    uniform = (torch.rand(rows, device=device) * 2**24).floor() * 2.0**-24
    return lambda: sampling.sample(logits, parameters, uniform)


def linear_case(shape: LinearShape) -> KernelCase:
    def prepare(kernel: Any, device: str) -> Call:
        if (dtype := _dtype_of(shape)) == torch.float16 and kernel.name not in ("torch", "triton"):
            raise NotServed("is measured in bfloat16")
        x = normal(shape.rows, shape.k, device=device, dtype=dtype)
        weight = linear_weight(kernel, shape, device)
        return lambda: kernel.run(x, weight)

    return KernelCase("linear", shape.name, shape, shape.fp8, prepare)


def linear_weight(kernel: Any, shape: LinearShape, device: str) -> PreparedLinear:
    """A weight as the kernel keeps it; dequantized for kernels without its format."""
    dtype, able = _dtype_of(shape), kernel.capabilities
    weight = normal(shape.n, shape.k, device=device, dtype=dtype, scale=shape.k**-0.5)
    bias = normal(shape.n, device=device, dtype=dtype) if shape.biased else None
    found: PreparedLinear
    if shape.fp8 or shape.format is not None:
        stored, format = _stored(weight, shape.format, shape.row_scales, shape.power_of_two)
        keep = able.quantized.get(type(format)) if able.takes is None or able.takes(format) else None
        if keep is not None:
            found = keep(stored, bias)
            return found
        weight = _values(stored, weight.dtype)
    found = kernel.prepare(weight, bias)
    return found


def _dtype_of(shape: LinearShape) -> torch.dtype:
    """AWQ's scales are float16, and so are its products."""
    return torch.bfloat16 if shape.format is None else getattr(torch, shape.format.scales)


def experts_case(shape: ExpertShape) -> KernelCase:
    """Routed experts on one rank; ids of experts on other ranks are ignored."""
    model, count = shape.model, shape.num_experts

    def prepare(kernel: Any, device: str) -> Call:
        weights = load_experts(kernel, count, model, device)
        x = normal(shape.tokens, model.hidden, device=device)
        ids = torch.rand(shape.tokens, model.num_experts, device=device).topk(model.top_k).indices.int()
        ids = ids.masked_fill(ids >= count, -1)
        shares = torch.rand(shape.tokens, model.top_k, device=device)
        return lambda: kernel.run_routed(x, shares, ids, weights, None)

    return KernelCase("experts", shape.name, shape, model.fp8, prepare)


def load_experts(kernel: Any, count: int, model: ExpertModel, device: str) -> ExpertWeights:
    """Weights of `count` identical experts of a model, each in its own memory; dequantized for kernels without their
    format."""
    able, form = kernel.capabilities, model.activation
    if not able.biases and (model.biased or not form.is_silu):
        raise NotServed("has no experts with this activation")
    if form.clamp and not able.clamps:
        raise NotServed("has no limit of the activation")
    weights = _filled_experts(kernel, count, model, device)
    weights.activation = form
    if model.biased:
        shapes = (count, 2 * model.width), (count, model.hidden)
        biases = [normal(*shape, device=device, dtype=torch.float32) for shape in shapes]
        weights.bias = ExpertBiases(biases[0], biases[1], 1.702, 7.0)
    return weights


def _filled_experts(kernel: Any, count: int, model: ExpertModel, device: str) -> ExpertWeights:
    hidden, width, squared = model.hidden, model.width, model.activation.squared
    rows = width // 2 if squared else width
    parts = [normal(*shape, device=device, scale=0.02) for shape in ((rows, hidden), (rows, hidden), (hidden, width))]
    quantized = model.fp8 or model.format is not None
    found = [_stored(part, model.format, model.row_scales) for part in parts if quantized]
    stored, format = [part for part, _ in found], found[0][1] if found else None
    keeps = kernel.capabilities.quantized.get(type(format))
    filled = 1 if device == "meta" else count  # meta tensors have no content: one expert reaches every conversion
    weights: ExpertWeights
    if keeps is None or (keeps.takes is not None and not keeps.takes(format)) or (squared and not keeps.squared):
        parts = [_values(part, torch.bfloat16) for part in stored] or parts
        allocate = kernel.capabilities.allocate_squared if squared else kernel.allocate
        weights = allocate(count, hidden, width, torch.bfloat16, device)
        for expert in range(filled):
            kernel.load_expert(weights, expert, *parts)
        return weights
    weights = keeps.allocate(count, hidden, width, device, format, **{"squared": True} if squared else {})
    for expert in range(filled):
        keeps.load(weights, expert, *stored)
    return weights


Stored = BlockWeight | RowWeight | CodedWeight
"""A weight in FP8 or in 4 bits."""


def _stored(
    weight: Tensor, codes: GroupCodes | None, row_scales: bool, power_of_two: bool = False
) -> tuple[Stored, KernelFormat]:
    """The weight in FP8, in blocks or with a scale per row, and its format; with `codes` another one of its size."""
    if codes is not None:
        return coded_weight(codes, *weight.shape, weight.device), codes
    if not row_scales:
        return quantize_weight(weight, power_of_two), BlockFP8(power_of_two)
    scales = weight.float().abs().amax(1).div_(FP8_MAX)
    return RowWeight((weight.float() / scales[:, None]).to(FP8), scales), ROW_FP8


def _values(stored: Stored, dtype: torch.dtype) -> Tensor:
    return (stored.dequantized() if isinstance(stored, CodedWeight) else dequantize_weight(stored, dtype)).to(dtype)


def all_cases(text: str = "") -> list[KernelCase]:
    """Every named shape of every family, or those with `text` in their name."""
    from moe_engine.kernels.experts import shapes as experts
    from moe_engine.kernels.linear import shapes as linear
    from moe_engine.kernels.ops import shapes as ops

    cases: Iterable[KernelCase] = [
        *map(op_case, ops.named_shapes()),
        *map(linear_case, linear.named_shapes()),
        *map(experts_case, experts.named_shapes()),
    ]
    return [case for case in cases if text in case.name]
