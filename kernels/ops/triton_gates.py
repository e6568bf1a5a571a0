"""Gates by sigmoid or softplus, one launch each: of attention's heads, and of a shared expert's result by the token's
own product; factors of query heads by position.

Legend: T tokens, D hidden, H heads, Dh head width.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor
from triton import next_power_of_2

from moe_engine.kernels.triton.aot import AotCase
from moe_engine.kernels.triton.dependent import dependent_jit, wait_for_inputs
from moe_engine.kernels.triton.launch import stride_of, warps_for, with_contiguous_rows

_TILE = 1024


@dependent_jit
def gate_heads_kernel(
    x, gate, stride, head_stride, HEADS: tl.constexpr, WIDTH: tl.constexpr, BY_HEAD: tl.constexpr,
    SOFTPLUS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """x [T, HEADS, WIDTH] *= sigmoid(gate), or softplus, in place; the factor is rounded before the product, as in
    torch. BY_HEAD: a head has one number."""
    wait_for_inputs()
    token = tl.program_id(0).to(tl.int64)
    item = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    live = item < HEADS * WIDTH
    head, channel = item // WIDTH, item % WIDTH
    number = tl.load(gate + token * stride + head * head_stride + (0 if BY_HEAD else channel), live, 0.0)
    wide = number.to(tl.float32)
    if SOFTPLUS:
        small = tl.exp(-tl.abs(wide))  # log(1 + small) without the rounding of 1 + small
        above = 1.0 + small
        rest = tl.where(above == 1.0, small, tl.log(above) * (small / tl.where(above == 1.0, 1.0, above - 1.0)))
        opened = tl.maximum(wide, 0.0) + rest
    else:
        opened = tl.sigmoid(wide)
    opened = opened.to(number.dtype).to(tl.float32)
    place = x + token * (HEADS * WIDTH) + item
    value = tl.load(place, live, 0.0).to(tl.float32)
    tl.store(place, (value * opened).to(x.dtype.element_ty), live)


@dependent_jit
def gate_rows_kernel(
    rows, x, weight, row_stride, x_stride, WIDTH: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """rows [T, WIDTH] *= sigmoid(x . weight), in place; product and sigmoid are rounded to x's dtype, as in torch."""
    wait_for_inputs()
    token = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    live = column < WIDTH
    value = tl.load(x + token * x_stride + column, live, 0.0)
    product = tl.sum(value.to(tl.float32) * tl.load(weight + column, live, 0.0).to(tl.float32), 0)
    opened = tl.sigmoid(product.to(value.dtype).to(tl.float32)).to(value.dtype).to(tl.float32)
    place = rows + token * row_stride + column
    tl.store(place, (tl.load(place, live, 0.0).to(tl.float32) * opened).to(rows.dtype.element_ty), live)


@dependent_jit
def scale_heads_kernel(
    q, positions, scale, bias, out, stride, head_stride, HEADS: tl.constexpr, WIDTH: tl.constexpr, ZEROS: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """out [T, HEADS, WIDTH + ZEROS] = q [T, HEADS, WIDTH] * (scale * ln(position + 1) + bias), then zeros."""
    wait_for_inputs()
    token = tl.program_id(0).to(tl.int64)
    item = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    head, channel = item // (WIDTH + ZEROS), item % (WIDTH + ZEROS)
    live = item < HEADS * (WIDTH + ZEROS)
    known = live & (channel < WIDTH)
    distance = tl.log((tl.load(positions + token) + 1).to(tl.float32))
    factor = tl.load(scale + head, known, 0.0) * distance + tl.load(bias + head, known, 0.0)
    value = tl.load(q + token * stride + head * head_stride + channel, known, 0.0).to(tl.float32)
    tl.store(out + token * (HEADS * (WIDTH + ZEROS)) + item, (value * factor).to(out.dtype.element_ty), live)


def gate_heads(x: Tensor, gate: Tensor, softplus: bool = False) -> Tensor:
    """`Gates.heads`."""
    count, heads, width = x.shape
    if not x.is_contiguous():
        x = x.contiguous()
    if count:
        gate, block = with_contiguous_rows(gate), min(_TILE, next_power_of_2(heads * width))
        gate_heads_kernel[(count, triton.cdiv(heads * width, block))](
            x, gate, stride_of(gate, 0), stride_of(gate, 1), HEADS=heads, WIDTH=width,
            BY_HEAD=gate.shape[2] < width, SOFTPLUS=softplus, BLOCK=block, num_warps=warps_for(block),
        )  # fmt: skip
    return x


def gate_rows(rows: Tensor, x: Tensor, weight: Tensor) -> Tensor:
    """`Gates.rows`."""
    count, width = x.shape
    if count:
        x, block = with_contiguous_rows(x), next_power_of_2(width)
        gate_rows_kernel[(count,)](
            rows, x, weight, stride_of(rows, 0), stride_of(x, 0), WIDTH=width, BLOCK=block, num_warps=warps_for(block)
        )
    return rows


def scale_heads(q: Tensor, positions: Tensor, scale: Tensor, bias: Tensor, zeros: int = 0) -> Tensor:
    """`ScaleHeads`."""
    count, heads, width = q.shape
    out, q = q.new_empty(count, heads, width + zeros), with_contiguous_rows(q)
    block = min(_TILE, next_power_of_2(heads * (width + zeros)))
    if count:
        scale_heads_kernel[(count, triton.cdiv(heads * (width + zeros), block))](
            q, positions, scale, bias, out, stride_of(q, 0), stride_of(q, 1), HEADS=heads, WIDTH=width, ZEROS=zeros,
            BLOCK=block, num_warps=warps_for(block),
        )  # fmt: skip
    return out


def aot_cases() -> list[AotCase]:
    """Qwen3-Next on four ranks, Ling and Laguna on one, Mistral Large 4 on eight."""
    heads, width, hidden = 4, 256, 2048
    block, wide = min(_TILE, next_power_of_2(heads * width)), next_power_of_2(hidden)
    signature = {"x": "*bf16", "gate": "*bf16", "stride": "i32:16", "head_stride": "i32:16"}
    constants = {"HEADS": heads, "WIDTH": width, "BY_HEAD": False, "SOFTPLUS": False, "BLOCK": block}
    ling = {"HEADS": 32, "WIDTH": 128, "BY_HEAD": True, "SOFTPLUS": False, "BLOCK": _TILE, "head_stride": 1}
    laguna = ling | {"HEADS": 64, "SOFTPLUS": True}
    by_head = {name: kind for name, kind in signature.items() if name != "head_stride"}
    factors = {"q": "*bf16", "positions": "*i64", "scale": "*fp32", "bias": "*fp32", "out": "*bf16"}
    factors |= {"stride": "i32:16", "head_stride": "i32:16"}
    plain = {"HEADS": 8, "WIDTH": 128, "ZEROS": 64, "BLOCK": _TILE}
    rows = dict.fromkeys(("rows", "x", "weight"), "*bf16") | dict.fromkeys(("row_stride", "x_stride"), "i32:16")
    return [
        AotCase("gate of heads", gate_heads_kernel, signature, constants, warps_for(block), 3, False),
        AotCase("gate of heads by one number", gate_heads_kernel, by_head, ling, warps_for(_TILE), 3, False),
        AotCase("softplus gate of heads", gate_heads_kernel, by_head, laguna, warps_for(_TILE), 3, False),
        AotCase("factors of heads, zeros", scale_heads_kernel, factors, plain, warps_for(_TILE), 3, False),
        AotCase("gate of rows", gate_rows_kernel, rows, {"WIDTH": hidden, "BLOCK": wide}, warps_for(wide), 3, False),
    ]
