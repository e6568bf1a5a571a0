"""Residual streams in Triton, in two launches: `write_kernel` adds a result to the streams and multiplies them by the
weights of the next mixing; `read_kernel` sums these products, makes the matrix doubly stochastic and reads the streams.
The norm of what is read, and its quantized form, can be a part of the second launch.

A token's sums are cut by channels, at the same places in every step, so that a token's values do not depend on others.

Legend: T tokens, D hidden, n streams, M numbers of a token, P parts of the channels.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton import next_power_of_2

from moe_engine.kernels.ops.streams import StreamWeights, mix_streams
from moe_engine.kernels.ops.triton_norm import rms_norm
from moe_engine.kernels.quantization.protocol import (
    BLOCK,
    UNQUANTIZED,
    Activation,
    ActivationFormat,
    QuantizedActivation,
    QuantizedRows,
)
from moe_engine.kernels.quantization.triton_rows import norm_blocks, norm_warps, rms_norm_quantize, store_norm
from moe_engine.kernels.triton.aot import AotCase
from moe_engine.kernels.triton.dependent import dependent_jit, wait_for_inputs
from moe_engine.kernels.triton.launch import element, row_stride, with_contiguous_rows

MAX_STREAMS = 8
"""Models with more are mixed in torch."""
ROWS = 16
"""Tokens of a program of `write_kernel`: the least rows of a matrix product."""
WRITE_PART, WRITE_BLOCK, READ_BLOCKS = 64, 32, 8
"""Channels of a program of `write_kernel`, and of an iteration in it; blocks of 128 channels of a program of
`read_kernel` without a norm."""
_BLOCK = tl.constexpr(BLOCK)
STAGES = 2
"""Pipeline stages of `write_kernel`: more do not fit the registers."""


@dependent_jit(do_not_specialize=["num_tokens"])
def write_kernel(
    x, residual, fn, parts, x_stride, residual_stride, num_tokens,
    STREAMS: tl.constexpr, WIDTH: tl.constexpr, NUMBERS: tl.constexpr, PADDED: tl.constexpr, ROWS: tl.constexpr,
    PART: tl.constexpr, BLOCK: tl.constexpr, ADD: tl.constexpr, ALIGNED: tl.constexpr, PRECISION: tl.constexpr,
    LATE: tl.constexpr,
):  # fmt: skip
    """residual [T, n D + n + n n]: with ADD, x [T, D] is added to the streams. parts [P, T, PADDED] = products of the
    program's channels with fn [M, n D], then their sum of squares; with LATE, part 0 also has the weights of the sum
    that is read now, which `read_kernel` overwrites in the residual. Grid (tokens / ROWS, P)."""
    wait_for_inputs()
    token, number = tl.program_id(0) * ROWS + tl.arange(0, ROWS), tl.arange(0, PADDED)
    live = token < num_tokens
    line = residual + tl.multiple_of(token.to(tl.int64) * residual_stride, ALIGNED)
    tail = line + STREAMS * WIDTH
    products, squares = tl.zeros([ROWS, PADDED], tl.float32), tl.zeros([ROWS], tl.float32)
    first = tl.program_id(1) * PART
    for begin in range(first, first + PART, BLOCK):
        column = begin + tl.arange(0, BLOCK)
        inside = column < WIDTH
        mask, place = live[:, None] & inside[None, :], line[:, None] + column[None, :]
        streams = ()
        for i in tl.static_range(STREAMS):
            streams = streams + (tl.load(place + i * WIDTH, mask, 0.0).to(tl.float32),)  # type: ignore[assignment]
        if ADD:
            value = tl.load(x + token.to(tl.int64)[:, None] * x_stride + column[None, :], mask, 0.0).to(tl.float32)
            new = ()
            for j in tl.static_range(STREAMS):
                summed = tl.load(tail + j, live, 0.0).to(tl.float32)[:, None] * value
                for i in tl.static_range(STREAMS):
                    share = tl.load(tail + STREAMS + i * STREAMS + j, live, 0.0).to(tl.float32)
                    summed += share[:, None] * streams[i]
                rounded = summed.to(residual.dtype.element_ty)
                tl.store(place + j * WIDTH, rounded, mask)
                new = new + (rounded.to(tl.float32),)  # type: ignore[assignment]
            streams = new
        for j in tl.static_range(STREAMS):
            if NUMBERS > 0:
                factors = fn + number[None, :] * (STREAMS * WIDTH) + j * WIDTH + column[:, None]
                weight = tl.load(factors, (number < NUMBERS)[None, :] & inside[:, None], 0.0)
                products = tl.dot(streams[j], weight, products, input_precision=PRECISION)
                squares += tl.sum(streams[j] * streams[j], 1)
    products = tl.where((number == NUMBERS)[None, :], squares[:, None], products)
    if LATE:  # noqa: SIM102 - a constant, and a value of the device
        if tl.program_id(1) == 0:
            index = number - (NUMBERS + 1)
            known = ((index >= 0) & (index < STREAMS))[None, :]
            before = tl.load(tail[:, None] + STREAMS + STREAMS * STREAMS + index[None, :], live[:, None] & known, 0.0)
            products = tl.where(known, before.to(tl.float32), products)
    target = parts + (tl.program_id(1).to(tl.int64) * num_tokens + token)[:, None] * PADDED + number[None, :]
    tl.store(target, products, live[:, None])


@triton.jit
def _number(own, have, base, scale, index, some, factor):
    """Numbers [I] of a token at `index`, from their parts at own [P]; 0 where `some` is false."""
    total = tl.sum(tl.load(own[:, None] + index[None, :], have[:, None] & some[None, :], 0.0), 0)
    return total * factor * tl.load(scale + index, some, 0.0) + tl.load(base + index, some, 0.0)


@triton.jit
def _sigmoid(x):
    return 1.0 / (1.0 + tl.exp(-x))


@triton.jit
def _doubly_stochastic(logits, some, floor, ITERATIONS: tl.constexpr):
    """logits [N, N] -> rows and columns that sum to 1, as in `streams`; 0 where `some` is false."""
    logits = tl.where(some, logits, -1e30)
    matrix = tl.where(some, tl.exp(logits - tl.max(logits, 1)[:, None]), 0.0)
    total = tl.sum(matrix, 1)
    matrix = tl.where(some, matrix / tl.where(total > 0.0, total, 1.0)[:, None] + floor, 0.0)
    matrix = tl.where(some, matrix / (tl.sum(matrix, 0)[None, :] + floor), 0.0)
    for _ in range(ITERATIONS - 1):
        matrix = tl.where(some, matrix / (tl.sum(matrix, 1)[:, None] + floor), 0.0)
        matrix = tl.where(some, matrix / (tl.sum(matrix, 0)[None, :] + floor), 0.0)
    return matrix


@dependent_jit(do_not_specialize=["num_tokens", "scale_stride"])
def read_kernel(
    residual, parts, base, scale, out, norm, quantized, scales, residual_stride, num_tokens, scale_stride, eps, floor,
    norm_eps,
    STREAMS: tl.constexpr, WIDTH: tl.constexpr, NUMBERS: tl.constexpr, PADDED: tl.constexpr, PARTS: tl.constexpr,
    ALL_PARTS: tl.constexpr, SIDE: tl.constexpr, ITERATIONS: tl.constexpr, WRITES: tl.constexpr, BLOCKS: tl.constexpr,
    ALIGNED: tl.constexpr, LATE: tl.constexpr, NORM: tl.constexpr, KEEP: tl.constexpr, QUANTIZE: tl.constexpr,
    POWER_OF_TWO: tl.constexpr,
):  # fmt: skip
    """out [T, D] = the sum of the streams by the token's numbers, without numbers their mean; with WRITES, those of the
    next result go after the streams. LATE: the sum is by weights that the part before has left, and the token's own
    ones go after the streams too. NORM: `norm` of the sum instead, of a whole row; KEEP: in `out`, QUANTIZE: as e4m3
    in `quantized`, with scales. Grid (T, parts of D)."""
    wait_for_inputs()
    token, part, stream = tl.program_id(0).to(tl.int64), tl.arange(0, ALL_PARTS), tl.arange(0, SIDE)
    own, have, known = parts + (part.to(tl.int64) * num_tokens + token) * PADDED, part < PARTS, stream < STREAMS
    squares = tl.sum(tl.load(own + NUMBERS, have, 0.0))
    factor = tl.rsqrt(squares / (STREAMS * WIDTH) + eps)
    if LATE:
        shares = tl.load(parts + token * PADDED + NUMBERS + 1 + stream, known, 0.0)
    elif NUMBERS == 0:
        shares = tl.where(known, 1.0 / STREAMS, 0.0)
    else:
        shares = _sigmoid(_number(own, have, base, scale, stream, known, factor)) + floor
    block = tl.program_id(1) * BLOCKS + tl.arange(0, BLOCKS)
    column = block[:, None] * _BLOCK + tl.arange(0, _BLOCK)[None, :]
    inside = column < WIDTH
    kind: tl.constexpr = residual.dtype.element_ty
    line = residual + tl.multiple_of(token * residual_stride, ALIGNED)
    total = tl.zeros([BLOCKS, _BLOCK], tl.float32)
    for j in tl.static_range(STREAMS):
        share = tl.sum(tl.where(stream == j, shares, 0.0))
        total += share * tl.load(line + j * WIDTH + column, inside, 0.0).to(tl.float32)
    if NORM:
        value = total.to(kind).to(tl.float32)
        store_norm(
            value, norm, out, quantized, scales, scale_stride, norm_eps, token, WIDTH, BLOCKS, KEEP, QUANTIZE,
            POWER_OF_TWO, kind,
        )  # fmt: skip
    else:
        tl.store(out + token * WIDTH + column, total.to(kind), inside)
    if WRITES:  # noqa: SIM102 - a constant, and a value of the device
        if tl.program_id(1) == 0:
            tail = line + STREAMS * WIDTH
            written = 2.0 * _sigmoid(_number(own, have, base, scale, STREAMS + stream, known, factor))
            tl.store(tail + stream, written.to(kind), known)
            cell = tl.arange(0, SIDE * SIDE)
            row, col = cell // SIDE, cell % SIDE
            place, some = row * STREAMS + col, (row < STREAMS) & (col < STREAMS)
            logits = _number(own, have, base, scale, 2 * STREAMS + place, some, factor)
            square = tl.reshape(some, [SIDE, SIDE])
            matrix = _doubly_stochastic(tl.reshape(logits, [SIDE, SIDE]), square, floor, ITERATIONS)
            tl.store(tail + STREAMS + place, tl.reshape(matrix, [SIDE * SIDE]).to(kind), some)
            if LATE:
                later = _sigmoid(_number(own, have, base, scale, stream, known, factor)) + floor
                tl.store(tail + STREAMS + STREAMS * STREAMS + stream, later.to(kind), known)


def mix(x: Tensor | None, residual: Tensor, weights: StreamWeights) -> Tensor:
    """`MixStreams`; a token's values do not depend on other tokens."""
    if not _takes(residual, weights):
        return mix_streams(x, residual, weights)
    out = residual.new_empty(len(residual), weights.fn.shape[1] // weights.count)
    _launch(x, residual, weights, out, None, None)
    return out


def mix_norm(
    x: Tensor | None, residual: Tensor, weights: StreamWeights, format: ActivationFormat, norm: Tensor, eps: float
) -> Activation:
    """`MixNormStreams`, in the launches of `mix`."""
    if not _takes(residual, weights):
        read = mix_streams(x, residual, weights)
        if not format.rows:
            return rms_norm(read, norm, eps)
        kept, rows = rms_norm_quantize(
            read, norm, eps, None, format.power_of_two, format.unquantized, None, format.exponents
        )
        return QuantizedActivation(rows, kept, residual.dtype)
    tokens, width = len(residual), len(norm)
    out = residual.new_empty(tokens, width) if format.unquantized else None
    quantized = QuantizedRows.empty(tokens, width, residual.device, exponents=format.exponents) if format.rows else None
    _launch(x, residual, weights, out, quantized, (norm, eps, format))
    if quantized is None:
        assert out is not None
        return out
    return QuantizedActivation(quantized, out, residual.dtype)


def _launch(
    x: Tensor | None, residual: Tensor, weights: StreamWeights, out: Tensor | None, quantized: QuantizedRows | None,
    norm: tuple[Tensor, float, ActivationFormat] | None,
) -> None:  # fmt: skip
    tokens, stride, width = len(residual), row_stride(residual), weights.fn.shape[1] // weights.count
    if not tokens:
        return
    weight, norm_eps, format = (None, 0.0, None) if norm is None else norm
    writes, reads = _constants(weights, stride, format)
    parts = torch.empty(reads["PARTS"], tokens, writes["PADDED"], dtype=torch.float32, device=residual.device)
    added = residual if x is None else with_contiguous_rows(x)
    # without numbers there are no weights: the kernels do not read what stands for them
    fn, base, scale = (weights.fn, weights.base, weights.scale) if reads["NUMBERS"] else (parts, parts, parts)
    write_kernel[(triton.cdiv(tokens, ROWS), reads["PARTS"])](
        added, residual, fn, parts, row_stride(added), stride, tokens, **writes, ADD=x is not None,
        num_warps=4, num_stages=STAGES,
    )  # fmt: skip
    data, scales, scale_stride = (None, None, 0)
    if quantized is not None:
        data, scales, scale_stride = quantized.data, quantized.scales, quantized.scale_stride
    read_kernel[(tokens, triton.cdiv(width, reads["BLOCKS"] * BLOCK))](
        residual, parts, base, scale, out, weight, data, scales, stride, tokens, scale_stride, weights.eps,
        weights.floor, norm_eps, **reads, num_warps=_warps(width, format),
    )  # fmt: skip


def _takes(residual: Tensor, weights: StreamWeights) -> bool:
    return weights.count <= MAX_STREAMS and residual.stride(1) == 1


def _warps(width: int, format: ActivationFormat | None) -> int:
    """Warps of `read_kernel`."""
    return 4 if format is None else norm_warps(width)


def _constants(
    weights: StreamWeights, stride: int, format: ActivationFormat | None = None
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Constants of both kernels, without ADD. `stride`: of the residual's rows; format: of the norm, None: no norm."""
    n, numbers = weights.count, len(weights.base)
    width = weights.fn.shape[1] // n
    parts = triton.cdiv(width, WRITE_PART)
    both = {
        "STREAMS": n, "WIDTH": width, "NUMBERS": numbers, "LATE": weights.late,
        "PADDED": max(16, next_power_of_2(numbers + 1 + n * weights.late)),
        "ALIGNED": next(size for size in (16, 8, 4, 2, 1) if stride % size == 0),
    }  # fmt: skip
    writes = {"ROWS": ROWS, "PART": WRITE_PART, "BLOCK": WRITE_BLOCK, "PRECISION": "tf32x3"}
    reads = {
        "PARTS": parts, "ALL_PARTS": next_power_of_2(parts), "SIDE": next_power_of_2(n),
        "ITERATIONS": weights.iterations, "WRITES": weights.writes,
        "BLOCKS": READ_BLOCKS if format is None else norm_blocks(width), "NORM": format is not None,
        "KEEP": format is not None and format.unquantized, "QUANTIZE": format is not None and format.rows,
        "POWER_OF_TWO": format is not None and format.power_of_two,
    }  # fmt: skip
    return both | writes, both | reads


def aot_cases() -> list[AotCase]:
    """DeepSeek V4-Flash and V4-Pro: before and after a part of a layer, and the head; V4.1-Flash, with late sums; the
    mean of GLM-5.3-Flash, whose other launches are those of V4-Flash."""
    bf16, parts = torch.bfloat16, [(torch.bfloat16, 24, True), (torch.bfloat16, 24, False), (torch.float32, 24, True)]
    cases = []
    for label, width, late, forms in (
        ("v4_flash", 4096, False, [*parts, (bf16, 4, True)]), ("v4_pro", 7168, False, [*parts, (bf16, 4, True)]),
        ("v41_flash", 5120, True, [*parts, (bf16, 0, True)]), ("glm53_flash", 4096, False, [(bf16, 0, True)]),
    ):  # fmt: skip
        for dtype, numbers, add in forms:
            vector = torch.empty(numbers, device="meta")
            fn = torch.empty(numbers, 4 * width, device="meta")
            weights = StreamWeights(fn, vector, vector, 4, 20, 1e-6, 1e-6, late)
            line = 4 * width + (32 if late else 20)
            writes, reads = _constants(weights, line)
            kind, name = f"*{element(dtype)}", f"{label}_{numbers}_{element(dtype)}{'' if add else '_first'}"
            stride = "i32:16" if late else "i32"
            signature = {
                "x": kind, "residual": kind, "fn": "*fp32", "parts": "*fp32", "x_stride": "i32:16",
                "residual_stride": stride, "num_tokens": "i32",
            }  # fmt: skip
            if not add:
                signature["x_stride"] = stride  # of the residual
            constants = writes | {"ADD": add}
            product = numbers > 0
            cases.append(AotCase(f"write_streams_{name}", write_kernel, signature, constants, 4, STAGES, product))
            if add:
                cases.append(_read_case(name, kind, stride, width, reads, None))
                formats = {"": UNQUANTIZED, "_fp8": ActivationFormat(True, True, True)}
                for label_, format in formats.items() if dtype == torch.bfloat16 else ():
                    own = _constants(weights, line, format)[1]
                    cases.append(_read_case(f"{name}_norm{label_}", kind, stride, width, own, format))
    return cases


def _read_case(
    name: str, kind: str, stride: str, width: int, constants: dict[str, Any], format: ActivationFormat | None
) -> AotCase:
    signature = {
        "residual": kind, "parts": "*fp32", "base": "*fp32", "scale": "*fp32", "out": kind, "residual_stride": stride,
        "num_tokens": "i32", "eps": "fp32", "floor": "fp32", "scale_stride": "i32", "norm_eps": "fp32",
    }  # fmt: skip
    pointers = {"norm": ("*fp32", format is not None)}
    pointers |= {name: (kind, format is not None and format.rows)
                 for name, kind in (("quantized", "*fp8e4nv"), ("scales", "*fp32"))}  # fmt: skip
    signature |= {name: kind for name, (kind, used) in pointers.items() if used}
    absent = {name: None for name, (_, used) in pointers.items() if not used}
    warps = _warps(width, format)
    return AotCase(f"read_streams_{name}", read_kernel, signature, constants | absent, warps, 3, False)
