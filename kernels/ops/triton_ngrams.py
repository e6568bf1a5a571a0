"""Rows of n-gram tables in Triton: ids of n-grams, numbers of rows, and their sum with the streams, a launch each.

Legend: as in `ngram_rows`.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton import next_power_of_2

from moe_engine.kernels.ops.ngram_rows import ID_BYTES, LEAST, OUTSIDE, SCALED, Ngrams, NgramTokens
from moe_engine.kernels.ops.streams import StreamWeights
from moe_engine.kernels.triton.aot import AotCase
from moe_engine.kernels.triton.dependent import dependent_jit, wait_for_inputs
from moe_engine.kernels.triton.launch import UNALIGNED, element, row_stride, warps_for, with_contiguous_rows

_LEAST, _OUTSIDE = tl.constexpr(LEAST), tl.constexpr(OUTSIDE)
_BLOCK = 1024
"""Channels of an iteration."""


@triton.jit
def _ids_of(tokens, map, live):
    """The ids of texts; OUTSIDE for image tokens."""
    token = tl.load(tokens, live, 0)
    return tl.where(token < 0, _OUTSIDE, tl.load(map + token, live & (token >= 0), 0))


@dependent_jit(
    do_not_specialize=["pad", "first"],
    do_not_specialize_on_alignment=[*UNALIGNED, "tokens", "requests", "first"],
)  # fmt: skip
def ngram_ids_kernel(
    tokens, positions, slots, requests, table, map, cache, residual, table_stride, cache_stride, residual_stride,
    first, pad, EACH: tl.constexpr, COUNT: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """See `PutIds`; the ids begin at element `first` of a residual row. A token before that is one of the step is not
    read from the cache, which other programs write. Grid (T,)."""
    wait_for_inputs()
    token, back = tl.program_id(0), tl.arange(0, BLOCK)
    request, position = tl.load(requests + token // EACH), tl.load(positions + token)
    place, index = position - back, token - back
    live = (back < COUNT) & (place >= 0)
    near = live & (index >= 0)
    near &= tl.load(positions + index, near, -1) == place
    near &= tl.load(requests + index // EACH, near, -1) == request
    new = _ids_of(tokens + index, map, near)
    old = live & ~near
    slot = tl.load(table + request.to(tl.int64) * table_stride + place, old, 0).to(tl.int64)
    found = tl.where(near, new, tl.load(cache + slot * cache_stride, old, 0))
    line = residual + token.to(tl.int64) * residual_stride + first
    ended = tl.cumsum((~live | (found == _OUTSIDE)).to(tl.int32), 0) > 0
    value = tl.where(ended & (back > 0), pad, found)
    tl.store(line.to(tl.pointer_type(tl.int32)) + back, value, back < COUNT)
    own = tl.sum(tl.where(back == 0, found, 0))
    tl.store(cache + tl.load(slots + token).to(tl.int64) * cache_stride, own)


@dependent_jit
def ngram_values_kernel(
    rows, scales, out, WIDTH: tl.constexpr, GROUP: tl.constexpr, BLOCK: tl.constexpr, SCALED: tl.constexpr
):
    """out [T C, WIDTH] = rows; SCALED: times powers of two, of GROUP numbers each. Grid (T C,)."""
    wait_for_inputs()
    row, column = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK)
    value = tl.load(rows + row * WIDTH + column, column < WIDTH, 0.0).to(tl.float32)
    if SCALED:
        exponent = tl.load(scales + row * (WIDTH // GROUP) + column // GROUP, column < WIDTH, 127).to(tl.int32)
        value *= tl.where(exponent > 0, exponent << 23, 1 << 22).to(tl.float32, bitcast=True)
    tl.store(out + row * WIDTH + column, value.to(out.dtype.element_ty), column < WIDTH)


@dependent_jit(do_not_specialize=["ids_stride"], do_not_specialize_on_alignment=["ids"])
def ngram_add_kernel(
    found, ids, x, residual, weights, found_stride, ids_stride, x_stride, residual_stride, eps, scale,
    STREAMS: tl.constexpr, SIDE: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr, ADD: tl.constexpr,
):  # fmt: skip
    """See `AddNgrams`; ADD: x is given. Grid (T,)."""
    wait_for_inputs()
    token, stream = tl.program_id(0).to(tl.int64), tl.arange(0, SIDE)
    kind: tl.constexpr = residual.dtype.element_ty
    line, own = residual + token * residual_stride, found + token * found_stride
    tail = line + STREAMS * WIDTH
    squares, keys, dots = tl.zeros([SIDE], tl.float32), tl.zeros([SIDE], tl.float32), tl.zeros([SIDE], tl.float32)
    for begin in range(0, WIDTH, BLOCK):
        column = begin + tl.arange(0, BLOCK)
        inside = column < WIDTH
        streams = ()
        for i in tl.static_range(STREAMS):
            streams = streams + (tl.load(line + i * WIDTH + column, inside, 0.0).to(tl.float32),)  # type: ignore[assignment]
        if ADD:
            value = tl.load(x + token * x_stride + column, inside, 0.0).to(tl.float32)
            new = ()
            for j in tl.static_range(STREAMS):
                summed = tl.load(tail + j).to(tl.float32) * value
                for i in tl.static_range(STREAMS):
                    summed += tl.load(tail + STREAMS + i * STREAMS + j).to(tl.float32) * streams[i]
                rounded = summed.to(kind)
                tl.store(line + j * WIDTH + column, rounded, inside)
                new = new + (rounded.to(tl.float32),)  # type: ignore[assignment]
            streams = new
        for j in tl.static_range(STREAMS):
            key = tl.load(own + j * WIDTH + column, inside, 0.0).to(tl.float32)
            weight = tl.load(weights + j * WIDTH + column, inside, 0.0)
            this = stream == j
            squares += tl.where(this, tl.sum(streams[j] * streams[j]), 0.0)
            keys += tl.where(this, tl.sum(key * key), 0.0)
            dots += tl.where(this, tl.sum(streams[j] * weight * key), 0.0)
    dot = dots * tl.rsqrt(squares / WIDTH + eps) * tl.rsqrt(keys / WIDTH + eps) * scale
    root = tl.sqrt(tl.maximum(tl.abs(dot), _LEAST))
    gates = 1.0 / (1.0 + tl.exp(tl.where(dot < 0.0, root, -root)))
    gates = tl.where(tl.load(ids + token * ids_stride) == _OUTSIDE, 0.0, gates)
    if ADD:
        tl.debug_barrier()  # threads read below what others have stored
    for begin in range(0, WIDTH, BLOCK):
        column = begin + tl.arange(0, BLOCK)
        inside = column < WIDTH
        value = tl.load(own + STREAMS * WIDTH + column, inside, 0.0).to(tl.float32)
        for j in tl.static_range(STREAMS):
            gate = tl.sum(tl.where(stream == j, gates, 0.0))
            place = line + j * WIDTH + column
            before = tl.load(place, inside, 0.0).to(tl.float32)
            tl.store(place, (before + gate * value).to(kind), inside)


def put_ids(tokens: NgramTokens, map: Tensor, pad: int, cache: Tensor, residual: Tensor, count: int) -> None:
    """`PutIds`."""
    if len(tokens.ids):
        first = residual.shape[1] - count * ID_BYTES // residual.element_size()
        ngram_ids_kernel[(len(tokens.ids),)](
            tokens.ids, tokens.positions, tokens.slots, tokens.requests, tokens.table, map, cache, residual,
            tokens.table.stride(0), cache.stride(0), row_stride(residual), first, pad, EACH=tokens.each, COUNT=count,
            BLOCK=next_power_of_2(count), num_warps=1,
        )  # fmt: skip


def values(rows: Tensor, scales: Tensor | None, dtype: torch.dtype) -> Tensor:
    """`NgramValues`."""
    tokens, columns, width = rows.shape
    out = torch.empty((tokens, columns * width), dtype=dtype, device=rows.device)
    if tokens:
        block = next_power_of_2(width)
        ngram_values_kernel[(tokens * columns,)](
            rows.contiguous(), None if scales is None else scales.contiguous(), out, WIDTH=width, GROUP=SCALED,
            BLOCK=block, SCALED=scales is not None, num_warps=warps_for(block),
        )  # fmt: skip
    return out


def add(
    found: Tensor, ids: Tensor, x: Tensor | None, residual: Tensor, weights: Tensor, streams: StreamWeights
) -> None:
    """`AddNgrams`; a token's values do not depend on other tokens."""
    (n, width), found = weights.shape, with_contiguous_rows(found)
    if len(found):
        added, sizes = residual if x is None else with_contiguous_rows(x), _constants(n, width)
        ngram_add_kernel[(len(found),)](
            found, ids, added, residual, weights, row_stride(found), ids.stride(0), row_stride(added),
            row_stride(residual), streams.eps, width**-0.5, **sizes, ADD=x is not None,
            num_warps=warps_for(sizes["BLOCK"]),  # no two threads have the same channel, which is changed in place
        )  # fmt: skip


NGRAMS = Ngrams(put_ids, values, add)


def _constants(n: int, width: int) -> dict[str, Any]:
    return {"STREAMS": n, "SIDE": next_power_of_2(n), "WIDTH": width, "BLOCK": min(_BLOCK, next_power_of_2(width))}


def aot_cases() -> list[AotCase]:
    """DeepSeek V4.1-Flash: n-grams of four tokens, rows of 256 numbers, four streams of 5,120 channels."""
    cases = []
    for dtype in (torch.bfloat16, torch.float32):
        kind = f"*{element(dtype)}"
        signature = {
            "tokens": "*i64:1", "positions": "*i64:1", "slots": "*i64:1", "requests": "*i32:1", "table": "*i32",
            "map": "*i32", "cache": "*i32", "residual": kind, "table_stride": "i32:16", "cache_stride": "i32:16",
            "residual_stride": "i32:16", "first": "i32", "pad": "i32",
        }  # fmt: skip
        sizes: dict[str, Any] = {"EACH": 1, "COUNT": 4, "BLOCK": 4}
        cases.append(AotCase(f"ngram_ids_{element(dtype)}", ngram_ids_kernel, signature, sizes, 1, 3, False))
        for add in (True, False):
            signature = {
                "found": kind, "ids": "*i32:1", "x": kind, "residual": kind, "weights": "*fp32",
                "found_stride": "i32:16", "ids_stride": "i32", "x_stride": "i32:16", "residual_stride": "i32:16",
                "eps": "fp32", "scale": "fp32",
            }  # fmt: skip
            name = f"ngram_add_{element(dtype)}{'' if add else '_alone'}"
            sizes = _constants(4, 5120) | {"ADD": add}
            cases.append(AotCase(name, ngram_add_kernel, signature, sizes, warps_for(_BLOCK), 3, False))
    for kind, scaled in (("fp8e4nv", True), ("bf16", False)):
        signature = {"rows": f"*{kind}", "out": "*bf16"} | ({"scales": "*u8"} if scaled else {})
        sizes = {"WIDTH": 256, "GROUP": SCALED, "BLOCK": 256, "SCALED": scaled} | ({} if scaled else {"scales": None})
        cases.append(AotCase(f"ngram_values_{kind}", ngram_values_kernel, signature, sizes, warps_for(256), 3, False))
    return cases
